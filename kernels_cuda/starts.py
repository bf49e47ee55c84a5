"""Histories that begin later: the work items of a plan clipped to each request's ``kv_start``.

A plan knows no such starts, and layers with different ones share it. So the items are copied and
clipped on the device, and the split kernel needs not know: a token below the start lies in no item.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from splitkv.common.cache import PackedCache
from splitkv.common.call import DecodeCall
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.masks import window_start
from splitkv.kernels_cuda.plan import ITEM_FIELDS, DevicePlan, to_device
from splitkv.kernels_cuda.primitives import span

_BLOCK = 128
_UNLIMITED = 2**31 - 2**16
"""As for the split kernel: larger windows would overflow 32-bit positions."""


@triton.jit(
    do_not_specialize=["capacity", "queries", "window", "anchors"],
    do_not_specialize_on_alignment=["items", "seq_lens", "kv_start", "clipped"],
)
def clip_kernel(
    items,  # int32 [5, capacity]: request, start, end, opens the window, slot
    seq_lens,  # [B], or cu_seqlens_k [B + 1]
    kv_start,  # [B]
    clipped,  # like items
    capacity,
    queries,
    window,
    anchors,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = item < capacity
    request = tl.load(items + item, mask=there, other=-1)
    planned = there & (request >= 0)
    own = tl.maximum(request, 0)
    start = tl.load(items + capacity + item, mask=there, other=0)
    end = tl.load(items + 2 * capacity + item, mask=there, other=0)
    if WINDOW:
        # a shorter request's window starts earlier: said here, as the kernel could not say it again
        _, length = span(seq_lens, own, PACKED)
        opens = tl.load(items + 3 * capacity + item, mask=there, other=0) != 0
        earlier = tl.maximum(window_start(length - queries, window, WINDOW_BLOCK), anchors)
        start = tl.where(opens, tl.minimum(start, earlier), start)
    lowest = tl.load(kv_start + own, mask=planned, other=0).to(tl.int32)
    start = tl.maximum(start, lowest)
    tl.store(clipped + item, request, mask=there)
    tl.store(clipped + capacity + item, start, mask=there)
    tl.store(clipped + 2 * capacity + item, tl.maximum(end, start), mask=there)
    tl.store(clipped + 3 * capacity + item, 0, mask=there)
    slot = tl.load(items + 4 * capacity + item, mask=there, other=-1)
    tl.store(clipped + 4 * capacity + item, slot, mask=there)


def clip_launch(call: DecodeCall, plan: DevicePlan) -> tuple[Launch, DevicePlan]:
    """What is launched for a call with ``kv_start``, and the plan whose items that fills."""
    assert call.kv_start is not None
    spec, cache, device = call.spec, call.cache, call.q.device
    lengths = cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens
    clipped = torch.empty_like(plan.items)
    assert plan.items.shape[0] == ITEM_FIELDS
    launch = Launch(
        clip_kernel,
        -(-plan.capacity // _BLOCK),
        {
            "items": plan.items,
            "seq_lens": to_device(lengths, device).contiguous(),
            "kv_start": to_device(call.kv_start, device).contiguous(),
            "clipped": clipped,
            "capacity": plan.capacity,
            "queries": spec.num_queries,
            "window": min(spec.sliding_window or 0, _UNLIMITED),
            "anchors": min(spec.anchor_tokens, _UNLIMITED) if spec.sliding_window else 0,
            "PACKED": isinstance(cache, PackedCache),
            "WINDOW": spec.sliding_window is not None,
            "WINDOW_BLOCK": min(spec.window_block, _UNLIMITED),
            "BLOCK": _BLOCK,
        },
    )
    return launch, replace(plan, items=clipped)
