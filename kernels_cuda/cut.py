"""The planner on the device: the cuts of ``splitkv.common.plan``, made where the lengths live.

Same integers as on the host for ``num_splits`` and ``split_size``; the automatic mode evaluates the
host's cost model in float64. What the host must know beforehand, the number of programs and the
size of the workspace, follows from the cache's capacity.
"""

import torch
import triton
import triton.language as tl

from splitkv.common.cache import PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitMode, SplitPlan, plan_splits, token_seconds
from splitkv.common.profile import DeviceProfile
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.masks import window_start
from splitkv.kernels_cuda.plan import ITEM_FIELDS, DevicePlan, bound_key
from splitkv.kernels_cuda.primitives import device_function, loop_bound

_CHUNK = 256
"""Requests that the counting program looks at together."""
_MOST_SPLITS_PER_WORKER = 16
"""Of the automatic mode, see ``most_splits``."""


@device_function
def visible_granules(
    seq_lens,
    request,
    there,
    queries,
    window,
    anchors,
    granule,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    """``(length, anchor_end, start, first, granules)`` of requests, int64.

    ``visible_bounds``, and the number of granules from the ``first`` on, which holds ``start``.
    """
    length = tl.load(seq_lens + request, mask=there, other=0).to(tl.int64)
    start = tl.zeros_like(length)
    anchor_end = start
    if WINDOW:
        opens = window_start(length - queries, window, WINDOW_BLOCK)
        start = tl.minimum(tl.maximum(opens, 0), length)
        anchor_end = tl.minimum(length, anchors)
        joined = anchor_end >= start
        start = tl.where(joined, 0, start)
        anchor_end = tl.where(joined, 0, anchor_end)
    first = start // granule
    granules = tl.where(length > start, tl.cdiv(length, granule) - first, 0)
    return length, anchor_end, start, first, granules


@device_function
def cuts_of(granules, per_split, even):
    """``(granules of a split, splits)``; even: of one size, else ``per_split`` but for the last."""
    size = tl.minimum(per_split, tl.maximum(granules, 1))
    pieces = tl.maximum(tl.cdiv(granules, size), 1)
    size = tl.where(even, tl.maximum(tl.cdiv(granules, pieces), 1), size)
    return size, tl.cdiv(granules, size)


@device_function
def automatic_size(
    seq_lens,
    batch,
    queries,
    window,
    anchors,
    granule,
    kv_heads,
    rows,
    workers,
    token_seconds,
    launch_seconds,
    merge_seconds,
    split_seconds,
    alone,
    together,
    neighbours,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Granules per split by the cost model, and whether all requests have as many granules: the
    host's ``_automatic``, operation for operation.

    Its sizes are looked at together: one row of tiles [16, CHUNK] each, the first of them whole
    requests.
    """
    total = tl.zeros([], tl.int64)
    longest = tl.zeros([], tl.int64)
    shortest = tl.full([], 2**31, tl.int64)
    busy = tl.zeros([], tl.int64)
    for chunk in tl.range(0, loop_bound(batch), CHUNK):
        request = chunk + tl.arange(0, CHUNK)
        there = request < batch
        _, _, _, _, granules = visible_granules(
            seq_lens, request, there, queries, window, anchors, granule, WINDOW, WINDOW_BLOCK
        )
        total += tl.sum(granules, 0)
        longest = tl.maximum(longest, tl.max(granules, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(there, granules, 2**31), 0))
        busy += tl.sum((granules > 0).to(tl.int64), 0)

    share = (total * kv_heads).to(tl.float64) / workers.to(tl.float64)
    uniform = longest == shortest
    which = tl.arange(0, 16)
    # as the host's _QUARTER_WAVES, behind whole requests: 1, 2, 3, 4, 8, 12, 16, 24, 32
    quarter_waves = tl.where(which <= 4, which, tl.where(which <= 7, (which - 3) * 4, 24))
    quarter_waves = tl.maximum(tl.where(which == 9, 32, quarter_waves), 1).to(tl.int64)
    pieces = tl.maximum(workers * quarter_waves // tl.maximum(4 * busy * kv_heads, 1), 1)
    ragged_sizes = share.to(tl.int64) * 4 // tl.maximum(quarter_waves, 4)
    sizes = tl.where(uniform, tl.cdiv(longest, pieces), ragged_sizes)
    sizes = tl.maximum(tl.where(which == 0, longest, sizes), 1)

    states = tl.zeros([16], tl.int64)
    largest = tl.full([16], 1, tl.int64)
    most = tl.zeros([16], tl.int64)
    for chunk in tl.range(0, loop_bound(batch), CHUNK):
        request = chunk + tl.arange(0, CHUNK)
        _, _, _, _, granules = visible_granules(
            seq_lens,
            request,
            request < batch,
            queries,
            window,
            anchors,
            granule,
            WINDOW,
            WINDOW_BLOCK,
        )
        size, count = cuts_of(granules[None, :], sizes[:, None], uniform)
        states += tl.sum(count, 1)
        largest = tl.maximum(largest, tl.max(size, 1))
        most = tl.maximum(most, tl.max(count, 1))
    items = states * kv_heads
    waves = tl.cdiv(items, workers)
    even = (waves * largest).to(tl.float64)
    ragged = share + largest.to(tl.float64) * 0.5
    ragged = tl.where(waves == 1, largest.to(tl.float64), ragged)
    slowest = tl.where(uniform, even, ragged)
    cores = workers // neighbours
    fullest = (tl.cdiv(items, cores) * largest).to(tl.float64) / neighbours.to(tl.float64)
    core = tl.where(uniform, fullest, 0.0)
    reading = tl.maximum(tl.maximum(alone * slowest, together * core), share)
    seconds = reading * granule.to(tl.float64) * token_seconds
    seconds += waves.to(tl.float64) * split_seconds
    merge = launch_seconds + (states * rows).to(tl.float64) * merge_seconds / workers.to(tl.float64)
    seconds += tl.where(most > 1, merge, 0.0)
    limit = tl.maximum(share, 1.0)
    largest_f64 = largest.to(tl.float64)
    allowed = (largest_f64 <= limit) | ((items <= workers) & (largest_f64 <= limit * 2.0))
    seconds = tl.where(allowed & (which < 10), seconds, float("inf"))
    best = tl.min(seconds, 0)
    return tl.max(tl.where(seconds == best, sizes, 0), 0), uniform


@triton.jit(
    do_not_specialize=[
        "batch",
        "queries",
        "window",
        "anchors",
        "granule",
        "requested",
        "kv_heads",
        "rows",
        "workers",
        "neighbours",
    ],
    do_not_specialize_on_alignment=["seq_lens", "sizes", "firsts", "slots"],
)
def count_kernel(
    seq_lens,  # [B]
    sizes,  # int32 [B], granules of each split
    firsts,  # int32 [B + 1], first item of each request
    slots,  # int32 [B + 1], first workspace slot of each request
    batch,
    queries,
    window,
    anchors,
    granule,
    requested,  # splits, or granules per split, or 0
    kv_heads,
    rows,  # S * H, of one state
    workers,
    token_seconds: tl.float64,
    launch_seconds: tl.float64,
    merge_seconds: tl.float64,
    split_seconds: tl.float64,
    alone: tl.float64,
    together: tl.float64,
    neighbours,
    MODE: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    granule = granule.to(tl.int64)
    even = batch > 0 if MODE != "split_size" else batch < 0
    if MODE == "automatic":
        per_split, even = automatic_size(
            seq_lens,
            batch,
            queries,
            window,
            anchors,
            granule,
            kv_heads,
            rows,
            workers,
            token_seconds,
            launch_seconds,
            merge_seconds,
            split_seconds,
            alone,
            together,
            neighbours,
            WINDOW,
            WINDOW_BLOCK,
            CHUNK,
        )
    items_before = tl.zeros([], tl.int32)
    slots_before = tl.zeros([], tl.int32)
    for chunk in tl.range(0, loop_bound(batch), CHUNK):
        request = chunk + tl.arange(0, CHUNK)
        there = request < batch
        _, anchor_end, _, _, granules = visible_granules(
            seq_lens, request, there, queries, window, anchors, granule, WINDOW, WINDOW_BLOCK
        )
        if MODE == "whole":
            per_split = tl.maximum(granules, 1)
        elif MODE == "num_splits":
            per_split = tl.maximum(tl.cdiv(granules, requested), 1)
        elif MODE == "split_size":
            per_split = tl.zeros_like(granules) + requested
        size, count = cuts_of(granules, per_split, even)
        tl.store(sizes + request, size.to(tl.int32), mask=there)
        count = count.to(tl.int32) + (anchor_end > 0).to(tl.int32)
        items = tl.where(there, tl.maximum(count, 1), 0)
        shared = tl.where(count > 1, count, 0)
        tl.store(firsts + request + 1, items_before + tl.cumsum(items, 0), mask=there)
        tl.store(slots + request + 1, slots_before + tl.cumsum(shared, 0), mask=there)
        items_before += tl.sum(items, 0)
        slots_before += tl.sum(shared, 0)
    tl.store(firsts, 0)
    tl.store(slots, 0)


@triton.jit(
    do_not_specialize=["capacity", "queries", "window", "anchors", "granule"],
    do_not_specialize_on_alignment=["seq_lens", "sizes", "firsts", "slots", "items"],
)
def fill_kernel(
    seq_lens,
    sizes,
    firsts,
    slots,
    items,  # int32 [5, capacity]
    capacity,
    queries,
    window,
    anchors,
    granule,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    granule = granule.to(tl.int64)
    length, anchor_end, start, first, granules = visible_granules(
        seq_lens, request, request >= 0, queries, window, anchors, granule, WINDOW, WINDOW_BLOCK
    )
    size = tl.load(sizes + request).to(tl.int64)
    begin = tl.load(firsts + request)
    end = tl.load(firsts + request + 1)
    first_slot = tl.load(slots + request)
    shared = tl.load(slots + request + 1) > first_slot
    has_anchor = (anchor_end > 0).to(tl.int32)
    for chunk in tl.range(loop_bound(begin), loop_bound(end), BLOCK):
        item = chunk + tl.arange(0, BLOCK)
        there = item < end
        split = item - begin - has_anchor
        from_token = (first + split * size) * granule
        to_token = tl.minimum(from_token + size * granule, length)
        from_token = tl.where(split < 0, 0, tl.maximum(from_token, start))
        to_token = tl.where(split < 0, anchor_end, to_token)
        slot = tl.where(shared, first_slot + item - begin, -1)
        tl.store(items + item, request + tl.zeros_like(item), mask=there)
        tl.store(items + capacity + item, from_token.to(tl.int32), mask=there)
        tl.store(items + 2 * capacity + item, to_token.to(tl.int32), mask=there)
        tl.store(
            items + 3 * capacity + item, ((split == 0) & (granules > 0)).to(tl.int32), mask=there
        )
        tl.store(items + 4 * capacity + item, slot, mask=there)


def plan_on_device(
    call: DecodeCall,
    profile: DeviceProfile,
    *,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> SplitPlan:
    """A plan for the call's own device lengths, whose cuts exist on the device only.

    Its host arrays hold no split, and its ``seq_lens`` the cache's capacity, which no length
    exceeds.

    Raises:
        ValueError: as ``plan_splits``.
    """
    plan = plan_splits(
        call.spec, [0] * call.batch, profile=profile, num_splits=num_splits, split_size=split_size
    )
    plan.seq_lens[:] = min(call.cache.capacity, 2**31 - 1)
    launches, on_device = cut_launches(call, plan)
    for launch in launches:
        launch.run(call.q.device)
    plan.bound[bound_key(call.q.device)] = on_device
    return plan


def cut_launches(call: DecodeCall, plan: SplitPlan) -> tuple[list[Launch], DevicePlan]:
    """What is launched to cut the call's lengths as ``plan`` says, and what these launches fill."""
    spec, profile, batch = call.spec, plan.profile, call.batch
    device = call.q.device
    capacity = most_splits(call, plan)
    seq_lens = call.cache.seq_lens.contiguous()
    buffer = torch.full((ITEM_FIELDS * capacity + batch + 1,), -1, dtype=torch.int32, device=device)
    on_device = DevicePlan.over(
        buffer,
        batch,
        num_items=capacity,
        num_slots=capacity,
        max_slots=capacity,
        most_states=capacity,
    )
    if batch == 0:
        return [], on_device
    sizes, firsts = torch.empty(2 * batch + 1, dtype=torch.int32, device=device).split(
        [batch, batch + 1]
    )
    shared: dict[str, object] = {
        "seq_lens": seq_lens,
        "sizes": sizes,
        "firsts": firsts,
        "slots": on_device.slots,
        "queries": spec.num_queries,
        "window": spec.sliding_window or 0,
        "anchors": spec.anchor_tokens,
        "granule": plan.granule,
        "WINDOW": spec.sliding_window is not None,
        "WINDOW_BLOCK": spec.window_block,
    }
    requested = plan.requested or 0
    if plan.mode is SplitMode.SPLIT_SIZE:
        requested = -(-requested // plan.granule)
    count = Launch(
        count_kernel,
        1,
        {
            **shared,
            "batch": batch,
            "requested": requested,
            "MODE": plan.mode.value,
            "kv_heads": spec.num_kv_heads,
            "rows": spec.num_queries * spec.num_q_heads,
            "workers": profile.workers,
            "token_seconds": token_seconds(spec, profile),
            "launch_seconds": profile.launch_seconds,
            "merge_seconds": profile.merge_seconds,
            "split_seconds": profile.split_seconds,
            "alone": profile.alone,
            "together": profile.together,
            "neighbours": profile.neighbours,
            "CHUNK": _CHUNK,
        },
        {"enable_fp_fusion": False},  # the host does not fuse either: same operations, same plan
    )
    fill = Launch(
        fill_kernel, batch, {**shared, "items": on_device.items, "capacity": capacity, "BLOCK": 64}
    )
    return [count, fill], on_device


def most_splits(call: DecodeCall, plan: SplitPlan) -> int:
    """The most items that lengths within the cache's capacity can need, empty requests included.

    Automatic splits hold at least max(1, c // 8) of N granules in all, where c is the whole part of
    N * K / workers: that makes at most 16 * workers / K splits, and one more per request for the
    rest.
    """
    spec, granule, batch = call.spec, plan.granule, call.batch
    longest = _granules(call.cache.capacity, granule)
    if spec.sliding_window is not None:
        seen = spec.anchor_tokens + spec.sliding_window + spec.num_queries
        longest = min(longest, _granules(seen, granule) + 1)
    total = batch * longest
    if isinstance(call.cache, PackedCache):
        total = min(total, _granules(call.cache.capacity, granule) + batch)
    apart = batch if spec.sliding_window is not None and spec.anchor_tokens else 0
    if plan.mode is SplitMode.WHOLE:
        return batch + apart
    if plan.mode is SplitMode.NUM_SPLITS:
        assert plan.requested is not None
        return min(batch * max(min(plan.requested, longest), 1), total + batch) + apart
    if plan.mode is SplitMode.SPLIT_SIZE:
        assert plan.requested is not None
        per_split = _granules(plan.requested, granule)
        return (
            min(batch * max(_granules(longest, per_split), 1), total // per_split + batch) + apart
        )
    busiest = _MOST_SPLITS_PER_WORKER * _granules(plan.profile.workers, spec.num_kv_heads)
    return min(total, busiest) + batch + apart


def _granules(tokens: int, granule: int) -> int:
    return -(-tokens // granule)
