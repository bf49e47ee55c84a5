"""Faults that users met elsewhere: one plan serves calls whose lengths have changed since.

A graph on a device replays a launch whose plan it captured. What the plan promises for that is
checked here on every backend, without a graph.
"""

import math

import pytest
import torch

from backends_in_reach import INTERPRETED, InReach, backends, every_backend, spec_of
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

REPLAYS = [[1, 17, 4096, 300], [4096, 4096, 4096, 4096], [0, 5, 1, 2], [129, 4095, 1, 64]]


def shortened(history: History, lengths: list[int]) -> History:
    return History(
        [rows[:n] for rows, n in zip(history.k, lengths, strict=True)],
        [rows[:n] for rows, n in zip(history.v, lengths, strict=True)],
    )


@pytest.mark.parametrize("lengths", REPLAYS, ids=str)
@backends(slow=INTERPRETED)
def test_G01_plan_for_an_upper_bound_serves_every_shorter_replay(
    on: InReach, lengths: list[int]
) -> None:
    history = random_history([4096] * 4, 8, 128, dtype=torch.bfloat16)
    q = random_queries(4, 32, 128, dtype=torch.bfloat16)
    cache = history.paged(16)
    plan = on.plan(spec_of(q, **cache), [4096] * 4, num_splits=8)
    first = on.decode(q, **cache, plan=plan)
    cache["seq_lens"] = lengths32(lengths)
    replayed = on.decode(q, **cache, plan=plan)
    eager = on.decode(q, **cache, plan=on.plan(spec_of(q, **cache), [4096] * 4, num_splits=8))
    assert same_bits(replayed, eager)
    wanted, wanted_lse = attend(q[:, None], shortened(history, lengths))
    assert_near(replayed[0], torch.cat(wanted))
    assert_near_lse(replayed[1], torch.cat(wanted_lse))
    cache["seq_lens"] = lengths32([4096] * 4)
    assert same_bits(on.decode(q, **cache, plan=plan), first)


@backends(slow=INTERPRETED)
def test_G01_plan_captured_at_length_one_grows_by_refresh(on: InReach) -> None:
    history = random_history([4096] * 4, 8, 128, dtype=torch.bfloat16)
    q = random_queries(4, 32, 128, dtype=torch.bfloat16)
    cache = history.paged(16)
    spec = spec_of(q, **cache)
    plan = on.plan(spec, [1] * 4, num_splits=8, capacity=64)
    for lengths in ([1] * 4, *REPLAYS):
        plan.refresh(lengths)
        cache["seq_lens"] = lengths32(lengths)
        fresh = on.plan(spec, lengths, num_splits=8)
        assert same_bits(on.decode(q, **cache, plan=plan), on.decode(q, **cache, plan=fresh))


@every_backend
def test_G01_lengths_beyond_the_plan_are_refused_not_cut_off(on: InReach) -> None:
    history = random_history([32], 2, 64, dtype=torch.float16)
    q = random_queries(1, 4, 64, dtype=torch.float16)
    cache = history.paged(16)
    plan = on.plan(spec_of(q, **cache), [1])
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 32.*the plan was made for 1;"):
        on.decode(q, **cache, plan=plan, validate="full")
    cache["seq_lens"] = lengths32([1])
    on.decode(q, **cache, plan=plan, validate="full")
    cache["seq_lens"] = lengths32([32])
    # The plan is bound to such calls by now; whoever asks for values to be checked still gets it.
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 32.*the plan was made for 1;"):
        on.decode(q, **cache, plan=plan, validate="full")


@backends(slow=INTERPRETED)
def test_G03_padded_rows_are_zero_and_live_rows_do_not_notice(on: InReach) -> None:
    live, bucket = 100, 112
    lengths = [1 + (37 * row) % 2000 for row in range(live)]
    history = random_history(lengths, 2, 16, dtype=torch.float16)
    q = random_queries(bucket, 4, 16, dtype=torch.float16)
    cache = history.paged(16)
    alone = on.decode(q[:live], **cache, split_size=512)
    table = torch.full((bucket, cache["block_table"].shape[1]), -1, dtype=torch.int32)
    table[:live] = cache["block_table"]
    cache["block_table"] = table
    cache["seq_lens"] = lengths32(lengths + [0] * (bucket - live))
    out, lse = on.decode(q, **cache, split_size=512)
    assert same_bits((out[:live], lse[:live]), alone)
    assert bool((out[live:] == 0).all())
    assert bool((lse[live:] == -math.inf).all())
    wanted, wanted_lse = attend(q[:live, None], history)
    assert_near(out[:live], torch.cat(wanted))
    assert_near_lse(lse[:live], torch.cat(wanted_lse))


@backends(slow=INTERPRETED)
def test_G03_packed_tokens_padded_by_repeating_the_last_offset(on: InReach) -> None:
    counts = [5, 60]  # 65 tokens padded to 72 by a third request without queries or keys
    history = random_history([40, 100, 0], 2, 16, dtype=torch.float16)
    q = random_queries(72, 4, 16, dtype=torch.float16)
    q[65:] = math.nan
    out, lse = on.decode(q, **history.paged(16), cu_seqlens_q=offsets32([*counts, 7]))
    wanted, wanted_lse = attend(q[:65].split(counts), shortened_to_two(history))
    assert_near(out[:65], torch.cat(wanted))
    assert_near_lse(lse[:65], torch.cat(wanted_lse))
    assert bool((out[65:] == 0).all())


def shortened_to_two(history: History) -> History:
    return History(history.k[:2], history.v[:2])


@every_backend
def test_G06_replay_with_other_query_offsets_shifts_no_row(on: InReach) -> None:
    accepted, lengths, stride = [1, 3, 2], [50, 60, 70], 4
    history = random_history(lengths, 2, 64, dtype=torch.float16)
    cache = history.paged(16)
    captured = random_queries(3 * stride, 4, 64, dtype=torch.float16)
    spec = spec_of(captured, **cache, cu_seqlens_q=offsets32([stride] * 3))
    plan = on.plan(spec, lengths, tile=16, num_splits=3)
    on.decode(captured, **cache, cu_seqlens_q=offsets32([stride] * 3), plan=plan)
    rows = [
        captured[stride * row + stride - n : stride * (row + 1)] for row, n in enumerate(accepted)
    ]
    wanted, wanted_lse = attend(rows, history)
    # Uniform stride: the accepted queries stand last, the unused rows before them hold NaN.
    uniform = torch.full_like(captured, math.nan)
    for row, queries in enumerate(rows):
        uniform[stride * (row + 1) - len(queries) : stride * (row + 1)] = queries
    out, lse = on.decode(uniform, **cache, cu_seqlens_q=offsets32([stride] * 3), plan=plan)
    used = torch.cat(
        [torch.arange(stride * (row + 1) - n, stride * (row + 1)) for row, n in enumerate(accepted)]
    )
    assert_near(out[used], torch.cat(wanted))
    assert_near_lse(lse[used], torch.cat(wanted_lse))
    # Ragged: the same plan and the captured spec, whose S is still 4, under other offsets.
    ragged = on.decode_as(
        spec, torch.cat(rows), **cache, cu_seqlens_q=offsets32(accepted), plan=plan
    )
    assert_near(ragged[0], torch.cat(wanted))
    assert_near_lse(ragged[1], torch.cat(wanted_lse))
