"""What every state and merge keeps: the identity, NaN, the borders to other encodings, sinks."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import splitkv
from splitkv.common.state import PartialState, finish, merge_states_torch, stack_states
from states import as_double, assert_merged, bits, state_of

LN2 = math.log(2.0)
INF = math.inf


def random_state(*rows: int, dim: int = 4, seed: int = 0, shift: float = 0.0) -> PartialState:
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(*rows, 9, generator=random) * 3 + shift
    return state_of(scores, torch.randn(*rows, 9, dim, generator=random))


def same(one: PartialState, other: PartialState) -> bool:
    return bits(one) == bits(other)


# The worked example


def example() -> tuple[PartialState, PartialState]:
    scores = torch.tensor([[0.0, LN2, math.log(3.0), math.log(4.0)]], dtype=torch.float64)
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)
    return state_of(scores[:, :2], values[:2]), state_of(scores[:, 2:], values[2:])


def test_the_example_has_the_documented_sums() -> None:
    first, second = (state.to_sums() for state in example())
    for got, want in ((first, (LN2, 1.5, 2.5)), (second, (math.log(4.0), 1.75, 11.0))):
        for part, value in zip(got, want, strict=True):
            assert part.item() == pytest.approx(value, rel=1e-15)


def test_the_example_merges_to_4_9_and_not_to_the_average_of_its_outs() -> None:
    parts = example()
    merged = splitkv.merge_states(list(parts))
    m, l, u = merged.to_sums()  # noqa: E741
    assert m.item() == math.log(4.0)
    assert l.item() == pytest.approx(2.5, rel=1e-15)
    assert u.item() == pytest.approx(12.25, rel=1e-15)
    assert merged.out.item() == pytest.approx(4.9, rel=1e-15)
    average = (parts[0].out + parts[1].out).item() / 2
    assert average == pytest.approx(
        3.976190476190476, rel=1e-15
    )  # 1.5 * 2.5 and 11 / 1.75: plausible, wrong
    assert abs(merged.out.item() - average) > 0.9


# The identity


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_an_empty_state_changes_no_bit(where: str) -> None:
    state = random_state(3, 5)
    state.out[0, 0, 0] = -0.0
    state.out[0, 1] = 0.0
    state.lse[1, 1] = state.max[1, 1] = -0.0
    empty = PartialState.empty((3, 5), 4)
    order = {
        "before": [empty, state],
        "after": [state, empty],
        "around": [empty, empty, state, empty],
    }
    assert same(merge_states_torch(order[where]), state)


def test_an_empty_state_changes_no_bit_whatever_its_out_holds() -> None:
    state = random_state(2, 3)
    empty = PartialState.empty((2, 3), 4)
    empty.out[:] = math.nan
    assert same(merge_states_torch([empty, state]), state)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_empty_states_merge_to_the_empty_state(count: int) -> None:
    empty = PartialState.empty((3, 5), 4)
    assert same(merge_states_torch([empty] * count), empty)
    assert same(merge_states_torch(stack_states([empty] * count)), empty)


def test_one_state_comes_back_bit_for_bit_even_nan() -> None:
    state = random_state(3, 5)
    state.out[1, 2] = math.nan
    assert same(merge_states_torch([state]), state)
    assert same(merge_states_torch(stack_states([state])), state)


def test_stacking_no_state_gives_the_empty_state_and_an_empty_list_is_refused() -> None:
    none = PartialState(torch.empty(0, 3, 5), torch.empty(0, 3, 5), torch.empty(0, 3, 5, 4))
    assert same(merge_states_torch(none), PartialState.empty((3, 5), 4))
    with pytest.raises(ValueError, match=r"at least one state; PartialState\.empty"):
        merge_states_torch([])


def test_states_without_rows_merge() -> None:
    empty = PartialState.empty((0, 5), 4)
    assert merge_states_torch([empty, empty]).out.shape == (0, 5, 4)


def test_a_row_may_be_empty_while_its_neighbour_is_not() -> None:
    scores = torch.tensor([[0.5, -0.25], [-INF, -INF], [1.0, -INF]])
    values = torch.tensor([[1.0], [3.0]])
    parts = [state_of(scores[:, :1], values[:1]), state_of(scores[:, 1:], values[1:])]
    merged = merge_states_torch(parts)
    assert merged.lse[1] == -INF
    assert merged.out[1] == 0
    assert bits(merged[2:]) == bits(parts[0][2:])


# Order, and extreme scores


def test_merging_a_state_with_itself_keeps_out_and_adds_ln_2() -> None:
    state = random_state(4, 3)
    merged = merge_states_torch([state, state])
    assert torch.equal(merged.out, state.out)  # w + w and the division by 2 are exact
    assert torch.equal(merged.max, state.max)
    eps = torch.finfo(torch.float32).eps
    assert bool(((merged.lse - state.lse - LN2).abs() <= eps * (merged.lse.abs() + 1)).all())


@pytest.mark.parametrize("shift", [1e4, -1e4, -61250.0, 3e38])
def test_far_scores_merge_by_their_differences(shift: float) -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0]]) + shift
    values = torch.tensor([[1.0], [2.0], [6.0]])
    parts = [state_of(scores[:, n : n + 1], values[n : n + 1]) for n in range(3)]
    merged = merge_states_torch(parts)
    assert merged.max.item() == scores[0, 0].item()
    assert merged.out.item() == 3.0
    assert math.isfinite(merged.lse.item())


def test_a_far_smaller_state_has_no_weight_and_makes_no_nan() -> None:
    high, low = random_state(2, 3, shift=1e4), random_state(2, 3, shift=-61250.0, seed=1)
    for order in ([high, low], [low, high]):
        assert same(merge_states_torch(order), high)


def test_the_order_of_a_list_is_the_order_of_the_additions() -> None:
    parts = [random_state(50, 8, seed=seed) for seed in range(5)]
    assert same(merge_states_torch(parts), merge_states_torch(parts))
    assert same(merge_states_torch(parts), merge_states_torch(stack_states(parts)))


# Properties

scores_of_a_key = st.one_of(
    st.just(-INF), st.floats(-61250.0, 1e4, width=32), st.floats(-30.0, 30.0, width=32)
)


@st.composite
def split_rows(draw: st.DrawFn) -> list[PartialState]:
    """States of two heads over up to six splits of up to four keys; any of them may be empty."""
    states = []
    for _ in range(draw(st.integers(1, 6))):
        keys = draw(st.integers(0, 4))
        row = st.lists(scores_of_a_key, min_size=keys, max_size=keys)
        scores = torch.tensor([draw(row), draw(row)], dtype=torch.float32).reshape(2, keys)
        value = st.floats(-8.0, 8.0, width=32)
        values = draw(st.lists(value, min_size=2 * keys, max_size=2 * keys))
        states.append(state_of(scores, torch.tensor(values, dtype=torch.float32).reshape(keys, 2)))
    return states


@given(split_rows())
@settings(deadline=None, max_examples=120)
def test_property_a_merge_is_the_float64_merge_and_never_nan(parts: list[PartialState]) -> None:
    exact = merge_states_torch([as_double(part) for part in parts])
    assert_merged(merge_states_torch(parts), exact, parts)


@given(split_rows(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_property_order_changes_no_more_than_rounding(
    parts: list[PartialState], random: Random
) -> None:
    exact = merge_states_torch([as_double(part) for part in parts])
    shuffled = random.sample(parts, len(parts))
    assert_merged(merge_states_torch(shuffled), exact, parts)


@given(split_rows(), st.data())
@settings(deadline=None, max_examples=60)
def test_property_grouping_changes_no_more_than_rounding(
    parts: list[PartialState], data: st.DataObject
) -> None:
    exact = merge_states_torch([as_double(part) for part in parts])
    at = data.draw(st.integers(0, len(parts)))
    sides = [merge_states_torch(side) for side in (parts[:at], parts[at:]) if side]
    assert_merged(merge_states_torch(sides), exact, parts)


@given(split_rows(), st.data())
@settings(deadline=None, max_examples=60)
def test_property_empty_states_change_no_bit_anywhere(
    parts: list[PartialState], data: st.DataObject
) -> None:
    empty = PartialState.empty((2,), 2)
    padded = list(parts)
    for _ in range(data.draw(st.integers(1, 3))):
        padded.insert(data.draw(st.integers(0, len(padded))), empty)
    assert same(merge_states_torch(padded), merge_states_torch(parts))


@given(split_rows())
@settings(deadline=None, max_examples=60)
def test_property_each_split_weighs_as_its_share_of_the_softmax(parts: list[PartialState]) -> None:
    doubled = [as_double(part) for part in parts]
    merged = merge_states_torch(doubled)
    for head in range(2):
        lse = [float(part.lse[head]) for part in doubled]
        top = max(lse)
        if top == -INF:
            assert merged.lse[head] == -INF
            continue
        weights = [math.exp(value - top) for value in lse]
        total = math.fsum(weights)
        assert merged.lse[head].item() == pytest.approx(top + math.log(total), rel=1e-12, abs=1e-12)
        for column in range(2):
            terms = [w * float(p.out[head, column]) for w, p in zip(weights, doubled, strict=True)]
            out = math.fsum(terms) / total
            assert merged.out[head, column].item() == pytest.approx(out, rel=1e-12, abs=1e-12)


# NaN


def test_nan_in_a_visible_value_comes_out_and_stays_in_its_column() -> None:
    poisoned, clean = random_state(2, 3), random_state(2, 3, seed=1)
    poisoned.out[0, 1, 2] = math.nan
    merged = merge_states_torch([clean, poisoned])
    assert merged.out.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert not merged.lse.isnan().any()


def test_nan_in_a_visible_score_poisons_its_row_and_no_other() -> None:
    poisoned, clean = random_state(2, 3), random_state(2, 3, seed=1)
    poisoned.lse[1, 0] = poisoned.max[1, 0] = math.nan
    poisoned.out[1, 0] = math.nan
    for order in ([clean, poisoned], [poisoned, clean]):
        merged = merge_states_torch(order)
        assert merged.out.isnan().all(-1).nonzero().tolist() == [[1, 0]]
        assert merged.lse.isnan().nonzero().tolist() == [[1, 0]]


def test_nan_survives_finish() -> None:
    state = random_state(2, 3)
    state.out[0, 0, 0] = math.nan
    out, _ = finish(state, sinks=torch.zeros(3), dtype=torch.bfloat16)
    assert out.isnan().nonzero().tolist() == [[0, 0, 0]]


# Sinks


def test_a_sink_takes_mass_and_adds_no_value() -> None:
    state = state_of(torch.zeros(1, 1, 4), torch.ones(4, 2))
    out, lse = finish(state, sinks=torch.zeros(1))
    eps = torch.finfo(torch.float32).eps
    assert out.flatten().tolist() == pytest.approx([0.8, 0.8], rel=2 * eps)
    assert lse.item() == pytest.approx(math.log(5.0), rel=1e-6)


def test_a_sink_equals_a_key_with_value_zero() -> None:
    random = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 3, 7, generator=random, dtype=torch.float64)
    values = torch.randn(2, 3, 7, 4, generator=random, dtype=torch.float64)
    sinks = torch.randn(3, generator=random, dtype=torch.float64)
    out, lse = finish(state_of(scores, values), sinks=sinks)
    with_key = torch.cat([scores, sinks[None, :, None].expand(2, 3, 1)], -1)
    padded = torch.cat([values, torch.zeros(2, 3, 1, 4, dtype=torch.float64)], -2)
    expected = state_of(with_key, padded)
    torch.testing.assert_close(out, expected.out, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-14, atol=1e-14)


def test_a_row_that_sees_nothing_ends_as_zero_and_the_sink() -> None:
    out, lse = finish(PartialState.empty((2, 3), 4), sinks=torch.tensor([1.5, -2.0, -INF]))
    assert torch.equal(out, torch.zeros(2, 3, 4))
    assert torch.equal(lse, torch.tensor([1.5, -2.0, -INF]).expand(2, 3))


def test_without_sinks_a_row_that_sees_nothing_ends_as_zero_and_minus_infinity() -> None:
    out, lse = finish(PartialState.empty((2, 3), 4), dtype=torch.float16)
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.zeros(2, 3, 4, dtype=torch.float16))
    assert torch.equal(lse, torch.full((2, 3), -INF))


def test_a_sink_of_minus_infinity_changes_no_bit() -> None:
    state = random_state(4, 3)
    out, lse = finish(state, sinks=torch.full((3,), -INF))
    assert torch.equal(out, state.out)
    assert torch.equal(lse, state.lse)


def test_16_bit_sinks_enter_in_float32() -> None:
    state = random_state(4, 3)
    sinks = torch.tensor([0.3, -1.7, 2.2]).to(torch.bfloat16)
    out, lse = finish(state, sinks=sinks)
    expected = finish(state, sinks=sinks.float())
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("shape", [(4,), (1,), (3, 1), ()])
def test_sinks_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sinks must be \[3\]"):
        finish(random_state(4, 3), sinks=torch.zeros(shape))


def test_sinks_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"on cpu, got .* on meta"):
        finish(random_state(4, 3), sinks=torch.zeros(3, device="meta"))


def test_out_is_cast_once_and_lse_is_not() -> None:
    state = random_state(4, 3)
    out, lse = finish(state, dtype=torch.bfloat16)
    assert torch.equal(out, state.out.to(torch.bfloat16))
    assert lse is state.lse


# The borders


def test_base_2_becomes_natural() -> None:
    out, lse2 = torch.ones(2, 3, 4), torch.tensor([[0.0, 10.0, -INF], [-3.0, 1.5, INF]])
    state = PartialState.from_lse2(out, lse2)
    seen = torch.isfinite(lse2)
    expected = lse2.double() * LN2
    eps = torch.finfo(torch.float32).eps
    off = (state.lse.double() - expected)[seen].abs()
    assert bool((off <= eps * expected[seen].abs()).all())
    assert bool((state.lse[~seen] == -INF).all())
    assert bool((state.out[~seen] == 0).all())


@pytest.mark.parametrize("encoding", [-INF, INF])
def test_an_lse_of_either_infinity_means_nothing_seen_whatever_out_holds(encoding: float) -> None:
    out = torch.full((1, 2, 4), math.nan)
    lse = torch.tensor([[encoding, 0.5]])
    out[0, 1] = 7.0
    state = PartialState.from_lse(out, lse)
    assert state.lse.tolist() == [[-INF, 0.5]]
    assert state.max.tolist() == [[-INF, 0.5]]
    assert state.out[0].tolist() == [[0.0] * 4, [7.0] * 4]


def test_an_lse_without_a_max_merges_like_one_with_it() -> None:
    parts = [random_state(4, 3, seed=seed) for seed in range(3)]
    bare = [PartialState.from_lse(part.out, part.lse) for part in parts]
    merged, expected = merge_states_torch(bare), merge_states_torch(parts)
    assert torch.equal(merged.out, expected.out)
    assert torch.equal(merged.lse, expected.lse)


def test_a_nan_lse_stays_nan_at_the_border() -> None:
    state = PartialState.from_lse(torch.ones(1, 1, 2), torch.full((1, 1), math.nan))
    assert state.lse.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_out_is_widened_and_a_16_bit_lse_is_refused(dtype: torch.dtype) -> None:
    out, lse = torch.ones(2, 3, 4, dtype=dtype), torch.zeros(2, 3)
    assert PartialState.from_lse(out, lse).out.dtype == torch.float32
    with pytest.raises(ValueError, match=f"lse must be float32 .*, got {dtype}"):
        PartialState.from_lse(out, lse.to(dtype))
    with pytest.raises(ValueError, match="must share float32"):
        PartialState(lse, lse.to(dtype), out.float())
    with pytest.raises(ValueError, match="must share float32"):
        PartialState(lse.to(dtype), lse.to(dtype), out)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (6,), (2, 1), ()])
def test_a_transposed_or_otherwise_misshapen_lse_is_refused(shape: tuple[int, ...]) -> None:
    out, lse = torch.ones(2, 3, 4), torch.zeros(shape)
    with pytest.raises(ValueError, match=r"lse \[\.\.\., H\]"):
        PartialState.from_lse(out, lse)
    with pytest.raises(ValueError, match=r"lse \[\.\.\., H\]"):
        PartialState(lse, lse, out)


def test_parts_of_a_state_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one device, got max on cpu, lse on cpu, out on meta"):
        PartialState(torch.zeros(3), torch.zeros(3), torch.zeros(3, 4, device="meta"))


@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [((2, 3, 5), torch.float32, "cpu"), ((1, 3, 4), torch.float32, "cpu"),
     ((2, 3, 4), torch.float64, "cpu"), ((2, 3, 4), torch.float32, "meta")],
)  # fmt: skip
def test_states_that_do_not_fit_are_not_merged(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    other = PartialState.empty(shape[:-1], shape[-1], dtype=dtype, device=device)
    with pytest.raises(ValueError, match="state 1 is"):
        splitkv.merge_states([PartialState.empty((2, 3), 4), other])


def test_sums_go_back_and_forth() -> None:
    state = random_state(4, 3)
    back = PartialState.from_sums(*state.to_sums())
    eps = torch.finfo(torch.float32).eps
    assert torch.equal(back.max, state.max)
    assert bool(((back.lse - state.lse).abs() <= 4 * eps * (state.lse.abs() + 1)).all())
    assert bool(((back.out - state.out).abs() <= 4 * eps * state.out.abs()).all())


def test_the_empty_state_as_sums_and_back() -> None:
    empty = PartialState.empty((2, 3), 4)
    m, l, u = empty.to_sums()  # noqa: E741
    assert bool((m == -INF).all())
    assert not l.any()
    assert not u.any()
    assert same(PartialState.from_sums(m, l, u), empty)


def test_sums_without_mass_are_empty_whatever_u_and_m_hold() -> None:
    state = PartialState.from_sums(
        torch.tensor([3.0]), torch.zeros(1), torch.full((1, 4), math.nan)
    )
    assert same(state, PartialState.empty((1,), 4))


def test_nan_sums_stay_nan() -> None:
    nan = torch.full((1,), math.nan)
    state = PartialState.from_sums(nan, nan, torch.full((1, 4), math.nan))
    assert state.lse.isnan().all()
    assert state.out.isnan().all()
    poisoned = PartialState.from_sums(
        torch.zeros(1), torch.ones(1), torch.tensor([[1.0, math.nan]])
    )
    assert poisoned.out.isnan().tolist() == [[False, True]]


def test_float64_states_stay_float64() -> None:
    parts = [as_double(random_state(2, 3, seed=seed)) for seed in range(3)]
    merged = merge_states_torch(parts)
    out, lse = finish(merged, sinks=torch.zeros(3))
    assert {merged.max.dtype, merged.lse.dtype, merged.out.dtype, out.dtype, lse.dtype} == {
        torch.float64
    }


def test_values_below_the_normal_numbers_merge_to_their_spacing() -> None:
    low = state_of(torch.zeros(1, 1), torch.tensor([[0.0]]))
    high = state_of(torch.ones(1, 1), torch.tensor([[1.1210e-44]]))
    exact = merge_states_torch([as_double(low), as_double(high)])
    for order in ([low, high], [high, low]):
        assert_merged(merge_states_torch(order), exact, order)
