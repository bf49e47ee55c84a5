"""The tensors of a case, the same bits on every host.

Numbers come from NumPy's Philox, keyed by seed, case and tensor. Only its raw 64-bit integers are
used (their stream is fixed for good), and their four 16-bit lanes are summed: nearly normal, and
integer arithmetic where a normal generator calls the platform's logarithm.
"""

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import Layout, ScaleKind
from splitkv.matrix.case import Case, Memory
from splitkv.matrix.fixtures import recorded
from splitkv.matrix.reference import visible

_FAR = 2**31
_SPARE_PAGES = 3
_SPARE_COLUMNS = 2
_SPARE_TOKENS = 5
_GARBAGE = (-1, 2**31 - 1)
"""What block table entries hold that nobody may read."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A call and its sinks [H]. order: which of the case's requests stands at each place."""

    call: DecodeCall
    sinks: Tensor | None
    order: tuple[int, ...]


def raw(seed: int, case: str, name: str, count: int) -> np.ndarray:
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


def build(
    case: Case,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    poisoned: bool = False,
    moved: bool = False,
) -> Inputs:
    """The case's call with its tensors on ``device``.

    poisoned: slots that no query may see hold ``case.poison``, unused table entries garbage.
    moved: requests stand in reverse order, on other pages.
    """
    order = tuple(range(len(case.seq_lens)))
    if moved:
        order = order[::-1]
    requests = [_request(case, seed, index) for index in order]
    if poisoned:
        requests = [_poison(case, request) for request in requests]
    cache = _cache(case, seed, requests, poisoned, moved, torch.device(device))
    call = DecodeCall(
        q=_pack([request.q for request in requests], case).to(device),
        cache=cache,
        spec=case.spec,
        cu_seqlens_q=_offsets(case, [len(request.q) for request in requests], device)
        if case.spec.packed_queries
        else None,
        alibi_slopes=_each(requests, "slopes", shared=not case.alibi_per_request, device=device),
        attn_bias=_each(
            requests if case.bias_batch else requests[:1], "bias", shared=False, device=device
        ),
        attn_mask=_each(requests, "mask", shared=False, device=device),
        k_scale=_each(requests, "k_scale", shared=_shared(case.spec.k_scale), device=device),
        v_scale=_each(requests, "v_scale", shared=_shared(case.spec.v_scale), device=device),
    )
    sinks = (
        normal(seed, case.id, "sinks", case.spec.num_q_heads).float() if case.spec.sinks else None
    )
    return Inputs(call, None if sinks is None else sinks.to(device), order)


def digest(case: Case, seed: int) -> str:
    """Of the bits of every tensor of the case, to compare hosts by."""
    found = hashlib.sha256()
    for index in range(len(case.seq_lens)):
        request = _request(case, seed, index)
        for name in Request.__slots__:
            if (tensor := getattr(request, name)) is not None:
                found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def _request(case: Case, seed: int, index: int) -> Request:
    spec, length, queries = case.spec, case.seq_lens[index], case.queries[index]

    def draw(name: str, *shape: int) -> Tensor:
        return normal(seed, case.id, f"{name}{index}", *shape)

    if case.fixture is not None:
        q, k, v = recorded(case.fixture, index, length, queries)
    else:
        q = draw("q", queries, spec.num_q_heads, spec.head_dim) * case.q_gain
        k = draw("k", length, spec.num_kv_heads, spec.head_dim)
        v = draw("v", length, spec.num_kv_heads, spec.head_dim_v)
    k, v = _codes(k, spec.cache_dtype), _codes(v, spec.cache_dtype)
    if case.nan is not None and index == 0:
        {"k": k, "v": v}[case.nan][length - 1, 0, 0] = math.nan
    return Request(
        q.to(spec.dtype),
        k,
        v,
        bias=_bias(case, seed, index if case.bias_batch else None) if spec.attn_bias else None,
        mask=_mask(case, seed, index) if spec.attn_mask else None,
        slopes=uniform(
            seed, case.id, f"slopes{index if case.alibi_per_request else ''}", spec.num_q_heads
        ).float()
        if spec.alibi
        else None,
        k_scale=_scale(case, seed, "k_scale", spec.k_scale, index),
        v_scale=_scale(case, seed, "v_scale", spec.v_scale, index),
    )


def _codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of variance 1 as a cache holds them; 36 int8 codes to the unit, to cut none off."""
    return (values * 36).round().to(dtype) if dtype == torch.int8 else values.to(dtype)


def _scale(case: Case, seed: int, name: str, kind: ScaleKind | None, index: int) -> Tensor | None:
    if kind is None:
        return None
    count = 1 if kind is ScaleKind.TENSOR else case.spec.num_kv_heads
    own = f"{name}{'' if _shared(kind) else index}"
    unit = 1 / 36 if case.spec.cache_dtype == torch.int8 else 1.0
    return ((0.5 + uniform(seed, case.id, own, count)) * unit).float()


def _shared(kind: ScaleKind | None) -> bool:
    return kind is not ScaleKind.REQUEST_HEAD


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


def _poison_code(case: Case) -> float:
    return 127 if case.spec.cache_dtype == torch.int8 else case.poison


def _poison(case: Case, request: Request) -> Request:
    """The request with every slot overwritten that none of its queries sees."""
    unseen = ~visible(case.spec, len(request.k), len(request.q), request.mask).any(0)
    k, v = request.k.clone(), request.v.clone()
    for j in torch.nonzero(unseen).flatten().tolist():
        k[j].fill_(_poison_code(case))
        v[j].fill_(_poison_code(case))
    return replace(request, k=k, v=v)


def _cache(
    case: Case,
    seed: int,
    requests: list[Request],
    poisoned: bool,
    moved: bool,
    device: torch.device,
) -> Cache:
    lengths = torch.tensor([len(request.k) for request in requests], dtype=case.index_dtype)
    lengths = lengths if case.host_lengths else lengths.to(device)
    layout = case.spec.layout
    if layout is Layout.PACKED:
        k = torch.cat([request.k for request in requests])
        v = torch.cat([request.v for request in requests])
        k, v = _on_device(k, v, case.memory, device)
        return PackedCache(k, v, _offsets(case, [len(request.k) for request in requests], device))
    if not layout.paged:
        k = _dense(case, seed, "k", requests, poisoned)
        v = _dense(case, seed, "v", requests, poisoned)
        if layout is Layout.BNSD:
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        return DenseCache(*_on_device(k, v, case.memory, device), lengths, layout)
    return _paged(case, seed, requests, poisoned, moved, lengths, device)


def _dense(case: Case, seed: int, name: str, requests: list[Request], poisoned: bool) -> Tensor:
    """[B, T, K, D or Dv], filler after each request."""
    rows = [getattr(request, name) for request in requests]
    capacity = max(map(len, rows)) + _SPARE_TOKENS
    if not case.odd_capacity:
        capacity = -(-capacity // 128) * 128
    dense = _filler(case, seed, name, poisoned, len(rows), capacity, *rows[0].shape[1:])
    for place, row in enumerate(rows):
        dense[place, : len(row)] = row
    return dense


def _paged(
    case: Case,
    seed: int,
    requests: list[Request],
    poisoned: bool,
    moved: bool,
    lengths: Tensor,
    device: torch.device,
) -> PagedCache:
    spec, page = case.spec, case.spec.page_size
    assert page is not None
    blocks = [-(-len(request.k) // page) for request in requests]
    pages = sum(blocks) + _SPARE_PAGES
    free = np.argsort(raw(seed, case.id, f"pages{moved}", pages), kind="stable").tolist()
    k = _filler(case, seed, "k", poisoned, pages, page, spec.num_kv_heads, spec.head_dim)
    v = _filler(case, seed, "v", poisoned, pages, page, spec.num_kv_heads, spec.head_dim_v)
    table = torch.zeros(
        len(requests), max(blocks, default=0) + _SPARE_COLUMNS, dtype=case.index_dtype
    )
    if poisoned:
        table[:, ::2], table[:, 1::2] = _GARBAGE
    first = _FAR // (page * spec.num_kv_heads * min(spec.head_dim, spec.head_dim_v))
    offset = first if case.memory is Memory.FAR else 0
    for place, request in enumerate(requests):
        used = visible(spec, len(request.k), len(request.q)).any(0)
        for block in range(blocks[place]):
            tokens = slice(block * page, (block + 1) * page)
            at = free.pop()
            count = len(request.k[tokens])
            k[at, :count], v[at, :count] = request.k[tokens], request.v[tokens]
            if not poisoned or used[tokens].any():
                table[place, block] = at + offset
    if spec.layout is Layout.HND:
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    if case.memory is Memory.FAR:
        k, v = _far(k, offset, device), _far(v, offset, device)
    else:
        k, v = _on_device(k, v, case.memory, device)
    return PagedCache(k, v, table.to(device), lengths, spec.layout)


def _filler(case: Case, seed: int, name: str, poisoned: bool, *shape: int) -> Tensor:
    """What lies in slots that belong to nobody: other numbers, or poison."""
    if poisoned:
        return torch.empty(shape, dtype=case.spec.cache_dtype).fill_(_poison_code(case))
    return _codes(normal(seed, case.id, f"filler {name}", *shape), case.spec.cache_dtype)


def _on_device(k: Tensor, v: Tensor, memory: Memory, device: torch.device) -> tuple[Tensor, Tensor]:
    if memory is Memory.JOINT:
        both = torch.cat([k, v], -1).to(device)
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :]
    if memory is Memory.STRIDED:
        return tuple(x.repeat_interleave(2, -1).to(device)[..., ::2] for x in (k, v))  # type: ignore[return-value]
    return k.to(device), v.to(device)


def _far(pool: Tensor, offset: int, device: torch.device) -> Tensor:
    """``pool`` after ``offset`` pages that nobody writes: on a host they cost only addresses."""
    far = torch.empty((offset + len(pool), *pool.shape[1:]), dtype=pool.dtype, device=device)
    far[offset:].copy_(pool)
    return far


def _offsets(case: Case, counts: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor(np.cumsum([0, *counts]), dtype=case.index_dtype, device=device)


def _pack(queries: list[Tensor], case: Case) -> Tensor:
    if case.spec.packed_queries:
        return torch.cat(queries)
    shape = (case.spec.num_queries, case.spec.num_q_heads, case.spec.head_dim)
    return torch.stack(queries) if queries else torch.empty(0, *shape, dtype=case.spec.dtype)


def _each(
    requests: list[Request], name: str, *, shared: bool, device: torch.device | str
) -> Tensor | None:
    """A tensor of every request stacked on a batch axis, or the one that all share."""
    values = [getattr(request, name) for request in requests]
    if not values or values[0] is None:
        return None
    return (values[0] if shared else torch.stack(values)).to(device)
