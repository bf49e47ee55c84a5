"""The call of a case: its tensors laid out on a device, clean or poisoned, here or elsewhere."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache, RingCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind, codes_per_item
from splitkv.common.validate import check_ring
from splitkv.matrix.case import Case, Memory
from splitkv.matrix.draw import Request, codes, groups_of, normal, raw, request, shared
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
    cache, by_token = _cache(case, seed, requests, poisoned, moved, device)
    kinds = _scale_kinds(spec)
    by_token = {
        name: numbers[..., 0] if kinds[name] is ScaleKind.TOKEN else numbers
        for name, numbers in by_token.items()
    }
    scales = {
        name: by_token[name] if name in by_token else _each(requests, name, shared(kind), device)
        for name, kind in kinds.items()
    }
    starts_at = torch.device("cpu") if case.host_lengths else device
    call = DecodeCall(
        q=_pack([entry.q for entry in requests], case).to(device),
        cache=cache,
        spec=spec,
        cu_seqlens_q=_offsets(case, counts, device) if spec.packed_queries else None,
        alibi_slopes=_each(requests, "slopes", not case.alibi_per_request, device),
        attn_bias=_each(requests[: None if case.bias_batch else 1], "bias", False, device),
        attn_mask=_each(requests, "mask", False, device),
        kv_start=_each(requests, "start", False, starts_at),
        **scales,
    )
    sinks = normal(seed, case.id, "sinks", spec.num_q_heads).float() if spec.sinks else None
    return Inputs(call, None if sinks is None else sinks.to(device), order)


def _scale_kinds(spec: DecodeSpec) -> dict[str, ScaleKind | None]:
    """Of scales and zero points, by the call's names; None: there are none."""
    return {
        "k_scale": spec.k_scale,
        "v_scale": spec.v_scale,
        "k_zero": spec.k_scale if spec.k_zero else None,
        "v_zero": spec.v_scale if spec.v_zero else None,
    }


def _widths(spec: DecodeSpec) -> dict[str, int]:
    """What lies token by token: k and v, and numbers that each token has; by name the last
    dimension.
    """
    dims = {"k": spec.head_dim, "v": spec.head_dim_v}
    per_item = codes_per_item(spec.cache_dtype)
    widths = {name: dim // per_item for name, dim in dims.items()}
    for name, kind in _scale_kinds(spec).items():
        if kind is ScaleKind.TOKEN:
            widths[name] = 1
        elif kind is ScaleKind.GROUP:
            widths[name] = groups_of(dims[name[0]])
    return widths


def _poison_of(case: Case, name: str) -> float:
    codes_ = name in ("k", "v") and not case.spec.cache_dtype.is_floating_point
    return 127 if codes_ else case.poison


def _poison(case: Case, drawn: Request) -> Request:
    """The request with every slot overwritten that none of its queries sees."""
    unseen = ~visible(case.spec, len(drawn.k), len(drawn.q), drawn.mask, drawn.start).any(0)
    changed = {name: getattr(drawn, name).clone() for name in _widths(case.spec)}
    for name, rows in changed.items():
        for j in torch.nonzero(unseen).flatten().tolist():
            rows[j].fill_(_poison_of(case, name))
    return replace(drawn, **changed)


def _cache(
    case: Case,
    seed: int,
    requests: list[Request],
    poisoned: bool,
    moved: bool,
    device: torch.device,
) -> tuple[Cache, dict[str, Tensor]]:
    """The cache, and what else each token has, by name."""
    lengths = torch.tensor([len(entry.k) for entry in requests], dtype=case.index_dtype)
    lengths = lengths if case.host_lengths else lengths.to(device)
    layout = case.spec.layout
    if case.memory is Memory.RING and not layout.paged:
        raise ValueError(f"case {case.id}: a ring has pages, layout {layout.value} has none")
    if layout is Layout.PACKED:
        parts = {
            name: torch.cat([getattr(entry, name) for entry in requests])
            for name in _widths(case.spec)
        }
        k, v, by_token = _on_device(parts, case.memory, device)
        at = torch.device("cpu") if case.host_lengths else device
        return PackedCache(k, v, _offsets(case, [len(entry.k) for entry in requests], at)), by_token
    if not layout.paged:
        parts = {name: _dense(case, seed, name, requests, poisoned) for name in _widths(case.spec)}
        k, v, by_token = _on_device(_as_laid_out(parts, layout), case.memory, device)
        return DenseCache(k, v, lengths, layout), by_token
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
) -> tuple[PagedCache, dict[str, Tensor]]:
    spec, page = case.spec, case.spec.page_size
    assert page is not None
    blocks = [-(-len(entry.k) // page) for entry in requests]
    pages = sum(blocks) + _SPARE_PAGES
    free = np.argsort(raw(seed, case.id, f"pages{moved}", pages), kind="stable").tolist()
    pools = _pools(case, seed, poisoned, pages)
    table = torch.zeros(
        len(requests), max(blocks, default=0) + _SPARE_COLUMNS, dtype=case.index_dtype
    )
    if poisoned:
        table[:, ::2], table[:, 1::2] = _GARBAGE
    first = _FAR // (page * spec.num_kv_heads * min(spec.head_dim, spec.head_dim_v))
    offset = first if case.memory is Memory.FAR else 0
    for place, entry in enumerate(requests):
        used = visible(spec, len(entry.k), len(entry.q), start=entry.start).any(0)
        for block in range(blocks[place]):
            tokens = slice(block * page, (block + 1) * page)
            at = free.pop()
            for name, pool in pools.items():
                rows = getattr(entry, name)[tokens]
                pool[at, : len(rows)] = rows
            if not poisoned or used[tokens].any():
                table[place, block] = at + offset
    pools = _as_laid_out(pools, spec.layout)
    if case.memory is Memory.FAR:
        pools = {name: _far(pool, offset, device) for name, pool in pools.items()}
    k, v, by_token = _on_device(pools, case.memory, device)
    return PagedCache(k, v, table.to(device), lengths, spec.layout), by_token


def _ring(
    case: Case,
    seed: int,
    requests: list[Request],
    poisoned: bool,
    moved: bool,
    lengths: Tensor,
    device: torch.device,
) -> tuple[PagedCache, dict[str, Tensor]]:
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
    pools = _pools(case, seed, poisoned, pages)
    for place, entry in enumerate(requests):
        for j in range(len(entry.k)):
            block = j // page
            column = block if block < anchors else anchors + (block - anchors) % blocks
            for name, pool in pools.items():
                pool[table[place, column], j % page] = getattr(entry, name)[j]
    k, v, by_token = _on_device(_as_laid_out(pools, spec.layout), Memory.PLAIN, device)
    table = table.to(case.index_dtype).to(device)
    longest = max(case.seq_lens, default=0)
    ring = RingCache(k, v, table, lengths, spec.layout, anchors, longest)
    check_ring(ring, spec)
    return ring.as_paged(), by_token


def _pools(case: Case, seed: int, poisoned: bool, pages: int) -> dict[str, Tensor]:
    """[pages, P, K, width] by name, of filler."""
    shape = (pages, case.spec.page_size or 0, case.spec.num_kv_heads)
    return {
        name: _filler(case, seed, name, poisoned, *shape, width)
        for name, width in _widths(case.spec).items()
    }


def _filler(case: Case, seed: int, name: str, poisoned: bool, *shape: int) -> Tensor:
    """What lies in slots that belong to nobody: other numbers, or poison."""
    dtype = case.spec.cache_dtype if name in ("k", "v") else torch.float32
    if poisoned:
        return torch.empty(shape, dtype=dtype).fill_(_poison_of(case, name))
    *rows, width = shape
    numbers = normal(seed, case.id, f"filler {name}", *rows, width * codes_per_item(dtype))
    return codes(numbers, dtype)


def _as_laid_out(parts: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Parts [outer, inner, K, width] in the layout's order."""
    if layout not in (Layout.HND, Layout.BNSD):
        return parts
    return {name: part.transpose(1, 2).contiguous() for name, part in parts.items()}


def _on_device(
    parts: dict[str, Tensor], memory: Memory, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """k, v, and the others."""
    k, v = parts["k"], parts["v"]
    others = {name: part.to(device) for name, part in parts.items() if name not in ("k", "v")}
    if memory is Memory.JOINT:
        both = torch.cat([k, v], -1).to(device)
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :], others
    if memory is Memory.STRIDED:
        k, v = (x.repeat_interleave(2, -1).to(device)[..., ::2] for x in (k, v))
        others = {name: part.repeat_interleave(2, -1)[..., ::2] for name, part in others.items()}
        return k, v, others
    k = k.to(device)
    v = k[..., : v.shape[-1]] if memory is Memory.LATENT else v.to(device)
    return k, v, others


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
