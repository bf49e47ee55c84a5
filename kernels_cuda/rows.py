"""What a program does with its tile of query rows, whatever shape its two products take."""

import triton.language as tl

from splitkv.kernels_cuda.masks import load_columns, pairs_visible
from splitkv.kernels_cuda.primitives import (
    across,
    add_sink,
    device_function,
    down,
    in_parts,
    narrow,
    soft_cap,
)


@device_function
def load_item(items, item, capacity):
    """``(request, start, end, opens_window, slot)`` of one split; request is -1 past the last."""
    request = tl.load(items + item).to(tl.int64)
    start = tl.load(items + capacity + item)
    end = tl.load(items + 2 * capacity + item)
    opens_window = tl.load(items + 3 * capacity + item)
    slot = tl.load(items + 4 * capacity + item).to(tl.int64)
    return request, start, end, opens_window, slot


@device_function
def places(first_row, first_query, queries, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """``(step, query, head, asked)`` of each row from ``first_row`` on: its query of the request
    and of all, its head, and whether there is such a query.
    """
    row = first_row + tl.arange(0, ROWS)
    step = row // GROUP
    return step, first_query + step, kv_head * GROUP + row % GROUP, step < queries


@device_function
def slopes_of(alibi_slopes, strides, request, head, asked, PARTS: tl.constexpr):
    """ALiBi's slope of each row, float32."""
    slopes = alibi_slopes + request * strides[0] + head * strides[1]
    return in_parts(tl.load(slopes, mask=asked, other=0.0).to(tl.float32), PARTS)


@device_function
def bias_of(attn_bias, strides, request, head, step, PARTS: tl.constexpr):
    """Pointers to the first column of each row's bias."""
    rows = attn_bias + request * strides[0] + head * strides[1] + step.to(tl.int64) * strides[2]
    return in_parts(rows, PARTS)


@device_function
def mask_of(attn_mask, strides, request, step, PARTS: tl.constexpr):
    """Pointers to the first column of each row's mask."""
    return in_parts(attn_mask + request * strides[0] + step.to(tl.int64) * strides[1], PARTS)


@device_function
def finish_scores(
    products,
    at,
    seen,
    position,
    asked,
    slope,  # None, or [M]
    bias_rows,  # None, or [M] pointers to columns that begin at token bias_from
    mask_rows,
    bias_strides,
    mask_strides,
    bias_from,
    mask_from,
    sm_scale,
    cap,
    window,
    anchors,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FULL: tl.constexpr,
):
    """``(scores, visible)`` of products [..., M, N]: -inf where a row does not see a token.

    FULL: every row sees every token, and neither mask nor bias reaches this tile.
    """
    visible = seen
    scores = products * sm_scale
    if SOFT_CAP:
        scores = soft_cap(scores, cap)
    if slope is not None:
        scores += down(slope) * (across(at) - down(position)).to(tl.float32)
    if not FULL:
        visible = pairs_visible(
            at, seen, position, asked, window, anchors, CAUSAL, WINDOW, WINDOW_BLOCK
        )
        if mask_rows is not None:
            visible &= load_columns(mask_rows, mask_strides[2], at, mask_from, visible, 1) != 0
        if bias_rows is not None:
            bias = load_columns(bias_rows, bias_strides[3], at, bias_from, visible, 0.0)
            bias = bias.to(tl.float32)
            scores += bias
            visible &= bias != float("-inf")
        scores = tl.where(visible, scores, float("-inf"))
    return scores, visible


@device_function
def store(
    slot,
    part_out,
    part_lse,
    part_top,
    out,
    out_lse,
    out_top,
    sinks,
    out_strides,
    lse_strides,
    top_strides,
    request,
    query,
    step,
    head,
    most_queries,
    heads,
    asked,
    dv,
    top,
    lse,
    result,
    DV: tl.constexpr,
):
    """Leave rows as a partial state in ``slot`` of the workspace, or as the answer (slot -1)."""
    if slot >= 0:
        first_row = slot * most_queries * heads
        state = first_row + step * heads + head
        _store_state(part_out, part_lse, part_top, state, asked, dv, top, lse, result, DV)
    else:
        _store_answer(
            out,
            out_lse,
            out_top,
            sinks,
            out_strides,
            lse_strides,
            top_strides,
            request,
            query,
            head,
            asked,
            dv,
            top,
            lse,
            result,
            DV,
        )


@device_function
def _store_state(part_out, part_lse, part_top, state, asked, dv, top, lse, result, DV):
    tl.store(part_top + state, top, mask=asked)
    tl.store(part_lse + state, lse, mask=asked)
    written = asked[:, None] & (dv < DV)[None, :]
    tl.store(part_out + state[:, None] * DV + dv[None, :], result, mask=written)


@device_function
def _store_answer(
    out,
    out_lse,
    out_top,
    sinks,
    out_strides,
    lse_strides,
    top_strides,
    request,
    query,
    head,
    asked,
    dv,
    top,
    lse,
    result,
    DV: tl.constexpr,
):
    """Finish a request of a single split: its sinks, its rounding, its strides."""
    if sinks is not None:
        lse, share = add_sink(lse, tl.load(sinks + head, mask=asked, other=0.0).to(tl.float32))
        result *= share[:, None]
    if out_top is not None:
        top_rows = (
            out_top + request * top_strides[0] + query * top_strides[1] + head * top_strides[2]
        )
        tl.store(top_rows, top, mask=asked)
    lse_rows = out_lse + request * lse_strides[0] + query * lse_strides[1] + head * lse_strides[2]
    tl.store(lse_rows, lse, mask=asked)
    out_rows = out + request * out_strides[0] + query * out_strides[1] + head * out_strides[2]
    cells = out_rows[:, None] + dv[None, :] * out_strides[3]
    written = asked[:, None] & (dv < DV)[None, :]
    tl.store(cells, narrow(result, out.dtype.element_ty), mask=written)
