"""int4 caches in the kernels: two codes a byte, a scale for each token and group of the head dim.

``splitkv.common.quantised`` says where codes lie. Of keys the codes themselves are multiplied, a
product for each group in one batch, since an lse shows each bit that scores lose: scores are the
sum over groups of scale * (q . code - zero * sum of q). Of values a tile's codes become values in
registers, since no scale is common to all tokens: in float16 (under float32 queries in float32)
but for a power of two for each token, which the weights take.
"""

import triton.language as tl

from splitkv.common.quantised import INT4_MIDDLE
from splitkv.kernels_cuda.primitives import INTERPRETED, across, device_function, dot, down, narrow
from splitkv.kernels_cuda.quantised import power_below

_MIDDLE = tl.constexpr(INT4_MIDDLE)

_TO_FLOAT16 = """{{
    .reg .b32 low, high, bias;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    mov.b32 bias, {bias};
    prmt.b32 $0, low, 0x64646464, 0x5150;
    prmt.b32 $1, low, 0x64646464, 0x5352;
    prmt.b32 $2, high, 0x64646464, 0x5150;
    prmt.b32 $3, high, 0x64646464, 0x5352;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    sub.f16x2 $2, $2, bias;
    sub.f16x2 $3, $3, bias;
    }}"""
_CODES = tl.constexpr(_TO_FLOAT16.format(bias="0x64006400"))
"""Four bytes at once: a code as the low byte of 1024 + code, less 1024; both exact."""
_AROUND_MIDDLE = tl.constexpr(_TO_FLOAT16.format(bias="0x64086408"))
"""Less 1032: the code less ``INT4_MIDDLE``."""


# Not pure, so that triton does not look behind it. It would see bytes and a join behind an operand
# of a product and lay that out for 8 neighbours of the summed axis in each of 4 lanes (kWidth 8 in
# its IR); an axis of fewer than 32 elements, as groups of 16 and parts of 16 tokens have, was then
# summed twice (triton 3.6 on an H200).
@device_function
def _halves(packed, ASSEMBLY):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=r,=r,=r,=r,r",
        [packed],
        dtype=(tl.float16, tl.float16),
        is_pure=False,
        pack=4,
    )


@device_function
def grouped_codes(packed, DTYPE: tl.constexpr, CENTRED: tl.constexpr, GROUP: tl.constexpr):
    """Codes [..., N, D / GROUP, GROUP] of bytes [..., N, D / 2], exact in DTYPE: float16, float32.
    CENTRED: less the zero point of codes that have none of their own.
    """
    if INTERPRETED:
        low, high = (packed & 15).to(tl.float16), (packed >> 4).to(tl.float16)
        if CENTRED:
            low -= _MIDDLE
            high -= _MIDDLE
    else:
        low, high = _halves(packed, _AROUND_MIDDLE if CENTRED else _CODES)
    groups: tl.constexpr = 2 * packed.shape[len(packed.shape) - 1] // GROUP
    pairs = tl.join(low, high)
    if len(packed.shape) == 2:
        codes = tl.reshape(pairs, (packed.shape[0], groups, GROUP))
    else:
        codes = tl.reshape(pairs, (packed.shape[0], packed.shape[1], groups, GROUP))
    return codes.to(DTYPE)


@device_function
def load_groups(
    values,
    strides,
    page,
    row,
    kv_head,
    seen,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scales or zero points of tokens' groups [..., N, BLOCK / GROUP], float32; 0 where unseen,
    whatever lies there, and past DIM.
    """
    group = tl.arange(0, BLOCK // GROUP).to(tl.int64)
    cells = values + page.to(tl.int64) * strides[0] + row * strides[1] + kv_head * strides[2]
    cells = down(cells) + group * strides[3]
    mask = down(seen) & (group < DIM // GROUP)
    return tl.load(cells, mask=mask, other=0.0).to(tl.float32)


@device_function
def group_queries(q, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """``(q, sums)`` by group: q [M, D] as [D / GROUP * PARTS, M, GROUP], and what its elements add
    up to, float32 [D / GROUP, M], in several parts [D / GROUP, 1, M].
    """
    rows: tl.constexpr = q.shape[0]
    groups: tl.constexpr = q.shape[1] // GROUP
    q = tl.permute(tl.reshape(q, (rows, groups, GROUP)), (1, 0, 2))
    sums = tl.sum(q.to(tl.float32), 2)
    if PARTS > 1:
        each = tl.broadcast_to(tl.expand_dims(q, 1), (groups, PARTS, rows, GROUP))
        q = tl.reshape(each, (groups * PARTS, rows, GROUP))
        sums = tl.expand_dims(sums, 1)
    return q, sums


@device_function
def _groups_first(numbers):
    """[..., N, G] as [G, ..., N]."""
    return tl.trans(numbers) if len(numbers.shape) == 2 else tl.permute(numbers, (2, 0, 1))


@device_function
def _products(q, codes):
    """[G, ..., M, N] of q from ``group_queries`` and codes [..., N, G, GROUP]."""
    if len(codes.shape) == 3:
        products = dot(q, tl.permute(codes, (1, 2, 0)))
    else:
        parts: tl.constexpr = codes.shape[0]
        tokens: tl.constexpr = codes.shape[1]
        groups: tl.constexpr = codes.shape[2]
        # parts last: a warp, which has a part, then has all its groups, and adds them up by itself
        keys = tl.permute(codes, (2, 0, 3, 1))
        keys = tl.reshape(keys, (groups * parts, codes.shape[3], tokens))
        products = tl.reshape(dot(q, keys), (groups, parts, q.shape[1], tokens))
    return products


@device_function
def score_groups(
    q,
    sums,
    packed,
    factor,
    scale,
    zero,
    scale_strides,
    zero_strides,
    page,
    row,
    kv_head,
    seen,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scores [..., M, N] with codes of bytes [..., N, D / 2], before soft cap, slopes and bias; q
    and sums from ``group_queries``, factor [..., M] from ``scale_queries``.
    """
    codes = grouped_codes(packed, q.dtype, zero is None, GROUP)
    zeros = None
    if zero is not None:
        zeros = load_groups(zero, zero_strides, page, row, kv_head, seen, DIM, BLOCK, GROUP)
        if q.dtype == tl.float32:  # answers would show the difference of two larger sums
            codes -= down(zeros)
    products = _products(q, codes)
    if zero is not None and q.dtype != tl.float32:
        products -= down(sums) * across(_groups_first(zeros))
    scales = load_groups(scale, scale_strides, page, row, kv_head, seen, DIM, BLOCK, GROUP)
    return tl.sum(products * across(_groups_first(scales)), 0) * down(factor)


@device_function
def group_values(
    packed,
    scale,
    zero,
    scale_strides,
    zero_strides,
    page,
    row,
    kv_head,
    seen,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``(values, unit)``: values [..., N, D] in DTYPE, float16 or float32, of which token n counts
    ``unit`` [..., N], a power of two or 0, times.
    """
    scales = load_groups(scale, scale_strides, page, row, kv_head, seen, DIM, BLOCK, GROUP)
    largest = tl.abs(scales)
    if zero is not None:
        zeros = load_groups(zero, zero_strides, page, row, kv_head, seen, DIM, BLOCK, GROUP)
        largest = tl.maximum(largest, tl.abs(zeros * scales))
    largest = tl.max(largest, len(largest.shape) - 1)
    unit, inverse = power_below(largest)
    unit = tl.where(largest == 0.0, 0.0, unit)  # such tokens add nothing, and set no tile's unit
    scales *= down(inverse)
    if zero is None:
        values = grouped_codes(packed, DTYPE, True, GROUP) * down(narrow(scales, DTYPE))
    else:  # in float32: a zero point in float16 would lose what is left of the code
        values = (grouped_codes(packed, tl.float32, False, GROUP) - down(zeros)) * down(scales)
        values = narrow(values, DTYPE)
    if len(packed.shape) == 2:
        values = tl.reshape(values, (packed.shape[0], BLOCK))
    else:
        values = tl.reshape(values, (packed.shape[0], packed.shape[1], BLOCK))
    return values, unit


@device_function
def unit_weights(weights, unit, DTYPE: tl.constexpr):
    """``(weights, common)``: weights [..., M, N] of tokens that count ``unit`` [..., N] times, in
    DTYPE for a product whose result counts ``common`` [..., 1, 1] times.
    """
    units = across(unit)
    common, inverse = power_below(tl.max(units, len(units.shape) - 1, keep_dims=True))
    return narrow(weights * (units * inverse), DTYPE), common
