"""Faults that users met elsewhere: sliding windows, ring buffers, eviction."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backends_in_reach import INTERPRETED, InReach, backends, every_backend, spec_of
from histories import (
    History,
    assert_near,
    assert_near_lse,
    assert_rounded,
    attend,
    lengths32,
    offsets32,
    position_history,
    random_history,
    random_queries,
)
from splitkv import RingCache, append_kv
from splitkv.layers.ring_history import RingHistory, missing_prefix


def constant(value: float, like: Tensor) -> Tensor:
    return torch.full_like(like, value, dtype=torch.float64)


@pytest.mark.parametrize("place", ["dense", "pages of 4", "ring"])
@pytest.mark.parametrize(
    ("window", "mean", "visible"),
    [
        ({"window_left": 3}, 7.5, 4),
        ({"sliding_window": 4}, 7.5, 4),
        ({"window_left": -1}, 4.5, 10),
        ({}, 4.5, 10),
        ({"window_left": 0}, 9.0, 1),
    ],
    ids=str,
)
@every_backend
def test_I01_window_counts_the_current_token_or_not(
    on: InReach, window: dict[str, Any], mean: float, visible: int, place: str
) -> None:
    history = position_history([10], 1, 16)
    q = torch.zeros(1, 2, 16)
    if place == "ring":
        cache = ring_of_pages(history, page=4, blocks=3)
        out, lse = on.decode_as(spec_of(q, **cache, **window), q, **cache, ring=True)
    else:
        cache = history.dense() if place == "dense" else history.paged(4)
        out, lse = on.decode(q, **cache, **window)
    assert_rounded(out, mean)
    assert_near_lse(lse, constant(math.log(visible), lse))


def ring_of_pages(history: History, page: int, blocks: int) -> dict[str, Any]:
    """A ring that just holds the one request of ``history``, its table in an order of its own."""
    cache = history.paged(page, spare_pages=0, seed=5)
    assert cache["block_table"].shape[1] == blocks
    return cache


@backends(slow=INTERPRETED)
def test_I02_oldest_key_of_a_gathered_window_counts(on: InReach) -> None:
    lengths, left = [4095, 4096, 5000], 4095
    history = random_history(lengths, 4, 64)
    oldest = [max(0, length - 1 - left) for length in lengths]
    assert oldest == [0, 0, 904]
    for rows, position in zip(history.k, oldest, strict=True):
        rows.zero_()
        rows[position, :, 0] = 30.0
    q = torch.zeros(3, 8, 64)
    q[..., 0] = 1.0
    out, _ = on.decode(q, **history.paged(1), window_left=left, sm_scale=1.0)
    for row, position in enumerate(oldest):
        value = history.v[row][position].repeat_interleave(2, 0)
        assert_near(out[row], value, bound=1e-5)


@every_backend
def test_I03_every_draft_token_has_its_own_window_start(on: InReach) -> None:
    history = position_history([20, 9], 1, 64)
    q = torch.zeros(5, 16, 64)
    out, lse = on.decode(q, **history.paged(16), cu_seqlens_q=offsets32([4, 1]), window_left=5)
    for row, mean in enumerate([13.5, 14.5, 15.5, 16.5, 5.5]):
        assert_rounded(out[row], mean)
    assert_near_lse(lse, constant(math.log(6), lse))


@pytest.mark.parametrize("length", [1, 128, 129, 256])
@backends(slow=INTERPRETED)
def test_I05_decode_row_equals_the_last_row_of_a_windowed_prefill(on: InReach, length: int) -> None:
    assert_step_equals_prefill(on, length)


@pytest.mark.slow
@backends(without=INTERPRETED)
def test_I05_decode_row_equals_the_last_row_of_a_long_windowed_prefill(on: InReach) -> None:
    assert_step_equals_prefill(on, 1000)


def assert_step_equals_prefill(on: InReach, length: int) -> None:
    cache = position_history([length], 8, 64).dense()
    step, step_lse = on.decode(torch.zeros(1, 64, 64), **cache, window_left=128)
    rows, rows_lse = on.decode(torch.zeros(1, length, 64, 64), **cache, window_left=128)
    first = max(0, length - 129)
    for out, lse in ((step, step_lse), (rows[:, -1], rows_lse[:, -1])):
        assert_rounded(out, (first + length - 1) / 2)
        assert_near_lse(lse, constant(math.log(length - first), lse))


@backends(slow=INTERPRETED)
def test_I06_window_may_begin_inside_a_split_and_a_page(on: InReach) -> None:
    history = random_history([5000, 40], 2, 64)
    q = random_queries(2, 2, 8, 64)
    wanted, wanted_lse = attend(q, history, window_left=100)
    cache = history.paged(16)
    for tile in (16, None):
        for num_splits in (1, 3, 16, 64):
            out, lse = on.decode(q, **cache, window_left=100, num_splits=num_splits, tile=tile)
            assert_near(out, torch.stack(wanted))
            assert_near_lse(lse, torch.stack(wanted_lse))


@backends(slow=INTERPRETED)
def test_I06_plan_of_longer_requests_follows_the_window_back(on: InReach) -> None:
    # Every split planned for 9000 tokens lies beyond the 5000 that are there, but for the one that
    # opens the window.
    history = random_history([5000, 40], 2, 64)
    q = random_queries(2, 2, 8, 64)
    wanted, wanted_lse = attend(q, history, window_left=100)
    cache = history.paged(16)
    plan = on.plan(spec_of(q, **cache, window_left=100), [9000, 5000], tile=16, num_splits=16)
    out, lse = on.decode(q, **cache, window_left=100, plan=plan)
    assert_near(out, torch.stack(wanted))
    assert_near_lse(lse, torch.stack(wanted_lse))


@every_backend
def test_I07_shared_prefix_keeps_to_the_window(on: InReach) -> None:
    prefix, suffixes, left = 64, [1, 20, 100], 50
    shared = random_history([prefix], 2, 32)
    own = random_history(suffixes, 2, 32, seed=7)
    q = random_queries(3, 4, 32)
    pages = shared.paged(16)
    pages["block_table"] = pages["block_table"].expand(3, -1)
    pages["seq_lens"] = lengths32([prefix] * 3)
    position = torch.tensor([prefix + length - 1 for length in suffixes])
    near = position[:, None, None] - torch.arange(prefix) <= left
    states = [
        on.partial(q, **pages, attn_mask=near),
        on.partial(q, **own.paged(16), window_left=left),
    ]
    assert bool((states[0].lse[2] == -math.inf).all())
    merged = on.merge(states)
    whole = History(
        [torch.cat([shared.k[0], rows]) for rows in own.k],
        [torch.cat([shared.v[0], rows]) for rows in own.v],
    )
    wanted, wanted_lse = attend(q[:, None], whole, window_left=left)
    assert_near(merged.out, torch.cat(wanted))
    assert_near_lse(merged.lse, torch.cat(wanted_lse))


def empty_ring(page: int, tokens: int, heads: int, dim: int) -> dict[str, Any]:
    """A ring of ``tokens`` slots that hold NaN, pages in falling order."""
    blocks = tokens // page
    pool = torch.full((blocks, page, heads, dim), math.nan)
    table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
    return {"k": pool, "v": pool.clone(), "block_table": table, "layout": "NHD"}


def append(ring: dict[str, Any], length: int, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Write the newest ``len(k)`` of ``length`` tokens; the ring at that length."""
    at_length = {**ring, "seq_lens": lengths32([length])}
    append_kv(RingCache(**at_length), k[None], v[None])
    return at_length


@every_backend
def test_I09_ring_drops_a_key_when_the_length_exceeds_it_not_before(on: InReach) -> None:
    ring = empty_ring(page=1, tokens=8, heads=1, dim=4)
    keys = (10 + torch.arange(11) / 10)[:, None, None].expand(11, 1, 4)
    q = torch.zeros(1, 1, 4)
    for length in range(6, 12):
        new = keys[:6] if length == 6 else keys[length - 1 : length]
        cache = append(ring, length, new, new)
        spec = spec_of(q, **cache, sliding_window=8)
        out, lse = on.decode_as(spec, q, **cache, ring=True)
        visible = min(length, 8)
        assert_near(out, constant(10 + (length - visible + length - 1) / 20, out), bound=2e-6)
        assert_near_lse(lse, constant(math.log(visible), lse))
        if length in (8, 9):
            assert round(float(out[0, 0, 0]), 4) == {8: 10.35, 9: 10.45}[length]


def ring_history(page: int, tokens: int, window: int) -> RingHistory:
    ring = empty_ring(page, tokens, 1, 8)
    return RingHistory(RingCache(**ring, seq_lens=lengths32([0])), window)


@pytest.mark.parametrize("length", [18, 16])
@every_backend
def test_I12_a_ring_is_cut_back_after_it_went_round_and_written_anew(
    on: InReach, length: int
) -> None:
    rejected, history = random_history([20], 1, 8), random_history([length + 5], 1, 8)
    for part in ("k", "v"):  # the tokens kept are the same in both
        getattr(rejected, part)[0][:length] = getattr(history, part)[0][:length]
    q = random_queries(1, 5, 1, 8)
    ring = ring_history(page=4, tokens=16, window=8)
    for at in range(20):
        ring.append(rejected.k[0][None, at], rejected.v[0][None, at])
    ring.trim([length])
    ring.append(history.k[0][None, length:], history.v[0][None, length:])
    cache = ring.cache
    given = {"k": cache.k, "v": cache.v, "block_table": cache.block_table}
    given |= {"seq_lens": cache.seq_lens, "layout": "NHD"}
    out, lse = on.decode_as(spec_of(q, **given, sliding_window=8), q, **given, ring=True)
    wanted, wanted_lse = attend(q, history, window_left=7)
    assert_near(out[0], wanted[0])
    assert_near_lse(lse[0], wanted_lse[0])


@pytest.mark.parametrize("length", [5, 3])
def test_I12_a_ring_is_not_cut_back_to_what_it_wrote_over(length: int) -> None:
    ring = ring_history(page=4, tokens=16, window=8)
    ring.append(*torch.zeros(2, 1, 20, 1, 8))
    with pytest.raises(ValueError, match=rf"lengths\[0\] is {length}.*0 to 3 were written over"):
        ring.trim([length])
    assert ring.lengths == [20]
    # rejected tokens have been written over the oldest ones too: cutting back does not undo that
    ring.trim([16])
    with pytest.raises(ValueError, match="0 to 3 were written over"):
        ring.trim([length])


def test_I14_a_prefix_is_used_again_only_if_the_smallest_ring_holds_it() -> None:
    layers = [ring_history(page=1, tokens=w, window=w) for w in (64, 512)]
    for layer in layers:
        layer.append(*torch.zeros(2, 1, 100, 1, 8))
    assert missing_prefix(layers, 0, 100) == ["layer 0 has written over positions 0 to 35"]
    assert missing_prefix(layers[1:], 0, 100) == []
    assert missing_prefix(layers[1:], 0, 101) == ["layer 0 holds 100 tokens, 101 were asked for"]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("chunk", [3, 8, 16, 17])
@backends(slow=INTERPRETED)
def test_I13_chunk_longer_than_the_ring_allows_is_refused_others_equal_one_shot(
    on: InReach, chunk: int, page: int
) -> None:
    total, window, tokens = 64, 8, 16
    history = random_history([total], 2, 16)
    queries = random_queries(1, total, 2, 16)
    wanted, wanted_lse = attend(queries, history, window_left=window - 1)
    ring = empty_ring(page, tokens, 2, 16)
    refused = False
    for start in range(0, total, chunk):
        part = slice(start, min(start + chunk, total))
        q = queries[:, part]
        needed = part.stop - max(0, start - window + 1)
        cache = append(ring, part.stop, history.k[0][part], history.v[0][part])
        spec = spec_of(q, **cache, sliding_window=window)
        if needed > tokens:
            with pytest.raises(ValueError, match=rf"seq_lens\[0\] is {part.stop}: the ring holds"):
                on.decode_as(spec, q, **cache, ring=True, validate="full")
            refused = True
            break
        out, lse = on.decode_as(spec, q, **cache, ring=True, validate="full")
        assert_near(out[0], wanted[0][part])
        assert_near_lse(lse[0], wanted_lse[0][part])
    assert refused == (chunk > tokens - window)


@pytest.mark.parametrize("resident", [20, 35])
@every_backend
def test_I16_compressed_cache_counts_slots_not_positions(on: InReach, resident: int) -> None:
    # Of 60 tokens ``resident`` are left; 4 new ones follow. The length is what is resident.
    history = random_history([resident + 4], 2, 16)
    q = random_queries(1, 4, 2, 16)
    out, lse = on.decode(q, **history.dense(64))
    step = torch.arange(4)[:, None]
    mask = torch.arange(resident + 4) <= resident + step
    wanted, wanted_lse = attend(q, history, causal=False, mask=mask[None])
    assert_near(out[0], wanted[0])
    assert_near_lse(lse[0], wanted_lse[0])
    probe = position_history([resident + 4], 2, 16).dense(64)
    means, _ = on.decode(torch.zeros(1, 4, 2, 16), **probe)
    for row in range(4):
        assert_rounded(means[0, row], (resident + row) / 2)
