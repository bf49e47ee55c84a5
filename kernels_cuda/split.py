"""The split kernel: one program attends to one split, with the query heads of one kv head.

A program's tile of rows packs the G query heads that share a kv head, for all S queries: row r is
query r // G, head r % G of the group. Larger S * G takes several tiles, each a program of its own.
A request of a single split is finished here; the others leave partial states in the workspace,
which ``merge`` reads.
"""

import triton
import triton.language as tl

from splitkv.kernels_cuda.int4 import group_queries, group_values, score_groups, unit_weights
from splitkv.kernels_cuda.masks import tile_bounds, tokens_seen
from splitkv.kernels_cuda.primitives import (
    aligned_offsets,
    dot,
    down,
    fetch_table,
    first_half,
    in_parts,
    join_parts,
    keep_apart,
    let_merge_start,
    load_rows,
    loop_bound,
    narrow,
    normalise,
    online_softmax,
    rows_of,
    score_dot,
    span,
    table_entries,
    token_offsets,
    turned,
)
from splitkv.kernels_cuda.quantised import (
    TOKEN,
    scale_queries,
    scale_sums,
    scale_weights,
    score_codes,
    subtract_zero,
    widen,
)
from splitkv.kernels_cuda.rows import (
    bias_of,
    finish_scores,
    load_item,
    mask_of,
    places,
    slopes_of,
    store,
)


@triton.jit(
    do_not_specialize=[
        "capacity",
        "window",
        "anchors",
        "bias_columns",
        "mask_columns",
        "row_tiles",
        "kv_heads",
        "most_queries",
    ],
    do_not_specialize_on_alignment=[
        "items",
        "seq_lens",
        "cu_seqlens_q",
        "block_table",
        "alibi_slopes",
        "attn_bias",
        "attn_mask",
        "sinks",
        "k_scale",
        "k_zero",
        "v_scale",
        "v_zero",
    ],
)
def split_kernel(
    q,  # [B, S, H, D] or [tokens, H, D]
    k,
    v,
    items,  # int32 [5, capacity]: request, start, end, opens the window, slot
    seq_lens,  # [B], or cu_seqlens_k [B + 1]
    cu_seqlens_q,  # None, or [B + 1]
    block_table,  # None, or [B, columns]
    alibi_slopes,  # None, or [B, H]
    attn_bias,  # None, or [B, H, S, bias_columns]
    attn_mask,  # None, or uint8 [B, S, mask_columns]
    sinks,  # None, or [H]
    k_scale,  # None, or as K_SCALE says
    k_zero,  # None, or like k_scale
    v_scale,
    v_zero,
    out,  # [B, S, H, Dv] or [tokens, H, Dv]
    out_lse,  # [B, S, H] or [tokens, H]
    out_top,  # None, or like out_lse
    part_out,  # [slots, S * H, Dv]
    part_lse,  # [slots, S * H]
    part_top,
    q_strides,  # request, query, head, dim
    k_strides,  # page or request, slot or row, head, dim
    v_strides,
    table_strides,
    alibi_strides,
    bias_strides,
    mask_strides,
    k_scale_strides,
    k_zero_strides,
    v_scale_strides,
    v_zero_strides,
    out_strides,  # request, query, head, dim
    lse_strides,
    top_strides,
    capacity,
    sm_scale,
    cap,
    window,
    anchors,
    bias_columns,
    mask_columns,
    row_tiles,
    kv_heads,
    most_queries,  # S, of packed queries the largest
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: not paged
    PACKED: tl.constexpr,
    ALIGNED: tl.constexpr,  # no part of a tile lies in two pages
    SAME_STRIDES: tl.constexpr,  # of k and v
    WIDE_ROWS: tl.constexpr,  # a page, or a tile of a cache without pages, spans 2**31 elements
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,  # 1: the window begins at any token
    SOFT_CAP: tl.constexpr,
    CODES: tl.constexpr,  # the cache is quantised
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_GROUP: tl.constexpr,  # elements that share a scale of int4 codes; 0: codes are not int4
    V_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile that hold queries: BLOCK_M, or half of it
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile's tokens, each with a softmax of its own; 1, or a warp each
    ROWS_DIFFER: tl.constexpr,  # some token may be seen by one row of a tile and not by another
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    row_tile = program % row_tiles
    kv_head = (program // row_tiles % kv_heads).to(tl.int64)
    request, planned_start, planned_end, opens_window, slot = load_item(
        items, program // row_tiles // kv_heads, capacity
    )
    if request < 0:  # the plan has fewer items than its capacity
        return

    first_token, length = span(seq_lens, request, PACKED)
    first_query = tl.zeros([], tl.int64)
    queries = most_queries
    if cu_seqlens_q is not None:
        first_query, queries = span(cu_seqlens_q, request, True)
    first_step = row_tile * BLOCK_M // GROUP
    if first_step >= queries:
        return
    last_step = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
    first_position = length - queries + first_step
    bias_from = length - bias_columns
    mask_from = length - mask_columns
    start, full_start, full_end, end = tile_bounds(
        planned_start,
        planned_end,
        opens_window,
        length,
        first_position,
        length - queries + last_step,
        tl.minimum(bias_from, mask_from),
        window,
        anchors,
        most_queries,
        CAUSAL,
        WINDOW,
        BLOCK_N,
        WINDOW_BLOCK,
    )

    if PAGE_SIZE > 0:
        fetch_table(start, end, request, block_table, table_strides, PAGE_SIZE)
    step, query, head, asked = places(
        row_tile * BLOCK_M, first_query, queries, kv_head, GROUP, BLOCK_M
    )
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)

    q_rows = q + request * q_strides[0] + query * q_strides[1] + head * q_strides[2]
    q_mask = asked[:, None] & (d < D)[None, :]
    q_tile = tl.load(q_rows[:, None] + d[None, :] * q_strides[3], mask=q_mask, other=0.0)
    k_items = d if K_GROUP == 0 else tl.arange(0, BLOCK_D // 2).to(tl.int64)
    v_items = dv if V_GROUP == 0 else tl.arange(0, BLOCK_DV // 2).to(tl.int64)
    K_ITEMS: tl.constexpr = D if K_GROUP == 0 else D // 2
    V_ITEMS: tl.constexpr = DV if V_GROUP == 0 else DV // 2
    k_row = k + kv_head * k_strides[2] + k_items * k_strides[3]
    v_row = v + kv_head * v_strides[2] + v_items * v_strides[3]
    each_row = in_parts(asked, PARTS) if ROWS_DIFFER else None
    position = in_parts(length - queries + step, PARTS)
    score_scale = sm_scale
    if CODES:
        q_tile, rest, factor, shift = scale_queries(
            q_tile,
            sm_scale,
            k_scale,
            k_zero,
            k_scale_strides,
            k_zero_strides,
            request,
            kv_head,
            d,
            D,
            K_SCALE,
        )
        if K_GROUP > 0:
            q_tile, group_sums = group_queries(q_tile, K_GROUP, PARTS)
        factor, shift = in_parts(factor, PARTS), in_parts(shift, PARTS)
        score_scale = 1.0
    slope = None
    if alibi_slopes is not None:
        slope = slopes_of(alibi_slopes, alibi_strides, request, head, asked, PARTS)
    bias_rows = None
    if attn_bias is not None:
        bias_rows = bias_of(attn_bias, bias_strides, request, head, step, PARTS)
    mask_rows = None
    if attn_mask is not None:
        mask_rows = mask_of(attn_mask, mask_strides, request, step, PARTS)

    if PARTS == 1:
        tokens = tl.arange(0, BLOCK_N)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        summed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    else:
        tokens = tl.reshape(tl.arange(0, BLOCK_N), (PARTS, BLOCK_N // PARTS))
        top = tl.full([PARTS, BLOCK_M], float("-inf"), tl.float32)
        summed = tl.zeros([PARTS, BLOCK_M, BLOCK_DV], tl.float32)
        if K_GROUP == 0:
            q_tile = tl.broadcast_to(q_tile[None, :, :], (PARTS, BLOCK_M, BLOCK_D))
        if CODES:
            rest = tl.broadcast_to(rest[None, :, :], (PARTS, BLOCK_M, BLOCK_D))
    leads = tokens  # the tokens whose pages are looked up
    if ALIGNED:
        leads = tl.arange(0, PARTS) * (BLOCK_N // PARTS)
        within = tl.arange(0, BLOCK_N // PARTS)
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    total = tl.zeros_like(top)
    drift = tl.zeros_like(top)

    # Tiles at either edge (phases 0 and 2) need masks; between them every row sees every token.
    # Where all rows see the same tokens, masks cost too little for a loop of its own.
    bounds = (start, full_start, full_end, end)
    FIRST_PHASE: tl.constexpr = 0 if WINDOW else (1 if ROWS_DIFFER else 2)
    if FIRST_PHASE == 2:
        bounds = (start, start, start, end)
    for phase in tl.static_range(FIRST_PHASE, 3):
        phase_end = bounds[phase + 1]
        # The pages of the next tile are loaded ahead: else its keys would wait for them.
        if PAGE_SIZE > 0 and (phase == 1 or FIRST_PHASE == 2):
            lead = bounds[phase] + leads
            next_page = table_entries(
                lead, lead < phase_end, request, block_table, table_strides, PAGE_SIZE
            )
        for first in tl.range(loop_bound(bounds[phase]), loop_bound(phase_end), BLOCK_N):
            at = first + tokens
            seen = tokens_seen(
                at,
                phase_end,
                first_position,
                window,
                anchors,
                WINDOW and phase != 1,
                WINDOW_BLOCK,
            )
            if PAGE_SIZE > 0 and (phase == 1 or FIRST_PHASE == 2):
                page = next_page
                lead = first + BLOCK_N + leads
                next_page = table_entries(
                    lead, lead < phase_end, request, block_table, table_strides, PAGE_SIZE
                )
            else:
                lead = first + leads
                page = table_entries(
                    lead,
                    lead < phase_end if ALIGNED else seen,
                    request,
                    block_table,
                    table_strides,
                    PAGE_SIZE,
                )
            if ALIGNED:
                offsets = aligned_offsets(
                    page, first + leads, within, k_strides, PAGE_SIZE, PARTS, WIDE_ROWS
                )
            else:
                offsets = token_offsets(
                    page, at, first, first_token, k_strides, PAGE_SIZE, WIDE_ROWS
                )
            keys = load_rows(k_row, offsets, k_items, seen, K_ITEMS, phase == 1)
            if CODES:
                row = rows_of(at, first_token, PAGE_SIZE)
                holder = page  # shaped to meet a row of each token
                if ALIGNED and PARTS > 1:
                    holder = down(page)
            if K_GROUP > 0:
                products = score_groups(
                    q_tile,
                    group_sums,
                    keys,
                    factor,
                    k_scale,
                    k_zero,
                    k_scale_strides,
                    k_zero_strides,
                    holder,
                    row,
                    kv_head,
                    seen,
                    D,
                    BLOCK_D,
                    K_GROUP,
                )
            elif CODES:
                products = score_codes(
                    q_tile,
                    rest,
                    keys,
                    factor,
                    shift,
                    k_scale,
                    k_zero,
                    k_scale_strides,
                    k_zero_strides,
                    request,
                    holder,
                    row,
                    kv_head,
                    seen,
                    d,
                    D,
                    K_SCALE,
                )
            else:
                products = score_dot(q_tile, turned(keys))
            scores, visible = finish_scores(
                products,
                at,
                seen,
                position,
                each_row,
                slope,
                bias_rows,
                mask_rows,
                bias_strides,
                mask_strides,
                bias_from,
                mask_from,
                score_scale,
                cap,
                window,
                anchors,
                CAUSAL,
                WINDOW,
                WINDOW_BLOCK,
                SOFT_CAP,
                phase == 1,
            )
            if phase != 1 and (attn_mask is not None or attn_bias is not None):
                seen = tl.max(visible.to(tl.int32), len(visible.shape) - 2) != 0
            weights, decay, top, total = online_softmax(scores, top, total, EXACT)

            # A weight of 0 does not silence a NaN: values that no row sees are not loaded.
            if not SAME_STRIDES and ALIGNED:
                offsets = aligned_offsets(
                    page, first + leads, within, v_strides, PAGE_SIZE, PARTS, WIDE_ROWS
                )
            elif not SAME_STRIDES:
                offsets = token_offsets(
                    page, at, first, first_token, v_strides, PAGE_SIZE, WIDE_ROWS
                )
            values = load_rows(v_row, offsets, v_items, seen, V_ITEMS, phase == 1)
            summed *= down(decay)
            if V_GROUP > 0:
                values, unit = group_values(
                    values,
                    v_scale,
                    v_zero,
                    v_scale_strides,
                    v_zero_strides,
                    holder,
                    row,
                    kv_head,
                    seen,
                    q_tile.dtype,
                    DV,
                    BLOCK_DV,
                    V_GROUP,
                )
                weights, unit = unit_weights(weights, unit, q_tile.dtype)
            elif CODES:
                values = widen(values, q_tile.dtype, True)
                if EXACT and v_zero is not None:
                    values = subtract_zero(
                        values,
                        v_zero,
                        v_zero_strides,
                        request,
                        holder,
                        row,
                        kv_head,
                        seen,
                        dv,
                        DV,
                        V_SCALE,
                    )
                weights, unit, drift = scale_weights(
                    weights,
                    drift * decay,
                    v_scale,
                    None if EXACT else v_zero,
                    v_scale_strides,
                    v_zero_strides,
                    holder,
                    row,
                    kv_head,
                    seen,
                    q_tile.dtype,
                    V_SCALE,
                )
            # integers have no NaN
            if ROWS_DIFFER and phase != 1 and v.dtype.element_ty.is_floating():
                values, foreign = keep_apart(values, visible)
                summed += foreign
            if V_SCALE == TOKEN or V_GROUP > 0:
                summed += dot(weights, values) * unit
            elif CODES:
                summed = dot(weights, values, summed)
            else:
                summed = dot(narrow(weights, values.dtype), values, summed)

    if CODES and V_GROUP == 0:
        summed = scale_sums(
            summed,
            drift,
            v_scale,
            None if EXACT else v_zero,
            v_scale_strides,
            v_zero_strides,
            request,
            kv_head,
            dv,
            DV,
            V_SCALE,
        )
    let_merge_start(EARLY)
    if PARTS > 1:
        if ROWS < BLOCK_M:
            top, total, summed = first_half(top), first_half(total), first_half(summed)
            step, query, head, asked = places(
                row_tile * BLOCK_M, first_query, queries, kv_head, GROUP, ROWS
            )
        top, total, summed = join_parts(top, total, summed, PARTS)
    lse, result = normalise(top, total, summed)
    store(
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
        kv_heads * GROUP,
        asked,
        dv,
        top,
        lse,
        result,
        DV,
    )
