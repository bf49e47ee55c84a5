"""How far requests are cut, on the device: granules of a split, by mode or by the cost model.

Integers have 32 bits wherever they are divided: division of 64 is a subroutine.
"""

import triton.language as tl

from splitkv.common.cost import QUARTER_WAVES
from splitkv.kernels_cuda.masks import window_start
from splitkv.kernels_cuda.primitives import device_function, loop_bound

_WAVES = tl.constexpr(QUARTER_WAVES)
_SIZES = tl.constexpr(1 + len(QUARTER_WAVES))


@device_function
def visible_granules(
    seq_lens,
    request,
    there,
    queries,
    window,
    anchors,
    GRANULE: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    """``(length, anchor_end, start, first, granules)`` of requests, int32.

    ``visible_bounds``, and the number of granules from the ``first`` on, which holds ``start``.
    """
    length = tl.load(seq_lens + request, mask=there, other=0).to(tl.int32)
    start = tl.zeros_like(length)
    anchor_end = start
    if WINDOW:
        opens = window_start(length.to(tl.int64) - queries, window, WINDOW_BLOCK)
        start = tl.minimum(tl.maximum(opens, 0), length).to(tl.int32)
        anchor_end = tl.minimum(length, anchors).to(tl.int32)
        joined = anchor_end >= start
        start = tl.where(joined, 0, start)
        anchor_end = tl.where(joined, 0, anchor_end)
    first = start // GRANULE
    granules = tl.where(length > start, (length - 1) // GRANULE + 1 - first, 0)
    return length, anchor_end, start, first, granules


@device_function
def chunked_end(batch, ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """Where loops over chunks of the batch end; known to the compiler if one chunk is all."""
    return CHUNK if ONCE else loop_bound(batch)


@device_function
def divide_up(x, divisor):
    """ceil(x / divisor) of int32 from 0 and 1 on; their sum may have more bits."""
    above = (tl.maximum(x, 1) - 1).to(tl.uint32) // divisor.to(tl.uint32)
    return tl.where(x > 0, above.to(tl.int32) + 1, 0)


@device_function
def cuts_of(granules, per_split, MODE: tl.constexpr):
    """``(granules of each split but the last, splits)`` of requests."""
    size = tl.zeros_like(granules) + per_split
    if MODE == "whole":
        size = tl.maximum(granules, 1)
    elif MODE == "num_splits":
        size = tl.maximum(divide_up(granules, size), 1)
    return size, divide_up(granules, size)


@device_function
def quarter_waves(which):
    """QUARTER_WAVES[which - 1], and 1 for any other ``which``."""
    quarters = tl.full(which.shape, 1, tl.int32)
    for index in tl.static_range(1, _SIZES):
        quarters = tl.where(which == index, _WAVES[index - 1], quarters)
    return quarters


@device_function
def automatic_size(
    seq_lens,
    batch,
    queries,
    window,
    anchors,
    kv_heads,
    workers,
    cores,
    granule_seconds,
    split_seconds,
    launch_seconds,
    state_seconds,
    alone,
    together,
    GRANULE: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Granules per split by the cost model: the host's ``best_size``, operation for operation.

    Its sizes are looked at together: one row of tiles [16, CHUNK] each, the first of them whole
    requests.
    """
    total = tl.zeros([], tl.int64)
    longest = tl.zeros([], tl.int32)
    for chunk in tl.range(0, chunked_end(batch, ONCE, CHUNK), CHUNK):
        request = chunk + tl.arange(0, CHUNK)
        _, _, _, _, granules = visible_granules(
            seq_lens,
            request,
            request < batch,
            queries,
            window,
            anchors,
            GRANULE,
            WINDOW,
            WINDOW_BLOCK,
        )
        total += tl.sum(granules.to(tl.int64), 0)
        longest = tl.maximum(longest, tl.max(granules, 0))

    share = (total * kv_heads).to(tl.float64) / workers.to(tl.float64)
    uniform = total == longest.to(tl.int64) * batch
    which = tl.arange(0, 16)
    quarters = quarter_waves(which)
    pieces = (workers * quarters) // (4 * batch * kv_heads)
    even_sizes = divide_up(longest, tl.maximum(pieces, 1))
    # a quarter of 2**31 granules, of 16 tokens or more, is above any request's number
    whole_share = tl.minimum(share, 536870911.0).to(tl.int32)
    ragged_sizes = (whole_share * 4) // quarters
    sizes = tl.where(uniform, even_sizes, tl.minimum(ragged_sizes, longest))
    sizes = tl.maximum(tl.where(which == 0, longest, sizes), 1)

    states = tl.zeros([16], tl.int32)
    for chunk in tl.range(0, chunked_end(batch, ONCE, CHUNK), CHUNK):
        request = chunk + tl.arange(0, CHUNK)
        _, _, _, _, granules = visible_granules(
            seq_lens,
            request,
            request < batch,
            queries,
            window,
            anchors,
            GRANULE,
            WINDOW,
            WINDOW_BLOCK,
        )
        states += tl.sum(divide_up(granules[None, :], sizes[:, None]), 1)
    items = states * kv_heads
    waves = divide_up(items, workers)
    size_f64 = sizes.to(tl.float64)
    fullest = together * (divide_up(items, cores).to(tl.float64) * size_f64)
    even = tl.maximum(alone * (waves.to(tl.float64) * size_f64), fullest)
    ragged = alone * tl.where(waves == 1, size_f64, share + size_f64 * 0.5)
    busy = tl.maximum(share, tl.where(uniform, even, ragged))
    seconds = busy * granule_seconds + waves.to(tl.float64) * split_seconds
    merge = launch_seconds + states.to(tl.float64) * state_seconds
    seconds = tl.where(sizes < longest, seconds + merge, seconds)
    limit = tl.maximum((total * kv_heads + workers - 1) // workers, 1)
    allowed = (sizes <= limit) | ((items <= workers) & (sizes <= limit * 2))
    seconds = tl.where(allowed & (which < _SIZES), seconds, float("inf"))
    best = tl.min(seconds, 0)
    return tl.max(tl.where(seconds == best, sizes, 0), 0)
