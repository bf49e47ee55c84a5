"""Cross-attention: every query sees all keys of another sequence, also where it has fewer."""

import math
from typing import Any

import pytest
import torch

from backends_in_reach import InReach, every_backend
from dense_attention import Problem, check, problem, stored, where

LENGTHS = (3, 40, 0, 1, 5)
STEPS = 5
"""More queries than keys, and as many, and fewer."""


def attend(on: InReach, given: Problem, layout: str = "NHD", **extra: Any) -> None:
    k, v = stored(given, layout)
    got = on.decode(given.q, k, v, **where(given, layout), **given.options, **extra)
    check(got, given)


@pytest.mark.parametrize("layout", ["NHD", "BSND", "packed"])
@every_backend
def test_every_query_sees_every_key(on: InReach, layout: str) -> None:
    given = problem(lengths=LENGTHS, queries=STEPS, dims=(64, 64), causal=False)
    attend(on, given, layout)
    attend(on, given, layout, num_splits=2)


@every_backend
def test_it_is_not_the_causal_answer(on: InReach) -> None:
    given = problem(lengths=LENGTHS, queries=STEPS, dims=(64, 64), causal=False)
    k, v = stored(given, "NHD")
    causal = on.decode(given.q, k, v, **where(given, "NHD"))
    with pytest.raises(AssertionError):
        check(causal, given)


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.2, 0.9, 0.7])},
        {"sliding_window": 3},
        {"sliding_window": 12, "window_block": 4, "anchor_tokens": 1},
    ],
    ids="+".join,
)
@every_backend
def test_places_are_counted_from_the_end_of_the_keys(on: InReach, options: dict[str, Any]) -> None:
    """Query t sits at L - S + t, below 0 where there are fewer keys than queries; what lies behind
    it is seen, and slopes say so with a positive distance.
    """
    given = problem(lengths=LENGTHS, queries=STEPS, dims=(64, 64), causal=False, **options)
    attend(on, given)
    attend(on, given, num_splits=2)


@every_backend
def test_a_query_before_the_first_key_is_bent_by_where_it_stands(on: InReach) -> None:
    """By hand: keys of score 0, one head, slope 1, queries at -1 and 0, keys at 0 alone."""
    q, k, v = torch.zeros(1, 2, 1, 64), torch.zeros(1, 1, 1, 64), torch.ones(1, 1, 1, 64)
    out, lse = on.decode(
        q,
        k,
        v,
        seq_lens=torch.tensor([1], dtype=torch.int32),
        layout="BSND",
        causal=False,
        alibi_slopes=torch.ones(1),
    )
    assert torch.equal(out, torch.ones(1, 2, 1, 64))
    assert lse[0, :, 0].tolist() == [1.0, 0.0]
    assert not math.isnan(float(lse.sum()))
