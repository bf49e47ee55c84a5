"""Faults that users met elsewhere: merging states, and what their log-sum-exp is."""

import math
from itertools import pairwise

import pytest
import torch

from backends_in_reach import IN_REACH, INTERPRETED, InReach, backends, every_backend
from histories import (
    History,
    assert_near,
    assert_near_lse,
    assert_rounded,
    attend,
    position_history,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import PartialState, merge_states

LOG2_E = math.log2(math.e)


def one_value(out: float, lse: float) -> PartialState:
    return PartialState.from_lse(torch.tensor([[[out]]]), torch.tensor([[lse]]))


def shards(history: History, *ends: int) -> list[History]:
    """One request's history cut at ``ends``."""
    bounds = [0, *ends, history.lengths[0]]
    return [
        History([history.k[0][low:high]], [history.v[0][low:high]])
        for low, high in pairwise(bounds)
    ]


@every_backend
def test_B01_base_two_lse_is_converted_before_the_merge(on: InReach) -> None:
    natural = [one_value(1.0, 5.0), one_value(0.0, 3.0)]
    base_two = [
        PartialState.from_lse2(state.out, torch.tensor([[value * LOG2_E]]))
        for state, value in zip(natural, (5.0, 3.0), strict=True)
    ]
    for states in (natural, base_two, [natural[0], base_two[1]]):
        merged = on.merge(states)
        assert_near(merged.out, torch.tensor([[[0.8807970780]]]), bound=1e-6)
        assert_near(merged.lse, torch.tensor([[5.1269280110]]), bound=1e-6)


@pytest.mark.parametrize("other", IN_REACH, ids=lambda other: other.name)
@every_backend
def test_B01_states_of_two_backends_merge_to_the_dense_result(on: InReach, other: InReach) -> None:
    history = random_history([96], 2, 64, dtype=torch.float16)
    q = random_queries(1, 4, 64, dtype=torch.float16)
    first, second = shards(history, 32)
    merged = merge_states([on.partial(q, **first.paged(16)), other.partial(q, **second.paged(16))])
    wanted, wanted_lse = attend([q], history)
    assert_near(merged.out, wanted[0], bound=2e-3)
    assert_near_lse(merged.lse, wanted_lse[0])


@backends(slow=INTERPRETED)
def test_B02_splits_need_the_lse_even_when_the_caller_does_not(on: InReach) -> None:
    history = random_history([4096], 4, 64, dtype=torch.float16)
    q = random_queries(1, 4, 64, dtype=torch.float16)
    cache = history.dense()
    with_lse, _ = on.decode(q, **cache, num_splits=16)
    assert same_bits((on.out_alone(q, **cache, num_splits=16),), (with_lse,))


@pytest.mark.parametrize(("tokens", "heads"), [(8, 8), (251, 5)])
@backends(slow=INTERPRETED)
def test_B03_lse_is_tokens_by_heads_and_the_square_case_would_show_a_transpose(
    on: InReach, tokens: int, heads: int
) -> None:
    random = torch.Generator().manual_seed(0)
    out = torch.randn(2, tokens, heads, 16, generator=random)
    lse = torch.rand(2, tokens, heads, generator=random) * 40 - 20
    merged = on.merge([PartialState.from_lse(out[part], lse[part]) for part in range(2)])
    weights = torch.softmax(lse.double(), 0)[..., None]
    assert_near(merged.out, (weights * out.double()).sum(0))
    if tokens == heads:
        swapped = torch.softmax(lse.double().transpose(1, 2), 0)[..., None]
        assert float(((weights - swapped) * out.double()).sum(0).abs().max()) > 0.1
    else:
        with pytest.raises(ValueError, match=r"lse \[\.\.\., H\].*lse \[5, 251\]"):
            PartialState.from_lse(out[0], lse[0].T.contiguous())


@backends(slow=INTERPRETED)
def test_B05_partial_outputs_are_not_rounded_before_the_merge(on: InReach) -> None:
    history = random_history([32768], 1, 128, dtype=torch.bfloat16)
    q = random_queries(1, 8, 128, dtype=torch.bfloat16)
    cache = history.paged(16)
    wanted = attend([q], history)[0][0]
    one_rounding = float(torch.finfo(torch.bfloat16).eps / 2 * wanted.abs().max())
    whole, _ = on.decode(q, **cache, num_splits=1)
    error_of_one = float((whole.double() - wanted).abs().max())
    for num_splits in (2, 16, 64):
        out, lse = on.decode(q, **cache, num_splits=num_splits)
        assert_near(out, wanted, bound=error_of_one + one_rounding)
        assert lse.dtype == torch.float32


@every_backend
def test_B07_constant_taken_from_the_keys_goes_back_into_the_lse(on: InReach) -> None:
    # Each shard quantises K minus its own mean; the original keys score scale * q.mean higher.
    random = torch.Generator().manual_seed(0)
    scale, q = 64**-0.5, random_queries(1, 2, 4, 64)
    states, exact_k, exact_v = [], [], []
    for mean_of_shard in (0.0, 3.0):
        k = torch.randn(64, 2, 64, generator=random) + mean_of_shard
        v = torch.randn(64, 2, 64, generator=random)
        mean = k.mean(0)
        k_scale, v_scale = (k - mean).abs().amax((0, 2)) / 127, v.abs().amax((0, 2)) / 127
        k_codes = ((k - mean) / k_scale[:, None]).round().to(torch.int8)
        v_codes = (v / v_scale[:, None]).round().to(torch.int8)
        shard = History([k_codes], [v_codes])
        state = on.partial(
            q, **shard.dense(), causal=False, k_scale=k_scale, v_scale=v_scale, sm_scale=scale
        )
        constant = scale * torch.einsum("bshd,hd->bsh", q, mean.repeat_interleave(2, 0))
        states.append(PartialState(state.max + constant, state.lse + constant, state.out))
        exact_k.append(k_codes.float() * k_scale[:, None] + mean)
        exact_v.append(v_codes.float() * v_scale[:, None])
        own = History([exact_k[-1]], [exact_v[-1]])
        wanted, wanted_lse = attend(q, own, causal=False, sm_scale=scale)
        assert_near_lse(states[-1].lse[0], wanted_lse[0])
        assert_near(state.out[0], wanted[0])
    merged = on.merge(states)
    whole = History([torch.cat(exact_k)], [torch.cat(exact_v)])
    wanted, wanted_lse = attend(q, whole, causal=False, sm_scale=scale)
    assert_near(
        merged.out[0], wanted[0], bound=1e-4
    )  # the stated tolerance of the lse, as a weight
    assert_near_lse(merged.lse[0], wanted_lse[0])


@pytest.mark.parametrize("num_splits", [1, 3])
@every_backend
def test_B08_no_score_is_low_enough_to_be_taken_for_nothing(on: InReach, num_splits: int) -> None:
    # 128 * -43.75 * 43.75 * 0.25 = -61250, exact in bfloat16 inputs and float32 sums.
    history = random_history([48], 1, 128, dtype=torch.bfloat16)
    history = History([torch.full_like(history.k[0], 43.75)], history.v)
    q = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    q[0, 0] = -43.75
    q[0, 1] = 2.0**-10
    out, lse = on.decode(q, **history.paged(16), sm_scale=0.25, tile=16, num_splits=num_splits)
    mean = history.v[0][:, 0].double().mean(0)
    for head, score in ((0, -61250.0), (1, 128 * 43.75 * 2.0**-10 * 0.25)):
        assert_near(out[0, head], mean)
        assert_near_lse(lse[0, head], torch.tensor(score + math.log(48), dtype=torch.float64))


@every_backend
def test_B10_running_merge_keeps_what_came_before(on: InReach) -> None:
    history = position_history([48], 2, 32)
    q = torch.zeros(1, 4, 2, 32)
    running: PartialState | None = None
    for shard in shards(history, 16, 32):
        state = on.partial(q, **shard.dense(), causal=False)
        running = state if running is None else on.merge([running, state])
    assert running is not None
    assert_rounded(running.out, 23.5)
    assert_near(running.lse, torch.full((1, 4, 2), math.log(48)))


def assert_sums_do_not_stick(
    on: InReach, length: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    v = torch.zeros(length, 1, 64)
    v[:, :, 0] = 1.0
    v[0::2, :, 1], v[1::2, :, 1] = 1.0, -1.0
    v[-1, :, 2] = 1.0
    history = History([torch.ones(length, 1, 64).to(kv_dtype)], [v.to(kv_dtype)])
    cache = history.paged(16, fill=1.0)
    q = torch.zeros(1, 4, 64, dtype=dtype)
    for num_splits in (1, 8, None):
        out, lse = on.decode(q, **cache, num_splits=num_splits)
        assert bool((out[..., 0] == 1.0).all())
        assert bool((out[..., 1] == 0.0).all())
        assert_near(out[..., 2].float() * length, torch.ones(1, 4), bound=1e-2)
        assert_near(lse, torch.full((1, 4), math.log(length)), bound=1e-5)


DTYPES = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
)


@DTYPES
@backends(slow=INTERPRETED)
def test_B12_sums_do_not_stick_at_4096_keys(
    on: InReach, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    assert_sums_do_not_stick(on, 4096, dtype, kv_dtype)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("length", [65536, 262144])
@backends(without=INTERPRETED)
def test_B12_sums_do_not_stick_at_long_context(
    on: InReach, length: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    assert_sums_do_not_stick(on, length, dtype, kv_dtype)


@pytest.mark.parametrize(
    ("pair", "weight"),
    [
        ((1000.0, 999.0), 0.7310585786),
        ((70000.0, 69999.0), 0.7310585786),
        ((12.34, 12.30), 0.5099986668),
    ],
)
@every_backend
def test_B13_merge_weights_need_a_float32_lse(
    on: InReach, pair: tuple[float, float], weight: float
) -> None:
    merged = on.merge([one_value(1.0, pair[0]), one_value(0.0, pair[1])])
    # 12.34 and 12.30 are rounded to float32 first: their difference carries two roundings.
    spacing = torch.finfo(torch.float32).eps * max(pair) if pair[0] < 100 else 0.0
    assert_near(merged.out, torch.tensor([[[weight]]]), bound=1e-6 + spacing)
    assert merged.lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_B13_half_precision_lse_is_refused(dtype: torch.dtype) -> None:
    out, lse = torch.ones(1, 1, 4, dtype=dtype), torch.full((1, 1), 1000.0, dtype=dtype)
    with pytest.raises(ValueError, match="lse must be float32"):
        PartialState.from_lse(out, lse)
    with pytest.raises(ValueError, match="share float32"):
        PartialState(lse, lse, out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@every_backend
def test_B13_lse_is_float32_whatever_the_queries_are(on: InReach, dtype: torch.dtype) -> None:
    history = random_history([200], 2, 64, dtype=dtype)
    q = random_queries(1, 2, 64, dtype=dtype)
    states = [on.partial(q, **shard.paged(4)) for shard in shards(history, 100)]
    merged = on.merge(states)
    wanted, wanted_lse = attend([q], history)
    assert {state.lse.dtype for state in (*states, merged)} == {torch.float32}
    assert_near(merged.out, wanted[0], bound=1.6e-2 if dtype == torch.bfloat16 else 2e-3)
    assert_near_lse(merged.lse, wanted_lse[0])
