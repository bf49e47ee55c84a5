"""From a call, its host lengths and a plan to operator launches: done once per plan, shared by all
layers of a step.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from splitkv.common.cache import DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.support import UnsupportedError
from splitkv.common.visibility import IntArray
from splitkv.kernels_ascend.fused_infer import Heads
from splitkv.kernels_ascend.host_facts import HostFacts
from splitkv.kernels_ascend.launches import (
    CopiedLaunch,
    DenseLaunch,
    Launch,
    PackedLaunch,
    PagedLaunch,
)
from splitkv.kernels_ascend.limits import limit
from splitkv.kernels_ascend.pieces import Piece, cut_pieces, whole_causal_pieces
from splitkv.kernels_ascend.pools import page_size_of, page_step
from splitkv.kernels_ascend.routes import Route, page_warning, route_of


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Launches of one call, and how their results become states.

    fold: slots per query (K where kv heads are requests of their own). gather: int64 [n, slots] on
    the device, rows of the concatenated results that are merged for each slot, in split order; the
    row after the last one is the state of nothing. None where the results already are one state per
    slot, in order.
    """

    launches: tuple[Launch, ...]
    fold: int
    gather: Tensor | None


def prepare(call: DecodeCall, plan: SplitPlan, facts: HostFacts) -> Prepared:
    """Cut, choose, check.

    Raises:
        UnsupportedError: the operators do not take these tensors or this many rows; nothing was
            launched.
    """
    if reasons := tensor_refusals(call, plan):
        _refuse(call.spec, *reasons)
    if _fits_dense(call, plan):
        return _prepare_dense(call, facts)
    if isinstance(call.cache, PackedCache):
        return _prepare_packed(call, plan, facts)
    return _prepare_paged(call, plan, facts)


def tensor_refusals(call: DecodeCall, plan: SplitPlan) -> list[str]:
    """Every reason against this call's strides and sizes: value, limit, what to do."""
    cache = call.cache
    steps = [
        page_step(tensor) if isinstance(cache, PagedCache) else 1 for tensor in (cache.k, cache.v)
    ]
    reasons = []
    for name, tensor, step in zip("kv", (cache.k, cache.v), steps, strict=True):
        torn = step is None if isinstance(cache, PagedCache) else not tensor.is_contiguous()
        if torn:
            reasons.append(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}: the "
                "operator reads contiguous tensors (or whole pages) and does not copy (vllm-ascend "
                "issue 11790); keep K and V as tensors of their own"
            )
        elements, allowed = tensor.numel() * (step or 1), limit("kv_elements_max")
        if elements > allowed.number:
            reasons.append(
                f"{name} spans {elements} elements: {allowed.says} ({allowed.source}); use several "
                "pools"
            )
    if None not in steps and steps[0] != steps[1]:
        reasons.append(
            f"pages of k lie {steps[0]} apart, pages of v {steps[1]}: one table serves both"
        )
    return reasons + _capacity_refusals(call, plan)


def _capacity_refusals(call: DecodeCall, plan: SplitPlan) -> list[str]:
    """Reasons against T of a dense cache."""
    if not isinstance(call.cache, DenseCache) or not call.batch or not call.cache.capacity:
        return []
    capacity, longest = call.cache.capacity, limit("keys_per_row_max")
    if _fits_dense(call, plan):
        if capacity <= longest.number:
            return []
        return [f"T {capacity}: {longest.says} ({longest.source}); cut with num_splits"]
    if page_size_of(call.cache) is not None:
        return []
    return [
        f"T {capacity} of the dense cache is not a multiple of {limit('page_multiple').number}, so "
        "that windows, splits and several queries cannot be expressed as pages of it; allocate T "
        "in multiples of 128"
    ]


def _fits_dense(call: DecodeCall, plan: SplitPlan) -> bool:
    """One query per request, no window, no cut: the operator reads the dense cache as it lies."""
    spec = call.spec
    single = (
        isinstance(call.cache, DenseCache) and spec.num_queries == 1 and not spec.packed_queries
    )
    return single and spec.sliding_window is None and plan.max_splits <= 1


def _prepare_dense(call: DecodeCall, facts: HostFacts) -> Prepared:
    launch = DenseLaunch(_heads(call.spec, 1), np.arange(call.batch), None, list(facts.lengths))
    return Prepared((launch,), 1, None)


def _prepare_packed(call: DecodeCall, plan: SplitPlan, facts: HostFacts) -> Prepared:
    spec = call.spec
    causal = _takes_causal_mask(spec, plan, facts)
    pieces = (
        whole_causal_pieces(facts.lengths, facts.counts)
        if causal
        else cut_pieces(plan, facts.lengths, facts.counts, align=1)
    )
    in_place, copied, kv_lens = _partition(pieces, facts)
    counts = [1 if piece is None else piece.count for piece in in_place]
    slots = np.concatenate(
        [_slots(piece, facts, 1) for piece in in_place] or [np.zeros(0, np.int64)]
    )
    launches: list[Launch] = []
    if in_place:
        _check_rows(spec, _with_fillers(in_place, kv_lens), 1, "TND")
        pick = _on_device(np.maximum(slots, 0), call.q.device)
        launches.append(PackedLaunch(_heads(spec, 1), slots, pick, kv_lens, counts, causal))
    if copied:
        starts = [facts.key_starts[piece.request] for piece in copied]
        launches.append(_copied_launch(call, copied, facts, 1, starts))
    return _assemble(launches, 1, call.q)


def _with_fillers(pieces: Sequence[Piece | None], kv_lens: Sequence[int]) -> list[Piece]:
    """The rows as pieces, fillers as one query over their keys."""
    rows = zip(pieces, kv_lens, strict=True)
    return [piece or Piece(0, 0, 1, 0, length) for piece, length in rows]


def _partition(
    pieces: Sequence[Piece], facts: HostFacts
) -> tuple[list[Piece | None], list[Piece], list[int]]:
    """Pieces that tile the packed keys from the front, None for keys that nobody reads; pieces that
    overlap those; row lengths.
    """
    in_place: list[Piece | None] = []
    copied: list[Piece] = []
    kv_lens: list[int] = []
    position = 0
    for piece in sorted(pieces, key=lambda piece: (piece.request, piece.start)):
        start = facts.key_starts[piece.request] + piece.start
        if start < position:
            copied.append(piece)
            continue
        if start > position:
            in_place.append(None)
            kv_lens.append(start - position)
        in_place.append(piece)
        kv_lens.append(piece.length)
        position = start + piece.length
    return in_place, copied, kv_lens


def _prepare_paged(call: DecodeCall, plan: SplitPlan, facts: HostFacts) -> Prepared:
    spec = call.spec
    page_size = page_size_of(call.cache)
    assert page_size is not None
    if isinstance(call.cache, DenseCache):
        warn_of_page_size(page_size)
    route = route_of(spec)
    shares = route.shares and page_size % limit("page_multiple_many").number == 0
    fold = spec.num_kv_heads if route.folds else 1
    causal = shares and _takes_causal_mask(spec, plan, facts)
    pieces = (
        whole_causal_pieces(facts.lengths, facts.counts)
        if causal
        else cut_pieces(plan, facts.lengths, facts.counts, align=page_size, share=shares)
    )
    in_place = [piece for piece in pieces if piece.start % page_size == 0]
    copied = [piece for piece in pieces if piece.start % page_size]
    launches: list[Launch] = []
    if in_place:
        launches.append(_paged_launch(call, in_place, facts, route, page_size, fold, causal))
    if copied:
        launches.append(_copied_launch(call, copied, facts, fold, [0] * len(copied)))
    return _assemble(launches, fold, call.q)


def _takes_causal_mask(spec: DecodeSpec, plan: SplitPlan, facts: HostFacts) -> bool:
    """Several queries over uncut requests: the one case where the operator's causal mask says
    exactly what is meant. Its documentation wants more keys than queries in every row.
    """
    several = spec.num_queries > 1 and spec.causal and spec.sliding_window is None
    rows = zip(facts.lengths, facts.counts, strict=True)
    longer = all(length > count > 0 for length, count in rows if length)
    return several and longer and plan.max_splits <= 1


def _paged_launch(
    call: DecodeCall,
    pieces: Sequence[Piece],
    facts: HostFacts,
    route: Route,
    page_size: int,
    fold: int,
    causal: bool,
) -> PagedLaunch:
    spec, device = call.spec, call.q.device
    layout = "TND" if any(piece.count > 1 for piece in pieces) else route.single
    _check_rows(spec, pieces, fold, layout)
    kv_lens = np.repeat([piece.length for piece in pieces], fold)
    first = np.repeat([piece.start // page_size for piece in pieces], fold)
    requests = np.array([piece.request for piece in pieces])
    rows = (requests[:, None] * fold + np.arange(fold)).ravel()
    blocks = -(-kv_lens // page_size)
    # columns past a row's own are never read: repeat its last one rather than touch the table's
    # unused entries
    columns = first[:, None] + np.minimum(np.arange(blocks.max()), blocks[:, None] - 1)
    whole_table = np.array_equal(rows, np.arange(call.batch * fold)) and not first.any()
    slots = np.concatenate([_slots(piece, facts, fold) for piece in pieces])
    return PagedLaunch(
        _heads(spec, fold),
        slots,
        _pick(slots, call.q, fold),
        kv_lens.tolist(),
        layout,
        np.repeat([piece.count for piece in pieces], fold).tolist(),
        page_size,
        None if whole_table else _on_device(rows[:, None], device),
        None if whole_table else _on_device(columns, device),
        causal,
    )


def _copied_launch(
    call: DecodeCall, pieces: Sequence[Piece], facts: HostFacts, fold: int, base: Sequence[int]
) -> CopiedLaunch:
    """base: what each piece's positions count from (its request's first row, if packed)."""
    device = call.q.device
    lengths = np.array([piece.length for piece in pieces])
    _check_rows(call.spec, pieces, 1, "BSND")
    step = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    position = np.array([piece.start for piece in pieces])[:, None] + np.array(base)[:, None] + step
    request = np.array([piece.request for piece in pieces])[:, None]
    slots = np.concatenate([_slots(piece, facts, fold) for piece in pieces])
    return CopiedLaunch(
        _heads(call.spec, 1),
        slots,
        _on_device(slots, device),
        lengths.tolist(),
        _on_device(request, device),
        _on_device(position, device),
    )


def _slots(piece: Piece | None, facts: HostFacts, fold: int) -> IntArray:
    """Slots of a row's results in the operator's order: by kv head where folded, then by query."""
    if piece is None:
        return np.array([-1])
    query = facts.query_starts[piece.request] + piece.first + np.arange(piece.count)
    return (query[None] * fold + np.arange(fold)[:, None]).ravel()


def _pick(slots: IntArray, q: Tensor, fold: int) -> Tensor | None:
    """The slots on the device, or None where they are all of q in order."""
    everything = _queries_of(q) * fold
    if np.array_equal(slots, np.arange(everything)):
        return None
    return _on_device(slots, q.device)


def _queries_of(q: Tensor) -> int:
    return int(np.prod(q.shape[:-2]))


def _assemble(launches: Sequence[Launch], fold: int, q: Tensor) -> Prepared:
    total = _queries_of(q) * fold
    results = np.concatenate([launch.slots for launch in launches] or [np.zeros(0, np.int64)])
    if np.array_equal(results, np.arange(total)):
        return Prepared(tuple(launches), fold, None)
    used = np.flatnonzero(results >= 0)
    order = used[np.argsort(results[used], kind="stable")]
    slot = results[order]
    counts = np.bincount(slot, minlength=total)
    rank = np.arange(len(slot)) - (np.cumsum(counts) - counts)[slot]
    gather = np.full((max(int(counts.max(initial=0)), 1), total), len(results))
    gather[rank, slot] = order
    return Prepared(tuple(launches), fold, _on_device(gather, q.device))


def _heads(spec: DecodeSpec, fold: int) -> Heads:
    return Heads(spec.num_q_heads // fold, spec.num_kv_heads // fold, spec.scale)


def _on_device(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


def _check_rows(spec: DecodeSpec, pieces: Sequence[Piece], fold: int, layout: str) -> None:
    sizes = [
        (len(pieces) * fold, "rows", limit("rows_tnd_max" if layout == "TND" else "rows_max")),
        (
            max((p.length for p in pieces if p.count == 1), default=0),
            "keys",
            limit("keys_per_row_max"),
        ),
    ]
    if layout == "TND":
        sizes.append((sum(p.count for p in pieces) * fold, "queries", limit("tnd_tokens_max")))
    reasons = [
        f"{size} {what} in {layout}: {allowed.says} ({allowed.source}); {_ROW_ADVICE[what]}"
        for size, what, allowed in sizes
        if size > allowed.number
    ]
    if reasons:
        _refuse(spec, *reasons)


_ROW_ADVICE = {
    "rows": "use fewer splits or a smaller batch",
    "keys": "cut with num_splits or split_size",
    "queries": "use a smaller batch",
}


def _refuse(spec: DecodeSpec, *reasons: str) -> NoReturn:
    lines = [
        f"backend 'ascend' does not take these tensors for {spec}",
        *(f"    - {reason}" for reason in reasons),
    ]
    raise UnsupportedError("\n".join(lines))


def warn_of_page_size(page_size: int) -> None:
    """Say once per place why a page size other than 128 is doubtful."""
    text = page_warning(page_size)
    if text is not None:
        warnings.warn(text, stacklevel=2)
