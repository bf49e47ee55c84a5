"""The n-ary merge kernel against the formulas of splitkv.common.state in float64."""

import math

import numpy as np
import pytest
import torch

from cuda_calls import BACKEND, DEVICE
from histories import same_bits
from splitkv.common.state import PartialState, merge_states_torch, stack_states
from splitkv.kernels_cuda.primitives import INTERPRETED


def states(count: int, *shape: int, seed: int = 0) -> PartialState:
    """[count, *shape, Dv] of random states; about a third are empty."""
    random = torch.Generator().manual_seed(seed)
    rows = (count, *shape[:-1])
    lse = torch.randn(rows, generator=random) * 5
    top = lse - torch.rand(rows, generator=random)
    out = torch.randn(count, *shape, generator=random)
    empty = torch.rand(rows, generator=random) < 0.3
    lse[empty], top[empty], out[empty] = -math.inf, -math.inf, 0.0
    return PartialState(top, lse, out)


def on_device(state: PartialState) -> PartialState:
    return PartialState(*(tensor.to(DEVICE) for tensor in (state.max, state.lse, state.out)))


def merged(state: PartialState | list[PartialState]) -> PartialState:
    placed = on_device(state) if isinstance(state, PartialState) else [on_device(s) for s in state]
    result = BACKEND.merge(placed)
    return PartialState(result.max.cpu(), result.lse.cpu(), result.out.cpu())


def fields(state: PartialState) -> tuple[torch.Tensor, ...]:
    return state.max, state.lse, state.out


@pytest.mark.parametrize(("count", "dim"), [(2, 16), (5, 1), (17, 80), (133, 64), (3, 512)])
def test_it_is_the_merge_of_the_formulas(count: int, dim: int) -> None:
    stacked = states(count, 2, 3, dim)
    exact = merge_states_torch(PartialState(*(tensor.double() for tensor in fields(stacked))))
    single = merge_states_torch(stacked)
    result = merged(stacked)
    assert torch.equal(result.max.double(), exact.max)
    assert torch.equal(result.lse == -math.inf, exact.lse == -math.inf)
    seen = exact.lse > -math.inf
    for got, plain, wanted in (
        (result.lse[seen], single.lse[seen], exact.lse[seen]),
        (result.out, single.out, exact.out),
    ):
        limit = 2 * max(
            (plain.double() - wanted).abs().max().item(), torch.finfo(torch.float32).eps
        )
        assert (got.double() - wanted).abs().max() <= limit
    assert same_bits(fields(result), fields(merged(stacked)))
    assert same_bits(fields(result), fields(merged([stacked[index] for index in range(count)])))


def neighbours_first(terms: torch.Tensor) -> torch.Tensor:
    """Over the first dimension, a power of two."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def one_after_another(terms: torch.Tensor) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def test_states_are_added_neighbours_first() -> None:
    stacked = states(16, 7, 64, seed=5)
    best = stacked.lse.amax(0)
    weights = torch.from_numpy(np.exp((stacked.lse - best).numpy()))
    terms = stacked.out * weights[..., None]
    result = merged(stacked).out
    expected = neighbours_first(terms) / neighbours_first(weights)[..., None]
    if not INTERPRETED.value:  # a GPU fuses products and sums, to other bits
        torch.testing.assert_close(result, expected)
        return
    assert torch.equal(result, expected)
    other = one_after_another(terms) / one_after_another(weights)[..., None]
    assert not torch.equal(result, other), "the control: bits tell orders apart"


def test_one_state_among_empty_ones_comes_out_bit_for_bit() -> None:
    (one,) = (states(1, 4, 40, seed=3)[0],)
    nothing = PartialState.empty((4,), 40)
    for mixed in ([nothing, one], [one, nothing, nothing], [nothing] * 20 + [one]):
        assert same_bits(fields(merged(mixed)), fields(one))
    assert merged([one]).out.data_ptr() != 0
    assert same_bits(fields(merged([one])), fields(one))


def test_only_empty_states() -> None:
    result = merged([PartialState.empty((2, 3), 24)] * 3)
    assert same_bits(fields(result), fields(PartialState.empty((2, 3), 24)))


def test_a_nan_is_not_lost() -> None:
    good, bad = states(2, 4, 16, seed=1)[0], PartialState.empty((4,), 16)
    bad.lse[:] = math.nan
    result = merged([PartialState.empty((4,), 16), bad, good])
    assert torch.isnan(result.lse).all()
    assert torch.isnan(result.out).all()


def test_values_far_apart_do_not_overflow() -> None:
    low, high = states(2, 3, 16, seed=2)[0], states(2, 3, 16, seed=4)[1]
    low.lse[:], high.lse[:] = -70000.0, 70000.0
    low.out[:], high.out[:] = 1e30, 2.0
    result = merged([low, high])
    assert same_bits((result.lse, result.out), (high.lse, high.out))


def test_states_that_do_not_lie_side_by_side() -> None:
    stacked = states(6, 3, 5, 16)
    turned = PartialState(
        stacked.max.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([stacked.lse, stacked.lse], -1)[..., 0],
        stacked.out.transpose(0, 3).contiguous().transpose(0, 3),
    )
    assert same_bits(fields(merged(turned)), fields(merged(stacked)))


def test_no_rows() -> None:
    result = merged([PartialState.empty((0, 3), 16)] * 2)
    assert result.out.shape == (0, 3, 16)


def test_float64_states_keep_their_precision() -> None:
    stacked = states(3, 2, 16)
    doubles = PartialState(*(tensor.double() for tensor in fields(stacked)))
    assert same_bits(fields(merged(doubles)), fields(merge_states_torch(doubles)))


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one state"):
        BACKEND.merge([])
    with pytest.raises(ValueError, match="must agree"):
        merged([PartialState.empty((2,), 16), PartialState.empty((3,), 16)])
    assert merged(stack_states([PartialState.empty((2,), 16)])).out.shape == (2, 16)
