"""Faults that users met elsewhere: splits, the planner and its workspace."""

import math
from dataclasses import replace

import pytest
import torch

from backends_in_reach import INTERPRETED, NOT_NATIVE, InReach, backends, spec_of
from histories import (
    assert_near,
    assert_near_lse,
    assert_rounded,
    attend,
    offsets32,
    position_history,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import PROFILES, DecodeSpec, Layout, plan_splits


@pytest.mark.parametrize("place", ["dense", "pages of 16"])
@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 16, 64])
@backends(slow=INTERPRETED)
def test_F01_split_length_need_not_divide_and_may_be_below_a_tile(
    on: InReach, num_splits: int, tile: int, place: str
) -> None:
    lengths = [1, 5, 31, 100, 1000, 1023, 1025]
    positions = position_history(lengths, 8, 128)
    values = random_history(lengths, 8, 128, dtype=torch.bfloat16, seed=4)
    q = random_queries(len(lengths), 32, 128, dtype=torch.bfloat16)
    wanted, wanted_lse = attend(q[:, None], values)
    for history, queries in ((positions, torch.zeros(len(lengths), 32, 128)), (values, q)):
        cache = history.dense() if place == "dense" else history.paged(16)
        with on.may_refuse("allocate T in multiples of 128"):
            out, lse = on.decode(queries, **cache, tile=tile, num_splits=num_splits)
        if history is values:
            assert_near(out, torch.cat(wanted))
            assert_near_lse(lse, torch.cat(wanted_lse))
            continue
        for row, length in enumerate(lengths):
            assert_rounded(out[row], (length - 1) / 2)
            assert_near_lse(lse[row], torch.full((32,), math.log(length), dtype=torch.float64))


@pytest.mark.parametrize("counts", [[1, 1], [3, 5]])
@backends(slow=INTERPRETED)
def test_F03_every_sequence_of_a_packed_batch_gets_its_own_rows(
    on: InReach, counts: list[int]
) -> None:
    history = random_history([1024, 1024], 4, 64, dtype=torch.bfloat16)
    q = random_queries(sum(counts), 4, 64, dtype=torch.bfloat16)
    wanted, wanted_lse = attend(q.split(counts), history)
    for num_splits in (1, 2, 5):
        out = torch.full_like(q, math.nan)
        result = on.decode(
            q,
            **history.paged(256),
            cu_seqlens_q=offsets32(counts),
            tile=128,
            num_splits=num_splits,
            out=out,
        )
        assert_near(result[0], torch.cat(wanted))
        assert_near_lse(result[1], torch.cat(wanted_lse))


@backends(slow=NOT_NATIVE)
def test_F04_automatic_splits_are_right_at_every_length_and_equal_what_they_report(
    on: InReach,
) -> None:
    whole = random_history([600], 8, 128, dtype=torch.bfloat16)
    cache = whole.paged(256)
    q = random_queries(1, 32, 128, dtype=torch.bfloat16)
    spec = spec_of(q, **cache)
    keys = whole.k[0].double().repeat_interleave(4, 1)
    values = whole.v[0].double().repeat_interleave(4, 1)
    scores = torch.einsum("hd,thd->ht", q[0].double(), keys) * 128**-0.5
    cut, wanted = 0, torch.empty(0)
    for length in range(1, 601):
        cache["seq_lens"] = torch.tensor([length], dtype=torch.int32)
        weights = torch.softmax(scores[:, :length], 1)
        wanted = torch.einsum("ht,thd->hd", weights, values[:length])
        automatic = on.decode(q, **cache, tile=16)
        assert_near(automatic[0][0], wanted)
        reported = on.plan(spec, [length], tile=16).max_splits
        assert same_bits(on.decode(q, **cache, tile=16, num_splits=reported), automatic)
        cut = max(cut, reported)
    assert_near(on.decode(q, **cache)[0][0], wanted)
    assert cut == 3  # pages of 256: automatic splits did happen


COUNTS = [*range(1, 65), 96, 128]


@backends(slow=NOT_NATIVE)
def test_F05_every_explicit_split_count_gives_the_same_answer(on: InReach) -> None:
    history = random_history([4096], 8, 128, dtype=torch.bfloat16)
    q = random_queries(1, 16, 128, dtype=torch.bfloat16)
    cache = history.dense()
    wanted, wanted_lse = attend([q], history)
    for num_splits in COUNTS:
        first = on.decode(q, **cache, tile=32, num_splits=num_splits)
        assert_near(first[0], wanted[0])
        assert_near_lse(first[1], wanted_lse[0])
        repeats = 20 if num_splits in (1, 2, 16, 32, 128) else 2
        for _ in range(repeats):
            assert same_bits(on.decode(q, **cache, tile=32, num_splits=num_splits), first)


@pytest.mark.parametrize("workers", [1, 20, 108, 132, 256])
def test_F07_splits_follow_lengths_and_kv_heads_not_capacity(workers: int) -> None:
    profile = replace(PROFILES["NVIDIA H200"], workers=workers, neighbours=1)
    spec = DecodeSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, layout=Layout.BSND)
    for length in (200, 131072):
        plan = plan_splits(spec, [length], profile=profile)
        tiles = -(-length // profile.tile_tokens)
        assert plan.num_splits <= tiles
        assert int(plan.lengths.sum()) == length
        assert int(plan.lengths.min()) > 0
        more = plan_splits(replace(spec, num_kv_heads=1), [length], profile=profile)
        assert more.num_splits >= plan.num_splits
        more_q_heads = plan_splits(replace(spec, num_q_heads=64), [length], profile=profile)
        assert more_q_heads.num_splits <= plan.num_splits
        if length == 131072 and workers > 8:
            assert plan.num_splits * 8 >= workers / 2


@pytest.mark.parametrize("gathered", [1, 8])
def test_F09_workspace_is_exact_and_one_split_too_few_is_refused_when_planning(
    gathered: int,
) -> None:
    spec = DecodeSpec(
        num_q_heads=64 * gathered,
        num_kv_heads=4,
        head_dim=256,
        layout=Layout.NHD,
        page_size=16,
    )
    lengths = [3072] * 528
    profile = PROFILES["NVIDIA H200"]
    for num_splits in (None, 4):
        plan = plan_splits(spec, lengths, profile=profile, num_splits=num_splits)
        cut = plan.num_splits if plan.max_splits > 1 else 0
        assert plan.partial_bytes == cut * 64 * gathered * (256 + 2) * 4
        need = plan.num_splits
        exact = plan_splits(spec, lengths, profile=profile, num_splits=num_splits, capacity=need)
        assert exact.num_splits == need
        with pytest.raises(ValueError, match=rf"capacity {need - 1} is below the {need} splits"):
            plan_splits(spec, lengths, profile=profile, num_splits=num_splits, capacity=need - 1)
    small = plan_splits(spec, [1] * 528, profile=profile, num_splits=4)
    with pytest.raises(ValueError, match=r"need 2112 splits, the plan's capacity is 528"):
        small.refresh(lengths)
    assert small.num_splits == 528


@pytest.mark.parametrize("head_dim", [80, 96, 112])
@backends(slow=INTERPRETED)
def test_F11_head_dims_below_their_padding_write_no_neighbour(on: InReach, head_dim: int) -> None:
    history = random_history([4000, 100], 2, head_dim, dtype=torch.float16)
    q = random_queries(2, 8, head_dim, dtype=torch.float16)
    guard = 128
    with on.active():
        placed = on.place(torch.full((q.numel() + 2 * guard,), 7.0, dtype=torch.float16))
        inside = placed[guard:-guard].view(q.shape)
        out, lse = on.decode(q, **history.paged(16), tile=16, num_splits=16, out=inside)
        buffer = placed.cpu()
    wanted, wanted_lse = attend(q[:, None], history)
    assert_near(out, torch.cat(wanted))
    assert_near_lse(lse, torch.cat(wanted_lse))
    assert bool((buffer[:guard] == 7.0).all())
    assert bool((buffer[-guard:] == 7.0).all())
    assert torch.equal(buffer[guard:-guard].view(q.shape), out)
