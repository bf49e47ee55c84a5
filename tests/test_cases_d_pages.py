"""Faults that users met elsewhere: page tables, page sizes and lengths."""

import math
import re
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
    offsets32,
    position_history,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import PagedCache, decode_attention


@pytest.mark.parametrize("bad", [8, -1, 2**31 - 1])
@every_backend
def test_D01_page_id_outside_the_pool_is_named_and_never_read(on: InReach, bad: int) -> None:
    history = random_history([40, 20], 4, 64, dtype=torch.float16)
    cache = history.paged(16, spare_pages=3)
    cache["block_table"][0, 1] = bad
    q = random_queries(2, 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=rf"block_table\[0, 1\] is {bad}.*pages 0 to 7"):
        on.decode(q, **cache, validate="full")


@pytest.mark.parametrize("num_splits", [1, 8])
@every_backend
def test_D02_entries_after_the_used_pages_are_never_dereferenced(
    on: InReach, num_splits: int
) -> None:
    history = random_history([1, 16, 17], 2, 64, dtype=torch.float16)
    q = random_queries(3, 8, 64, dtype=torch.float16)
    cache = history.paged(16, width=8, spare_pages=3)
    poisoned = int(torch.isnan(cache["k"].float()).flatten(1).all(1).nonzero()[0])
    results = []
    for unused in (-1, 10**9, poisoned):
        cache = history.paged(16, width=8, spare_pages=3, unused=unused)
        results.append(on.decode(q, **cache, tile=16, num_splits=num_splits, validate="full"))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    wanted, wanted_lse = attend(q[:, None], history)
    assert_near(results[0][0], torch.cat(wanted))
    assert_near_lse(results[0][1], torch.cat(wanted_lse))


@every_backend
def test_D04_lengths_beyond_the_tables_capacity_are_refused(on: InReach) -> None:
    # A warm-up for 512 tokens over a table that addresses 4 pages of 16.
    cache = random_history([64] * 8, 8, 64, dtype=torch.float16).paged(16)
    cache["seq_lens"] = lengths32([512] * 8)
    q = random_queries(8, 8, 64, dtype=torch.float16)
    plans: list[dict[str, Any]] = [{}, {"tile": 16, "num_splits": 4}]
    for plan in plans:
        with pytest.raises(ValueError, match=r"seq_lens\[0\] is 512.*capacity is 64 tokens"):
            on.decode(q, **cache, **plan, validate="full")


@every_backend
def test_D06_page_table_may_be_any_view(on: InReach) -> None:
    history = random_history([3, 9, 24, 31], 2, 64, dtype=torch.float16)
    q = random_queries(4, 4, 64, dtype=torch.float16)
    cache = history.paged(8)
    table = cache.pop("block_table")
    wide = torch.full((4, 8), 10**6, dtype=torch.int32)
    wide[:, ::2] = table
    long_rows = torch.full((4, 64), 10**6, dtype=torch.int32)
    long_rows[:, :4] = table
    views = [wide[:, ::2], long_rows[:, :4], table.t().contiguous().t()]
    contiguous = on.decode(q, **cache, block_table=table)
    for view in views:
        assert view.stride() != table.stride()
        assert same_bits(on.decode(q, **cache, block_table=view), contiguous)
    assert_near(contiguous[0], torch.cat(attend(q[:, None], history)[0]))


METADATA = ["seq_lens", "block_table", "cu_seqlens_q", "cu_seqlens_k", "kv_indptr", "kv_indices"]


def call_with_metadata() -> tuple[torch.Tensor, History]:
    history = random_history([1], 8, 64, dtype=torch.bfloat16)
    both = History(history.k * 2, history.v * 2)
    q = random_queries(1, 32, 64, dtype=torch.bfloat16).expand(2, 32, 64).contiguous()
    return q, both


def metadata_arguments(history: History, name: str) -> dict[str, Any]:
    if name == "cu_seqlens_k":
        return history.packed()
    cache = history.paged(2)
    if name == "cu_seqlens_q":
        return {**cache, "cu_seqlens_q": offsets32([1, 1])}
    if name in ("kv_indptr", "kv_indices"):
        table = cache.pop("block_table")
        return {**cache, "kv_indptr": offsets32([1, 1]), "kv_indices": table.flatten()}
    return cache


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", METADATA)
@backends(slow=INTERPRETED)
def test_D07_int32_and_int64_metadata_mean_the_same(
    on: InReach, name: str, dtype: torch.dtype
) -> None:
    q, history = call_with_metadata()
    arguments = metadata_arguments(history, name)
    arguments[name] = arguments[name].to(dtype)
    if name.startswith("kv_"):
        out = decode_attention(q, **arguments)  # turned into a table before any backend sees it
        assert isinstance(out, torch.Tensor)
    else:
        out, _ = on.decode(q, **arguments)
    assert_near(out, torch.cat(attend(q[:, None], history)[0]))
    assert same_bits((out[0],), (out[1],))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
@pytest.mark.parametrize("name", METADATA)
def test_D07_narrow_metadata_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    q, history = call_with_metadata()
    arguments = metadata_arguments(history, name)
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(ValueError, match=rf"{name} must be int32 or int64, got {dtype}"):
        decode_attention(q, **arguments)


def last_page_cache(last_page_len: list[int]) -> PagedCache:
    pool = torch.zeros(4, 16, 4, 64)
    return PagedCache.from_indptr(
        pool,
        pool,
        offsets32([1, 2, 2]),
        lengths32([0, 1, 2, 3, 0]),
        last_page_len=lengths32(last_page_len),
    )


def test_D09_full_last_page_counts_whole() -> None:
    cache = last_page_cache([16, 16, 1])
    assert cache.seq_lens.tolist() == [16, 32, 17]
    assert cache.block_table.tolist() == [[0, -1], [1, 2], [3, 0]]


@pytest.mark.parametrize(("last", "index", "value"), [([0, 0, 1], 0, 0), ([16, 17, 1], 1, 17)])
def test_D09_last_page_length_of_zero_or_above_the_page_is_refused(
    last: list[int], index: int, value: int
) -> None:
    with pytest.raises(
        ValueError, match=rf"last_page_len\[{index}\] is {value}, allowed are 1 to 16"
    ):
        last_page_cache(last)


@pytest.mark.parametrize("page_size", [480, 1, 3, 24, 784])
@every_backend
def test_D10_page_size_need_not_be_a_power_of_two(on: InReach, page_size: int) -> None:
    history = random_history([479, 481, 960, 7], 1, 576, head_dim_v=512, dtype=torch.bfloat16)
    q = random_queries(4, 16, 576, dtype=torch.bfloat16)
    wanted, wanted_lse = attend(q[:, None], history)
    for size in (16, page_size):
        out, lse = on.decode(q, **history.paged(size))
        assert_near(out, torch.cat(wanted))
        assert_near_lse(lse, torch.cat(wanted_lse))


@pytest.mark.parametrize("steps", [1, 32])
@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64, 128, 256])
@backends(slow=INTERPRETED)
def test_D11_every_page_size_is_right_or_refused(on: InReach, page_size: int, steps: int) -> None:
    history = random_history([100, 300], 8, 128, dtype=torch.bfloat16)
    q = random_queries(2, steps, 16, 128, dtype=torch.bfloat16)
    out, lse = on.decode(q, **history.paged(page_size))
    wanted, wanted_lse = attend(q, history)
    assert_near(out, torch.stack(wanted))
    assert_near_lse(lse, torch.stack(wanted_lse))


@pytest.mark.parametrize("freed", ["-1", "0", "another request's page"])
@every_backend
def test_D13_pages_left_of_the_window_may_be_freed(on: InReach, freed: str) -> None:
    history = random_history([200, 64], 2, 64, dtype=torch.float16)
    q = random_queries(2, 8, 64, dtype=torch.float16)
    cache = history.paged(16)
    kept = on.decode(q, **cache, window_left=31)
    table = cache["block_table"].clone()
    other = int(table[1, 3])
    table[0, :10] = {"-1": -1, "0": 0}.get(freed, other)
    table[1, :2] = {"-1": -1, "0": 0}.get(freed, int(table[0, 12]))
    cache["block_table"] = table
    assert same_bits(on.decode(q, **cache, window_left=31, validate="full"), kept)
    wanted, wanted_lse = attend(q[:, None], history, window_left=31)
    assert_near(kept[0], torch.cat(wanted))
    assert_near_lse(kept[1], torch.cat(wanted_lse))


BAD_LENGTHS = [([5, -1, 3], 1, -1), ([2**31, 1, 1], 0, 2**31)]


@pytest.mark.parametrize(("lengths", "index", "value"), BAD_LENGTHS)
@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_D14_negative_and_too_large_lengths_are_named(
    kind: str, lengths: list[int], index: int, value: int
) -> None:
    cache = random_history([5, 1, 3], 2, 64).paged(16)
    cache["seq_lens"] = lengths if kind == "list" else torch.tensor(lengths)
    with pytest.raises(ValueError, match=rf"seq_lens\[{index}\] is {value}"):
        decode_attention(random_queries(3, 4, 64), **cache)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 1, 4], "[2] is 1 after 2"),
        ([0, 1, 2, 5], "[3] must be the row count 4, got 5"),
        ([1, 2, 3, 4], "[0] must be 0, got 1"),
    ],
)
def test_D14_offsets_that_fall_or_miss_an_end_are_named(
    name: str, offsets: list[int], message: str
) -> None:
    arguments = random_history([1, 1, 2], 2, 64).packed()
    arguments["cu_seqlens_q"] = offsets32([1, 1, 2])
    arguments[name] = lengths32(offsets)
    with pytest.raises(ValueError, match=re.escape(name) + ".*" + re.escape(message)):
        decode_attention(random_queries(4, 4, 64), **arguments)


@every_backend
def test_D14_uniform_probe_sees_exactly_the_valid_lengths(on: InReach) -> None:
    lengths = [5, 0, 3]
    out, lse = on.decode(torch.zeros(3, 4, 64), **position_history(lengths, 2, 64).paged(16))
    assert_rounded(out[0], 2.0)
    assert bool((out[1] == 0).all())
    assert_rounded(out[2], 1.0)
    logs = torch.tensor([math.log(5), -math.inf, math.log(3)], dtype=torch.float64)
    assert_near_lse(lse, logs[:, None].expand(3, 4))
