"""The split kernel's launch: what a call, its plan and its tile say to the kernel."""

import torch
from torch import Tensor

from splitkv.common.cache import Cache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.kernels_cuda.launch import Launch, broadcast_strides, early, query_strides
from splitkv.kernels_cuda.plan import DevicePlan, device_offsets, to_device
from splitkv.kernels_cuda.quantised import scale_arguments
from splitkv.kernels_cuda.split import split_kernel
from splitkv.kernels_cuda.states import Destination, Workspace
from splitkv.kernels_cuda.tiles import Tile, padded, rows_differ, tile_for

_UNLIMITED = 2**31 - 2**16
"""A window or anchor count that hides nothing; larger ones would overflow 32-bit positions."""

_MOST_REGISTERS = 255
"""A thread's; left to itself, the assembler spills a few to fit one more block."""


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
            "ROWS": _rows(call, tile),
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


def _rows(call: DecodeCall, tile: Tile) -> int:
    """Rows of a tile that hold queries: half of them where no more can, as with a product's 16."""
    queries = call.spec.num_queries * call.spec.group
    return tile.rows // 2 if queries <= tile.rows // 2 else tile.rows


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
