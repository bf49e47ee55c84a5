"""Which tokens a tile of query rows sees, by the predicate of ``splitkv.common.visibility``."""

import triton.language as tl

from splitkv.kernels_cuda.primitives import device_function


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
            start = tl.minimum(start, tl.maximum(length - most_queries - window + 1, anchors))
        if start >= anchors:
            start = tl.maximum(start, first_position - window + 1)
        full_start = tl.maximum(start, last_position - window + 1)
    end = tl.maximum(end, start)
    full_start = tl.minimum(start + tl.cdiv(full_start - start, BLOCK_N) * BLOCK_N, end)
    full_end = full_start + tl.maximum(full_end - full_start, 0) // BLOCK_N * BLOCK_N
    return start, full_start, full_end, end


@device_function
def tokens_seen(at, end, first_position, window, anchors, WINDOW: tl.constexpr):
    """Whether some row sees token ``at`` [N], before ``end``: only such tokens are loaded."""
    seen = at < end
    if WINDOW:
        seen &= (at > first_position - window) | (at < anchors)
    return seen


@device_function
def pairs_visible(
    at, seen, position, asked, window, anchors, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Whether the row at ``position`` [M] sees token ``at`` [N]; [M, N]."""
    visible = asked[:, None] & seen[None, :]
    if CAUSAL:
        visible &= at[None, :] <= position[:, None]
    if WINDOW:
        visible &= (at[None, :] > position[:, None] - window) | (at < anchors)[None, :]
    return visible


@device_function
def load_columns(rows, stride, at, masked_from, visible, other: tl.constexpr):
    """Mask or bias [M, N] whose column 0 is token ``masked_from``; ``other`` where it is silent."""
    column = at - masked_from
    cells = rows[:, None] + column[None, :].to(tl.int64) * stride
    return tl.load(cells, mask=visible & (column >= 0)[None, :], other=other)
