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

from splitkv.common.spec import ScaleKind
from splitkv.matrix.case import Case
from splitkv.matrix.fixtures import recorded


@dataclass(frozen=True, slots=True)
class Request:
    """One request in logical order.

    q: [S, H, D]; k: [L, K, D]; v: [L, K, Dv]; bias: [H or 1, largest S, n]; mask: [largest S, n];
    slopes: [H]; k_scale, v_scale: [1] or [K].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


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
    if case.nan is not None and index == 0:
        {"k": k, "v": v}[case.nan][length - 1, 0, 0] = math.nan
    return Request(
        q.to(spec.dtype),
        k,
        v,
        bias=_bias(case, seed, index if case.bias_batch else None) if spec.attn_bias else None,
        mask=_mask(case, seed, index) if spec.attn_mask else None,
        slopes=_slopes(case, seed, index) if spec.alibi else None,
        k_scale=_scale(case, seed, "k_scale", spec.k_scale, index),
        v_scale=_scale(case, seed, "v_scale", spec.v_scale, index),
    )


def codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of variance 1 as a cache holds them; 36 int8 codes to the unit, to cut none off."""
    return (values * 36).round().to(dtype) if dtype == torch.int8 else values.to(dtype)


def shared(kind: ScaleKind | None) -> bool:
    """Whether all requests have the same scale."""
    return kind is not ScaleKind.REQUEST_HEAD


def digest(case: Case, seed: int) -> str:
    """Of the bits of every tensor of the case, to compare hosts by."""
    found = hashlib.sha256()
    for index in range(len(case.seq_lens)):
        drawn = request(case, seed, index)
        for name in Request.__slots__:
            if (tensor := getattr(drawn, name)) is not None:
                found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def _scale(case: Case, seed: int, name: str, kind: ScaleKind | None, index: int) -> Tensor | None:
    if kind is None:
        return None
    count = 1 if kind is ScaleKind.TENSOR else case.spec.num_kv_heads
    own = f"{name}{'' if shared(kind) else index}"
    unit = 1 / 36 if case.spec.cache_dtype == torch.int8 else 1.0
    return ((0.5 + uniform(seed, case.id, own, count)) * unit).float()


def _slopes(case: Case, seed: int, index: int) -> Tensor:
    """[H], positive."""
    own = f"slopes{index if case.alibi_per_request else ''}"
    return uniform(seed, case.id, own, case.spec.num_q_heads).float()


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
