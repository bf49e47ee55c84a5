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
_FEW_ROWS = 16
"""Of a request: a row is cut in chunks then, since many states would take one program too long."""
_PROGRAMS = 512
"""Of a merge: above that many, programs merge several chunks each. Where nothing was split, each
program costs what it takes to start."""


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
    total = tl.sum(totals, 0)
    merged = tl.sum(summed, 0)

    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), tl.where(total == 1.0, base, base + tl.log(divisor)))
    out = tl.where(nothing, 0.0, tl.where(total == 1.0, merged, merged / divisor))
    return top, lse, out


@triton.jit(
    do_not_specialize=["states", "queries", "heads", "cells_each"],
    do_not_specialize_on_alignment=["slots", "cu_seqlens_q", "sinks"],
)
def merge_kernel(
    part_out,  # [slots, rows, Dv] of S * H rows
    part_lse,  # [slots, rows]
    part_top,
    slots,  # None (states 0 to ``states`` belong to all rows), or [B + 1]
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
    cells_each,  # chunks of rows that one program merges, one after another
    DV: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a row
    MANY: tl.constexpr,  # states from which on blocks are larger; 0: no row has so many
    BLOCK_STATES: tl.constexpr,
    BLOCK_MANY: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    rows = queries * heads
    programs = tl.cdiv(rows * CHUNKS, cells_each)  # of a request
    request = (program // programs).to(tl.int64)
    first_cell = program % programs * cells_each
    last_cell = tl.minimum(first_cell + cells_each, rows * CHUNKS)
    first = tl.zeros([], tl.int32)
    last = states
    if slots is not None:
        first = tl.load(slots + request)
        last = tl.load(slots + request + 1)
    wait_for_splits(EARLY)
    if first == last:  # the split kernel has finished this request
        return
    first_query = tl.zeros([], tl.int64)
    end_query = first_query + queries
    if cu_seqlens_q is not None:
        first_query = tl.load(cu_seqlens_q + request).to(tl.int64)
        end_query = tl.load(cu_seqlens_q + request + 1).to(tl.int64)

    for cell in tl.range(loop_bound(first_cell), loop_bound(last_cell)):
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
        cells = out_row + dv * out_strides[3]
        tl.store(cells, narrow(merged, out.dtype.element_ty), mask=asked & (dv < DV))


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
        requests=plan.batch,
        rows_of_request=spec.num_queries * spec.num_q_heads,
        few_rows=spec.num_queries * spec.num_q_heads <= _FEW_ROWS,
        most_states=plan.most_states,
        slots=plan.slots,
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
        requests=1,
        rows_of_request=rows,
        few_rows=False,
        most_states=states.lse.shape[0],
        slots=None,
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
    requests: int,
    rows_of_request: int,
    few_rows: bool,
    most_states: int,
    **arguments: object,
) -> Launch:
    head_dim_v = parts.out.shape[-1]
    padded_dim = power_of_two(head_dim_v)
    block = min(padded_dim, 32) if few_rows else padded_dim
    chunks = -(-head_dim_v // block)
    cells = rows_of_request * chunks
    # states at hand: the fewer warps a row takes, the more rows are on their way
    cells_each, num_warps = 1, 1 if block <= 128 else 2  # one would spill 256 columns
    if arguments["slots"] is not None:
        cells_each = min(max(requests * cells // _PROGRAMS, 1), cells)
        num_warps = 4 if few_rows else 2
    return Launch(
        merge_kernel,
        requests * -(-cells // cells_each),
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
            "cells_each": cells_each,
            "DV": head_dim_v,
            "CHUNKS": chunks,
            "MANY": _MANY if most_states > _MANY else 0,
            "BLOCK_STATES": max(min(16, 4096 // block), 1),
            "BLOCK_MANY": max(4096 // block, 1),
            "BLOCK_DV": block,
            "EARLY": early(parts.out.device),
            **arguments,
        },
        {"num_warps": num_warps, "launch_pdl": early(parts.out.device)},
    )
