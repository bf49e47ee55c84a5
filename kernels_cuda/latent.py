"""The split kernel for wide heads: absorbed MLA, whose values are the first columns of its keys.

A key is cut into a head part, the widest power of two in it, and the rest: 512 + 64 of 576 columns
are not padded to 1024. Where v is the head part's view of k (``shares_memory``), its tile is loaded
once and enters both products. Items, masks and partial states are ``split_kernel``'s.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.common.cache import Cache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec
from splitkv.kernels_cuda import latent_hopper
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.masks import tile_bounds, tokens_seen
from splitkv.kernels_cuda.plan import DevicePlan
from splitkv.kernels_cuda.primitives import (
    dot,
    keep_apart,
    let_merge_start,
    load_rows,
    loop_bound,
    narrow,
    normalise,
    online_softmax,
    score_dot,
    span,
    table_entries,
    token_offsets,
)
from splitkv.kernels_cuda.quantised import scale_arguments
from splitkv.kernels_cuda.rows import (
    bias_of,
    finish_scores,
    load_item,
    mask_of,
    places,
    slopes_of,
    store,
)
from splitkv.kernels_cuda.split_launch import split_launch
from splitkv.kernels_cuda.states import Destination, Workspace
from splitkv.kernels_cuda.tiles import Tile, padded, rows_differ

_WIDEST_WHOLE = 256
"""The widest padded head dim of ``split_kernel``."""

_OF_SPLIT_KERNEL = ("ALIGNED", "BLOCK_D", "PARTS", "ROWS", "SAME_STRIDES")
"""Arguments that it takes and the kernels for wide heads do not."""


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
def latent_kernel(
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
    HEAD: tl.constexpr,  # columns of the head part of a key; D - HEAD are the rest
    SHARED: tl.constexpr,  # values are the head part of the keys
    PAGE_SIZE: tl.constexpr,  # 0: not paged
    PACKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,  # 1: the window begins at any token
    WIDE_ROWS: tl.constexpr,  # a page, or a tile of a cache without pages, spans 2**31 elements
    ROWS_DIFFER: tl.constexpr,  # some token may be seen by one row of a tile and not by another
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    row_tile = program % row_tiles  # neighbours read the same keys: once from memory
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

    step, query, head, asked = places(
        row_tile * BLOCK_M, first_query, queries, kv_head, GROUP, BLOCK_M
    )
    position = length - queries + step
    d = tl.arange(0, BLOCK_HEAD).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)

    q_rows = request * q_strides[0] + query * q_strides[1] + head * q_strides[2]
    q_head = load_rows(q + d * q_strides[3], q_rows, d, asked, HEAD, False)
    k_row = k + kv_head * k_strides[2] + d * k_strides[3]
    v_row = v + kv_head * v_strides[2] + dv * v_strides[3]
    if D > HEAD:
        rest = tl.arange(0, BLOCK_REST).to(tl.int64)
        q_rest = load_rows(q + (HEAD + rest) * q_strides[3], q_rows, rest, asked, D - HEAD, False)
        k_row_rest = k + kv_head * k_strides[2] + (HEAD + rest) * k_strides[3]
    slope = None
    if alibi_slopes is not None:
        slope = slopes_of(alibi_slopes, alibi_strides, request, head, asked, 1)
    bias_rows = None
    if attn_bias is not None:
        bias_rows = bias_of(attn_bias, bias_strides, request, head, step, 1)
    mask_rows = None
    if attn_mask is not None:
        mask_rows = mask_of(attn_mask, mask_strides, request, step, 1)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
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
            at = bounds[phase] + tl.arange(0, BLOCK_N)
            page = table_entries(at, at < phase_end, request, block_table, table_strides, PAGE_SIZE)
        # Edges have few tiles: to have several of them in flight takes registers for nothing.
        for first in tl.range(
            loop_bound(bounds[phase]),
            loop_bound(phase_end),
            BLOCK_N,
            num_stages=None if phase == 1 or FIRST_PHASE == 2 else 1,
        ):
            at = first + tl.arange(0, BLOCK_N)
            seen = tokens_seen(
                at, phase_end, first_position, window, anchors, WINDOW and phase != 1, WINDOW_BLOCK
            )
            if (phase != 1 and FIRST_PHASE != 2) or PAGE_SIZE == 0:
                page = table_entries(at, seen, request, block_table, table_strides, PAGE_SIZE)

            offsets = token_offsets(page, at, first, first_token, k_strides, PAGE_SIZE, WIDE_ROWS)
            keys = load_rows(k_row, offsets, d, seen, HEAD, phase == 1)
            products = score_dot(q_head, tl.trans(keys))
            if D > HEAD:
                k_rest = load_rows(k_row_rest, offsets, rest, seen, D - HEAD, phase == 1)
                products = dot(q_rest, tl.trans(k_rest), products)
            scores, visible = finish_scores(
                products,
                at,
                seen,
                position,
                asked,
                slope,
                bias_rows,
                mask_rows,
                bias_strides,
                mask_strides,
                bias_from,
                mask_from,
                sm_scale,
                cap,
                window,
                anchors,
                CAUSAL,
                WINDOW,
                WINDOW_BLOCK,
                SOFT_CAP,
                phase == 1,
            )
            weights, decay, top, total = online_softmax(
                scores, top, total, q.dtype.element_ty == tl.float32
            )

            # A weight of 0 does not silence a NaN: values that no row sees are not loaded or, where
            # they came with the keys, blanked.
            if phase != 1 and (attn_mask is not None or attn_bias is not None):
                seen = tl.max(visible.to(tl.int32), 0) != 0
            if not SHARED:
                offsets = token_offsets(
                    page, at, first, first_token, v_strides, PAGE_SIZE, WIDE_ROWS
                )
                values = load_rows(v_row, offsets, dv, seen, DV, phase == 1)
            elif phase != 1 and (attn_mask is not None or attn_bias is not None):
                values = tl.where(seen[:, None], keys, 0.0)
            else:
                values = keys
            summed *= decay[:, None]
            if ROWS_DIFFER and phase != 1:
                values, foreign = keep_apart(values, visible)
                summed += foreign
            summed = dot(narrow(weights, values.dtype), values, summed)
            if PAGE_SIZE > 0 and (phase == 1 or FIRST_PHASE == 2):
                at += BLOCK_N
                page = table_entries(
                    at, at < phase_end, request, block_table, table_strides, PAGE_SIZE
                )

    let_merge_start(EARLY)
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


def latent(spec: DecodeSpec) -> bool:
    """Whether heads are too wide for ``split_kernel``."""
    return max(padded(spec.head_dim), padded(spec.head_dim_v)) > _WIDEST_WHOLE


def head_part(spec: DecodeSpec) -> int:
    """Columns of the head part of a key: the largest power of two that is not above D."""
    return 1 << (spec.head_dim.bit_length() - 1)


def shares_memory(spec: DecodeSpec, cache: Cache) -> bool:
    """Whether v is the view of k's head part, as ``k[..., :512]`` is in absorbed MLA."""
    k, v = cache.k, cache.v
    same = v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    return same and spec.head_dim_v == head_part(spec)


def latent_tile(spec: DecodeSpec, *, shared: bool) -> Tile:
    """The tile of ``spec``, one that compiles without spilled registers; but float32 spills 8 to
    400 bytes a thread where v is not the view or rows differ.
    """
    if spec.dtype == torch.float32:
        return Tile(16, tokens=16, num_warps=8, num_stages=1)
    if spec.attn_mask or rows_differ(spec, 16):
        return Tile(16, tokens=16, num_warps=8, num_stages=2)
    few = spec.num_queries * spec.group <= 16 or rows_differ(spec, 32)
    if not shared:
        return Tile(16 if few else 32, tokens=32, num_warps=8, num_stages=2)
    if few:
        return Tile(16, tokens=32, num_warps=4, num_stages=3)
    return Tile(32, tokens=32, num_warps=8, num_stages=3)


def latent_launch(
    call: DecodeCall,
    plan: DevicePlan,
    workspace: Workspace,
    destination: Destination,
    sinks: Tensor | None,
    tile: Tile | None = None,
) -> Launch:
    """``split_launch`` with a kernel for wide heads.

    tile: None for that of ``latent_tile``, or the kernel written for Hopper where that is at hand.
    """
    spec, device = call.spec, call.q.device
    shared = shares_memory(spec, call.cache)
    if tile is None and _is_hopper(device) and latent_hopper.takes(call, shared=shared):
        return launch_for_hopper(call, plan, workspace, destination, sinks)
    return _launch(
        call, plan, workspace, destination, sinks, tile or latent_tile(spec, shared=shared)
    )


def launch_for_hopper(
    call: DecodeCall,
    plan: DevicePlan,
    workspace: Workspace,
    destination: Destination,
    sinks: Tensor | None,
) -> Launch:
    """Of a call that ``latent_hopper`` takes."""
    tile = Tile(latent_hopper.ROWS, latent_hopper.TOKENS, num_warps=8, num_stages=1)
    return latent_hopper.hopper_launch(_launch(call, plan, workspace, destination, sinks, tile))


def _launch(
    call: DecodeCall,
    plan: DevicePlan,
    workspace: Workspace,
    destination: Destination,
    sinks: Tensor | None,
    tile: Tile,
) -> Launch:
    spec, head = call.spec, head_part(call.spec)
    row_tiles = -(-spec.num_queries * spec.group // tile.rows)
    launch = split_launch(call, plan, workspace, destination, sinks)
    arguments: dict[str, Any] = dict(launch.arguments)
    for name in (*_OF_SPLIT_KERNEL, *scale_arguments(call)):
        arguments.pop(name, None)
    row_stride = max(abs(arguments[strides][1]) for strides in ("k_strides", "v_strides"))
    arguments |= {
        "row_tiles": row_tiles,
        "HEAD": head,
        "SHARED": shares_memory(spec, call.cache),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.tokens,
        "BLOCK_HEAD": padded(head),
        "BLOCK_REST": padded(spec.head_dim - head) if spec.head_dim > head else 0,
        "ROWS_DIFFER": rows_differ(spec, tile.rows),
        "WIDE_ROWS": (call.cache.page_size or tile.tokens) * row_stride >= 2**31,
    }
    return replace(
        launch,
        kernel=latent_kernel,
        programs=plan.num_items * spec.num_kv_heads * row_tiles,
        arguments=arguments,
        options={**launch.options, "num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def _is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has Hopper's warpgroup products, which no later one has either."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
