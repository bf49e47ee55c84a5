"""The call of a case: its tensors laid out on a device, clean or poisoned, here or elsewhere."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache, RingCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import Layout
from splitkv.common.validate import check_ring
from splitkv.matrix.case import Case, Memory
from splitkv.matrix.draw import Request, codes, normal, raw, request, shared
from splitkv.matrix.reference import visible

_FAR = 2**31
_SPARE_PAGES = 3
_SPARE_COLUMNS = 2
_SPARE_TOKENS = 5
_GARBAGE = (-1, 2**31 - 1)
"""What block table entries hold that nobody may read."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A call and its sinks [H]. order: which of the case's requests stands at each place."""

    call: DecodeCall
    sinks: Tensor | None
    order: tuple[int, ...]


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
    order = tuple(range(len(case.seq_lens)))[:: -1 if moved else 1]
    requests = [request(case, seed, index) for index in order]
    if poisoned:
        requests = [_poison(case, entry) for entry in requests]
    device = torch.device(device)
    spec = case.spec
    counts = [len(entry.q) for entry in requests]
    call = DecodeCall(
        q=_pack([entry.q for entry in requests], case).to(device),
        cache=_cache(case, seed, requests, poisoned, moved, device),
        spec=spec,
        cu_seqlens_q=_offsets(case, counts, device) if spec.packed_queries else None,
        alibi_slopes=_each(requests, "slopes", not case.alibi_per_request, device),
        attn_bias=_each(requests[: None if case.bias_batch else 1], "bias", False, device),
        attn_mask=_each(requests, "mask", False, device),
        k_scale=_each(requests, "k_scale", shared(spec.k_scale), device),
        v_scale=_each(requests, "v_scale", shared(spec.v_scale), device),
    )
    sinks = normal(seed, case.id, "sinks", spec.num_q_heads).float() if spec.sinks else None
    return Inputs(call, None if sinks is None else sinks.to(device), order)


def _poison_code(case: Case) -> float:
    return 127 if case.spec.cache_dtype == torch.int8 else case.poison


def _poison(case: Case, drawn: Request) -> Request:
    """The request with every slot overwritten that none of its queries sees."""
    unseen = ~visible(case.spec, len(drawn.k), len(drawn.q), drawn.mask).any(0)
    k, v = drawn.k.clone(), drawn.v.clone()
    for j in torch.nonzero(unseen).flatten().tolist():
        k[j].fill_(_poison_code(case))
        v[j].fill_(_poison_code(case))
    return replace(drawn, k=k, v=v)


def _cache(
    case: Case,
    seed: int,
    requests: list[Request],
    poisoned: bool,
    moved: bool,
    device: torch.device,
) -> Cache:
    lengths = torch.tensor([len(entry.k) for entry in requests], dtype=case.index_dtype)
    lengths = lengths if case.host_lengths else lengths.to(device)
    layout = case.spec.layout
    if case.memory is Memory.RING and not layout.paged:
        raise ValueError(f"case {case.id}: a ring has pages, layout {layout.value} has none")
    if layout is Layout.PACKED:
        k = torch.cat([entry.k for entry in requests])
        v = torch.cat([entry.v for entry in requests])
        k, v = _on_device(k, v, case.memory, device)
        at = torch.device("cpu") if case.host_lengths else device
        return PackedCache(k, v, _offsets(case, [len(entry.k) for entry in requests], at))
    if not layout.paged:
        k = _dense(case, seed, "k", requests, poisoned)
        v = _dense(case, seed, "v", requests, poisoned)
        if layout is Layout.BNSD:
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        return DenseCache(*_on_device(k, v, case.memory, device), lengths, layout)
    if case.memory is Memory.RING:
        return _ring(case, seed, requests, poisoned, moved, lengths, device)
    return _paged(case, seed, requests, poisoned, moved, lengths, device)


def _dense(case: Case, seed: int, name: str, requests: list[Request], poisoned: bool) -> Tensor:
    """[B, T, K, D or Dv], filler after each request."""
    rows = [getattr(entry, name) for entry in requests]
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
    blocks = [-(-len(entry.k) // page) for entry in requests]
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
    for place, entry in enumerate(requests):
        used = visible(spec, len(entry.k), len(entry.q)).any(0)
        for block in range(blocks[place]):
            tokens = slice(block * page, (block + 1) * page)
            at = free.pop()
            count = len(entry.k[tokens])
            k[at, :count], v[at, :count] = entry.k[tokens], entry.v[tokens]
            if not poisoned or used[tokens].any():
                table[place, block] = at + offset
    if spec.layout is Layout.HND:
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    if case.memory is Memory.FAR:
        k, v = _far(k, offset, device), _far(v, offset, device)
    else:
        k, v = _on_device(k, v, case.memory, device)
    return PagedCache(k, v, table.to(device), lengths, spec.layout)


def _ring(
    case: Case,
    seed: int,
    requests: list[Request],
    poisoned: bool,
    moved: bool,
    lengths: Tensor,
    device: torch.device,
) -> PagedCache:
    """As few pages as the window allows, each token written over the one that it evicts."""
    spec, page = case.spec, case.spec.page_size
    assert page is not None
    if spec.sliding_window is None:
        raise ValueError(f"case {case.id}: a ring needs a sliding_window, which says what it keeps")
    anchors = -(-spec.anchor_tokens // page)
    blocks = -(-(spec.sliding_window + spec.num_queries - 2) // page) + 1
    columns = anchors + blocks
    pages = len(requests) * columns + _SPARE_PAGES
    free = np.argsort(raw(seed, case.id, f"pages{moved}", pages), kind="stable")
    table = torch.tensor(free[: len(requests) * columns].reshape(-1, columns))
    k = _filler(case, seed, "k", poisoned, pages, page, spec.num_kv_heads, spec.head_dim)
    v = _filler(case, seed, "v", poisoned, pages, page, spec.num_kv_heads, spec.head_dim_v)
    for place, entry in enumerate(requests):
        for j in range(len(entry.k)):
            block = j // page
            column = block if block < anchors else anchors + (block - anchors) % blocks
            k[table[place, column], j % page] = entry.k[j]
            v[table[place, column], j % page] = entry.v[j]
    if spec.layout is Layout.HND:
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    table = table.to(case.index_dtype).to(device)
    longest = max(case.seq_lens, default=0)
    ring = RingCache(k.to(device), v.to(device), table, lengths, spec.layout, anchors, longest)
    check_ring(ring, spec)
    return ring.as_paged()


def _filler(case: Case, seed: int, name: str, poisoned: bool, *shape: int) -> Tensor:
    """What lies in slots that belong to nobody: other numbers, or poison."""
    if poisoned:
        return torch.empty(shape, dtype=case.spec.cache_dtype).fill_(_poison_code(case))
    return codes(normal(seed, case.id, f"filler {name}", *shape), case.spec.cache_dtype)


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


def _offsets(case: Case, counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(np.cumsum([0, *counts]), dtype=case.index_dtype, device=device)


def _pack(queries: list[Tensor], case: Case) -> Tensor:
    if case.spec.packed_queries:
        return torch.cat(queries)
    shape = (case.spec.num_queries, case.spec.num_q_heads, case.spec.head_dim)
    return torch.stack(queries) if queries else torch.empty(0, *shape, dtype=case.spec.dtype)


def _each(requests: list[Request], name: str, same: bool, device: torch.device) -> Tensor | None:
    """A tensor of every request stacked on a batch axis, or the one that is the same for all."""
    values = [getattr(entry, name) for entry in requests]
    if not values or values[0] is None:
        return None
    return (values[0] if same else torch.stack(values)).to(device)
