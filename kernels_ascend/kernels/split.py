"""The split kernel: one work item attends to one split, with the query rows of one kv head.

Rows pack the G query heads that share a kv head for all S queries: row r is query r // G, head r %
G of the group. The host lays queries, slopes and biases out by kv head and row, so that a tile of
rows is one stretch of memory; keys and values are read where they lie, a tile never leaving its
page. Every split leaves a state, which the merge kernel reads.

A program takes work items in a loop: the grid is no larger than the cores. Lengths are read on the
device, so that a plan for longer requests, and a captured graph, stay right for shorter ones.
"""

import triton
import triton.language as tl

from splitkv.kernels_ascend.kernels.primitives import (
    device_function,
    dot,
    finite_or_zero,
    loop_bound,
    narrow,
    soft_cap,
)


@device_function
def tile_from(position, PAGE_SIZE: tl.constexpr, PAGE_TILES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile that holds ``position``; tiles are counted page by page."""
    if PAGE_SIZE == 0:
        return position // BLOCK_N
    return position // PAGE_SIZE * PAGE_TILES + position % PAGE_SIZE // BLOCK_N


@device_function
def tile_after(position, PAGE_SIZE: tl.constexpr, PAGE_TILES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first tile that holds nothing before ``position``."""
    if PAGE_SIZE == 0:
        return (position + BLOCK_N - 1) // BLOCK_N
    return position // PAGE_SIZE * PAGE_TILES + (position % PAGE_SIZE + BLOCK_N - 1) // BLOCK_N


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "k_first",
        "k_row",
        "k_head",
        "v_first",
        "v_row",
        "v_head",
        "slope_stride",
        "bias_first",
        "bias_head",
        "work",
        "capacity",
        "rows",
        "row_tiles",
        "kv_heads",
        "queries",
        "columns",
        "window",
        "anchors",
    ]
)
def split_kernel(
    q,  # [B, K, rows, D]
    k,
    v,
    items,  # int32 [4, capacity]: request, start, end, opens the window
    seq_lens,  # int32 [B]
    steps,  # int32 [rows]: which of the S queries a row belongs to
    block_table,  # None, or int32 [B, columns]
    slopes,  # None, or float32 [1 or B, K, rows]
    bias,  # None, or float32 [1 or B, 1 or K, rows, BLOCK_N + columns]: -inf hides
    part_out,  # float32 [capacity, K, rows, DV]
    part_lse,  # float32 [capacity, K, rows]
    part_top,
    table_stride,  # of a request
    k_first,  # stride of a page or request, slot or token, head
    k_row,
    k_head,
    v_first,
    v_row,
    v_head,
    slope_stride,  # of a request
    bias_first,  # of a request, kv head
    bias_head,
    work,
    capacity,
    rows,
    row_tiles,
    kv_heads,
    queries,
    columns,
    window,
    anchors,
    sm_scale,
    cap,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: not paged
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED_START: tl.constexpr,  # splits may begin within a tile
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    PAGE_TILES: tl.constexpr = (PAGE_SIZE + BLOCK_N - 1) // BLOCK_N
    RAGGED_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N != 0
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    n = tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    rows64 = rows.to(tl.int64)  # the interpreter counts in Python integers, which have no dtype
    for index in range(
        loop_bound(tl.program_id(0)), loop_bound(work), loop_bound(tl.num_programs(0))
    ):
        row = index % row_tiles * BLOCK_M + m
        kv_head = index // row_tiles % kv_heads
        item = index // row_tiles // kv_heads
        request = tl.load(items + item)
        start = tl.load(items + capacity + item)
        end = tl.load(items + 2 * capacity + item)
        length = tl.load(seq_lens + request)
        asked = row < rows
        position = length - queries + tl.load(steps + row, mask=asked, other=0)
        first_position = length - queries
        last_position = length - 1

        # What some row sees lies in [start, end), what every row sees in [full_from, full_to).
        end = tl.minimum(end, length)
        full_to = tl.minimum(end, length - columns)
        full_from = start
        if CAUSAL:
            full_to = tl.minimum(full_to, first_position + 1)
        if WINDOW:
            opens = tl.load(items + 3 * capacity + item)
            # A shorter request's window starts earlier; anchors stop it, a split of their own.
            earlier = tl.maximum(first_position - window + 1, anchors)
            start = tl.where(opens != 0, tl.minimum(start, earlier), start)
            full_from = tl.maximum(start, last_position - window + 1)
        first_tile = tile_from(start, PAGE_SIZE, PAGE_TILES, BLOCK_N)
        last_tile = tl.maximum(tile_after(end, PAGE_SIZE, PAGE_TILES, BLOCK_N), first_tile)
        full_first = tile_after(full_from, PAGE_SIZE, PAGE_TILES, BLOCK_N)
        full_first = tl.minimum(tl.maximum(full_first, first_tile), last_tile)
        full_last = tile_from(tl.maximum(full_to, 0), PAGE_SIZE, PAGE_TILES, BLOCK_N)
        full_last = tl.minimum(tl.maximum(full_last, full_first), last_tile)

        q_rows = q + (request * kv_heads + kv_head) * rows64 * D
        q_tile = tl.load(q_rows + row[:, None] * D + d[None, :], mask=asked[:, None], other=0.0)
        if slopes is not None:
            slope_rows = slopes + request * slope_stride.to(tl.int64) + kv_head * rows64
            slope = tl.load(slope_rows + row, mask=asked, other=0.0)
        if bias is not None:
            bias_rows = bias + request * bias_first.to(tl.int64) + kv_head * bias_head.to(tl.int64)

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        summed = tl.zeros([BLOCK_M, DV], tl.float32)
        # Tiles at either edge (phases 0 and 2) need masks; between them every row sees every key.
        FIRST_PHASE: tl.constexpr = 0 if RAGGED_START or RAGGED_PAGE else 1
        for phase in tl.static_range(FIRST_PHASE, 1 if RAGGED_PAGE else 3):
            if RAGGED_PAGE:
                low = first_tile
                high = last_tile
            elif phase == 0:
                low = first_tile
                high = full_first
            elif phase == 1:
                low = full_first if RAGGED_START else first_tile
                high = full_last
            else:
                low = full_last
                high = last_tile
            for tile in range(loop_bound(low), loop_bound(high)):
                if PAGE_SIZE == 0:
                    page = request
                    in_page = tile * BLOCK_N
                    first = in_page
                else:
                    in_page = tile % PAGE_TILES * BLOCK_N
                    first = tile // PAGE_TILES * PAGE_SIZE + in_page
                    page = tl.load(block_table + request * table_stride + tile // PAGE_TILES)
                at = first + n
                k_tile = k + page * k_first.to(tl.int64) + kv_head * k_head.to(tl.int64)
                k_tile += in_page * k_row.to(tl.int64)
                v_tile = v + page * v_first.to(tl.int64) + kv_head * v_head.to(tl.int64)
                v_tile += in_page * v_row.to(tl.int64)
                k_cells = k_tile + n[:, None] * k_row + d[None, :]
                v_cells = v_tile + n[:, None] * v_row + dv[None, :]
                if phase == 1:
                    keys = tl.load(k_cells)
                    values = tl.load(v_cells)
                elif RAGGED_PAGE:
                    there = (at < end) & (in_page + n < PAGE_SIZE)
                    keys = tl.load(k_cells, mask=there[:, None], other=0.0)
                    values = tl.load(v_cells, mask=there[:, None], other=0.0)
                else:
                    there = at < end
                    keys = tl.load(k_cells, mask=there[:, None], other=0.0)
                    values = tl.load(v_cells, mask=there[:, None], other=0.0)

                scores = dot(q_tile, tl.trans(keys)) * sm_scale
                if SOFT_CAP:
                    scores = soft_cap(scores, cap)
                if slopes is not None:
                    scores += slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
                if phase != 1:
                    visible = asked[:, None] & (there & (at >= start))[None, :]
                    if CAUSAL:
                        visible &= at[None, :] <= position[:, None]
                    if WINDOW:
                        visible &= (at[None, :] > position[:, None] - window) | (at < anchors)[
                            None, :
                        ]
                    if bias is not None:
                        # Triton-Ascend 3.2.0 lowers a mask of which the lower bound hides a whole
                        # tile to accesses out of bounds: zeros lie before the columns instead.
                        column = tl.maximum(first - (length - columns), -BLOCK_N) + BLOCK_N
                        extra = tl.load(
                            bias_rows + row[:, None] * (columns + BLOCK_N) + (column + n)[None, :],
                            mask=asked[:, None] & (at < end)[None, :],
                            other=0.0,
                        )
                        scores += extra
                        visible &= extra != float("-inf")
                    scores = tl.where(visible, scores, float("-inf"))
                    # A weight of 0 does not silence a NaN: a value that no row sees becomes 0.
                    seen = tl.max(tl.where(visible, 1.0, 0.0), 0) > 0.0
                    values = tl.where(seen[:, None], values, 0.0)

                new_top = tl.maximum(top, tl.max(scores, 1))
                base = finite_or_zero(new_top)
                weights = tl.exp(scores - base[:, None])
                decay = tl.exp(top - base)
                total = total * decay + tl.sum(weights, 1)
                top = new_top
                summed = summed * decay[:, None] + dot(narrow(weights, values.dtype), values)

        nothing = total == 0.0
        divisor = tl.where(nothing, 1.0, total)
        lse = tl.where(nothing, float("-inf"), top + tl.log(divisor))
        result = tl.where(nothing[:, None], 0.0, summed / divisor[:, None])
        state = (item * kv_heads + kv_head) * rows64
        tl.store(part_top + state + row, top, mask=asked)
        tl.store(part_lse + state + row, lse, mask=asked)
        tl.store(
            part_out + state * DV + row[:, None] * DV + dv[None, :], result, mask=asked[:, None]
        )
