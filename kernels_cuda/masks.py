"""Which tokens a tile of query rows sees, by the predicate of ``splitkv.common.visibility``."""

import triton.language as tl

from splitkv.kernels_cuda.primitives import across, device_function, down


@device_function
def window_start(position, window, WINDOW_BLOCK: tl.constexpr):
    """Where the window of the row at ``position`` starts; 0 or less where it hides nothing.

    In this order nothing overflows, and division may round a negative position either way.
    """
    start = position - window + 1
    if WINDOW_BLOCK > 1:
        start = position - position % WINDOW_BLOCK - (window - WINDOW_BLOCK)
    return start


@device_function
def tile_bounds(
    start,
    end,
    opens_window,
    length,
    first_position,
    last_position,
    masked_from,
    window,
    anchors,
    most_queries,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    """``(start, full_start, full_end, end)`` for rows at first_position to last_position.

    Some row sees something only in [start, end); every row sees everything in [full_start,
    full_end), which is a whole number of tiles, begins a whole number of tiles after ``start``, and
    ends before ``masked_from``, where a mask or a bias begins. The split was planned as [start,
    end), perhaps for a longer request.
    """
    end = tl.minimum(end, length)
    full_start = start
    full_end = tl.minimum(end, masked_from)
    if CAUSAL:
        end = tl.minimum(end, last_position + 1)
        full_end = tl.minimum(full_end, first_position + 1)
    if WINDOW:
        if opens_window != 0:
            # A shorter request's window starts earlier; anchors stop it, a split of their own.
            opens = window_start(length - most_queries, window, WINDOW_BLOCK)
            start = tl.minimum(start, tl.maximum(opens, anchors))
        if start >= anchors:
            start = tl.maximum(start, window_start(first_position, window, WINDOW_BLOCK))
        full_start = tl.maximum(start, window_start(last_position, window, WINDOW_BLOCK))
    end = tl.maximum(end, start)
    full_start = tl.minimum(start + tl.cdiv(full_start - start, BLOCK_N) * BLOCK_N, end)
    full_end = full_start + tl.maximum(full_end - full_start, 0) // BLOCK_N * BLOCK_N
    return start, full_start, full_end, end


@device_function
def tokens_seen(
    at,
    end,
    first_position,
    window,
    anchors,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    """Whether some row sees token ``at`` [N], before ``end``: only such tokens are loaded."""
    seen = at < end
    if WINDOW:
        seen &= (at >= window_start(first_position, window, WINDOW_BLOCK)) | (at < anchors)
    return seen


@device_function
def pairs_visible(
    at,
    seen,
    position,
    asked,
    window,
    anchors,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    """Whether the row at ``position`` [..., M] sees token ``at`` [..., N]; [..., M, N]."""
    visible = across(seen)
    if asked is not None:
        visible = down(asked) & visible
    if CAUSAL:
        visible &= across(at) <= down(position)
    if WINDOW:
        start = window_start(position, window, WINDOW_BLOCK)
        visible &= (across(at) >= down(start)) | across(at < anchors)
    return visible


@device_function
def load_columns(rows, stride, at, masked_from, visible, other: tl.constexpr):
    """Mask or bias [..., M, N], ``other`` where it is silent; column 0 is token ``masked_from``."""
    column = at - masked_from
    cells = down(rows) + across(column).to(tl.int64) * stride
    return tl.load(cells, mask=visible & across(column >= 0), other=other)
