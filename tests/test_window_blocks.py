"""Windows that begin at blocks, and chunked attention, against masks written here."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import splitkv
from backends_in_reach import InReach, every_backend
from histories import lengths32, random_history, random_queries
from splitkv.backends.ascend import AscendBackend
from splitkv.common.spec import DecodeSpec, Feature, Layout
from splitkv.common.visibility import visible_bounds, window_start
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.graphs import graph_refusals
from splitkv.layers.ring_history import RingHistory

PAGE = 16


def spec(**fields: Any) -> DecodeSpec:
    made: dict[str, Any] = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "layout": Layout.NHD,
        "page_size": PAGE,
    }
    return DecodeSpec(**made | fields)


def chunked(length: int, queries: int, chunk: int) -> Tensor:
    """bool [S, L]: a query sees its own chunk, up to itself; said chunk by chunk, without a
    division of positions.
    """
    square = torch.zeros(length, length, dtype=torch.bool)
    for first in range(0, length, chunk):
        last = min(first + chunk, length)
        square[first:last, first:last] = torch.ones(last - first, last - first).tril() > 0
    return square[length - queries :]


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q [S, H, D], k, v [L, K, D], seen [S, L]: out [S, H, D] and lse [S, H] in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("shd,lhd->shl", q.double(), k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    return torch.einsum("shl,lhd->shd", scores.softmax(-1), v), scores.logsumexp(-1)


def near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    return all(
        torch.allclose(x.double(), y, rtol=0, atol=2e-5) for x, y in zip(got, want, strict=True)
    )


LENGTHS = [31, 32, 33, 34, 64, 97]
"""Around the edges of chunks of 32, so that three queries stand on one side or on both."""


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 2}], ids=str)
@every_backend
def test_chunked_attention(on: InReach, splits: dict[str, int]) -> None:
    history = random_history(LENGTHS, 2, 64)
    q = random_queries(len(LENGTHS), 3, 4, 64)
    block, tokens = {"sliding_window": 32, "window_block": 32}, {"sliding_window": 32}
    out, lse = on.decode(q, **history.paged(PAGE), **block, **splits)
    control = on.decode(q, **history.paged(PAGE), **tokens, **splits)
    for row, length in enumerate(LENGTHS):
        want = attention(q[row], history.k[row], history.v[row], chunked(length, 3, 32))
        assert near((out[row], lse[row]), want), length
        # a window of tokens shows what blocks hide, but where no query is past the first chunk
        assert near((control[0][row], control[1][row]), want) == (length <= 32), length


@every_backend
def test_what_lies_before_the_block_is_never_read(on: InReach) -> None:
    lengths, settings = [97, 64, 40], {"sliding_window": 48, "window_block": 16}
    clean, spoilt = (random_history(lengths, 2, 64) for _ in range(2))
    q, answers = random_queries(3, 1, 4, 64), []
    for k, v, length in zip(spoilt.k, spoilt.v, lengths, strict=True):
        hidden = max(((length - 1) // 16 - 2) * 16, 0)
        k[:hidden], v[:hidden] = math.nan, math.inf
    for history in (clean, spoilt):
        cache = history.paged(PAGE, fill=math.nan)
        if history is spoilt:
            for row, length in enumerate(lengths):
                cache["block_table"][row, : max((length - 1) // 16 - 2, 0)] = -1
        answers.append(on.decode(q, **cache, **settings))
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


def test_a_block_of_one_token_is_the_window_of_tokens() -> None:
    positions = torch.arange(-5, 200)
    assert torch.equal(window_start(positions, spec(sliding_window=37)), positions - 36)


def test_bounds_follow_blocks_and_begin_no_earlier_than_a_window_of_tokens() -> None:
    lengths = np.arange(0, 200, dtype=np.int64)
    blocks, tokens = (spec(sliding_window=64, window_block=b, num_queries=3) for b in (32, 1))
    _, start = visible_bounds(lengths, 3, blocks)
    assert (start % 32 == 0).all()
    assert (start >= visible_bounds(lengths, 3, tokens)[1]).all()
    assert start[[66, 67, 98, 99]].tolist() == [0, 32, 32, 64]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_block": 4}, "window_block 4 needs a sliding_window .* got None"),
        ({"window_block": 4, "sliding_window": 6}, "a multiple of it .* got 6"),
        ({"window_block": 8, "sliding_window": 4}, "a multiple of it .* got 4"),
        ({"window_block": 0, "sliding_window": 4}, "window_block must be a positive integer"),
        ({"window_block": True, "sliding_window": 4}, "window_block must be a positive integer"),
    ],
)
def test_what_is_no_window_of_blocks_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(**fields)


def test_the_feature_and_the_plan_s_key_know_the_block() -> None:
    tokens = spec(sliding_window=64)
    blocks = spec(sliding_window=64, window_block=32)
    assert Feature.WINDOW_BLOCKS in blocks.features
    assert Feature.WINDOW_BLOCKS not in tokens.features
    assert tokens.plan_key != blocks.plan_key
    plan = splitkv.select(tokens, name="cpu").plan(tokens, [97])
    history, q = random_history([97], 2, 64), random_queries(1, 1, 4, 64)[:, 0]
    settings: dict[str, Any] = {"sliding_window": 64, "window_block": 32, "backend": "cpu"}
    with pytest.raises(ValueError, match="plan was made for"):
        splitkv.decode_attention(q, **history.paged(PAGE), **settings, plan=plan)


def test_enormous_blocks_overflow_nothing() -> None:
    history, q = random_history([97], 2, 64), random_queries(1, 1, 4, 64)[:, 0]
    whole = splitkv.decode_attention(q, **history.paged(PAGE), backend="cpu")
    most = 2**31 - 1
    for window, block in ((most, most), (2**30, 2**30), (most, 3 * 7)):
        settings = {"sliding_window": window - window % block, "window_block": block}
        got = splitkv.decode_attention(q, **history.paged(PAGE), backend="cpu", **settings)
        assert isinstance(got, Tensor)
        assert isinstance(whole, Tensor)
        assert torch.equal(got, whole)


def test_ascend_routes_that_count_tokens_refuse_blocks() -> None:
    blocks = spec(sliding_window=64, window_block=32)
    assert AscendBackend().refusals(blocks) == []  # windows reach it as lengths and tables
    [reason] = own.refusals(blocks)
    assert "the own kernel's window begins at a token" in reason
    captured = graph_refusals(blocks, AscendBackend().wants)
    assert any("window_block 32" in one for one in captured)
    assert own.refusals(spec(sliding_window=64)) == []
    tokens = graph_refusals(spec(sliding_window=64), AscendBackend().wants)
    assert not any("window_block" in one for one in tokens)


@pytest.mark.parametrize("page", [1, 3, 16])
def test_a_ring_that_holds_the_window_holds_its_blocks(page: int) -> None:
    """The smallest ring for W tokens, step by step: chunks never need more than that."""
    window, tokens = 32, 75
    blocks = -(-(window - 1) // page) + 1
    history = random_history([tokens], 2, 64)
    k, v = (torch.zeros(blocks, page, 2, 64) for _ in range(2))
    table = torch.arange(blocks, dtype=torch.int32)[None]
    ring = splitkv.RingCache(k, v, table, lengths32([0]), Layout.NHD, 0, tokens)
    holds = RingHistory(ring, window)
    own = spec(sliding_window=window, window_block=window, page_size=page, dtype=torch.float32)
    for t in range(tokens):
        holds.append(history.k[0][None, t : t + 1], history.v[0][None, t : t + 1])
        q = random_queries(1, 1, 4, 64)
        got = splitkv.decode(q, holds.cache, own, backend="cpu")
        keys, values = history.k[0][: t + 1], history.v[0][: t + 1]
        want = attention(q[0], keys, values, chunked(t + 1, 1, window))
        assert near((got[0][0], got[1][0]), want), t
