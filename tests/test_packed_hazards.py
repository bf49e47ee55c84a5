"""What a published skeleton of varlen split decode gets wrong, on our packed route.

Each test names a hazard, shows that every backend is free of it, and that the same input and
measure catch a skeleton that has it.
"""

import math

import pytest
import torch
from torch import Tensor

from backends_in_reach import InReach, every_backend, spec_of
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    random_history,
    random_queries,
    same_bits,
)
from skeleton import HEAD_BLOCK, TILE, Hazard, skeleton

H, K, D = 14, 2, 128  # 7 query heads per kv head: a multiple of no tile
DTYPE = torch.bfloat16


def batch(lengths: list[int], heads: int = H, kv_heads: int = K) -> tuple[Tensor, History]:
    q = random_queries(len(lengths), heads, D, dtype=DTYPE)
    return q, random_history(lengths, kv_heads, D, dtype=DTYPE)


def decoded(on: InReach, q: Tensor, history: History, splits: int) -> tuple[Tensor, Tensor]:
    """Into buffers of NaN, cut on multiples of a tile."""
    return on.decode(
        q, **history.packed(), tile=TILE, num_splits=splits, out=torch.full_like(q, math.nan)
    )


def check(result: tuple[Tensor, Tensor], q: Tensor, history: History) -> None:
    want, want_lse = attend(q[:, None], history)
    assert_near(result[0], torch.cat(want))
    assert_near_lse(result[1], torch.cat(want_lse))


def assert_caught(hazard: Hazard, q: Tensor, history: History, splits: int) -> None:
    """The measure of ``check`` passes the skeleton, and not the one with the hazard."""
    want = torch.cat(attend(q[:, None], history)[0])
    assert_near(skeleton(q, history, splits).to(DTYPE), want)
    with pytest.raises(AssertionError, match="worst error"):
        assert_near(skeleton(q, history, splits, hazard).to(DTYPE), want)


@every_backend
def test_this_shape_is_declined_by_nobody(on: InReach) -> None:
    """Else the tests below would end at a refusal."""
    q, history = batch([3])
    assert on.backend.refusals(spec_of(q, **history.packed())) == []


@every_backend
def test_a_tile_across_a_requests_end_sees_no_neighbour(on: InReach) -> None:
    q, history = batch([37, 21, 64, 5])
    assert_caught(Hazard.NEIGHBOUR, q, history, 3)
    for splits in (1, 3):
        result = decoded(on, q, history, splits)
        check(result, q, history)
        mine = splits - 1  # the first request, and the third
        keys = [torch.full_like(k, math.nan) for k in history.k]
        values = [torch.full_like(v, math.inf) for v in history.v]
        keys[mine], values[mine] = history.k[mine], history.v[mine]
        poisoned = decoded(on, q, History(keys, values), splits)
        assert same_bits(
            tuple(part[mine] for part in poisoned), tuple(part[mine] for part in result)
        )


def test_a_mask_that_multiplies_is_caught_by_a_neighbour_of_nan() -> None:
    q, history = batch([37, 21])
    history.k[1].fill_(math.nan)
    history.v[1].fill_(math.inf)
    right = skeleton(q, history, 1)[0]
    assert bool(right.isfinite().all())
    assert bool(skeleton(q, history, 1, Hazard.MULTIPLIED_MASK)[0].isnan().any())


@every_backend
def test_the_lse_of_a_partial_keeps_its_bits(on: InReach) -> None:
    """Scores around 724, where 16 bits are 0.5 apart (half) or 4 (bfloat16)."""
    q, history = batch([96, 50])
    q[..., 0] = 64.0
    for k in history.k:
        k[..., 0] = 128.0
    assert_caught(Hazard.LSE_16_BITS, q, history, 4)
    check(decoded(on, q, history, 4), q, history)


@every_backend
def test_a_group_of_seven_heads_reads_its_own_kv_head(on: InReach) -> None:
    q, history = batch([40, 17], heads=28, kv_heads=4)
    assert (28 // 4) % HEAD_BLOCK
    assert_caught(Hazard.HEAD_BLOCK, q, history, 2)
    check(decoded(on, q, history, 2), q, history)


@every_backend
def test_more_splits_than_tokens(on: InReach) -> None:
    q, history = batch([3, 1, 18])
    assert_caught(Hazard.UNGUARDED, q, history, 20)
    for splits in (8, 20):
        check(decoded(on, q, history, splits), q, history)


@every_backend
def test_a_length_that_the_splits_do_not_divide_loses_no_tail(on: InReach) -> None:
    q, history = batch([131, 66, 7])
    assert_caught(Hazard.DROPPED_TAIL, q, history, 5)
    for splits in (3, 5):
        check(decoded(on, q, history, splits), q, history)


@every_backend
def test_requests_of_no_tokens_between_others(on: InReach) -> None:
    q, history = batch([0, 33, 0, 0, 18, 0])
    assert_caught(Hazard.UNGUARDED, q, history, 2)
    for splits in (1, 3):
        out, lse = decoded(on, q, history, splits)
        check((out, lse), q, history)
        empty = torch.tensor(history.lengths) == 0
        assert bool((out[empty] == 0).all())
        assert bool((lse[empty] == -math.inf).all())
        alone = decoded(on, q[~empty], History(history.k[1:5:3], history.v[1:5:3]), splits)
        assert same_bits((out[~empty], lse[~empty]), alone)
