"""The tensors of a case request by request, the same bits on every host.

Numbers come from NumPy's Philox, keyed by seed, case and tensor. Only its raw 64-bit integers are
used (their stream is fixed for good), and their four 16-bit lanes are summed: nearly normal, and
integer arithmetic where a normal generator calls the platform's logarithm.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.quantised import group_sizes, pack_int4, unpack_int4
from splitkv.common.spec import INT4, ScaleKind
from splitkv.matrix.case import Case, Memory
from splitkv.matrix.fixtures import recorded


@dataclass(frozen=True, slots=True)
class Request:
    """One request in logical order.

    q: [S, H, D]; k: [L, K, D]; v: [L, K, Dv]; bias: [H or 1, largest S, n]; mask: [largest S, n];
    start: [], the first visible position; slopes: [H]; k_scale, v_scale, k_zero, v_zero: [1], [K],
    per token [L, K, 1], per channel [K, D or Dv], or of groups [L, K, D or Dv / g]. int4 codes lie
    in k and v as in a cache, half as wide.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    start: Tensor | None
    slopes: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_zero: Tensor | None
    v_zero: Tensor | None


def raw(seed: int, case: str, name: str, count: int) -> npt.NDArray[np.uint64]:
    """``count`` 64-bit integers, keyed by all three."""
    key = hashlib.sha256(f"{seed}/{case}/{name}".encode()).digest()[:16]
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)


def normal(seed: int, case: str, name: str, *shape: int) -> Tensor:
    """Float64 numbers of mean 0 and variance 1, within 3.47."""
    lanes = raw(seed, case, name, math.prod(shape)).view(np.uint16).reshape(-1, 4)
    total = lanes.sum(1, dtype=np.int64) - 2 * 65535
    return torch.from_numpy(total * (math.sqrt(3.0) / 65536)).reshape(shape)


def uniform(seed: int, case: str, name: str, *shape: int) -> Tensor:
    """Float64 numbers in [0, 1)."""
    top = raw(seed, case, name, math.prod(shape)) >> np.uint64(11)
    return torch.from_numpy(top * 2.0**-53).reshape(shape)


def request(case: Case, seed: int, index: int) -> Request:
    """What request ``index`` of ``case`` consists of, on the host."""
    spec, length, queries = case.spec, case.seq_lens[index], case.queries[index]
    if case.fixture is not None:
        q, k, v = recorded(case.fixture, index, length, queries)
    else:
        shapes = (
            (queries, spec.num_q_heads, spec.head_dim),
            (length, spec.num_kv_heads, spec.head_dim),
            (length, spec.num_kv_heads, spec.head_dim_v),
        )
        names = (f"q{index}", f"k{index}", f"v{index}")
        q, k, v = (
            normal(seed, case.id, name, *shape) for name, shape in zip(names, shapes, strict=True)
        )
        q = q * case.q_gain
    k, v = codes(k, spec.cache_dtype), codes(v, spec.cache_dtype)
    if case.memory is Memory.LATENT:
        v = k[..., : k.shape[-1] * spec.head_dim_v // spec.head_dim]
    if case.nan is not None and index == 0:
        {"k": k, "v": v}[case.nan][length - 1, 0, 0] = math.nan
    scales = {name: _scale(case, seed, name, index) for name in ("k_scale", "v_scale")}
    zeros = {name: _zero(case, seed, name, index) for name in ("k_zero", "v_zero")}
    return Request(
        q.to(spec.dtype),
        k,
        v,
        bias=_bias(case, seed, index if case.bias_batch else None) if spec.attn_bias else None,
        mask=_mask(case, seed, index) if spec.attn_mask else None,
        start=_start(case, seed, index) if spec.kv_start else None,
        slopes=_slopes(case, seed, index) if spec.alibi else None,
        **scales,
        **zeros,
    )


def codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of variance 1 as a cache holds them; 36 int8 codes to the unit, to cut none off, and 2
    int4 codes, around 8.
    """
    if dtype == INT4:
        return pack_int4((values * 2 + 8).round().clamp(0, 15).to(INT4))
    return (values * 36).round().to(dtype) if dtype == torch.int8 else values.to(dtype)


def dequantised(codes: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
    """The values [L, K, D] of one request's ``codes``, float64; scale and zero as ``Request`` has
    them.
    """
    if codes.dtype == INT4 and scale is not None:
        codes = unpack_int4(codes)
        wide = codes.shape[-1] // scale.shape[-1]
        scale, zero = (
            None if x is None else x.repeat_interleave(wide, -1)
            for x in (scale, torch.tensor([8.0]) if zero is None else zero)
        )
    values = codes.double()
    values = values if zero is None else values - _to_rows(zero)
    return values if scale is None else values * _to_rows(scale)


def _to_rows(numbers: Tensor) -> Tensor:
    return numbers.double()[:, None] if numbers.ndim == 1 else numbers.double()


def shared(kind: ScaleKind | None) -> bool:
    """Whether all requests have the same scale."""
    return kind not in (ScaleKind.REQUEST_HEAD, ScaleKind.TOKEN, ScaleKind.GROUP)


def digest(case: Case, seed: int) -> str:
    """Of the bits of every tensor of the case, to compare hosts by."""
    found = hashlib.sha256()
    for index in range(len(case.seq_lens)):
        drawn = request(case, seed, index)
        for name in Request.__slots__:
            if (tensor := getattr(drawn, name)) is not None:
                found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def _scale(case: Case, seed: int, name: str, index: int) -> Tensor | None:
    kind: ScaleKind | None = getattr(case.spec, name)
    if kind is None:
        return None
    own = f"{name}{'' if shared(kind) else index}"
    unit = {torch.int8: 1 / 36, INT4: 1 / 2}.get(case.spec.cache_dtype, 1.0)
    shape = _scale_shape(case, name, kind, index)
    return ((0.5 + uniform(seed, case.id, own, *shape)) * unit).float()


def _zero(case: Case, seed: int, name: str, index: int) -> Tensor | None:
    """About one standard deviation of the codes to either side; not whole."""
    kind: ScaleKind | None = getattr(case.spec, f"{name[0]}_scale")
    if kind is None or not getattr(case.spec, name):
        return None
    own = f"{name}{'' if shared(kind) else index}"
    shape = _scale_shape(case, name, kind, index)
    drawn = uniform(seed, case.id, own, *shape)
    return (6 + 4 * drawn if kind is ScaleKind.GROUP else 72 * drawn - 36).float()


def _scale_shape(case: Case, name: str, kind: ScaleKind, index: int) -> tuple[int, ...]:
    heads = case.spec.num_kv_heads
    width = case.spec.head_dim if name.startswith("k") else case.spec.head_dim_v
    return {
        ScaleKind.TENSOR: (1,),
        ScaleKind.HEAD: (heads,),
        ScaleKind.REQUEST_HEAD: (heads,),
        ScaleKind.TOKEN: (case.seq_lens[index], heads, 1),
        ScaleKind.CHANNEL: (heads, width),
        ScaleKind.GROUP: (case.seq_lens[index], heads, groups_of(width)),
    }[kind]


def groups_of(dim: int) -> int:
    """Groups of 32 elements, of 16 where 32 does not divide ``dim``."""
    return dim // max((group for group in group_sizes(dim) if group <= 32), default=dim)


def _slopes(case: Case, seed: int, index: int) -> Tensor:
    """[H], positive."""
    own = f"slopes{index if case.alibi_per_request else ''}"
    return uniform(seed, case.id, own, case.spec.num_q_heads).float()


def _start(case: Case, seed: int, index: int) -> Tensor:
    """Anywhere from 0 to the request's length; a NaN that must be seen lies at the last token."""
    length = case.seq_lens[index]
    start = int(float(uniform(seed, case.id, f"start{index}")) * (length + 1))
    seen = case.nan is not None and index == 0
    return torch.tensor(min(start, length - 1) if seen else start, dtype=case.index_dtype)


def _bias(case: Case, seed: int, index: int | None) -> Tensor:
    """[H or 1, S, n]; with ``bias_hides`` about a third is -inf."""
    shape = (case.spec.num_q_heads if case.bias_heads else 1, case.spec.num_queries, case.columns)
    bias = normal(seed, case.id, f"bias{index}", *shape).float()
    if case.bias_hides:
        bias[uniform(seed, case.id, f"hidden{index}", *shape) < 0.3] = -math.inf
    return bias


def _mask(case: Case, seed: int, index: int) -> Tensor:
    """[S, n]; where there are several queries the first sees none of the columns."""
    shape = (case.spec.num_queries, case.columns)
    mask = uniform(seed, case.id, f"mask{index}", *shape) < 0.6
    if len(mask) > 1:
        mask[0] = False
    return mask
