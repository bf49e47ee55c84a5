"""A cascade's calls: the groups in one, the suffixes in another, one merge.

A group becomes a request of its own: its pages are the history, the queries of its members the
queries, ragged and without a causal mask. What a request has behind its groups is a shorter request
over the rest of its table. Backends see nothing new, so each that takes ragged queries serves it.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.ascend import AscendBackend
from splitkv.backends.base import Backend
from splitkv.backends.cascade.plan import CascadePlan, page_size_of
from splitkv.backends.cpu import CpuBackend
from splitkv.backends.cpu_work import QUERY_ROWS
from splitkv.backends.cuda import CudaBackend
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState
from splitkv.common.visibility import IntArray


def attend(
    backend: Backend, call: DecodeCall, plan: CascadePlan, lengths: IntArray
) -> PartialState:
    """The state of a call, [B, S, H] or [sum of S, H].

    lengths: the plan's ``seq_lens`` that the call was checked by.
    """
    if not plan.groups:
        return backend.partial(call, _suffix_plan(backend, plan, lengths))
    rows = _rows(plan, call.q.device)
    prefix = backend.partial(_prefix_call(call, plan, rows), _prefix_plan(backend, plan, rows))
    states = [_picked(prefix, index) for index in rows.levels]
    if (lengths > plan.shared).any():
        suffix = backend.partial(_suffix_call(call, plan), _suffix_plan(backend, plan, lengths))
        states.append(_by_row(suffix, call.spec))
    state, shape = backend.merge(states), call.rows
    return PartialState(
        state.max.reshape(shape),
        state.lse.reshape(shape),
        state.out.reshape(*shape, call.spec.head_dim_v),
    )


def queries_per_read(backend: Backend, spec: DecodeSpec) -> int | None:
    """Queries of one request that a backend serves by one pass over K and V; None: any number.

    On CUDA tiles of queries read the same split side by side, so that a second pass may come from
    the L2 cache; here it counts like the first.
    """
    if isinstance(backend, CpuBackend):
        return max(QUERY_ROWS // spec.num_q_heads, 1)
    many = replace(_shared_spec(spec), num_queries=QUERY_ROWS)
    if isinstance(backend, CudaBackend):
        from splitkv.kernels_cuda.tiles import tile_for

        return max(tile_for(many).rows // spec.group, 1)
    if isinstance(backend, AscendBackend):
        route = backend.choice(many).route
        return None if route is not None and route.shares else 1
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """How rows of queries and states lie in the groups' call; ``g`` groups, and one request more of
    no tokens where some row lacks some level: its state is that of nothing.

    queries: int64 [rows], the query of each row. offsets: int [g + 1], the call's cu_seqlens_q.
    lengths: int [g]; tokens: the same on the host. table_rows: int64 [g], columns: int64 [g,
    widest], where the pages stand. levels: for each level, the state's row of each query.
    """

    queries: Tensor
    offsets: Tensor
    lengths: Tensor
    tokens: list[int]
    table_rows: Tensor
    columns: Tensor
    levels: tuple[slice | Tensor, ...]


def _rows(plan: CascadePlan, device: torch.device) -> _Rows:
    key = ("rows", device)
    known = plan.bound.get(key)
    if not isinstance(known, _Rows):
        known = plan.bound[key] = _make_rows(plan, device)
    return known


def _make_rows(plan: CascadePlan, device: torch.device) -> _Rows:
    groups, counts = plan.groups, plan.counts
    members = np.concatenate([group.members for group in groups])
    first = np.cumsum(counts) - counts
    total = int(plan.group_queries.sum())
    begin = np.cumsum(counts[members]) - counts[members]
    queries = np.arange(total) + np.repeat(first[members] - begin, counts[members])
    levels = np.full((plan.levels, int(counts.sum())), total)
    levels[np.repeat([group.level for group in groups], plan.group_queries), queries] = np.arange(
        total
    )
    offsets = np.concatenate(([0], np.cumsum(plan.group_queries)))
    tokens = plan.group_tokens
    table_rows = np.array([group.members[0] for group in groups])
    begins = np.array([group.first for group in groups])
    if (levels == total).any():
        queries, offsets = np.append(queries, 0), np.append(offsets, total + 1)
        tokens, table_rows, begins = (np.append(of, 0) for of in (tokens, table_rows, begins))
    widest = max(len(group.pages) for group in groups)
    last = plan.shared.max() // page_size_of(plan.spec) - 1
    columns = np.minimum(begins[:, None] + np.arange(widest), last)
    # an NPU's operators take lengths from the host, a GPU's kernels on the device
    near = device if device.type == "cuda" else torch.device("cpu")
    return _Rows(
        torch.from_numpy(queries).to(device),
        torch.from_numpy(offsets.astype(np.int32)).to(near),
        torch.from_numpy(tokens.astype(np.int32)).to(near),
        tokens.tolist(),
        torch.from_numpy(table_rows).to(device),
        torch.from_numpy(columns).to(device),
        tuple(_index(level, device) for level in levels),
    )


def _index(rows: IntArray, device: torch.device) -> slice | Tensor:
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _picked(state: PartialState, index: slice | Tensor) -> PartialState:
    return PartialState(state.max[index], state.lse[index], state.out[index])


def _by_row(state: PartialState, spec: DecodeSpec) -> PartialState:
    """[rows, H]."""
    heads = spec.num_q_heads
    return PartialState(
        state.max.reshape(-1, heads),
        state.lse.reshape(-1, heads),
        state.out.reshape(-1, heads, spec.head_dim_v),
    )


def _shared_spec(spec: DecodeSpec) -> DecodeSpec:
    """``spec`` for queries that see all of a group's pages, but for their number."""
    return replace(
        spec,
        packed_queries=True,
        causal=False,
        sliding_window=None,
        window_block=1,
        anchor_tokens=0,
        attn_bias=False,
        attn_mask=False,
        sinks=False,
    )


def prefix_spec(plan: CascadePlan) -> DecodeSpec:
    """The spec of the groups' call."""
    return replace(_shared_spec(plan.spec), num_queries=int(plan.group_queries.max()))


def _prefix_plan(backend: Backend, plan: CascadePlan, rows: _Rows) -> SplitPlan:
    key = ("prefix", backend)
    known = plan.bound.get(key)
    if not isinstance(known, SplitPlan):
        known = plan.bound[key] = backend.plan(prefix_spec(plan), rows.tokens)
    return known


@dataclass(frozen=True, slots=True, eq=False)
class _Suffix:
    """lengths: the array that the cascade's plan held when ``plan`` was made."""

    lengths: IntArray
    plan: SplitPlan


def _suffix_plan(backend: Backend, plan: CascadePlan, lengths: IntArray) -> SplitPlan:
    key = ("suffix", backend)
    known = plan.bound.get(key)
    if not isinstance(known, _Suffix) or known.lengths is not lengths:
        made = backend.plan(plan.spec, (lengths - plan.shared).tolist())
        known = plan.bound[key] = _Suffix(lengths, made)
    return known.plan


def _prefix_call(call: DecodeCall, plan: CascadePlan, rows: _Rows) -> DecodeCall:
    spec, cache = prefix_spec(plan), call.cache
    assert isinstance(cache, PagedCache)
    table = cache.block_table.index_select(0, rows.table_rows).gather(1, rows.columns)
    q = call.q.reshape(-1, spec.num_q_heads, spec.head_dim).index_select(0, rows.queries)
    pages = PagedCache(cache.k, cache.v, table, rows.lengths, cache.layout)
    scales = {name: getattr(call, name) for name in ("k_scale", "v_scale", "k_zero", "v_zero")}
    return DecodeCall(q, pages, spec, rows.offsets, **scales)


def _suffix_call(call: DecodeCall, plan: CascadePlan) -> DecodeCall:
    cache = call.cache
    assert isinstance(cache, PagedCache)
    shift = _shift(plan, cache)
    if isinstance(shift.columns, int):
        table = cache.block_table[:, shift.columns :]
    else:
        table = cache.block_table.gather(1, shift.columns)
    lengths = cache.seq_lens - shift.tokens
    return replace(call, cache=PagedCache(cache.k, cache.v, table, lengths, cache.layout))


@dataclass(frozen=True, slots=True, eq=False)
class _Shift:
    """tokens: like seq_lens, what groups read of each request. columns: int64 [B, width], where the
    rest of each table row stands; or the first column, where it is the same for all.
    """

    tokens: Tensor
    columns: int | Tensor


def _shift(plan: CascadePlan, cache: PagedCache) -> _Shift:
    table, lengths = cache.block_table, cache.seq_lens
    width = table.shape[1]
    key = ("shift", table.device, width, lengths.device, lengths.dtype)
    known = plan.bound.get(key)
    if isinstance(known, _Shift):
        return known
    pages = plan.shared // cache.page_size
    columns: int | Tensor = int(pages.min())
    if (pages != columns).any():
        reach = np.minimum(np.arange(width - pages.min()) + pages[:, None], width - 1)
        columns = torch.from_numpy(reach).to(table.device)
    tokens = torch.from_numpy(plan.shared).to(lengths.device, lengths.dtype)
    known = plan.bound[key] = _Shift(tokens, columns)
    return known
