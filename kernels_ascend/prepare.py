"""From a call, its host lengths and a plan to operator launches: done once per plan, shared by all
layers of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.common.cache import DenseCache, PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.visibility import IntArray
from splitkv.kernels_ascend.checks import (
    check_rows,
    refuse,
    takes_whole_cache,
    tensor_refusals,
    warn_of_page_size,
)
from splitkv.kernels_ascend.fused_infer import Heads
from splitkv.kernels_ascend.host_facts import HostFacts
from splitkv.kernels_ascend.launches import (
    CopiedLaunch,
    DenseLaunch,
    FusionLaunch,
    LatentLaunch,
    Launch,
    PackedLaunch,
    PagedLaunch,
)
from splitkv.kernels_ascend.limits import violations
from splitkv.kernels_ascend.pieces import (
    Piece,
    Tiling,
    cut_pieces,
    tile_rows,
    whole_causal_pieces,
)
from splitkv.kernels_ascend.pools import page_size_of
from splitkv.kernels_ascend.routes import FIA_MLA, FIA_ROWS, FIA_TND, FUSION, Wants, choose


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


def prepare(call: DecodeCall, plan: SplitPlan, facts: HostFacts, wants: Wants) -> Prepared:
    """Cut, choose, check.

    Raises:
        UnsupportedError: the operators do not take these tensors or this many rows; nothing was
            launched.
    """
    if reasons := tensor_refusals(call, plan, wants):
        refuse(call.spec, *reasons)
    choice = choose(call.spec, wants)
    if choice.route is None:
        refuse(call.spec, *choice.refusals)
    if choice.route is FUSION:
        return _prepare_fusion(call, plan, facts, wants)
    if choice.route is FIA_MLA:
        return _prepare_latent(call, plan, facts, wants)
    if isinstance(call.cache, PackedCache):
        return _prepare_packed(call, plan, facts, wants)
    if takes_whole_cache(call, plan):
        return _prepare_dense(call, facts)
    return _prepare_paged(call, plan, facts, wants)


def _prepare_dense(call: DecodeCall, facts: HostFacts) -> Prepared:
    launch = DenseLaunch(_heads(call.spec, 1), np.arange(call.batch), None, list(facts.lengths))
    return Prepared((launch,), 1, None)


def _prepare_packed(call: DecodeCall, plan: SplitPlan, facts: HostFacts, wants: Wants) -> Prepared:
    spec = call.spec
    causal = _takes_causal_mask(spec, plan, facts)
    pieces = _pieces(plan, facts, causal=causal)
    starts = [facts.key_starts[piece.request] + piece.start for piece in pieces]
    tiling = tile_rows(starts, [piece.length for piece in pieces])
    in_place = [None if row is None else pieces[row] for row in tiling.in_place]
    counts = [1 if piece is None else piece.count for piece in in_place]
    slots = _all_slots(in_place, facts, 1)
    launches: list[Launch] = []
    if in_place:
        rows = _with_fillers(in_place, tiling.lengths)
        check_rows(spec, wants, FIA_TND, rows, layout="TND", causal=causal)
        pick = _on_device(np.maximum(slots, 0), call.q.device)
        launches.append(PackedLaunch(_heads(spec, 1), slots, pick, tiling.lengths, counts, causal))
    if tiling.overlapping:
        copied = [pieces[row] for row in tiling.overlapping]
        starts = [facts.key_starts[piece.request] for piece in copied]
        launches.append(_copied_launch(call, copied, facts, 1, starts, wants))
    return _assemble(launches, 1, call.q)


def _prepare_fusion(call: DecodeCall, plan: SplitPlan, facts: HostFacts, wants: Wants) -> Prepared:
    """Dense and packed caches alike are rows one after the other to this operator; what lies
    between them, and slots past a length, get rows that nobody reads.
    """
    spec = call.spec
    causal = _takes_causal_mask(spec, plan, facts)
    pieces = _pieces(plan, facts, causal=causal)
    fold = spec.num_kv_heads if spec.layout is Layout.BNSD else 1
    rows = [(piece, head) for piece in pieces for head in range(fold)]
    if isinstance(call.cache, DenseCache):
        capacity = call.cache.capacity
        starts = [(piece.request * fold + head) * capacity + piece.start for piece, head in rows]
    else:
        starts = [facts.key_starts[piece.request] + piece.start for piece, _ in rows]
    tiling = tile_rows(starts, [piece.length for piece, _ in rows])
    launches: list[Launch] = []
    for chosen, lengths, copies in (
        (tiling.in_place, tiling.lengths, False),
        (tiling.overlapping, [rows[row][0].length for row in tiling.overlapping], True),
    ):
        if not chosen:
            continue
        taken = [(None, None) if row is None else rows[row] for row in chosen]
        fillers = _with_fillers([piece for piece, _ in taken], lengths)
        check_rows(spec, wants, FUSION, fillers, layout="TND", causal=causal)
        slots = np.concatenate([_slots(piece, facts, fold, head) for piece, head in taken])
        launches.append(
            FusionLaunch(
                _heads(spec, fold),
                slots,
                _on_device(np.maximum(slots, 0), call.q.device),
                lengths,
                [1 if piece is None else piece.count for piece, _ in taken],
                causal,
                _tokens(starts, lengths, tiling, call.q.device) if copies else None,
            )
        )
    return _assemble(launches, fold, call.q)


def _prepare_latent(call: DecodeCall, plan: SplitPlan, facts: HostFacts, wants: Wants) -> Prepared:
    pieces = _pieces(plan, facts, share=False)
    if not pieces:
        return _assemble([], 1, call.q)
    check_rows(call.spec, wants, FIA_MLA, pieces, layout="BSND")
    copied = _copied_launch(call, pieces, facts, 1, [0] * len(pieces), wants)
    latent = LatentLaunch(
        copied.heads, copied.slots, copied.pick, copied.kv_lens, copied.request, copied.position
    )
    return _assemble([latent], 1, call.q)


def _tokens(
    starts: Sequence[int], lengths: Sequence[int], tiling: Tiling, device: torch.device
) -> Tensor:
    """Where the keys of the overlapping rows lie, one row after the other."""
    rows = zip(tiling.overlapping, lengths, strict=True)
    ranges = [np.arange(starts[row], starts[row] + length) for row, length in rows]
    return _on_device(np.concatenate(ranges), device)


def _with_fillers(pieces: Sequence[Piece | None], kv_lens: Sequence[int]) -> list[Piece]:
    """The rows as pieces, fillers as one query over their keys."""
    rows = zip(pieces, kv_lens, strict=True)
    return [piece or Piece(0, 0, 1, 0, length) for piece, length in rows]


def _prepare_paged(call: DecodeCall, plan: SplitPlan, facts: HostFacts, wants: Wants) -> Prepared:
    spec = call.spec
    page_size = page_size_of(call.cache)
    assert page_size is not None
    if isinstance(call.cache, DenseCache):
        warn_of_page_size(page_size)
    shares = _shares_rows(spec, page_size, wants)
    fold = spec.num_kv_heads if spec.layout is Layout.BNSD else 1
    causal = shares and _takes_causal_mask(spec, plan, facts)
    pieces = _pieces(plan, facts, causal=causal, align=page_size, share=shares)
    in_place = [piece for piece in pieces if piece.start % page_size == 0]
    copied = [piece for piece in pieces if piece.start % page_size]
    launches: list[Launch] = []
    if in_place:
        launches.append(_paged_launch(call, in_place, facts, wants, page_size, fold, causal))
    if copied:
        launches.append(_copied_launch(call, copied, facts, fold, [0] * len(copied), wants))
    return _assemble(launches, fold, call.q)


def _shares_rows(spec: DecodeSpec, page_size: int, wants: Wants) -> bool:
    """Whether queries of a request share rows in layout TND; the pages of a dense cache, which the
    spec does not know, may speak against it.
    """
    if choose(spec, wants).route is not FIA_TND:
        return False
    facts = replace(FIA_TND.facts(spec, wants), page_size=page_size)
    reasons = violations(facts, strict=wants.strict)
    if reasons and wants.route is not None:
        refuse(spec, *reasons)
    return not reasons


def _pieces(
    plan: SplitPlan, facts: HostFacts, *, causal: bool = False, align: int = 1, share: bool = True
) -> list[Piece]:
    """Whole requests where the operator's causal mask is taken (``causal``), else ranges that every
    query of a piece sees whole.
    """
    if causal:
        return whole_causal_pieces(facts.lengths, facts.counts)
    return cut_pieces(plan, facts.lengths, facts.counts, align=align, share=share)


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
    wants: Wants,
    page_size: int,
    fold: int,
    causal: bool,
) -> PagedLaunch:
    spec, device = call.spec, call.q.device
    layout, route = FIA_ROWS.layouts[spec.layout][0], FIA_ROWS
    if any(piece.count > 1 for piece in pieces):
        layout, route = "TND", FIA_TND
    check_rows(
        spec,
        wants,
        route,
        pieces,
        layout=layout,
        fold=fold,
        causal=causal,
        page_size=page_size,
    )
    kv_lens = np.repeat([piece.length for piece in pieces], fold)
    first = np.repeat([piece.start // page_size for piece in pieces], fold)
    requests = np.array([piece.request for piece in pieces])
    rows = (requests[:, None] * fold + np.arange(fold)).ravel()
    blocks = -(-kv_lens // page_size)
    # columns past a row's own are never read: repeat its last one rather than touch the table's
    # unused entries
    columns = first[:, None] + np.minimum(np.arange(blocks.max()), blocks[:, None] - 1)
    whole_table = np.array_equal(rows, np.arange(call.batch * fold)) and not first.any()
    slots = _all_slots(pieces, facts, fold)
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
    call: DecodeCall,
    pieces: Sequence[Piece],
    facts: HostFacts,
    fold: int,
    base: Sequence[int],
    wants: Wants,
) -> CopiedLaunch:
    """base: what each piece's positions count from (its request's first row, if packed)."""
    device = call.q.device
    lengths = np.array([piece.length for piece in pieces])
    check_rows(call.spec, wants, FIA_ROWS, pieces, layout="BSND")
    step = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    position = np.array([piece.start for piece in pieces])[:, None] + np.array(base)[:, None] + step
    request = np.array([piece.request for piece in pieces])[:, None]
    slots = _all_slots(pieces, facts, fold)
    return CopiedLaunch(
        _heads(call.spec, 1),
        slots,
        _on_device(slots, device),
        lengths.tolist(),
        _on_device(request, device),
        _on_device(position, device),
    )


def _all_slots(pieces: Sequence[Piece | None], facts: HostFacts, fold: int) -> IntArray:
    return np.concatenate(
        [_slots(piece, facts, fold) for piece in pieces] or [np.zeros(0, np.int64)]
    )


def _slots(piece: Piece | None, facts: HostFacts, fold: int, head: int | None = None) -> IntArray:
    """Slots of a row's results in the operator's order: by kv head where folded (all, or ``head``
    alone), then by query.
    """
    if piece is None:
        return np.array([-1])
    query = facts.query_starts[piece.request] + piece.first + np.arange(piece.count)
    heads = np.arange(fold) if head is None else np.array([head])
    return (query[None] * fold + heads[:, None]).ravel()


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
