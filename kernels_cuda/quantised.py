"""Quantised caches in the kernels: x = (code - zero) * scale, with no tile of x ever made.

``splitkv.common.quantised`` says what the kinds of scales mean. Where each enters:

    scale of k   one a program: the scores' factor; per channel: the queries; per token: the scores
    scale of v   one a program, or per channel: the result; per token: the weights
    zero of k    (code - zero) . q = code . q - zero . q, and zero . q is a number a row
    zero of v    w . (code - zero) = w . code - w . zero, a number a row, and a channel
                 (both are taken off the codes where queries are float32)

Products with codes are in float16 where queries have 16 bits: it holds every code of int8, e4m3 and
e5m2 exactly, an NVIDIA GPU from compute capability 8.9 on makes two float16 of two 8-bit floats in
one instruction, and its 11 bits lose no more of queries and weights than bfloat16's 8. Its range is
kept by powers of two, which cost no bits: a row of queries is divided by the one below its largest
element, weights times scales by the one below the tile's largest scale. float32 queries multiply in
float32.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from splitkv.common.cache import PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import QUANTISED_DTYPES, DecodeSpec, Layout, ScaleKind
from splitkv.kernels_cuda.primitives import (
    INTERPRETED,
    across,
    device_function,
    dot,
    down,
    narrow,
    score_dot,
    turned,
)

_UNSCALED, _ONE, _TOKEN, _CHANNEL, _GROUP = 0, 1, 2, 3, 4
UNSCALED = tl.constexpr(_UNSCALED)
ONE = tl.constexpr(_ONE)
"""One scale for all that a program reads: of the tensor, of the head, of the request and head."""
TOKEN = tl.constexpr(_TOKEN)
CHANNEL = tl.constexpr(_CHANNEL)
_KINDS = {
    None: _UNSCALED,
    ScaleKind.TENSOR: _ONE,
    ScaleKind.HEAD: _ONE,
    ScaleKind.REQUEST_HEAD: _ONE,
    ScaleKind.TOKEN: _TOKEN,
    ScaleKind.CHANNEL: _CHANNEL,
    ScaleKind.GROUP: _GROUP,
}

_INT8_TO_FLOAT16 = tl.constexpr(
    """{
    .reg .b32 shifted, bias;
    xor.b32 shifted, $2, 0x80808080;
    mov.b32 bias, 0x64806480;
    prmt.b32 $0, shifted, 0x64646464, 0x5150;
    prmt.b32 $1, shifted, 0x64646464, 0x5352;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    }"""
)
"""Four at once: the code plus 128 as the low byte of 1024 + (code + 128), less 1152; both exact.

A third of the instructions of a conversion, which goes through another unit at a quarter of the
rate (CUDA C++ programming guide, "Arithmetic instructions": type conversions).
"""

_E4M3_TO_FLOAT16 = tl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
_E5M2_TO_FLOAT16 = tl.constexpr(
    """{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
    }"""
)
"""The code is the upper byte of its float16."""


@device_function
def _decoded(codes, DTYPE: tl.constexpr):
    """8-bit floats as DTYPE by their bits: the interpreter's cast reads NaN as 480.

    OCP 8-bit floating point: e4m3 has no infinity, and NaN where all other bits are 1; e5m2 is the
    upper half of a float16.
    """
    bits = codes.to(tl.uint8, bitcast=True)
    if codes.dtype == tl.float8e5:
        return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    magnitude = (bits & 0x7F).to(tl.uint16)
    half = (magnitude << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    half = tl.where(magnitude == 0x7F, float("nan"), half)
    return tl.where(bits >= 128, -half, half).to(DTYPE)


@device_function
def _four_at_once(codes, ASSEMBLY, HERE: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,r", [codes], dtype=tl.float16, is_pure=not HERE, pack=4
    )


@device_function
def widen(codes, DTYPE: tl.constexpr, HERE: tl.constexpr):
    """``codes`` of int8, e4m3 or e5m2 as DTYPE, float16 or float32: exact.

    HERE: in the layout that the codes have, not in the one that a product wants. Triton moves pure
    expressions to the other side of a change of layout; a product that wants its second factor
    transposed, as values are, then reads shared memory byte by byte.
    """
    if INTERPRETED and codes.dtype != tl.int8:
        wide = _decoded(codes, DTYPE)
    elif INTERPRETED or DTYPE != tl.float16:  # noqa: SIM300
        wide = codes.to(DTYPE)
    elif codes.dtype == tl.int8:
        wide = _four_at_once(codes, _INT8_TO_FLOAT16, HERE)
    elif codes.dtype == tl.float8e5:
        wide = _four_at_once(codes, _E5M2_TO_FLOAT16, HERE)
    else:
        wide = _four_at_once(codes, _E4M3_TO_FLOAT16, HERE)
    return wide


@device_function
def power_below(x):
    """``(power, 1 / power)``: the largest power of two that is not above float32 ``x``, 0 or more.

    1 for 0 and for what has no exponent of its own; at most 2**126, whose inverse has one.
    """
    exponent = x.to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent == 0, 127, tl.minimum(exponent, 253))
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return power, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@device_function
def load_one(values, strides, request, kv_head):
    """The scale or zero point of all that a program reads, float32."""
    return tl.load(values + request * strides[0] + kv_head * strides[1]).to(tl.float32)


@device_function
def load_tokens(values, strides, page, row, kv_head, seen):
    """Scales or zero points of tokens [..., N], float32; 0 where unseen, whatever lies there."""
    cells = values + page.to(tl.int64) * strides[0] + row * strides[1] + kv_head * strides[2]
    return tl.load(cells, mask=seen, other=0.0).to(tl.float32)


@device_function
def load_channels(values, strides, kv_head, dim, DIM: tl.constexpr):
    """Scales or zero points of channels [BLOCK_DIM], float32; 0 past DIM."""
    cells = values + kv_head * strides[0] + dim * strides[1]
    return tl.load(cells, mask=dim < DIM, other=0.0).to(tl.float32)


@device_function
def subtract_zero(
    tile,
    zero,
    strides,
    request,
    page,
    row,
    kv_head,
    seen,
    dim,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
):
    """``tile`` [..., N, D] of codes in float32, less their zero points.

    In float32 answers the difference of two sums would show, each much larger than what it leaves.
    """
    if KIND == TOKEN:
        tile -= down(load_tokens(zero, strides, page, row, kv_head, seen))
    elif KIND == CHANNEL:
        tile -= load_channels(zero, strides, kv_head, dim, DIM)
    else:
        tile -= load_one(zero, strides, request, kv_head)
    return tile


@device_function
def scale_queries(
    q,
    sm_scale,
    scale,  # None, or as KIND says
    zero,  # None, or like scale
    scale_strides,
    zero_strides,
    request,
    kv_head,
    d,
    D: tl.constexpr,
    KIND: tl.constexpr,
):
    """``(q, rest, factor, shift)``: scores are ``((q + rest) @ codes - shift) * factor``, both [M].

    q [M, D] comes back in the dtype of the products. Per channel it is multiplied by the scales in
    float32, and what float16 rounds off is ``rest``: together 22 bits, since an lse shows each bit
    that scores lose. Elsewhere nothing is rounded off, and ``rest`` is not used. shift is what the
    zero points add up to; per token, their factor.
    """
    wide = q.to(tl.float32)
    factor = tl.zeros([q.shape[0]], tl.float32) + sm_scale
    if KIND == CHANNEL:
        wide *= load_channels(scale, scale_strides, kv_head, d, D)[None, :]
    if KIND == ONE:
        factor *= load_one(scale, scale_strides, request, kv_head)
    if q.dtype != tl.float32:
        unit, inverse = power_below(tl.max(tl.abs(wide), 1))
        factor *= unit
        wide *= inverse[:, None]
        q = narrow(wide, tl.float16)
        rest = q
        if KIND == CHANNEL:
            rest = narrow(wide - q.to(tl.float32), tl.float16)
    else:
        q = wide
        rest = q
    shift = tl.zeros([q.shape[0]], tl.float32)
    if zero is not None:
        if KIND == CHANNEL:
            wide *= load_channels(zero, zero_strides, kv_head, d, D)[None, :]
        shift = tl.sum(wide, 1)
        if KIND == ONE:
            shift *= load_one(zero, zero_strides, request, kv_head)
    return q, rest, factor, shift


@device_function
def score_codes(
    q,
    rest,
    codes,
    factor,
    shift,
    scale,
    zero,
    scale_strides,
    zero_strides,
    request,
    page,
    row,
    kv_head,
    seen,
    dim,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
):
    """Scores [..., M, N] with codes [..., N, D], before soft cap, slopes and bias; q, rest, factor
    and shift from ``scale_queries``.
    """
    wide = widen(codes, q.dtype, False)
    if q.dtype == tl.float32 and zero is not None:
        wide = subtract_zero(
            wide, zero, zero_strides, request, page, row, kv_head, seen, dim, DIM, KIND
        )
    keys = turned(wide)
    products = score_dot(q, keys)
    if KIND == CHANNEL and q.dtype != tl.float32:
        products = dot(rest, keys, products)
    if zero is not None and q.dtype != tl.float32:
        if KIND == TOKEN:
            zeros = load_tokens(zero, zero_strides, page, row, kv_head, seen)
            products -= down(shift) * across(zeros)
        else:
            products -= down(shift)
    products *= down(factor)
    if KIND == TOKEN:
        products *= across(load_tokens(scale, scale_strides, page, row, kv_head, seen))
    return products


@device_function
def scale_weights(
    weights,
    drift,
    scale,
    zero,
    scale_strides,
    zero_strides,
    page,
    row,
    kv_head,
    seen,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
):
    """``(weights, unit, drift)``: weights [..., M, N] in DTYPE for a product with codes, whose
    result counts ``unit`` [..., 1, 1] times; drift [..., M], already decayed, grows by the zero
    points' share.
    """
    unit = tl.full([1, 1], 1.0, tl.float32)
    if KIND == TOKEN:
        scales = across(load_tokens(scale, scale_strides, page, row, kv_head, seen))
        unit, inverse = power_below(tl.max(tl.abs(scales), len(scales.shape) - 1, keep_dims=True))
        weights *= scales * inverse
    weights = narrow(weights, DTYPE)
    if zero is not None:
        # of the rounded weights: what rounding does then grows with code - zero, not with code
        shares = weights.to(tl.float32)
        if KIND == TOKEN:
            shares *= across(load_tokens(zero, zero_strides, page, row, kv_head, seen))
        drift += tl.sum(shares * unit, len(shares.shape) - 1)
    return weights, unit, drift


@device_function
def scale_sums(
    summed,
    drift,
    scale,
    zero,
    scale_strides,
    zero_strides,
    request,
    kv_head,
    dv,
    DV: tl.constexpr,
    KIND: tl.constexpr,
):
    """Weighted values [..., M, Dv] of weighted codes; before they are normalised and stored."""
    if zero is not None:
        if KIND == CHANNEL:
            zeros = load_channels(zero, zero_strides, kv_head, dv, DV)
            summed -= down(drift) * zeros
        elif KIND == ONE:
            summed -= down(drift * load_one(zero, zero_strides, request, kv_head))
        else:
            summed -= down(drift)
    if KIND == CHANNEL:
        summed *= load_channels(scale, scale_strides, kv_head, dv, DV)
    elif KIND == ONE:
        summed *= load_one(scale, scale_strides, request, kv_head)
    return summed


def quantised(spec: DecodeSpec) -> bool:
    """Whether the cache holds codes, scaled or not."""
    return spec.cache_dtype in QUANTISED_DTYPES


def scale_arguments(call: DecodeCall) -> dict[str, Any]:
    """The split kernel's arguments for a quantised cache; of another, those that switch it off."""
    spec = call.spec
    return {
        "k_scale": call.k_scale,
        "k_zero": call.k_zero,
        "v_scale": call.v_scale,
        "v_zero": call.v_zero,
        "k_scale_strides": _strides(call, call.k_scale, spec.k_scale),
        "k_zero_strides": _strides(call, call.k_zero, spec.k_scale),
        "v_scale_strides": _strides(call, call.v_scale, spec.v_scale),
        "v_zero_strides": _strides(call, call.v_zero, spec.v_scale),
        "K_SCALE": _KINDS[spec.k_scale],
        "V_SCALE": _KINDS[spec.v_scale],
        "CODES": quantised(spec),
        "K_GROUP": _group(call.k_scale, spec.k_scale, spec.head_dim),
        "V_GROUP": _group(call.v_scale, spec.v_scale, spec.head_dim_v),
    }


def _group(scale: Tensor | None, kind: ScaleKind | None, dim: int) -> int:
    """Elements that share a scale of int4 codes; 0 of others."""
    return dim // scale.shape[-1] if scale is not None and kind is ScaleKind.GROUP else 0


def _strides(
    call: DecodeCall, values: Tensor | None, kind: ScaleKind | None
) -> tuple[int, ...] | None:
    """One: (request, head); per token: (page or request, slot or row, head), and of groups (..,
    group); per channel: (head, dim).
    """
    if values is None:
        return None
    stride = values.stride()
    if kind is ScaleKind.TENSOR:
        return (0, 0)
    if kind is ScaleKind.HEAD:
        return (0, *stride)
    if kind not in (ScaleKind.TOKEN, ScaleKind.GROUP):
        return stride
    cache = call.cache
    if isinstance(cache, PackedCache):
        return (0, *stride)
    head_major = cache.layout in (Layout.HND, Layout.BNSD)
    return (stride[0], stride[2], stride[1], *stride[3:]) if head_major else stride
