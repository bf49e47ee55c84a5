"""Faults that users met elsewhere: block-sparse attention, here masks over pages."""

import math

import pytest
import torch

from backends_in_reach import INTERPRETED, InReach, backends, every_backend
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    lengths32,
    random_history,
    random_queries,
    same_bits,
)

BLOCK = 64


@pytest.mark.parametrize("place", ["dense", "pages of 64"])
@backends(slow=INTERPRETED)
def test_Q01_query_block_without_a_key_block_is_empty(on: InReach, place: str) -> None:
    length = 256
    history = random_history([length], 2, 64)
    q = random_queries(1, length, 4, 64)
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        blocks = torch.rand(4, 4, generator=random) < 0.3
        blocks[1] = False
        blocks[3] = torch.tensor([False, False, False, True])
        mask = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[None]
        cache = history.dense() if place == "dense" else history.paged(BLOCK)
        first = on.decode(q, **cache, causal=False, attn_mask=mask)
        out, lse = first
        assert bool((out[0, BLOCK : 2 * BLOCK] == 0).all())
        assert bool((lse[0, BLOCK : 2 * BLOCK] == -math.inf).all())
        wanted, wanted_lse = attend(q, history, causal=False, mask=mask)
        assert_near(out, wanted[0][None])
        assert_near_lse(lse, wanted_lse[0][None])
        for _ in range(3):
            assert same_bits(on.decode(q, **cache, causal=False, attn_mask=mask), first)


@pytest.mark.parametrize("validate", ["full", "none"])
@every_backend
def test_Q03_invalid_entries_of_a_block_list_contribute_nothing(on: InReach, validate: str) -> None:
    # Eight listed blocks of 16: entries that are no page are masked, so they are not used.
    page, pages = 16, 8
    pool = random_history([pages * page], 1, 64, dtype=torch.float16)
    k, v = (rows[0].unflatten(0, (pages, page)).clone() for rows in (pool.k, pool.v))
    k[0], v[0] = math.nan, math.nan  # where -1 would be routed to
    listed = torch.tensor([[3, -1, 1, -1, 6, 99, -1, 2], [-1] * 8])
    valid = (listed >= 0) & (listed < pages)
    mask = valid.repeat_interleave(page, 1)
    mask[0, 7 * page + 5 :] = False  # the last listed block is valid in part
    q = random_queries(2, 16, 64, dtype=torch.float16)
    out, lse = on.decode(
        q,
        k,
        v,
        block_table=listed.to(torch.int32),
        seq_lens=lengths32([8 * page, 8 * page]),
        layout="NHD",
        attn_mask=mask[:, None],
        validate=validate,
    )
    chosen = listed[0][valid[0]]
    count = (len(chosen) - 1) * page + 5
    keys = History([k[chosen].flatten(0, 1)[:count]], [v[chosen].flatten(0, 1)[:count]])
    wanted, wanted_lse = attend([q[:1]], keys)
    assert_near(out[0], wanted[0][0])
    assert_near_lse(lse[0], wanted_lse[0][0])
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -math.inf).all())


@every_backend
def test_Q03_block_of_nan_that_is_listed_but_masked_changes_no_bit(on: InReach) -> None:
    page, pages = 16, 8
    pool = random_history([pages * page], 1, 64, dtype=torch.float16)
    listed = torch.tensor([[3, 0, 1]], dtype=torch.int32)
    mask = torch.ones(1, 1, 3 * page, dtype=torch.bool)
    mask[..., page : 2 * page] = False
    q = random_queries(1, 16, 64, dtype=torch.float16)
    results = []
    for fill in (0.0, math.nan, math.inf):
        k, v = (rows[0].unflatten(0, (pages, page)).clone() for rows in (pool.k, pool.v))
        k[0], v[0] = fill, fill
        results.append(
            on.decode(
                q,
                k,
                v,
                block_table=listed,
                seq_lens=lengths32([3 * page]),
                layout="NHD",
                attn_mask=mask,
            )
        )
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
