"""The split kernel: one program attends to one split, with the query heads of one kv head.

A program's tile of rows packs the G query heads that share a kv head, for all S queries: row r is
query r // G, head r % G of the group. Larger S * G takes several tiles, each a program of its own.
A request of a single split is finished here; the others leave partial states in the workspace,
which ``merge`` reads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.common.cache import Cache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.kernels_cuda.launch import Launch, broadcast_strides, early, query_strides
from splitkv.kernels_cuda.masks import tile_bounds, tokens_seen
from splitkv.kernels_cuda.plan import DevicePlan, device_offsets, to_device
from splitkv.kernels_cuda.primitives import (
    aligned_offsets,
    dot,
    down,
    fetch_table,
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
    span,
    table_entries,
    token_offsets,
    turned,
)
from splitkv.kernels_cuda.quantised import (
    TOKEN,
    scale_arguments,
    scale_queries,
    scale_sums,
    scale_weights,
    score_codes,
    subtract_zero,
    widen,
)
from splitkv.kernels_cuda.rows import finish_scores, load_item, store_answer, store_state
from splitkv.kernels_cuda.states import Destination, Workspace
from splitkv.kernels_cuda.tiles import Tile, padded, rows_differ, tile_for

_UNLIMITED = 2**31 - 2**16
"""A window or anchor count that hides nothing; larger ones would overflow 32-bit positions."""

_MOST_REGISTERS = 255
"""A thread's; left to itself, the assembler spills a few to fit one more block."""


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile's tokens, each with a softmax of its own; 1, or a warp each
    ROWS_DIFFER: tl.constexpr,  # some token may be seen by one row of a tile and not by another
    EARLY: tl.constexpr,
):
    let_merge_start(EARLY)
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
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    step = rows // GROUP
    asked = step < queries
    query = first_query + step
    head = kv_head * GROUP + rows % GROUP
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)

    q_rows = q + request * q_strides[0] + query * q_strides[1] + head * q_strides[2]
    q_mask = asked[:, None] & (d < D)[None, :]
    q_tile = tl.load(q_rows[:, None] + d[None, :] * q_strides[3], mask=q_mask, other=0.0)
    k_row = k + kv_head * k_strides[2] + d * k_strides[3]
    v_row = v + kv_head * v_strides[2] + dv * v_strides[3]
    each_row = in_parts(asked, PARTS) if ROWS_DIFFER else None
    position = in_parts(length - queries + step, PARTS)
    slope = None
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
        factor, shift = in_parts(factor, PARTS), in_parts(shift, PARTS)
        score_scale = 1.0
    if alibi_slopes is not None:
        slopes = alibi_slopes + request * alibi_strides[0] + head * alibi_strides[1]
        slope = in_parts(tl.load(slopes, mask=asked, other=0.0).to(tl.float32), PARTS)
    bias_rows = None
    if attn_bias is not None:
        bias_rows = attn_bias + request * bias_strides[0] + head * bias_strides[1]
        bias_rows = in_parts(bias_rows + step.to(tl.int64) * bias_strides[2], PARTS)
    mask_rows = None
    if attn_mask is not None:
        mask_rows = attn_mask + request * mask_strides[0] + step.to(tl.int64) * mask_strides[1]
        mask_rows = in_parts(mask_rows, PARTS)

    if PARTS == 1:
        tokens = tl.arange(0, BLOCK_N)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        summed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    else:
        tokens = tl.reshape(tl.arange(0, BLOCK_N), (PARTS, BLOCK_N // PARTS))
        top = tl.full([PARTS, BLOCK_M], float("-inf"), tl.float32)
        summed = tl.zeros([PARTS, BLOCK_M, BLOCK_DV], tl.float32)
        q_tile = tl.broadcast_to(q_tile[None, :, :], (PARTS, BLOCK_M, BLOCK_D))
        if CODES:
            rest = tl.broadcast_to(rest[None, :, :], (PARTS, BLOCK_M, BLOCK_D))
    leads = tokens  # the tokens whose pages are looked up
    if ALIGNED:
        leads = tl.arange(0, PARTS) * (BLOCK_N // PARTS)
        within = tl.arange(0, BLOCK_N // PARTS)
    PAGED_AHEAD: tl.constexpr = PAGE_SIZE > 0
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
        if PAGED_AHEAD and (phase == 1 or FIRST_PHASE == 2):
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
            if PAGED_AHEAD and (phase == 1 or FIRST_PHASE == 2):
                page = next_page
                lead = first + BLOCK_N + leads
                next_page = table_entries(
                    lead, lead < phase_end, request, block_table, table_strides, PAGE_SIZE
                )
            else:
                lead = first + leads
                page = table_entries(
                    first + leads,
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
            keys = load_rows(k_row, offsets, d, seen, D, phase == 1)
            if CODES:
                row = rows_of(at, first_token, PAGE_SIZE)
                if ALIGNED and PARTS > 1:
                    page = down(page)
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
                    page,
                    row,
                    kv_head,
                    seen,
                    d,
                    D,
                    K_SCALE,
                )
            else:
                products = dot(q_tile, turned(keys))
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
            values = load_rows(v_row, offsets, dv, seen, DV, phase == 1)
            summed *= down(decay)
            if CODES:
                values = widen(values, q_tile.dtype, True)
                if EXACT and v_zero is not None:
                    values = subtract_zero(
                        values,
                        v_zero,
                        v_zero_strides,
                        request,
                        page,
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
                    page,
                    row,
                    kv_head,
                    seen,
                    q_tile.dtype,
                    V_SCALE,
                )
            if ROWS_DIFFER and phase != 1 and v.dtype.element_ty != tl.int8:  # int8 has no NaN
                values, foreign = keep_apart(values, visible)
                summed += foreign
            if CODES and V_SCALE == TOKEN:
                summed += dot(weights, values) * unit
            elif CODES:
                summed = dot(weights, values, summed)
            else:
                summed = dot(narrow(weights, values.dtype), values, summed)

    if CODES:
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
    if PARTS > 1:
        top, total, summed = join_parts(top, total, summed, PARTS)
    lse, result = normalise(top, total, summed)
    if slot >= 0:
        heads = kv_heads * GROUP
        first_row = slot * most_queries * heads
        store_state(
            part_out,
            part_lse,
            part_top,
            first_row,
            step,
            head,
            heads,
            asked,
            dv,
            top,
            lse,
            result,
            DV,
        )
        return
    store_answer(
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


def split_launch(
    call: DecodeCall,
    plan: DevicePlan,
    workspace: Workspace,
    destination: Destination,
    sinks: Tensor | None,
) -> Launch:
    """Attend to every split; finish the requests that have a single one."""
    spec, cache, device = call.spec, call.cache, call.q.device
    tile = tile_for(spec)
    row_tiles = -(-spec.num_queries * spec.group // tile.rows)
    lengths = cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens
    mask = None if call.attn_mask is None else call.attn_mask.view(torch.uint8)
    k_strides, v_strides = _cache_strides(cache)
    return Launch(
        split_kernel,
        plan.num_items * spec.num_kv_heads * row_tiles,
        {
            "q": call.q,
            "k": cache.k,
            "v": cache.v,
            "items": plan.items,
            "seq_lens": to_device(lengths, device).contiguous(),
            "cu_seqlens_q": device_offsets(call),
            "block_table": cache.block_table if isinstance(cache, PagedCache) else None,
            "alibi_slopes": call.alibi_slopes,
            "attn_bias": call.attn_bias,
            "attn_mask": mask,
            "sinks": sinks,
            **scale_arguments(call),
            "out": destination.out,
            "out_lse": destination.lse,
            "out_top": destination.top,
            "part_out": workspace.out,
            "part_lse": workspace.lse,
            "part_top": workspace.top,
            "q_strides": query_strides(call.q, 4),
            "k_strides": k_strides,
            "v_strides": v_strides,
            "table_strides": cache.block_table.stride() if isinstance(cache, PagedCache) else None,
            "alibi_strides": None
            if call.alibi_slopes is None
            else query_strides(call.alibi_slopes, 2),
            "bias_strides": broadcast_strides(call.attn_bias),
            "mask_strides": broadcast_strides(mask),
            "out_strides": query_strides(destination.out, 4),
            "lse_strides": query_strides(destination.lse, 3),
            "top_strides": None if destination.top is None else query_strides(destination.top, 3),
            "capacity": plan.capacity,
            "sm_scale": spec.scale,
            "cap": spec.logits_soft_cap or 0.0,
            "window": min(spec.sliding_window or 0, _UNLIMITED),
            "anchors": min(spec.anchor_tokens, _UNLIMITED) if spec.sliding_window else 0,
            "bias_columns": 0 if call.attn_bias is None else call.attn_bias.shape[-1],
            "mask_columns": 0 if mask is None else mask.shape[-1],
            "row_tiles": row_tiles,
            "kv_heads": spec.num_kv_heads,
            "most_queries": spec.num_queries,
            "GROUP": spec.group,
            "D": spec.head_dim,
            "DV": spec.head_dim_v,
            "PAGE_SIZE": cache.page_size or 0,
            "PACKED": isinstance(cache, PackedCache),
            "ALIGNED": _aligned(call, tile),
            "SAME_STRIDES": k_strides == v_strides,
            "WIDE_ROWS": _wide_rows(k_strides, v_strides, cache.page_size or tile.tokens),
            "CAUSAL": spec.causal and spec.num_queries > 1,
            "WINDOW": spec.sliding_window is not None,
            "WINDOW_BLOCK": min(spec.window_block, _UNLIMITED),
            "SOFT_CAP": spec.logits_soft_cap is not None,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.tokens,
            "BLOCK_D": padded(spec.head_dim),
            "BLOCK_DV": padded(spec.head_dim_v),
            "PARTS": tile.parts,
            "ROWS_DIFFER": rows_differ(spec, tile.rows),
            "EARLY": early(device),
        },
        {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": _MOST_REGISTERS,
        },
    )


def _aligned(call: DecodeCall, tile: Tile) -> bool:
    """Whether splits begin where pages do, and a part of a tile divides a page."""
    page_size = call.cache.page_size
    free = call.spec.sliding_window is not None or call.kv_start is not None
    return page_size is not None and not free and page_size % (tile.tokens // tile.parts) == 0


def _wide_rows(k_strides: tuple[int, ...], v_strides: tuple[int, ...], rows: int) -> bool:
    return rows * max(abs(k_strides[1]), abs(v_strides[1])) >= 2**31


def _cache_strides(cache: Cache) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of k and v as (page or request, slot or row, head, dim)."""
    if isinstance(cache, PackedCache):
        return (0, *cache.k.stride()), (0, *cache.v.stride())
    if isinstance(cache, PagedCache):
        k, v = cache.nhd()
    else:
        k, v = (tensor.transpose(1, 2) for tensor in cache.bnsd())
    return k.stride(), v.stride()
