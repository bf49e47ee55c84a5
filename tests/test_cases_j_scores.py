"""Faults that users met elsewhere: sinks, soft cap and scale."""

import math

import pytest
import torch

from backends_in_reach import INTERPRETED, InReach, backends, every_backend
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    offsets32,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import PartialState, decode_attention, finish


def ones_history(length: int, dim: int = 16, dtype: torch.dtype = torch.float32) -> History:
    """K random, V = 1: out is the share of the softmax that keys hold."""
    history = random_history([length], 1, dim, dtype=dtype)
    return History(history.k, [torch.ones_like(history.v[0])])


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
@every_backend
def test_J01_sink_counts_once_whatever_the_splits(
    on: InReach, num_splits: int, dtype: torch.dtype
) -> None:
    q, sinks = torch.zeros(1, 2, 16, dtype=dtype), torch.zeros(2)
    cache = ones_history(4, dtype=dtype).dense()
    with on.may_refuse("T 4 of the dense cache is not a multiple of 16"):
        out, lse = on.decode(q, **cache, sinks=sinks, tile=1, num_splits=num_splits)
    assert_near(out, torch.full_like(out, 0.8, dtype=torch.float64))
    assert_near(lse, torch.full_like(lse, math.log(5), dtype=torch.float64))
    without, without_lse = on.decode(q, **cache, tile=1, num_splits=num_splits)
    assert_near(without, torch.ones_like(without))
    assert_near(without_lse, torch.full_like(without_lse, math.log(4), dtype=torch.float64))


@every_backend
def test_J01_sink_counts_once_over_splits_of_whole_pages(on: InReach) -> None:
    q, sinks = torch.zeros(1, 2, 16, dtype=torch.bfloat16), torch.zeros(2)
    cache = ones_history(64, dtype=torch.bfloat16).paged(16)
    for num_splits in (1, 2, 4):
        out, lse = on.decode(q, **cache, sinks=sinks, tile=16, num_splits=num_splits)
        assert_near(out, torch.full_like(out, 64 / 65, dtype=torch.float64))
        assert_near(lse, torch.full_like(lse, math.log(65), dtype=torch.float64))


@pytest.mark.parametrize("num_splits", [1, 2, 4])
@every_backend
def test_J01_sink_counts_once_when_leading_splits_see_nothing(on: InReach, num_splits: int) -> None:
    q, sinks = torch.zeros(1, 2, 16), torch.zeros(2)
    cache = ones_history(4).dense()
    mask = torch.tensor([[[False, False, True, True]]])
    hidden = on.decode(q, **cache, sinks=sinks, attn_mask=mask, tile=1, num_splits=num_splits)
    windowed = on.decode(q, **cache, sinks=sinks, window_left=1, tile=1, num_splits=num_splits)
    for out, lse in (hidden, windowed):
        assert_near(out, torch.full_like(out, 2 / 3, dtype=torch.float64))
        assert_near(lse, torch.full_like(lse, math.log(3), dtype=torch.float64))


@every_backend
def test_J02_sink_on_a_row_without_keys(on: InReach) -> None:
    history = random_history([0, 5], 2, 16)
    q = random_queries(2, 2, 16)
    sinks = torch.tensor([1.5, -math.inf])
    out, lse = on.decode(q, **history.paged(16), sinks=sinks)
    # The returned lse holds the sink: its logit alone for head 0, nothing for head 1.
    assert bool((out[0] == 0).all())
    assert lse[0].tolist() == [1.5, -math.inf]
    wanted, wanted_lse = attend(q[:, None], history, sinks=sinks)
    assert_near(out, torch.cat(wanted))
    assert_near_lse(lse, torch.cat(wanted_lse))
    plain, plain_lse = on.decode(q, **history.paged(16))
    assert same_bits((out[1, 1], lse[1, 1:]), (plain[1, 1], plain_lse[1, 1:]))
    state = on.partial(q, **history.paged(16))
    assert bool((state.lse[0] == -math.inf).all())


@every_backend
def test_J04_sink_and_bias_enter_after_the_scale(on: InReach) -> None:
    history = random_history([4], 1, 64)
    bias = torch.tensor([0.0, 1.0, 0.0, -0.5])
    out, lse = on.decode(
        torch.zeros(1, 1, 64),
        **history.dense(),
        sm_scale=0.125,
        sinks=torch.tensor([2.0]),
        attn_bias=bias.reshape(1, 1, 1, 4),
    )
    mass = bias.double().exp()
    total = mass.sum() + math.exp(2.0)
    assert_near(out[0, 0], (mass / total) @ history.v[0][:, 0].double())
    assert_near(lse[0, 0], total.log())


@every_backend
def test_J04_sink_enters_after_the_scale(on: InReach) -> None:
    cache = ones_history(4, 64, torch.bfloat16).dense()
    q, sinks = torch.zeros(1, 1, 64, dtype=torch.bfloat16), torch.tensor([2.0])
    out, lse = on.decode(q, **cache, sm_scale=0.125, sinks=sinks)
    total = 4 + math.exp(2.0)
    assert_near(out, torch.full_like(out, 4 / total, dtype=torch.float64))
    assert_near(lse, torch.full_like(lse, math.log(total), dtype=torch.float64))


@every_backend
def test_J07_four_ways_to_write_a_sink_are_one_function(on: InReach) -> None:
    history = random_history([4], 2, 16)
    q = random_queries(1, 4, 2, 16)
    sinks = torch.tensor([0.7, -1.3])
    column, _ = attend(q, history, sinks=sinks)  # an extra column, dropped after the softmax
    built_in, _ = on.decode(q, **history.dense(), sinks=sinks)
    state = on.partial(q, **history.dense())
    renormalised = state.out * torch.sigmoid(state.lse - sinks)[..., None]
    as_state = PartialState.from_lse(torch.zeros_like(state.out), sinks.expand(1, 4, 2))
    merged = on.merge([state, as_state]).out
    finished, _ = finish(state, sinks=sinks)
    for out in (built_in, renormalised, merged, finished):
        assert_near(out[0], column[0], bound=1e-6)


@every_backend
def test_J08_soft_cap_saturates_without_overflow(on: InReach) -> None:
    scores = [1000.0, 3000.0, 4400.0, 5000.0, 10000.0, -10000.0]
    history = random_history([6], 1, 64)
    history.k[0].zero_()
    history.k[0][:, 0, 0] = torch.tensor(scores)
    q = torch.zeros(1, 1, 64)
    q[..., 0] = 1.0
    out, lse = on.decode(q, **history.dense(), sm_scale=1.0, logits_soft_cap=50.0)
    assert_near(out[0, 0], history.v[0][:5, 0].double().mean(0))
    assert_near_lse(lse[0], doubles(50 + math.log(5)))


SCALES = [1.0, 128**-0.5, 1 / 128, 0.5, None]


@pytest.mark.parametrize("sm_scale", SCALES)
@pytest.mark.parametrize(("dim", "dim_v"), [(128, 128), (192, 128)])
@pytest.mark.parametrize("steps", [1, 8])
@backends(slow=INTERPRETED)
def test_J10_scale_reaches_every_path(
    on: InReach, steps: int, dim: int, dim_v: int, sm_scale: float | None
) -> None:
    history = random_history([50], 2, dim, head_dim_v=dim_v, dtype=torch.float16)
    q = random_queries(1, steps, 8, dim, dtype=torch.float16)
    wanted, wanted_lse = attend(q, history, sm_scale=sm_scale)
    cache = history.paged(16)
    out, lse = on.decode(q, **cache, sm_scale=sm_scale)
    state = on.partial(q, **cache, sm_scale=sm_scale)
    packed, packed_lse = on.decode(
        q[0], **cache, sm_scale=sm_scale, cu_seqlens_q=offsets32([steps])
    )
    for got, got_lse in ((out[0], lse[0]), (state.out[0], state.lse[0]), (packed, packed_lse)):
        assert_near(got, wanted[0], bound=2e-3)
        assert_near_lse(got_lse, wanted_lse[0])


@pytest.mark.parametrize("sm_scale", [0.0, -0.25, -40.0, 1e-30])
@every_backend
def test_J12_zero_and_negative_scales_are_values(on: InReach, sm_scale: float) -> None:
    history = random_history([5], 2, 16)
    positions = torch.arange(5.0)[:, None, None].expand(5, 2, 16).contiguous()
    history = History(history.k, [positions])
    q = random_queries(1, 2, 16)
    out, lse = on.decode(q, **history.dense(), sm_scale=sm_scale)
    wanted, wanted_lse = attend([q], history, sm_scale=sm_scale)
    # Scores of 40 times a dot product carry float32's rounding of the dot product, 40 times.
    rounding = torch.finfo(torch.float32).eps * float(wanted_lse[0].abs().max())
    assert_near(out, wanted[0], bound=4 * (1e-5 + rounding))
    assert_near_lse(lse, wanted_lse[0])
    if sm_scale == 0.0:
        assert_near(out, torch.full_like(out, 2.0))
        assert_near(lse, torch.full_like(lse, math.log(5)))


@pytest.mark.parametrize("sm_scale", [math.nan, math.inf, -math.inf])
def test_J12_scale_that_is_no_number_is_refused(sm_scale: float) -> None:
    history = random_history([5], 2, 16)
    with pytest.raises(ValueError, match="sm_scale must be finite"):
        decode_attention(random_queries(1, 2, 16), **history.dense(), sm_scale=sm_scale)


@every_backend
def test_J13_key_scale_is_not_folded_into_half_precision_queries(on: InReach) -> None:
    # 300 * 400 is past float16's 65504. Scales are per kv head here, not per channel.
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (40, 2, 64), generator=random, dtype=torch.int8)
    values = torch.randint(-127, 128, (40, 2, 64), generator=random, dtype=torch.int8)
    q = (torch.rand(1, 4, 64, generator=random) * 600 - 300).half()
    q[0, 0, 0] = 300.0
    k_scale, v_scale = torch.tensor([400.0, 0.5]), torch.tensor([0.01, 0.02])
    sm_scale = 1e-7
    out, lse = on.decode(
        q,
        **History([codes], [values]).dense(),
        k_scale=k_scale,
        v_scale=v_scale,
        sm_scale=sm_scale,
    )
    exact = History([codes.float() * k_scale[:, None]], [values.float() * v_scale[:, None]])
    wanted, wanted_lse = attend([q], exact, sm_scale=sm_scale)
    assert_near(out, wanted[0])
    assert_near_lse(lse, wanted_lse[0])


def test_J13_scale_per_channel_is_refused_not_misread() -> None:
    cache = random_history([40], 2, 64).dense()
    cache |= {name: cache[name].to(torch.int8) for name in ("k", "v")}
    with pytest.raises(ValueError, match=r"k_scale must be .*got \[64\]"):
        decode_attention(random_queries(1, 4, 64), **cache, k_scale=torch.ones(64))
