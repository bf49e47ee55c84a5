"""Faults that users met elsewhere: rows and states that saw nothing."""

import math

import pytest
import torch
from torch import Tensor

from backends_in_reach import InReach, every_backend
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    lengths32,
    offsets32,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import PartialState


def fields(state: PartialState) -> tuple[Tensor, Tensor, Tensor]:
    return state.max, state.lse, state.out


def state_of_three_tokens(seed: int, empty: tuple[int, ...], dtype: torch.dtype) -> PartialState:
    """Three tokens, five heads, Dv 64, ``out`` in ``dtype``; those in ``empty`` saw nothing."""
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(3, 5, 64, generator=random).to(dtype)
    lse = torch.randn(3, 5, generator=random)
    for token in empty:
        out[token], lse[token] = 0.0, -math.inf
    return PartialState.from_lse(out, lse)


def merged_in_float64(states: list[PartialState], token: int) -> tuple[Tensor, Tensor]:
    lse = torch.stack([state.lse[token] for state in states]).double()
    out = torch.stack([state.out[token] for state in states]).double()
    weights = torch.softmax(lse, 0)
    return (weights[..., None] * out).sum(0), torch.logsumexp(lse, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [2, 3, 8])
@every_backend
def test_A01_merging_empty_states_is_empty_and_finite_states_show_no_epsilon(
    on: InReach, count: int, dtype: torch.dtype
) -> None:
    # Token 0: one finite state among empty ones; token 1: all empty; token 2: all finite.
    states = [state_of_three_tokens(0, (1,), dtype)]
    states += [state_of_three_tokens(seed, (0, 1), dtype) for seed in range(1, count)]
    running = states[0]
    for state in states[1:]:
        running = on.merge([running, state])
    for merged in (on.merge(states), running):
        assert same_bits((merged.lse[0], merged.out[0]), (states[0].lse[0], states[0].out[0]))
        assert bool((merged.out[1] == 0).all())
        assert bool((merged.lse[1] == -math.inf).all())
        out, lse = merged_in_float64(states, token=2)
        assert_near(merged.out[2], out)
        assert_near(merged.lse[2], lse)


@every_backend
def test_A01_merging_a_stack_of_no_states_is_the_empty_state(on: InReach) -> None:
    nothing = PartialState(torch.empty(0, 3, 5), torch.empty(0, 3, 5), torch.empty(0, 3, 5, 64))
    assert same_bits(fields(on.merge(nothing)), fields(PartialState.empty((3, 5), 64)))


@pytest.mark.parametrize("num_splits", [1, 4])
@every_backend
def test_A02_row_without_keys_overwrites_the_callers_buffers(on: InReach, num_splits: int) -> None:
    history = random_history([5, 0, 33, 0], 4, 64, dtype=torch.bfloat16)
    q = random_queries(4, 16, 64, dtype=torch.bfloat16)
    buffer, lse_buffer = torch.full_like(q, math.nan), torch.full((4, 16), 7.0)
    out, lse = on.decode(
        q, **history.paged(16), tile=16, num_splits=num_splits, out=buffer, lse=lse_buffer
    )
    for row in (1, 3):
        assert bool((out[row] == 0).all())
        assert bool((lse[row] == -math.inf).all())
    wanted, wanted_lse = attend(q[:, None], history)
    for row in (0, 2):
        assert_near(out[row], wanted[row][0])
        assert_near_lse(lse[row], wanted_lse[row][0])
    second = PartialState.from_lse(random_queries(4, 16, 64, seed=2), random_queries(4, 16, seed=3))
    merged = on.merge([PartialState.from_lse(out, lse), second])
    for row in (1, 3):
        assert same_bits((merged.lse[row], merged.out[row]), (second.lse[row], second.out[row]))


@every_backend
def test_A04_row_without_keys_has_lse_minus_infinity(on: InReach) -> None:
    history = random_history([4, 0, 2], 2, 64, dtype=torch.float16)
    q = random_queries(6, 4, 64, dtype=torch.float16)
    out, lse = on.decode(q, **history.packed(), cu_seqlens_q=offsets32([2, 3, 1]), causal=False)
    assert bool((lse[2:5] == -math.inf).all())
    assert bool((out[2:5] == 0).all())
    wanted, wanted_lse = attend(q.split([2, 3, 1]), history, causal=False)
    assert_near(out, torch.cat(wanted))
    assert_near_lse(lse, torch.cat(wanted_lse))


@every_backend
def test_A04_foreign_lse_of_plus_infinity_is_read_as_empty_and_does_not_win(on: InReach) -> None:
    foreign = PartialState.from_lse(torch.full((2, 4, 64), math.nan), torch.full((2, 4), math.inf))
    other = PartialState.from_lse(random_queries(2, 4, 64), random_queries(2, 4))
    merged = on.merge([foreign, other])
    assert same_bits((merged.lse, merged.out), (other.lse, other.out))


@every_backend
def test_A05_first_chunk_invisible_for_some_rows_of_a_multi_token_query(on: InReach) -> None:
    history = random_history([10], 4, 32)
    q = random_queries(1, 6, 4, 32)
    key, step = torch.arange(10), torch.arange(6)[:, None]
    mask = (key <= 4 + step) & ((step >= 3) | (key >= 4))
    states = []
    for start, end in ((0, 4), (4, 10)):
        chunk = History([history.k[0][start:end]], [history.v[0][start:end]])
        states.append(
            on.partial(q, **chunk.dense(), causal=False, attn_mask=mask[None, :, start:end])
        )
    assert bool((states[0].lse[0, :3] == -math.inf).all())
    merged = on.merge(states)
    assert same_bits(
        (merged.lse[0, :3], merged.out[0, :3]), (states[1].lse[0, :3], states[1].out[0, :3])
    )
    wanted, wanted_lse = attend(q, history, mask=mask[None])
    assert_near(merged.out[0], wanted[0])
    assert_near_lse(merged.lse[0], wanted_lse[0])


@every_backend
def test_A06_decode_and_prefill_paths_agree_on_empty_and_other_rows(on: InReach) -> None:
    history = random_history([0, 1, 8], 8, 128, dtype=torch.float16)
    q = random_queries(3, 8, 128, dtype=torch.float16)
    cache = history.paged(8)
    decoded, decoded_lse = on.decode(q, **cache)
    # Prefill: four queries per request (packed), of which the decode step's is the last.
    prefill_q = torch.cat(
        [random_queries(3, 3, 8, 128, dtype=torch.float16, seed=5), q[:, None]], 1
    )
    prefilled, prefilled_lse = on.decode(
        prefill_q.flatten(0, 1), **cache, cu_seqlens_q=offsets32([4, 4, 4])
    )
    packed, packed_lse = on.decode(q, **cache, cu_seqlens_q=offsets32([1, 1, 1]))
    wanted, wanted_lse = attend(q[:, None], history)
    for out, lse in (
        (decoded, decoded_lse),
        (packed, packed_lse),
        (prefilled[3::4], prefilled_lse[3::4]),
    ):
        assert bool((out[0] == 0).all())
        assert_near(out, torch.cat(wanted))
        assert_near_lse(lse, torch.cat(wanted_lse))


@every_backend
def test_A08_leading_keys_masked_valid_keys_later(on: InReach) -> None:
    # The index list is a table of one-token pages; padding (-1) is masked, its entry not used.
    heads, listed, padding = 16, 64, 16
    history = random_history([128], 1, 576, dtype=torch.bfloat16)
    k, v = history.k[0][:, None], history.k[0][:, None, :, :512]
    valid = torch.randperm(128, generator=torch.Generator().manual_seed(3))[: listed - padding]
    indices = torch.full((2, listed), -1)
    indices[0, padding:] = valid
    mask = ((indices >= 0) & (indices < 128))[:, None]
    q = random_queries(2, heads, 576, dtype=torch.bfloat16)
    out, lse = on.decode(
        q,
        k,
        v,
        block_table=indices.to(torch.int32),
        seq_lens=lengths32([listed, listed]),
        layout="NHD",
        attn_mask=mask,
    )
    chosen = History([k[valid, 0]], [v[valid, 0]])
    wanted, wanted_lse = attend([q[:1]], chosen)
    assert_near(out[0], wanted[0][0])
    assert_near_lse(lse[0], wanted_lse[0][0])
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -math.inf).all())


@every_backend
def test_A09_fully_masked_row_has_lse_minus_infinity_not_zero(on: InReach) -> None:
    history = random_history([8], 2, 64)
    q = random_queries(1, 4, 2, 64)
    mask = torch.ones(1, 4, 8, dtype=torch.bool)
    mask[0, 2] = False
    out, lse = on.decode(q, **history.dense(), causal=False, attn_mask=mask, tile=2, num_splits=4)
    assert bool((lse[0, 2] == -math.inf).all())
    assert bool((out[0, 2] == 0).all())
    wanted, wanted_lse = attend(q, history, causal=False, mask=mask)
    assert_near(out[0], wanted[0])
    assert_near_lse(lse[0], wanted_lse[0])
