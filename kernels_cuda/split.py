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
from splitkv.kernels_cuda.launch import Launch, broadcast_strides, query_strides
from splitkv.kernels_cuda.masks import load_columns, pairs_visible, tile_bounds, tokens_seen
from splitkv.kernels_cuda.plan import DevicePlan, device_offsets, to_device
from splitkv.kernels_cuda.primitives import (
    add_sink,
    dot,
    load_tile,
    locate,
    loop_bound,
    narrow,
    normalise,
    online_softmax,
    soft_cap,
    span,
)
from splitkv.kernels_cuda.states import Destination, Workspace
from splitkv.kernels_cuda.tiles import padded, tile_for

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
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    program = tl.program_id(0)
    row_tile = program % row_tiles
    kv_head = (program // row_tiles % kv_heads).to(tl.int64)
    item = program // row_tiles // kv_heads
    request = tl.load(items + item).to(tl.int64)
    if request < 0:  # the plan has fewer items than its capacity
        return
    planned_start = tl.load(items + capacity + item)
    planned_end = tl.load(items + 2 * capacity + item)
    opens_window = tl.load(items + 3 * capacity + item)
    slot = tl.load(items + 4 * capacity + item).to(tl.int64)

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
    )

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    step = rows // GROUP
    asked = step < queries
    position = length - queries + step
    query = first_query + step
    head = kv_head * GROUP + rows % GROUP
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)

    q_rows = q + request * q_strides[0] + query * q_strides[1] + head * q_strides[2]
    q_mask = asked[:, None] & (d < D)[None, :]
    q_tile = tl.load(q_rows[:, None] + d[None, :] * q_strides[3], mask=q_mask, other=0.0)
    if alibi_slopes is not None:
        slopes = alibi_slopes + request * alibi_strides[0] + head * alibi_strides[1]
        slope = tl.load(slopes, mask=asked, other=0.0).to(tl.float32)
    if attn_bias is not None:
        bias_rows = attn_bias + request * bias_strides[0] + head * bias_strides[1]
        bias_rows += step.to(tl.int64) * bias_strides[2]
    if attn_mask is not None:
        mask_rows = attn_mask + request * mask_strides[0] + step.to(tl.int64) * mask_strides[1]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Tiles at either edge (phases 0 and 2) need masks; between them every row sees every token.
    bounds = (start, full_start, full_end, end)
    FIRST_PHASE: tl.constexpr = 0 if WINDOW else 1
    for phase in tl.static_range(FIRST_PHASE, 3):
        phase_end = bounds[phase + 1]
        for first in tl.range(loop_bound(bounds[phase]), loop_bound(phase_end), BLOCK_N):
            at = first + tl.arange(0, BLOCK_N)
            seen = tokens_seen(
                at, phase_end, first_position, window, anchors, WINDOW and phase != 1
            )
            page, row = locate(
                at, seen, request, first_token, block_table, table_strides, PAGE_SIZE, phase == 1
            )

            k_tokens = k + page * k_strides[0] + row * k_strides[1] + kv_head * k_strides[2]
            keys = load_tile(k_tokens, d, k_strides[3], seen, D, BLOCK_D, phase == 1)
            scores = dot(q_tile, tl.trans(keys)) * sm_scale
            if SOFT_CAP:
                scores = soft_cap(scores, cap)
            if alibi_slopes is not None:
                scores += slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
            if phase != 1:
                visible = pairs_visible(at, seen, position, asked, window, anchors, CAUSAL, WINDOW)
                if attn_mask is not None:
                    visible &= (
                        load_columns(mask_rows, mask_strides[2], at, mask_from, visible, 1) != 0
                    )
                if attn_bias is not None:
                    bias = load_columns(bias_rows, bias_strides[3], at, bias_from, visible, 0.0)
                    bias = bias.to(tl.float32)
                    scores += bias
                    visible &= bias != float("-inf")
                scores = tl.where(visible, scores, float("-inf"))
                if attn_mask is not None or attn_bias is not None:
                    seen = tl.max(visible.to(tl.int32), 0) != 0
            weights, decay, top, total = online_softmax(scores, top, total)

            # A weight of 0 does not silence a NaN: values that no row sees are not loaded.
            v_tokens = v + page * v_strides[0] + row * v_strides[1] + kv_head * v_strides[2]
            values = load_tile(v_tokens, dv, v_strides[3], seen, DV, BLOCK_DV, phase == 1)
            summed = dot(narrow(weights, values.dtype), values, summed * decay[:, None])

    lse, result = normalise(top, total, summed)
    written = asked[:, None] & (dv < DV)[None, :]
    if slot >= 0:
        state = (slot * most_queries + step) * (kv_heads * GROUP) + head
        tl.store(part_top + state, top, mask=asked)
        tl.store(part_lse + state, lse, mask=asked)
        tl.store(part_out + state[:, None] * DV + dv[None, :], result, mask=written)
        return
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
    out_tile = out_rows[:, None] + dv[None, :] * out_strides[3]
    tl.store(out_tile, narrow(result, out.dtype.element_ty), mask=written)


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
            "CAUSAL": spec.causal and spec.num_queries > 1,
            "WINDOW": spec.sliding_window is not None,
            "SOFT_CAP": spec.logits_soft_cap is not None,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.tokens,
            "BLOCK_D": padded(spec.head_dim),
            "BLOCK_DV": padded(spec.head_dim_v),
        },
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": _MOST_REGISTERS},
    )


def _cache_strides(cache: Cache) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of k and v as (page or request, slot or row, head, dim)."""
    if isinstance(cache, PackedCache):
        return (0, *cache.k.stride()), (0, *cache.v.stride())
    if isinstance(cache, PagedCache):
        k, v = cache.nhd()
    else:
        k, v = (tensor.transpose(1, 2) for tensor in cache.bnsd())
    return k.stride(), v.stride()
