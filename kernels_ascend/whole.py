"""Whole histories through operators that report no LSE: the output, and nothing to merge it by."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from splitkv.common.cache import DenseCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.kernels_ascend.checks import check_planned, check_rows, refuse, tensor_refusals
from splitkv.kernels_ascend.fused_infer import Heads, Pages, packed_queries
from splitkv.kernels_ascend.host_facts import HostFacts, read_facts
from splitkv.kernels_ascend.lse import normalise
from splitkv.kernels_ascend.output_only import incremental, paged_attention, prompt
from splitkv.kernels_ascend.pieces import Piece
from splitkv.kernels_ascend.pools import pool_of
from splitkv.kernels_ascend.routes import (
    FIA_SINKS,
    INCRE,
    PAGED_ATTENTION,
    PROMPT,
    Route,
    Wants,
    choose,
)
from splitkv.kernels_ascend.soc import Soc


def decode_whole(
    call: DecodeCall, plan: SplitPlan, wants: Wants, sinks: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """``(out, lse)`` of a route without states, or None where the route has them.

    out: [B, S, H, Dv] in q's dtype. lse: float32 [B, S, H], NaN throughout, as the operator reports
    none; route fia-sinks is the exception, whose operator folds the sinks in itself, so that its
    lse has them and ``finish`` is not called.

    Raises:
        UnsupportedError: the plan cuts a request, or a documented limit that only the tensors show.
    """
    route = choose(call.spec, wants).route
    if route is None or route.state:
        return None
    if reasons := tensor_refusals(call, plan, wants):
        refuse(call.spec, *reasons)
    facts = read_facts(call, plan.bound)
    check_planned(facts, plan)
    if route is FIA_SINKS:
        return _with_sinks(call, facts, wants, sinks)
    unknown = torch.full(call.rows, math.nan, device=call.q.device)
    out = call.q.new_zeros((*call.rows, call.spec.head_dim_v))
    if not call.q.numel() or not any(facts.lengths):
        return out, unknown
    fills = _fills(call, facts, wants, route)
    _check(call, facts, wants, route, listed=not fills)
    return _zeroed(_run(call, facts, route, fills), facts.lengths), unknown


def _fills(call: DecodeCall, facts: HostFacts, wants: Wants, route: Route) -> bool:
    """Whether the operator must do, and can do, without length lists."""
    return (
        route is PROMPT
        and wants.soc is Soc.ATLAS_310P
        and all(length == call.cache.capacity for length in facts.lengths)
    )


def _zeroed(out: Tensor, lengths: Sequence[int]) -> Tensor:
    """Out [B, ...] with 0 for requests without keys: what operators leave there differs."""
    if all(lengths):
        return out
    seen = torch.tensor([length > 0 for length in lengths], dtype=torch.bool).to(out.device)
    return torch.where(seen[:, None, None, None], out, 0.0)


def _run(call: DecodeCall, facts: HostFacts, route: Route, fills: bool) -> Tensor:
    spec, cache, lengths = call.spec, call.cache, list(facts.lengths)
    heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.scale)
    layout = route.layouts[spec.layout][0]
    q = call.q.contiguous()
    if route is PAGED_ATTENTION:
        table = pool_of(cache, spec, spec.page_size or 0).table
        return paged_attention(q[:, 0], cache.k, cache.v, table, heads, lengths)[:, None]
    if route is INCRE:
        if isinstance(cache, DenseCache):
            kv = (cache.k, cache.v)
            return incremental(q[:, 0], heads, lengths, layout=layout, kv=kv)[:, None]
        pool = pool_of(cache, spec, spec.page_size or 0)
        pages = Pages(pool.k, pool.v, pool.table, pool.page_size)
        return incremental(q[:, 0], heads, lengths, layout=layout, pages=pages)[:, None]
    by_head = layout == "BNSD"
    q = q.transpose(1, 2).contiguous() if by_head else q
    listed = None if fills else lengths
    out = prompt(q, cache.k, cache.v, heads, listed, layout=layout, causal=spec.causal)
    return out.transpose(1, 2) if by_head else out


def _with_sinks(
    call: DecodeCall, facts: HostFacts, wants: Wants, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """FIA v2 with the sink handed over, exactly once: rows that see keys have it from the operator,
    rows without keys get it here.
    """
    spec, queries = call.spec, call.spec.num_queries
    if sinks is None:
        raise ValueError("route fia-sinks needs sinks [H], got None")
    if not call.q.numel():
        return call.q.new_zeros((*call.rows, spec.head_dim_v)), torch.zeros(
            call.rows, device=call.q.device
        )
    _check(call, facts, wants, FIA_SINKS)
    _check_causal(spec, facts)
    pool = pool_of(call.cache, spec, spec.page_size or 0)
    out, lse = packed_queries(
        call.q.flatten(0, 1).contiguous(),
        Heads(spec.num_q_heads, spec.num_kv_heads, spec.scale),
        [queries] * call.batch,
        facts.lengths,
        pages=Pages(pool.k, pool.v, pool.table, pool.page_size),
        causal=queries > 1 and spec.causal,
        sinks=sinks.to(spec.dtype),
    )
    out, lse = normalise(out, lse)
    unseen = torch.tensor([length == 0 for length in facts.lengths], dtype=torch.bool)
    unseen = unseen.to(lse.device).repeat_interleave(queries)[:, None]
    out = torch.where(unseen[..., None], 0.0, out)
    lse = torch.where(unseen, sinks.to(lse.dtype)[None], lse)
    return out.view(*call.rows, -1).to(spec.dtype), lse.view(call.rows)


def _check(
    call: DecodeCall, facts: HostFacts, wants: Wants, route: Route, *, listed: bool = True
) -> None:
    spec, queries = call.spec, call.spec.num_queries
    pieces = [Piece(row, 0, queries, 0, length) for row, length in enumerate(facts.lengths)]
    layout = route.layouts[spec.layout][0]
    causal = queries > 1 and spec.causal
    if causal:
        _check_causal(spec, facts)
    check_rows(
        spec,
        wants,
        route,
        pieces,
        layout=layout,
        causal=causal,
        page_size=spec.page_size,
        listed=listed,
    )


def _check_causal(spec: DecodeSpec, facts: HostFacts) -> None:
    short = [n for n in facts.lengths if 0 < n < spec.num_queries]
    if short and spec.causal:
        refuse(
            spec,
            f"{spec.num_queries} queries over {short[0]} keys: queries in front of the first key "
            "have rows that see nothing, whose result is not documented; use a route with states",
        )
