"""Splits cover what is visible, once; they are even, or independent of the batch, by mode."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import splitkv
from splitkv.common.cost import QUARTER_WAVES, StepCost, splits_of, step_cost
from splitkv.common.plan import SplitMode, SplitPlan, granule_tokens, plan_splits
from splitkv.common.profile import PROFILES, DeviceProfile
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.visibility import IntArray

H200 = PROFILES["NVIDIA H200"]
Modes = dict[str, int]


def profile(workers: int = 132, tile: int = 128, launch: float = 3e-6) -> DeviceProfile:
    return DeviceProfile("test", workers, 4e12, launch, 2e-9, tile, source="made up")


def spec(
    heads: int = 32, kv_heads: int = 8, page_size: int | None = 16, **fields: Any
) -> DecodeSpec:
    return DecodeSpec(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        layout=Layout.BSND if page_size is None else Layout.NHD,
        page_size=page_size,
        **fields,
    )


def cuts(plan: SplitPlan, request: int) -> list[tuple[int, int]]:
    low, high = plan.indptr[request : request + 2].tolist()
    return list(zip(plan.start[low:high].tolist(), plan.end[low:high].tolist(), strict=True))


def seen_by_some_query(length: int, queries: int, spec: DecodeSpec) -> np.ndarray:
    """bool [length], from the definition: 0 <= j < L, causal, window or anchor."""
    seen = np.zeros(length, dtype=bool)
    key = np.arange(length)
    for query in range(queries):
        position = length - queries + query
        visible = np.ones(length, dtype=bool)
        if spec.causal:
            visible &= key <= position
        if spec.sliding_window is not None:
            block = spec.window_block
            near = position // block - key // block < spec.sliding_window // block
            visible &= near | (key < spec.anchor_tokens)
        seen |= visible
    return seen


def assert_covers_once(ranges: list[tuple[int, int]], seen: np.ndarray) -> None:
    read = np.zeros(len(seen), dtype=np.int64)
    for start, end in ranges:
        assert 0 <= start < end <= len(seen)
        read[start:end] += 1
    assert np.array_equal(read, seen.astype(np.int64))


def executed(plan: SplitPlan, lengths: IntArray, counts: IntArray) -> list[list[tuple[int, int]]]:
    """What is read for lengths up to the planned ones, by the rule in ``SplitPlan``'s docstring."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for split in range(plan.num_splits):
        request = int(plan.request[split])
        start, end = int(plan.start[split]), min(int(plan.end[split]), int(lengths[request]))
        if plan.window_first[split] and plan.spec.sliding_window is not None:
            first, block = lengths[request] - counts[request], plan.spec.window_block
            window_start = (first // block + 1) * block - plan.spec.sliding_window
            start = min(start, max(int(window_start), plan.spec.anchor_tokens))
        if start < end:
            ranges[request].append((start, end))
    return ranges


lengths_near_edges = st.one_of(
    st.integers(0, 700),
    st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025]),
)
batches = st.lists(lengths_near_edges, min_size=0, max_size=12)
modes: st.SearchStrategy[Modes] = st.one_of(
    st.just({}),
    st.integers(1, 40).map(lambda n: {"num_splits": n}),
    st.integers(1, 500).map(lambda t: {"split_size": t}),
)
profiles = st.builds(
    profile,
    st.sampled_from([1, 2, 20, 132]),
    st.sampled_from([1, 16, 64, 128]),
    st.sampled_from([0.0, 3e-6]),
)
specs = st.builds(
    lambda window, block, anchors, queries, page, causal: spec(
        page_size=page,
        sliding_window=window if window is None else -(-window // block) * block,
        window_block=1 if window is None else block,
        anchor_tokens=anchors if window is not None else 0,
        num_queries=queries,
        causal=causal,
    ),
    st.none() | st.integers(1, 300),
    st.sampled_from([1, 1, 7, 64, 300]),
    st.sampled_from([0, 0, 1, 16, 70]),
    st.sampled_from([1, 1, 4, 9]),
    st.sampled_from([None, 1, 16, 48, 128]),
    st.booleans(),
)
quick = settings(deadline=None, max_examples=120)


@given(specs, batches, profiles, modes)
@quick
def test_property_splits_cover_what_is_visible_without_gap_overlap_or_empty_split(
    spec: DecodeSpec, lengths: list[int], profile: DeviceProfile, mode: Modes
) -> None:
    plan = plan_splits(spec, lengths, profile=profile, **mode)
    assert plan.batch == len(lengths)
    assert plan.request[: plan.num_splits].tolist() == sorted(
        plan.request[: plan.num_splits].tolist()
    )
    for request, length in enumerate(lengths):
        ranges = cuts(plan, request)
        assert ranges == sorted(ranges)
        assert_covers_once(ranges, seen_by_some_query(length, spec.num_queries, spec))


@given(specs, batches, profiles, modes)
@quick
def test_property_cuts_fall_on_granules_or_on_the_edges_of_what_is_visible(
    spec: DecodeSpec, lengths: list[int], profile: DeviceProfile, mode: Modes
) -> None:
    plan = plan_splits(spec, lengths, profile=profile, **mode)
    granule = plan.granule
    assert granule % (spec.page_size or 1) == 0
    assert profile.tile_tokens <= granule < profile.tile_tokens + (spec.page_size or 1)
    for request, length in enumerate(lengths):
        for (_, end), (start, _) in pairwise(cuts(plan, request)):
            on_a_granule = end == start and end % granule == 0
            assert on_a_granule or (end == spec.anchor_tokens and start > end)
        if 0 < length <= granule:
            assert len(cuts(plan, request)) == 1 + (cuts(plan, request)[0][1] < length)


@given(specs, batches, profiles, modes, st.data())
@quick
def test_property_a_plan_for_an_upper_bound_is_right_for_anything_shorter(
    spec: DecodeSpec, lengths: list[int], profile: DeviceProfile, mode: Modes, data: st.DataObject
) -> None:
    plan = plan_splits(spec, lengths, profile=profile, **mode)
    actual = np.array([data.draw(st.integers(0, length)) for length in lengths], dtype=np.int64)
    counts = np.full_like(actual, spec.num_queries)
    for ranges, length in zip(executed(plan, actual, counts), actual.tolist(), strict=True):
        assert_covers_once(ranges, seen_by_some_query(length, spec.num_queries, spec))


def test_a_window_that_shrinks_back_into_the_anchors_reads_nothing_twice() -> None:
    windowed = spec(page_size=None, sliding_window=100, anchor_tokens=50)
    plan = plan_splits(windowed, [1000], profile=profile(tile=64))
    assert cuts(plan, 0)[0] == (0, 50)
    for length in (0, 1, 49, 50, 51, 99, 120, 149, 150, 151, 200, 999, 1000):
        [ranges] = executed(plan, np.array([length]), np.array([1]))
        assert_covers_once(ranges, seen_by_some_query(length, 1, windowed))


@given(specs, batches, st.data())
@quick
def test_property_a_request_with_fewer_queries_than_planned_still_finds_all_it_sees(
    spec: DecodeSpec, lengths: list[int], data: st.DataObject
) -> None:
    plan = plan_splits(spec, lengths, profile=profile(tile=64))
    counts = [data.draw(st.integers(0, spec.num_queries)) for _ in lengths]
    ranges = executed(plan, np.array(lengths, dtype=np.int64), np.array(counts, dtype=np.int64))
    for parts, length, queries in zip(ranges, lengths, counts, strict=True):
        read = np.zeros(length, dtype=np.int64)
        for start, end in parts:
            read[start:end] += 1
        assert read.max(initial=0) <= 1
        assert not (seen_by_some_query(length, queries, spec) & (read == 0)).any()


# Automatic mode


def granules_seen(plan: SplitPlan) -> int:
    """Granules that hold a visible position; an anchor range apart from its window has its own."""
    total = 0
    for request in range(plan.batch):
        ranges = cuts(plan, request)
        runs = ranges[:1]
        for start, end in ranges[1:]:
            if start == runs[-1][1]:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        total += sum(-(-end // plan.granule) - start // plan.granule for start, end in runs)
    return total


def assert_balanced(plan: SplitPlan) -> None:
    share = -(-granules_seen(plan) * plan.spec.num_kv_heads // plan.profile.workers)
    anchors = plan.spec.anchor_tokens if plan.spec.sliding_window is not None else 0
    slowest = int(plan.worker_tokens().max())
    assert slowest <= 2 * max(share, 1) * plan.granule + anchors
    assert plan.worker_tokens().sum() == plan.lengths.sum() * plan.spec.num_kv_heads


@given(specs, batches, profiles)
@quick
@example(spec(page_size=None, sliding_window=130), [1000], profile(tile=128))
def test_property_the_slowest_worker_reads_at_most_twice_its_share_or_one_granule(
    spec: DecodeSpec, lengths: list[int], profile: DeviceProfile
) -> None:
    assert_balanced(plan_splits(spec, lengths, profile=profile))


@pytest.mark.parametrize("requests", [1, 2, 7, 131, 132, 133, 1000, 10_000])
@pytest.mark.parametrize("window", [None, 4096])
def test_ragged_batches_are_balanced(requests: int, window: int | None) -> None:
    random = np.random.default_rng(requests)
    lengths = np.minimum(random.pareto(0.8, requests) * 500 + 1, 200_000).astype(np.int64)
    plan = plan_splits(spec(sliding_window=window, kv_heads=4), lengths, profile=H200)
    assert_balanced(plan)
    visible = lengths if window is None else np.minimum(lengths, window)
    assert plan.lengths.sum() == visible.sum()
    assert (plan.lengths > 0).all()


@pytest.mark.parametrize("workers", [1, 20, 108, 132, 256])
@pytest.mark.parametrize("length", [200, 131072])
def test_f07_splits_follow_lengths_and_kv_heads(length: int, workers: int) -> None:
    plan = plan_splits(spec(), [length], profile=profile(workers))
    assert 1 <= plan.num_splits <= -(-length // 128)
    if length == 200:
        assert plan.num_splits <= 2
    elif workers == 1:
        assert plan.num_splits == 1
    else:
        # 32 query heads would fill 20 workers, 8 kv heads do not
        assert plan.num_splits * 8 >= workers
        whole = plan_splits(spec(), [length], profile=profile(workers), num_splits=1)
        assert plan.predicted_seconds < whole.predicted_seconds


def test_a_worker_for_every_kv_head_does_not_keep_a_history_whole() -> None:
    # 11 of 20 workers would read it in one go; cut in pieces, all 20 do
    lone = spec(heads=11, kv_heads=11)
    plan = plan_splits(lone, [131072], profile=profile(20))
    whole = plan_splits(lone, [131072], profile=profile(20), num_splits=1)
    assert plan.max_splits > 1
    assert plan.predicted_seconds < 0.75 * whole.predicted_seconds


def test_short_histories_stay_whole() -> None:
    plan = plan_splits(spec(), [200] * 132, profile=H200)
    assert plan.max_splits == 1
    assert plan.partial_bytes == 0


def test_one_long_request_is_cut_while_its_short_neighbours_are_not() -> None:
    plan = plan_splits(spec(), [200] * 31 + [131072], profile=H200)
    counts = np.diff(plan.indptr)
    assert (counts[:-1] == 1).all()
    assert counts[-1] > 8


def test_a_window_is_cut_inside_the_window_only() -> None:
    windowed = spec(sliding_window=16384, anchor_tokens=64)
    plan = plan_splits(windowed, [1_000_000], profile=H200)
    ranges = cuts(plan, 0)
    assert ranges[0] == (0, 64)
    assert ranges[1][0] == 1_000_000 - 16384
    assert len(ranges) > 2


# Modes that do not look at the batch


@given(specs, batches, profiles, modes.filter(bool), st.data())
@quick
def test_property_with_split_size_or_num_splits_cuts_do_not_depend_on_the_batch(
    spec: DecodeSpec, lengths: list[int], profile: DeviceProfile, mode: Modes, data: st.DataObject
) -> None:
    plan = plan_splits(spec, lengths, profile=profile, **mode)
    order = data.draw(st.permutations(range(len(lengths))))
    company = data.draw(batches)
    mixed = plan_splits(spec, [lengths[n] for n in order] + company, profile=profile, **mode)
    for place, request in enumerate(order):
        alone = plan_splits(spec, [lengths[request]], profile=profile, **mode)
        assert cuts(alone, 0) == cuts(plan, request) == cuts(mixed, place)


@given(batches, st.integers(2, 40))
@quick
def test_property_num_splits_is_an_upper_bound_that_is_met_evenly(
    lengths: list[int], wanted: int
) -> None:
    plan = plan_splits(spec(), lengths, profile=profile(tile=16), num_splits=wanted)
    for request, length in enumerate(lengths):
        sizes = [end - start for start, end in cuts(plan, request)]
        granules = -(-length // 16)
        assert len(sizes) <= min(wanted, granules)
        if granules >= wanted:
            assert max(sizes) <= -(-granules // wanted) * 16


@given(batches, st.integers(1, 500))
@quick
def test_property_split_size_is_what_every_split_but_the_last_has(
    lengths: list[int], size: int
) -> None:
    plan = plan_splits(spec(), lengths, profile=profile(tile=16), split_size=size)
    rounded = -(-size // 16) * 16
    for request, length in enumerate(lengths):
        sizes = [end - start for start, end in cuts(plan, request)]
        assert sizes == [rounded] * (length // rounded) + [length % rounded] * (
            length % rounded > 0
        )


def test_one_split_cuts_nothing() -> None:
    plan = plan_splits(spec(), [0, 1, 100_000], profile=H200, num_splits=1)
    assert plan.mode is SplitMode.WHOLE
    assert [cuts(plan, n) for n in range(3)] == [[], [(0, 1)], [(0, 100_000)]]


# Refresh


def arrays(plan: SplitPlan) -> list[np.ndarray]:
    return [plan.request, plan.start, plan.end, plan.window_first, plan.indptr, plan.seq_lens]


def snapshot(plan: SplitPlan) -> list[list[int]]:
    return [array.tolist() for array in arrays(plan)]


@given(specs, batches, modes, st.data())
@quick
def test_property_refresh_gives_the_plan_of_the_new_lengths_in_the_same_arrays(
    spec: DecodeSpec, lengths: list[int], mode: Modes, data: st.DataObject
) -> None:
    new = [data.draw(lengths_near_edges) for _ in lengths]
    plan = plan_splits(spec, lengths, profile=profile(tile=16), capacity=2000, **mode)
    before = [array.ctypes.data for array in arrays(plan)]
    plan.bound["device copy"] = "old"
    plan.refresh(new)
    fresh = plan_splits(spec, new, profile=profile(tile=16), **mode)
    assert [cuts(plan, n) for n in range(len(new))] == [cuts(fresh, n) for n in range(len(new))]
    count = plan.num_splits
    assert count == fresh.num_splits
    assert plan.window_first[:count].tolist() == fresh.window_first.tolist()
    assert plan.request[:count].tolist() == fresh.request.tolist()
    assert plan.seq_lens.tolist() == new
    assert not plan.bound
    assert [array.ctypes.data for array in arrays(plan)] == before


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4096, 129], r"need 34 splits, the plan's capacity is 9; plan again"),
        ([1024, -1], r"seq_lens\[1\] is -1, allowed are 0 to 2147483647"),
        ([1024], r"the plan holds 2 requests, got 1 lengths"),
        ([1024.0, 1.0], r"seq_lens must be one-dimensional integers"),
    ],
)
def test_a_refused_refresh_leaves_the_plan_as_it_was(lengths: list[int], message: str) -> None:
    plan = plan_splits(spec(), [1024, 100], profile=profile(tile=128), split_size=128)
    plan.bound["device copy"] = "kept"
    before = snapshot(plan)
    with pytest.raises(ValueError, match=message):
        plan.refresh(lengths)
    assert snapshot(plan) == before
    assert plan.bound == {"device copy": "kept"}


def test_a_plan_shrinks_and_grows_again_within_its_capacity() -> None:
    plan = plan_splits(spec(), [1024, 1024], profile=profile(tile=128), split_size=128)
    plan.refresh([1, 0])
    assert (plan.num_splits, plan.max_splits) == (1, 1)
    plan.refresh([1024, 1000])
    assert plan.num_splits == 16


# Malformed requests, and what a plan reports


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_splits": 2, "split_size": 64}, "num_splits or split_size, not both: got 2 and 64"),
        ({"num_splits": 0}, "num_splits must be an integer of 1 or more .*, got 0"),
        ({"split_size": -5}, "split_size must be an integer of 1 or more .*, got -5"),
        ({"num_splits": 2.0}, "num_splits must be an integer of 1 or more .*, got 2.0"),
        ({"num_splits": True}, "num_splits must be an integer of 1 or more .*, got True"),
        ({"split_size": "64"}, "split_size must be an integer of 1 or more .*, got '64'"),
        ({"split_size": 128, "capacity": 7}, "capacity 7 is below the 8 splits"),
    ],
)
def test_malformed_planning_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_splits(spec(), [1024], profile=profile(tile=128), **arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, -1], r"seq_lens\[1\] is -1"),
        ([2**31], r"seq_lens\[0\] is 2147483648, allowed are 0 to 2147483647"),
        ([[1, 2]], "one-dimensional integers, got 2-d"),
        ([1.5], "one-dimensional integers"),
        ([True], "one-dimensional integers"),
    ],
)
def test_malformed_lengths_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_splits(spec(), lengths, profile=H200)


def test_lengths_up_to_the_last_int32_are_planned() -> None:
    plan = plan_splits(spec(), [2**31 - 1], profile=H200)
    ranges = cuts(plan, 0)
    assert (ranges[0][0], ranges[-1][1]) == (0, 2**31 - 1)
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))


@pytest.mark.parametrize("mode", [{}, {"num_splits": 4}, {"split_size": 64}, {"num_splits": 1}])
def test_no_request_and_no_token_are_legal(mode: Modes) -> None:
    for lengths in ([], [0], [0, 0, 0]):
        plan = plan_splits(spec(), lengths, profile=H200, **mode)
        assert plan.num_splits == 0
        assert plan.kv_bytes == 0
        assert plan.balance == 1.0
        assert math.isfinite(plan.predicted_seconds)


@pytest.mark.parametrize(
    ("tile", "page", "granule"),
    [(128, None, 128), (128, 16, 128), (128, 48, 144), (16, 128, 128), (1, 1, 1)],
)
def test_a_granule_is_the_tile_in_whole_pages(tile: int, page: int | None, granule: int) -> None:
    assert granule_tokens(tile, page) == granule


def test_what_a_plan_reports() -> None:
    plan = splitkv.plan_splits(spec(), [1024, 100], profile=profile(132, 128), num_splits=4)
    assert plan.lengths.tolist() == [256, 256, 256, 256, 100]
    assert plan.kv_bytes == 1124 * 8 * 256 * 2
    assert plan.partial_bytes == 4 * 32 * (128 + 2) * 4  # the request with one split leaves none
    assert plan.waves == 5 * 8 / 132
    assert plan.launch_order.tolist() == [0, 1, 2, 3, 4]
    loads = plan.worker_tokens()
    assert plan.balance == pytest.approx(loads.mean() / 256)
    summary = json.loads(json.dumps(plan.summary()))
    assert summary["splits"] == 5
    assert summary["mode"] == "num_splits"


def test_the_longest_splits_are_launched_first() -> None:
    plan = plan_splits(spec(), [100, 5000, 700], profile=H200, num_splits=1)
    assert plan.launch_order.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"tile_tokens": 0},
        {"read_bandwidth": 0.0},
        {"launch_seconds": -1.0},
        {"merge_seconds": math.nan},
    ],
)
def test_a_device_profile_refuses_what_no_device_has(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be 1 or more|must be above 0"):
        replace(H200, **wrong)


def plain_seconds(cost: StepCost, granules: list[int], size: int) -> float:
    """The model in its own words: inf where a split may leave one worker with too much."""
    share = sum(granules) * cost.kv_heads / cost.workers
    states = sum(math.ceil(each / size) for each in granules)
    items, limit = states * cost.kv_heads, max(math.ceil(share), 1)
    if size > limit and not (items <= cost.workers and size <= 2 * limit):
        return math.inf
    waves = math.ceil(items / cost.workers)
    slowest = size if waves == 1 else share + size / 2
    core = 0.0
    if len(set(granules)) == 1:
        slowest, core = waves * size, math.ceil(items / cost.cores) * size * cost.together
    seconds = max(share, cost.alone * slowest, core) * cost.granule_seconds
    seconds += waves * cost.split_seconds
    return seconds + (cost.merge_seconds(states) if size < max(granules) else 0)


@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
        st.builds(lambda n, b: [n] * b, st.integers(1, 200_000), st.integers(1, 300)),
    ),
    kv_heads=st.sampled_from([1, 8]),
)
@example(lengths=[131072] + [1024] * 63, kv_heads=8)
@example(lengths=[8192], kv_heads=8)
def test_property_no_considered_size_is_predicted_to_be_faster(
    lengths: list[int], kv_heads: int
) -> None:
    granules = [math.ceil(length / 64) for length in lengths]
    cost = step_cost(spec(kv_heads=kv_heads), H200, 64)
    share = sum(granules) * kv_heads // H200.workers
    whole = max(granules)
    if len(set(granules)) == 1:
        pieces = [max(H200.workers * q // (4 * len(granules) * kv_heads), 1) for q in QUARTER_WAVES]
        sizes = [whole, *(math.ceil(whole / each) for each in pieces)]
    else:
        sizes = [whole, *(min(max(share * 4 // q, 1), whole) for q in QUARTER_WAVES)]
    best = cost.best_size(np.array(granules))
    found = {size: plain_seconds(cost, granules, size) for size in sizes}
    assert found[best] == pytest.approx(min(found.values()), rel=1e-12)


def test_splits_are_counted_exactly_at_the_limit() -> None:
    granules = np.array([2**31 - 1, 2**31 - 2, 2**30 + 1, 0])
    sizes = [2**31 - 1, 2**30, 2**15 + 1, 3, 2, 1]
    exact = [sum(-(-each // size) for each in granules.tolist()) for size in sizes]
    assert splits_of(granules, sizes) == exact
    single = granules.astype(np.float32) / np.array(sizes, np.float32)[:, None]
    assert np.ceil(single).sum(1).tolist() != exact, "the control: float32 is not enough"
