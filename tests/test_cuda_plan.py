"""Plans as the CUDA kernels read them: of the host, or cut on the device by the same integers."""

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cuda_calls import BACKEND, DEVICE, call_of, decode, host_plan
from histories import random_history, random_queries, same_bits
from splitkv.common.cache import DenseCache, PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import A100, H200, DeviceProfile
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_cuda import plan as device_plans
from splitkv.kernels_cuda.attention import attention_launches
from splitkv.kernels_cuda.cut import cut_launches, plan_on_device
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.plan import DevicePlan, bind
from splitkv.kernels_cuda.primitives import INTERPRETED, table_entries, token_offsets
from splitkv.kernels_cuda.states import Destination

MODES = (
    {},
    {"num_splits": 1},
    {"num_splits": 3},
    {"num_splits": 64},
    {"split_size": 200},
    {"split_size": 1000},
)


def bare_call(
    lengths: list[int], capacity: int, kv_heads: int = 1, packed: bool = False, **settings: Any
) -> DecodeCall:
    """A call whose cache takes no memory to speak of: nobody reads it."""
    batch, heads = len(lengths), 2 * kv_heads
    layout = Layout.PACKED if packed else Layout.BSND
    spec = DecodeSpec(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=8, layout=layout, **settings
    )
    q = torch.empty(batch, spec.num_queries, heads, 8, dtype=torch.bfloat16, device=DEVICE)
    row = torch.empty(1, kv_heads, 8, dtype=torch.bfloat16, device=DEVICE)
    if packed:
        k = row.expand(sum(lengths), -1, -1)
        offsets = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)
        return DecodeCall(q, PackedCache(k, k, offsets), spec)
    k = row.expand(batch, capacity, -1, -1)
    return DecodeCall(
        q, DenseCache(k, k, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)), spec
    )


def in_order(plan: DevicePlan) -> np.ndarray:
    """The items, by request and position."""
    items = plan.items.cpu().numpy()
    items = items[:, items[0] >= 0]
    return items[:, np.lexsort((items[1], items[0]))]


def to_merge(plan: DevicePlan) -> list[int]:
    """The requests with partial states."""
    count, *requests = plan.merged.tolist()
    return requests[:count]


def random_lengths(dice: random.Random) -> list[int]:
    top = dice.choice([10, 300, 3000, 40000, 200000])
    batch = dice.choice([1, 2, 3, 5, 17])
    if dice.random() < 0.3:
        return [top] * batch
    return [dice.choice([0, 1, top, dice.randrange(top + 1)]) for _ in range(batch)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("splits", MODES)
def test_the_device_cuts_as_the_host_does(splits: dict[str, int], seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(2):
        lengths = random_lengths(dice)
        profile: DeviceProfile = dice.choice([H200, A100])
        window = dice.choice([None, 1, 100, 5000])
        block = 1 if window is None else dice.choice([1, 1, 4, 100, 5000])
        call = bare_call(
            lengths,
            capacity=max(lengths) + dice.choice([0, 1000]),
            kv_heads=dice.choice([1, 2, 8, 32]),
            packed=dice.random() < 0.3,
            num_queries=dice.choice([1, 3]),
            sliding_window=window if window is None else -(-window // block) * block,
            window_block=block,
            anchor_tokens=dice.choice([0, 4, 300]),
        )
        on_device = bind(plan_on_device(call, profile, **splits), DEVICE)
        on_host = bind(plan_splits(call.spec, lengths, profile=profile, **splits), DEVICE)
        assert np.array_equal(in_order(on_device), in_order(on_host))
        assert torch.equal(on_device.slots, on_host.slots)
        assert to_merge(on_device) == to_merge(on_host)
        assert on_host.num_items <= on_device.num_items == on_device.capacity
        assert on_host.num_slots <= on_device.num_slots


def test_a_batch_larger_than_one_chunk_is_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitkv.kernels_cuda.cut._CHUNKS", ((8, 1),))
    lengths = [(index * 137) % 900 for index in range(20)]
    call = bare_call(lengths, 900)
    for splits in ({}, {"num_splits": 2}):
        on_device = bind(plan_on_device(call, H200, **splits), DEVICE)
        on_host = bind(plan_splits(call.spec, lengths, profile=H200, **splits), DEVICE)
        assert np.array_equal(in_order(on_device), in_order(on_host))
        assert torch.equal(on_device.slots, on_host.slots)
        assert to_merge(on_device) == to_merge(on_host)


RAGGED = [200_000, *[1024] * 7, 0]


def test_automatic_cuts_follow_the_one_list_of_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    call = bare_call(RAGGED, 200_000, kv_heads=8)
    on_host = in_order(bind(plan_splits(call.spec, RAGGED, profile=H200), DEVICE))
    assert on_host.shape[1] > len(RAGGED), "the long one is cut"
    assert np.array_equal(in_order(bind(plan_on_device(call, H200), DEVICE)), on_host)
    if INTERPRETED.value:  # a compiled kernel keeps its list
        monkeypatch.setattr("splitkv.kernels_cuda.granules._WAVES", tl.constexpr((12,) * 9))
        other = in_order(bind(plan_on_device(call, H200), DEVICE))
        assert not np.array_equal(other, on_host), "the control: another list, other cuts"


@pytest.mark.parametrize(
    "splits", [{}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 2**29}]
)
@pytest.mark.parametrize("window", [None, 2**31 - 1, 2**30])
def test_the_longest_lengths_do_not_overflow(splits: dict[str, int], window: int | None) -> None:
    lengths = [2**31 - 1, 3, 2**31 - 64]
    call = bare_call(lengths, 2**31 - 1, num_queries=3, sliding_window=window, anchor_tokens=9)
    on_device = bind(plan_on_device(call, H200, **splits), DEVICE)
    on_host = bind(plan_splits(call.spec, lengths, profile=H200, **splits), DEVICE)
    assert np.array_equal(in_order(on_device), in_order(on_host))


@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}])
def test_a_replayed_cut_leaves_nothing_of_the_one_before(splits: dict[str, int]) -> None:
    call = bare_call([900, 0, 40], 9000)
    plan = plan_splits(call.spec, [0] * 3, profile=H200, **splits)
    (launch,), on_device = cut_launches(call, plan)
    on_device.items.fill_(7)
    on_device.slots.fill_(7)
    launch.run(DEVICE)
    on_host = bind(plan_splits(call.spec, [900, 0, 40], profile=H200, **splits), DEVICE)
    assert np.array_equal(in_order(on_device), in_order(on_host))
    assert (on_device.items[:, on_host.num_items :] == -1).all()
    assert on_device.capacity > on_host.num_items + 64 * 3 or splits, "some program clears twice"
    assert torch.equal(on_device.slots, on_host.slots)


def test_the_bound_of_a_packed_batch_does_not_grow_with_its_square() -> None:
    call = bare_call([1000] * 64, 0, packed=True)
    plan = bind(plan_on_device(call, H200, split_size=128), DEVICE)
    assert plan.num_items <= 64 * 8 + 2 * 64


def test_items_cover_every_request_longest_first() -> None:
    call = bare_call([300, 0, 1000], 1000)
    plan = bind(plan_splits(call.spec, [300, 0, 1000], profile=H200, num_splits=3), DEVICE)
    request, start, end, opens, slot = plan.items.cpu().numpy()[:, : plan.num_items]
    assert sorted(request) == [0, 0, 0, 1, 2, 2, 2]
    assert list(end - start) == sorted(end - start, reverse=True)
    assert slot[request == 1] == -1
    assert sorted(slot[request != 1]) == list(range(6)), "each split has a slot of its own"
    assert list(plan.slots) == [0, 3, 3, 6]
    assert opens[(request == 2) & (start == 0)] == 1
    assert plan.num_slots == 6, "the workspace is exact"


def test_requests_of_one_split_take_no_workspace() -> None:
    lengths = [5, 9, 700]
    call = bare_call(lengths, 700)
    plan = plan_splits(call.spec, lengths, profile=H200, num_splits=1)
    destination = Destination(torch.empty_like(call.q), torch.empty(call.rows))
    (only,) = attention_launches(call, bind(plan, DEVICE), destination)
    part = only.arguments["part_out"]
    assert isinstance(part, torch.Tensor)
    assert part.numel() == 0 == BACKEND.workspace_bytes(plan)


def test_the_workspace_is_what_the_backend_says() -> None:
    lengths = [700, 9, 300]
    call = bare_call(lengths, 700, num_queries=2)
    plan = plan_splits(call.spec, lengths, profile=H200, num_splits=3)
    destination = Destination(torch.empty_like(call.q), torch.empty(call.rows))
    split, merge = attention_launches(call, bind(plan, DEVICE), destination)
    parts = [split.arguments[name] for name in ("part_out", "part_lse", "part_top")]
    assert sum(
        part.nbytes for part in parts if isinstance(part, torch.Tensor)
    ) == BACKEND.workspace_bytes(plan)
    assert merge.programs == 2 * 2 * 2, "two requests are split, of two queries and heads"


@pytest.mark.parametrize("replaced", [{"_MOST_PROGRAMS": 3}, {"_FEW_ROWS": 0}, {"_CHUNK": 16}])
def test_bits_of_a_merge_follow_from_its_states_alone(
    replaced: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [2200, 0, 40, 200]
    history = random_history(lengths, 1, 64)
    call = call_of(random_queries(4, 1, 2, 64), history.dense())
    plan = host_plan(call, lengths, split_size=16)
    assert plan.max_splits > 32, "the most states of one block"
    ordinary = decode(call, plan)
    for name, value in replaced.items():
        monkeypatch.setattr(f"splitkv.kernels_cuda.merge.{name}", value)
    assert same_bits(ordinary, decode(call, plan))


def test_programs_lie_on_the_axis_without_a_small_limit() -> None:
    call = bare_call([1] * 2050, 1, kv_heads=32)
    plan = plan_splits(call.spec, [1] * 2050, profile=H200)
    destination = Destination(torch.empty_like(call.q), torch.empty(call.rows))
    launch = attention_launches(call, bind(plan, DEVICE), destination)[0]
    assert launch.programs == 2050 * 32 > 65535


def test_a_refreshed_plan_keeps_its_memory() -> None:
    history = random_history([300, 40], 1, 16)
    call = call_of(random_queries(2, 1, 2, 16), history.dense())
    plan = BACKEND.plan(call.spec, [129, 300], num_splits=2, capacity=9)
    address = bind(plan, DEVICE).items.data_ptr()
    plan.refresh([300, 40])
    answer = decode(call, plan)
    assert bind(plan, DEVICE).items.data_ptr() == address, "a captured graph reads this memory"
    assert same_bits(answer, decode(call, host_plan(call, [300, 40], num_splits=2)))


def test_a_plan_that_is_gone_leaves_no_memory_behind() -> None:
    call = bare_call([300], 300)
    plan = plan_splits(call.spec, [300], profile=H200)
    bind(plan, DEVICE)
    before = len(device_plans._buffers)
    del plan
    gc.collect()
    assert len(device_plans._buffers) == before - 1


def test_what_is_captured_covers_all_that_a_refresh_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = bare_call([300, 1], 300)
    plan = plan_splits(call.spec, [300, 1], profile=H200, num_splits=2, capacity=7)
    destination = Destination(torch.empty_like(call.q), torch.empty(call.rows))
    unbound = plan_splits(call.spec, [300, 1], profile=H200)
    whole = plan_splits(call.spec, [300, 1], profile=H200, num_splits=1)
    bound = [bind(each, DEVICE) for each in (plan, whole)]
    for module in ("plan", "attention"):
        monkeypatch.setattr(f"splitkv.kernels_cuda.{module}.capturing", lambda device: True)
    split, merge = attention_launches(call, bound[0], destination)
    assert split.programs == 7 + 2
    part = merge.arguments["part_lse"]
    assert isinstance(part, torch.Tensor)
    assert part.shape[0] == 7
    assert len(attention_launches(call, bound[1], destination)) == 1
    with pytest.raises(RuntimeError, match="decode once before the capture"):
        bind(unbound, DEVICE)


def test_plans_of_host_and_device_are_for_the_same_workers() -> None:
    shared = BACKEND.profile().workers
    for dim, workers in ((128, shared), (512, shared // BACKEND.profile().neighbours)):
        call = call_of(random_queries(1, 1, 2, dim), random_history([70], 1, dim).dense())
        assert BACKEND.plan(call.spec, [70]).profile == BACKEND.profile_for(call.spec)
        plan = BACKEND.plan_for(call)
        assert isinstance(plan, SplitPlan)
        assert plan.profile == BACKEND.profile_for(call.spec)
        assert plan.profile.workers == workers


def test_a_device_plan_says_what_it_serves() -> None:
    plan = plan_on_device(bare_call([3, 5], 77), H200)
    assert plan.num_splits == 0
    assert list(plan.seq_lens) == [77, 77]


@pytest.mark.parametrize("splits", [{"num_splits": 2, "split_size": 128}, {"num_splits": 0}])
def test_malformed_splits_are_refused(splits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_splits"):
        plan_on_device(bare_call([3], 3), H200, **splits)


@triton.jit
def address_kernel(
    at, table, found, table_strides, strides, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr
):
    request = tl.zeros([], tl.int64)
    tokens = at + tl.arange(0, 16)
    page = table_entries(tokens, tokens >= 0, request, table, table_strides, PAGE_SIZE)
    offsets = token_offsets(page, tokens, at, request, strides, PAGE_SIZE, WIDE)
    tl.store(found + tl.arange(0, 16), offsets)


def addresses(
    at: int, table: list[list[int]], dtype: torch.dtype, strides: tuple[int, int], **how: Any
) -> list[int]:
    """Elements from the cache's start to 16 tokens from ``at`` on."""
    entries = torch.tensor(table, dtype=dtype, device=DEVICE)
    found = torch.empty(16, dtype=torch.int64, device=DEVICE)
    arguments = {
        "at": at,
        "table": entries,
        "found": found,
        "table_strides": entries.stride(),
        "strides": strides,
        **how,
    }
    Launch(address_kernel, 1, arguments).run(DEVICE)
    return found.tolist()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_offsets_are_widened_before_they_are_multiplied(
    dtype: torch.dtype, wide: bool
) -> None:
    found = addresses(8, [[0, 3_000_000]], dtype, (276480, 17280), PAGE_SIZE=16, WIDE=wide)
    second = [3_000_000 * 276480 + slot * 17280 for slot in range(8)]
    assert found == [*(slot * 17280 for slot in range(8, 16)), *second]


def test_rows_that_span_2_31_elements_are_told_apart_when_said_to_be_wide() -> None:
    row = 2**28
    expected = [slot * row for slot in range(16)]
    assert addresses(0, [[0]], torch.int32, (0, row), PAGE_SIZE=16, WIDE=True) == expected
    assert addresses(0, [[0]], torch.int32, (0, row), PAGE_SIZE=0, WIDE=True) == expected
    narrow = addresses(0, [[0]], torch.int32, (0, row), PAGE_SIZE=16, WIDE=False)
    assert narrow != expected, "the control: 32 bits wrap"


def test_plans_are_made_where_the_lengths_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> list[int]:
        raise AssertionError("the host waited for the device's lengths")

    call = bare_call([300, 20], 300)
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    plan = BACKEND.plan_for(call, num_splits=2)
    assert isinstance(plan, SplitPlan)
    assert bind(plan, DEVICE).num_items == 4
