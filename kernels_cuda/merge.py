"""The merge kernel: a program merges all partial states of query heads, in a fixed order.

The formulas stand in ``splitkv.common.state``. One state, or one among empty ones, comes out bit
for bit: its weight is 1, and what is added to it is -0.0, the identity of addition.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.state import PartialState
from splitkv.kernels_cuda.launch import Launch, early, query_strides
from splitkv.kernels_cuda.plan import DevicePlan, device_offsets
from splitkv.kernels_cuda.primitives import (
    add_sink,
    device_function,
    finite_or_zero_top,
    loop_bound,
    narrow,
    wait_for_splits,
    weight_of,
)
from splitkv.kernels_cuda.states import Destination, Workspace
from splitkv.kernels_cuda.tiles import power_of_two

_MANY = 32
"""More states than that are merged in larger blocks: each block waits for the one before it."""
_FEW_ROWS = 128
"""In all: a row is cut in chunks then, so that more multiprocessors read."""
_CHUNK = 32
_MOST_PROGRAMS = 2048
"""Of a merge, which share out what there is."""
_MOST_HALVINGS = tl.constexpr(12)
"""Of a block of states: 4096 of them at most."""


@device_function
def in_order(x):
    """The sum over the first dimension of [N] ([1]) or [N, D] ([D]), N a power of two, neighbours
    first.

    ``tl.sum`` adds in an order that follows from the tile and its warps; this one is the same for
    any, so that those can be chosen by what else a merge has to do.
    """
    terms = tl.expand_dims(x, 0) if len(x.shape) == 1 else tl.trans(x)
    for _halving in tl.static_range(_MOST_HALVINGS):
        if terms.shape[1] > 1:
            pairs = tl.reshape(terms, (terms.shape[0], terms.shape[1] // 2, 2))
            even, odd = tl.split(pairs)
            terms = even + odd
    return tl.sum(terms, 1)


@device_function
def merge_states(
    part_out,
    part_lse,
    part_top,
    first,
    last,
    rows,
    row,
    dv,
    DV: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
):
    """``(top, lse, out)`` of states ``first`` to ``last`` of a row; out [Dv], (-inf, -inf, 0) of
    none.

    Every state is weighted against the largest lse of its block and those before it.
    """
    top = tl.full([], float("-inf"), tl.float32)
    best = top
    totals = tl.zeros([BLOCK_STATES], tl.float32)
    # from its bits: Triton makes +0.0 of the constant -0.0
    minus_zero = tl.full([BLOCK_STATES, dv.shape[0]], 0x80000000, tl.uint32).to(
        tl.float32, bitcast=True
    )
    summed = minus_zero
    for start in tl.range(loop_bound(first), loop_bound(last), BLOCK_STATES):
        state = start + tl.arange(0, BLOCK_STATES)
        there = state < last
        cell = state.to(tl.int64) * rows + row
        state_top = tl.load(part_top + cell, mask=there, other=float("-inf"))
        state_lse = tl.load(part_lse + cell, mask=there, other=float("-inf"))
        values_at = part_out + cell[:, None] * DV + dv[None, :]
        values = tl.load(values_at, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        top = tl.maximum(top, tl.max(state_top, 0))
        new_best = tl.maximum(best, tl.max(state_lse, 0))
        base = finite_or_zero_top(new_best)
        decay = tl.where(best == new_best, 1.0, weight_of(best - base, True))
        best = new_best
        weight = weight_of(state_lse - base, True)
        totals = totals * decay + weight
        seen = state_lse != float("-inf")
        summed = summed * decay + tl.where(seen[:, None], values * weight[:, None], minus_zero)
    base = finite_or_zero_top(best)
    total = tl.sum(in_order(totals), 0)
    merged = in_order(summed)

    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), tl.where(total == 1.0, base, base + tl.log(divisor)))
    out = tl.where(nothing, 0.0, tl.where(total == 1.0, merged, merged / divisor))
    return top, lse, out


@device_function
def states_of(requests, slots, states, index, there):
    """``(request, first, last)``: of the requests to be merged the one of this index, and where its
    states lie; loaded before they are needed.
    """
    request = tl.zeros([], tl.int64)
    first = tl.zeros([], tl.int32)
    last = states
    if requests is not None:
        request = tl.load(requests + 1 + index, mask=there, other=0).to(tl.int64)
        first = tl.load(slots + request)
        last = tl.load(slots + request + 1)
    return request, first, last


@triton.jit(
    do_not_specialize=["states", "queries", "heads"],
    do_not_specialize_on_alignment=["slots", "requests", "cu_seqlens_q", "sinks"],
)
def merge_kernel(
    part_out,  # [slots, rows, Dv] of S * H rows
    part_lse,  # [slots, rows]
    part_top,
    slots,  # None (states 0 to ``states`` belong to all rows), or [B + 1]
    requests,  # None, or int32 [1 + B]: how many have several states, then which
    cu_seqlens_q,  # None, or [B + 1]
    sinks,  # None, or [H]
    out,  # [B, S, H, Dv] or [tokens, H, Dv]
    lse,
    top,  # None, or like lse
    out_strides,  # request, query, head, dim
    lse_strides,
    top_strides,
    states,
    queries,
    heads,
    DV: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a row
    MANY: tl.constexpr,  # states from which on blocks are larger; 0: no row has so many
    BLOCK_STATES: tl.constexpr,
    BLOCK_MANY: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = queries * heads
    cells = rows * CHUNKS  # of a request
    end = cells if requests is None else tl.load(requests) * cells
    programs = tl.num_programs(0)
    begin = tl.program_id(0)
    request, first, last = states_of(requests, slots, states, begin // cells, begin < end)
    wait_for_splits(EARLY)
    for each in tl.range(loop_bound(begin), loop_bound(end), loop_bound(programs)):
        first_query = tl.zeros([], tl.int64)
        end_query = first_query + queries
        if cu_seqlens_q is not None:
            first_query = tl.load(cu_seqlens_q + request).to(tl.int64)
            end_query = tl.load(cu_seqlens_q + request + 1).to(tl.int64)
        cell = each % cells
        row = cell // CHUNKS
        chunk = cell % CHUNKS
        head = (row % heads).to(tl.int64)
        query = first_query + row // heads
        asked = query < end_query
        until = tl.where(asked, last, first)  # no split wrote what is not asked
        dv = (chunk * BLOCK_DV + tl.arange(0, BLOCK_DV)).to(tl.int64)
        if MANY > 0 and last - first > MANY:
            merged_top, merged_lse, merged = merge_states(
                part_out, part_lse, part_top, first, until, rows, row, dv, DV, BLOCK_MANY
            )
        else:
            merged_top, merged_lse, merged = merge_states(
                part_out, part_lse, part_top, first, until, rows, row, dv, DV, BLOCK_STATES
            )
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            merged_lse, share = add_sink(merged_lse, sink)
            merged *= share
        once = asked & (chunk == 0)
        if top is not None:
            top_at = top + request * top_strides[0] + query * top_strides[1] + head * top_strides[2]
            tl.store(top_at, merged_top, mask=once)
        lse_at = lse + request * lse_strides[0] + query * lse_strides[1] + head * lse_strides[2]
        tl.store(lse_at, merged_lse, mask=once)
        out_row = out + request * out_strides[0] + query * out_strides[1] + head * out_strides[2]
        answer = narrow(merged, out.dtype.element_ty)
        tl.store(out_row + dv * out_strides[3], answer, mask=asked & (dv < DV))
        after = each + programs
        request, first, last = states_of(requests, slots, states, after // cells, after < end)


def merge_launch(
    call: DecodeCall,
    plan: DevicePlan,
    workspace: Workspace,
    destination: Destination,
    sinks: Tensor | None,
) -> Launch:
    """Merge the partial states of every request that has several splits, and finish them."""
    spec = call.spec
    return _launch(
        workspace,
        destination,
        rows=plan.num_merged * spec.num_queries * spec.num_q_heads,
        most_states=plan.most_states,
        slots=plan.slots,
        requests=plan.merged,
        cu_seqlens_q=device_offsets(call),
        sinks=sinks,
        states=0,
        queries=spec.num_queries,
        heads=spec.num_q_heads,
    )


def merge_stacked(states: PartialState) -> PartialState:
    """Merge float32 states stacked on axis 0, contiguous or not.

    states: max and lse [N, ..., H], out [N, ..., H, Dv].
    """
    shape, device = states.lse.shape[1:], states.lse.device
    lse, top = (torch.empty(shape, device=device) for _ in range(2))
    out = torch.empty(states.out.shape[1:], device=device)
    if (rows := lse.numel()) == 0:
        return PartialState(top, lse, out)
    parts = Workspace(
        states.out.reshape(-1, rows, out.shape[-1]).contiguous(),
        states.lse.reshape(-1, rows).contiguous(),
        states.max.reshape(-1, rows).contiguous(),
    )
    flat = Destination(out.view(1, rows, -1), lse.view(1, rows), top.view(1, rows))
    launch = _launch(
        parts,
        flat,
        rows=rows,
        most_states=states.lse.shape[0],
        slots=None,
        requests=None,
        cu_seqlens_q=None,
        sinks=None,
        states=states.lse.shape[0],
        queries=1,
        heads=rows,
    )
    launch.run(device)
    return PartialState(top, lse, out)


def _launch(
    parts: Workspace,
    destination: Destination,
    *,
    rows: int,
    most_states: int,
    requests: Tensor | None,
    **arguments: object,
) -> Launch:
    """rows: how many are to be merged, as far as the host knows."""
    head_dim_v = parts.out.shape[-1]
    padded_dim = power_of_two(head_dim_v)
    block = min(padded_dim, _CHUNK) if requests is not None and rows <= _FEW_ROWS else padded_dim
    chunks = -(-head_dim_v // block)
    most = 4096 // padded_dim  # states of one block, whose number shows in the last bits
    programs = rows * chunks
    if requests is not None:
        programs = min(programs, _MOST_PROGRAMS)
    return Launch(
        merge_kernel,
        programs,
        {
            "part_out": parts.out,
            "part_lse": parts.lse,
            "part_top": parts.top,
            "out": destination.out,
            "lse": destination.lse,
            "top": destination.top,
            "out_strides": query_strides(destination.out, 4),
            "lse_strides": query_strides(destination.lse, 3),
            "top_strides": None if destination.top is None else query_strides(destination.top, 3),
            "DV": head_dim_v,
            "CHUNKS": chunks,
            "MANY": _MANY if most_states > _MANY else 0,
            "BLOCK_STATES": max(min(16, most, power_of_two(most_states)), 1),
            "BLOCK_MANY": max(most, 1),
            "BLOCK_DV": block,
            "EARLY": early(parts.out.device),
            "requests": requests,
            **arguments,
        },
        # after a split kernel the time of a row counts, of states at hand the number on their way
        {"num_warps": 2 if requests is None else 4, "launch_pdl": early(parts.out.device)},
    )
