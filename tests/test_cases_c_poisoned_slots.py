"""Faults that users met elsewhere: what unused, stale and recycled slots hold."""

import math
from typing import Any

import pytest
import torch

from backends_in_reach import INTERPRETED, InReach, backends, every_backend
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
    same_bits,
)
from splitkv import PagedCache, append_kv

POISONS = [math.nan, math.inf, -math.inf, 3e38]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("place", ["pages of 4", "pages of 16", "dense"])
@every_backend
def test_C01_nan_in_unfilled_slots_and_unused_pages_changes_no_bit(
    on: InReach, place: str, poison: float, num_splits: int
) -> None:
    history = random_history([13, 32, 1, 48], 2, 64, dtype=torch.bfloat16)
    q = random_queries(4, 8, 64, dtype=torch.bfloat16)
    results = []
    for fill in (0.0, poison):
        if place == "dense":
            cache = history.dense(128, fill=fill)
        else:
            cache = history.paged(4 if place == "pages of 4" else 16, fill=fill)
        results.append(on.decode(q, **cache, tile=16, num_splits=num_splits))
    assert same_bits(results[0], results[1])
    wanted, wanted_lse = attend(q[:, None], history)
    assert_near(results[1][0], torch.cat(wanted))
    assert_near_lse(results[1][1], torch.cat(wanted_lse))


@pytest.mark.parametrize("pad_page", ["-1", "reserved", "a live row's"])
@every_backend
def test_C03_padding_rows_write_nothing_that_a_live_row_reads(on: InReach, pad_page: str) -> None:
    live, pads, page = [9, 17, 30], 5, 16
    whole = random_history(live, 2, 64)
    before = History([k[:-2] for k in whole.k], [v[:-2] for v in whole.v])
    room = History(
        [torch.cat([k, k[:2]]) for k in before.k], [torch.cat([v, v[:2]]) for v in before.v]
    )
    cache = room.paged(page, fill=0.0, spare_pages=16 - 4, unused=0)
    k, v, live_table = cache["k"], cache["v"], cache["block_table"]
    reserved = sorted(set(range(16)) - set(live_table.flatten().tolist()))
    pointed_at = {"-1": -1, "reserved": reserved[0]}.get(pad_page, int(live_table[2, 1]))
    pad_table = torch.full((pads, live_table.shape[1]), pointed_at, dtype=torch.int32)
    table = torch.cat([live_table, pad_table])
    untouched = k[reserved].clone()
    pad_kv = torch.full((pads, 1, 2, 64), math.nan)
    for step in (1, 2):
        lengths = [length - 2 + step for length in live]
        padded = lengths32([*lengths, *[0] * pads])
        new_k, new_v = (
            torch.stack([rows[n - 1 : n] for rows, n in zip(part, lengths, strict=True)])
            for part in (whole.k, whole.v)
        )
        append_kv(
            PagedCache(k, v, table, padded),
            torch.cat([new_k, pad_kv]),
            torch.cat([new_v, pad_kv]),
        )
        q = random_queries(len(live), 4, 64, seed=step)
        padded_q = torch.cat([q, torch.full((pads, 4, 64), math.nan)])
        out, lse = on.decode(
            padded_q, k, v, block_table=table, seq_lens=padded, layout="NHD", split_size=page
        )
        alone = History(
            [rows[:n] for rows, n in zip(whole.k, lengths, strict=True)],
            [rows[:n] for rows, n in zip(whole.v, lengths, strict=True)],
        )
        unpadded = on.decode(q, **alone.paged(page), split_size=page)
        assert same_bits((out[:3], lse[:3]), unpadded)
        assert bool((out[3:] == 0).all())
        assert bool((lse[3:] == -math.inf).all())
    assert torch.equal(k[reserved], untouched)


@pytest.mark.parametrize("causal", [True, False])
@backends(slow=INTERPRETED)
def test_C04_tail_of_the_last_tile_stays_out_of_the_denominator(on: InReach, causal: bool) -> None:
    lengths = [1, 15, 16, 17, 200, 255, 256, 257]
    history = random_history(lengths, 8, 128, dtype=torch.bfloat16)
    q = torch.zeros(len(lengths), 8, 128, dtype=torch.bfloat16)
    out, lse = on.decode(q, **history.paged(16), causal=causal)
    for row, length in enumerate(lengths):
        assert_near(out[row], history.v[row].double().mean(0))
        assert_near_lse(lse[row], torch.full((8,), math.log(length), dtype=torch.float64))


@pytest.mark.parametrize("causal", [True, False])
@every_backend
def test_C04_mean_position_counts_only_valid_slots(on: InReach, causal: bool) -> None:
    lengths = [1, 17, 255, 257]
    history = position_history(lengths, 2, 16)
    out, lse = on.decode(torch.zeros(4, 2, 16), **history.paged(16), causal=causal)
    for row, length in enumerate(lengths):
        assert_rounded(out[row], (length - 1) / 2)
        assert_near(lse[row], torch.full((2,), math.log(length)))


@pytest.mark.parametrize("window_left", [None, 511])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@every_backend
def test_C06_recycled_pages_of_a_quantised_cache_change_no_bit(
    on: InReach, dtype: torch.dtype, window_left: int | None
) -> None:
    lengths, page = [2001, 2000, 1999], 16
    random = torch.Generator().manual_seed(0)
    codes = [
        torch.randint(0, 120, (n, 2, 64), generator=random, dtype=torch.uint8) for n in lengths
    ]
    history = History(
        [rows.view(dtype) for rows in codes], [rows.flip(0).view(dtype) for rows in codes]
    )
    scales: dict[str, Any] = {
        "k_scale": torch.tensor([0.01, 0.02]),
        "v_scale": torch.tensor([0.5, 0.25]),
    }
    q = random_queries(3, 6, 64)
    fresh = history.paged(page, fill=0.0)
    recycled = history.paged(page, fill=0.0)
    # The former owner filled every slot of the pool; 0x7F is NaN in e4m3 and 127 in int8.
    for name in ("k", "v"):
        stale = torch.full_like(recycled[name].view(torch.uint8), 0x7F)
        for row, length in enumerate(lengths):
            pages = recycled["block_table"][row, : -(-length // page)].long()
            live = recycled[name].view(torch.uint8)[pages].flatten(0, 1)
            live[length:] = 0x7F
            stale[pages] = live.unflatten(0, (len(pages), page))
        recycled[name] = stale.view(dtype)
    results = [
        on.decode(q, **cache, **scales, window_left=window_left, split_size=512)
        for cache in (fresh, recycled)
    ]
    assert same_bits(results[0], results[1])
    exact = History(
        [rows.float() * scales["k_scale"][:, None] for rows in history.k],
        [rows.float() * scales["v_scale"][:, None] for rows in history.v],
    )
    wanted, wanted_lse = attend(q[:, None], exact, window_left=window_left)
    largest = max(float(rows.abs().max()) for rows in exact.v)
    assert_near(results[1][0], torch.cat(wanted), bound=1e-5 * largest)
    assert_near_lse(results[1][1], torch.cat(wanted_lse))
