"""Faults that users met elsewhere: causal alignment and several queries per request."""

import math

import pytest
import torch

from backends_in_reach import InReach, every_backend
from histories import (
    History,
    assert_near,
    assert_near_lse,
    assert_rounded,
    attend,
    lengths32,
    position_history,
    random_history,
    random_queries,
)


@every_backend
def test_M01_causal_mask_is_aligned_to_the_end(on: InReach) -> None:
    history = position_history([5], 1, 8)
    out, lse = on.decode(torch.zeros(1, 2, 1, 8), **history.dense())
    for step, (mean, visible) in enumerate([(1.5, 4), (2.0, 5)]):
        assert_rounded(out[0, step], mean)
        assert_near(lse[0, step], torch.full((1,), math.log(visible)))
        so_far = position_history([visible], 1, 8)
        single, single_lse = on.decode(torch.zeros(1, 1, 8), **so_far.dense())
        assert_rounded(single, mean)
        assert_near(single_lse[0], lse[0, step].double())


@every_backend
def test_M01_rows_of_one_call_equal_single_token_steps(on: InReach) -> None:
    history = random_history([37], 2, 64, dtype=torch.float16)
    q = random_queries(1, 4, 4, 64, dtype=torch.float16)
    out, lse = on.decode(q, **history.paged(16))
    wanted, wanted_lse = attend(q, history)
    assert_near(out, torch.stack(wanted))
    for step in range(4):
        length = 37 - 4 + step + 1
        so_far = History([history.k[0][:length]], [history.v[0][:length]])
        single, single_lse = on.decode(q[:, step], **so_far.paged(16))
        assert_near(single[0], wanted[0][step])
        assert_near_lse(single_lse[0], wanted_lse[0][step])
        assert_near_lse(lse[0, step], wanted_lse[0][step])


@every_backend
def test_M03_each_query_row_has_its_own_length(on: InReach) -> None:
    lengths = [100, 2, 0]
    history = random_history(lengths, 1, 192, head_dim_v=128, dtype=torch.bfloat16)
    q = random_queries(3, 4, 16, 192, dtype=torch.bfloat16)
    cache = history.paged(16)
    assert cache["block_table"].shape[0] == 3
    out, lse = on.decode(q, **cache)
    wanted, wanted_lse = attend(q, history)
    assert_near(out, torch.stack(wanted))
    assert_near_lse(lse, torch.stack(wanted_lse))
    counts, counts_lse = on.decode(torch.zeros_like(q), **cache)
    for row, seen in enumerate([[97, 98, 99, 100], [0, 0, 1, 2], [0, 0, 0, 0]]):
        for step, visible in enumerate(seen):
            expected = math.log(visible) if visible else -math.inf
            assert_near_lse(counts_lse[row, step], torch.full((16,), expected, dtype=torch.float64))
            assert bool(counts[row, step].any()) == (visible > 0)


@pytest.mark.parametrize("num_splits", [1, 3])
@every_backend
def test_M03_rows_shorter_than_their_queries_stay_right_when_split(
    on: InReach, num_splits: int
) -> None:
    history = random_history([100, 2, 0], 1, 64, dtype=torch.float16)
    q = random_queries(3, 4, 16, 64, dtype=torch.float16)
    out, lse = on.decode(q, **history.paged(16), tile=16, num_splits=num_splits)
    wanted, wanted_lse = attend(q, history)
    assert_near(out, torch.stack(wanted))
    assert_near_lse(lse, torch.stack(wanted_lse))


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("capacity", [8, 16384])
@every_backend
def test_M04_offset_comes_from_the_length_not_from_the_capacity(
    on: InReach, capacity: int, layout: str
) -> None:
    lengths = [5, 7]
    history = random_history(lengths, 2, 16)
    q = random_queries(2, 2, 2, 16)
    cache = history.dense(capacity, layout=layout)
    out, lse = on.decode(q, **cache)
    wanted, wanted_lse = attend(q, history)
    assert_near(out, torch.stack(wanted))
    assert_near_lse(lse, torch.stack(wanted_lse))
    probe = position_history(lengths, 2, 16).dense(capacity, layout=layout)
    means, _ = on.decode(torch.zeros(2, 2, 2, 16), **probe)
    for row, length in enumerate(lengths):
        assert_rounded(means[row, 0], (length - 2) / 2)
        assert_rounded(means[row, 1], (length - 1) / 2)


@every_backend
def test_M04_static_cache_with_a_mask_sees_the_same_keys(on: InReach) -> None:
    # The mask covers the last n valid positions: a full-capacity mask is cut to the length.
    history = random_history([5, 7], 2, 16)
    q = random_queries(2, 2, 2, 16)
    cache = history.dense(8)
    position = torch.arange(8)
    newest = lengths32([5, 7])[:, None].long() - 2 + torch.arange(2)
    whole = position <= newest[..., None]
    columns = (lengths32([5, 7]).long() - 5)[:, None] + torch.arange(5)
    mask = whole.gather(2, columns[:, None].expand(2, 2, 5))
    out, lse = on.decode(q, **cache, causal=False, attn_mask=mask)
    wanted, wanted_lse = attend(q, history)
    assert_near(out, torch.stack(wanted))
    assert_near_lse(lse, torch.stack(wanted_lse))
