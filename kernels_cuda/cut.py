"""The planner on the device: the cuts of ``splitkv.common.plan``, made where the lengths live.

Same integers as on the host; the automatic mode evaluates the host's cost model in the same
operations of float64. What the host must know beforehand, the number of programs and the size of
the workspace, follows from the cache's capacity.

One launch, a program per request, and none waits for another: each looks at all lengths, to know
where its own items lie, and writes those.
"""

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from splitkv.common.cache import PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.cost import step_cost
from splitkv.common.plan import SplitMode, SplitPlan, plan_splits
from splitkv.common.profile import DeviceProfile
from splitkv.kernels_cuda.granules import automatic_size, chunked_end, cuts_of, visible_granules
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.plan import DevicePlan, bound_key, table_size
from splitkv.kernels_cuda.primitives import device_function, loop_bound

_CHUNKS = ((64, 1), (256, 4), (1024, 8))
"""Requests that a program looks at together, and its warps: the first that holds the batch, or
the last, several times.
"""
_BLOCK = 64
"""Items that a program writes together."""
_MOST_SPLITS_PER_WORKER = 16
"""Of the automatic mode, see ``most_splits``."""


@triton.jit(
    do_not_specialize=[
        "batch",
        "capacity",
        "queries",
        "window",
        "anchors",
        "requested",
        "kv_heads",
        "workers",
        "cores",
    ],
    do_not_specialize_on_alignment=["seq_lens", "items", "slots", "merged"],
)
def cut_kernel(
    seq_lens,  # [B]
    items,  # int32 [5, capacity]
    slots,  # int32 [B + 1], first workspace slot of each request
    merged,  # int32 [1 + B]: how many requests have several states, then which
    batch,
    capacity,
    queries,
    window,
    anchors,
    requested,  # splits, or granules per split, or 0
    kv_heads,
    workers,
    cores,
    granule_seconds: tl.float64,
    split_seconds: tl.float64,
    launch_seconds: tl.float64,
    state_seconds: tl.float64,
    alone: tl.float64,
    together: tl.float64,
    MODE: tl.constexpr,
    GRANULE: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    ONCE: tl.constexpr,  # CHUNK requests are all
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0)
    length, anchor_end, start, first, granules = visible_granules(
        seq_lens, own, own >= 0, queries, window, anchors, GRANULE, WINDOW, WINDOW_BLOCK
    )
    per_split = requested
    if MODE == "automatic":
        per_split = automatic_size(
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
            GRANULE,
            WINDOW,
            WINDOW_BLOCK,
            ONCE,
            CHUNK,
        )
    size, count = cuts_of(granules, per_split, MODE)
    states = count + (anchor_end > 0).to(tl.int32)

    first_item = tl.zeros([], tl.int32)
    first_slot = tl.zeros([], tl.int32)
    all_items = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    all_merged = tl.zeros([], tl.int32)
    for chunk in tl.range(0, chunked_end(batch, ONCE, CHUNK), CHUNK):
        request = chunk + tl.arange(0, CHUNK)
        _, their_anchor_end, _, _, their_granules = visible_granules(
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
        _, their_count = cuts_of(their_granules, per_split, MODE)
        their_states = their_count + (their_anchor_end > 0).to(tl.int32)
        taken = tl.where(request < batch, tl.maximum(their_states, 1), 0)
        all_items += tl.sum(taken, 0)
        first_item += tl.sum(tl.where(request < own, taken, 0), 0)
        several = (request < batch) & (their_states > 1)
        earlier = several & (request < own)
        first_slot += tl.sum(tl.where(earlier, their_states, 0), 0)
        before += tl.sum(earlier.to(tl.int32), 0)
        all_merged += tl.sum(several.to(tl.int32), 0)
    shared = states > 1
    if own == 0:
        tl.store(slots, 0)
        tl.store(merged, all_merged)
    tl.store(slots + own + 1, first_slot + tl.where(shared, states, 0))
    tl.store(merged + 1 + before, own, mask=shared)

    for chunk in tl.range(0, loop_bound(tl.maximum(states, 1)), BLOCK):
        index = chunk + tl.arange(0, BLOCK)
        split = index - (states - count)  # anchors come first
        grid = (first + split * size) * GRANULE
        to = tl.where(split + 1 < count, grid + size * GRANULE, length)
        store_items(
            items + first_item + index,
            capacity,
            index < tl.maximum(states, 1),
            own,
            tl.where(split < 0, 0, tl.maximum(grid, start)),
            tl.where(split < 0, anchor_end, to),
            ((split == 0) & (count > 0)).to(tl.int32),
            tl.where(shared, first_slot + index, -1),
        )
    unused = capacity - all_items
    for chunk in tl.range(loop_bound(own * BLOCK), loop_bound(unused), loop_bound(batch * BLOCK)):
        index = chunk + tl.arange(0, BLOCK)
        store_items(items + all_items + index, capacity, index < unused, -1, -1, -1, -1, -1)


@device_function
def store_items(column, capacity, there, request, start, end, opens_window, slot):
    """Columns of the items [5, capacity], where ``there`` [N]; numbers, or [N] of them."""
    row = tl.zeros(there.shape, tl.int32)
    tl.store(column, row + request, mask=there)
    tl.store(column + capacity, row + start, mask=there)
    tl.store(column + 2 * capacity, row + end, mask=there)
    tl.store(column + 3 * capacity, row + opens_window, mask=there)
    tl.store(column + 4 * capacity, row + slot, mask=there)


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
    spec, batch, device = call.spec, call.batch, call.q.device
    capacity = most_splits(call, plan)
    buffer = torch.empty(table_size(capacity, batch), dtype=torch.int32, device=device)
    on_device = DevicePlan.over(
        buffer,
        batch,
        num_items=capacity,
        num_slots=capacity,
        num_merged=batch,
        max_slots=capacity,
        most_states=capacity,
    )
    if batch == 0:
        on_device.slots.zero_()
        on_device.merged.zero_()
        return [], on_device
    requested = plan.requested or 0
    if plan.mode is SplitMode.SPLIT_SIZE:
        requested = _granules(requested, plan.granule)
    cost = step_cost(spec, plan.profile, plan.granule)
    chunk, warps = next((each for each in _CHUNKS if batch <= each[0]), _CHUNKS[-1])
    arguments: dict[str, object] = {
        "seq_lens": call.cache.seq_lens.contiguous(),
        "items": on_device.items,
        "slots": on_device.slots,
        "merged": on_device.merged,
        "batch": batch,
        "capacity": capacity,
        "queries": spec.num_queries,
        "window": spec.sliding_window or 0,
        "anchors": spec.anchor_tokens,
        "requested": requested,
        **asdict(cost),
        "MODE": plan.mode.value,
        "GRANULE": plan.granule,
        "WINDOW": spec.sliding_window is not None,
        "WINDOW_BLOCK": spec.window_block,
        "ONCE": batch <= chunk,
        "CHUNK": chunk,
        "BLOCK": _BLOCK,
    }
    # the host does not fuse multiplications and additions either: same operations, same plan
    options = {"enable_fp_fusion": False, "num_warps": warps}
    return [Launch(cut_kernel, batch, arguments, options)], on_device


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
