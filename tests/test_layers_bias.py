"""Weights on edges and T5's relative positions, as biases."""

import math

import pytest
import torch

import splitkv
from backends_in_reach import InReach, every_backend
from histories import random_history, random_queries
from splitkv.layers.bias import edge_bias, relative_bias, relative_buckets

LENGTHS = [40, 7, 0]


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@every_backend
def test_a_weight_multiplies_the_key_s_share(on: InReach, steps: int, by_head: bool) -> None:
    history = random_history(LENGTHS, 2, 64)
    q = random_queries(len(LENGTHS), steps, 4, 64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(LENGTHS), *((4,) if by_head else ()), 12, generator=generator) * 3
    weights[..., 4] = 0.0  # hidden, whatever it holds
    bias = edge_bias(weights, steps)
    assert bias.shape == (3, 4 if by_head else 1, steps, 12)
    for rows in (*history.k[:2], *history.v[:2]):
        if len(rows) >= 8:
            rows[len(rows) - 8] = math.nan
    out, lse = on.decode(q, **history.dense(), attn_bias=bias)
    for b, length in enumerate(LENGTHS):
        for h in range(4):
            for t in range(steps):
                seen = max(length - steps + t + 1, 0)
                scores = history.k[b][:, h // 2].double() @ q[b, t, h].double() / 8.0
                factor = torch.ones(length, dtype=torch.float64)
                own = weights[b, h] if by_head else weights[b]
                last = min(12, length)
                factor[length - last :] = own[12 - last :].double()
                factor[seen:] = 0.0
                share = torch.where(factor > 0, factor * scores.exp(), 0.0)
                assert torch.allclose(lse[b, t, h].double(), share.sum().log(), atol=1e-5)
                values = torch.where(factor[:, None] > 0, history.v[b][:, h // 2].double(), 0.0)
                want = share @ values / share.sum().clamp(min=1e-30)
                assert torch.allclose(out[b, t, h].double(), want, atol=1e-5)


def test_a_multiplied_score_is_something_else() -> None:
    """Why log w is added: a weight below 1 must not make a key of negative score weigh more."""
    scores, weight = torch.tensor([-2.0, 0.0]), torch.tensor([0.5, 1.0])
    added = (scores + edge_bias(weight[None])[0, 0, 0]).softmax(-1)[0]
    multiplied = (scores * weight).softmax(-1)[0]
    assert added < scores.softmax(-1)[0] < multiplied


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.tensor([[1.0, -0.5]]), r"weights\[0, 1\] is -0.5"),
        (torch.tensor([[math.nan, 1.0]]), r"weights\[0, 0\] is nan"),
        (torch.tensor([[1.0], [math.inf]]), r"weights\[1, 0\] is inf"),
        (torch.tensor([[1, 2]]), "floating dtype"),
        (torch.ones(3), r"\[B, n\] or \[B, H, n\]"),
    ],
)
def test_what_is_no_weight_is_refused(weights: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        edge_bias(weights)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (32, 20), (8, 16), (64, 1000), (7, 9)])
def test_buckets_are_those_of_transformers(buckets: int, most: int, bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    theirs = t5.T5Attention._relative_position_bucket
    distance = torch.arange(-3000, 3001)
    got = relative_buckets(distance, buckets, most, bidirectional)
    assert torch.equal(got, theirs(distance, bidirectional, buckets, most))
    assert not torch.equal(got, theirs(distance, bidirectional, buckets, most + 30))
    assert int(got.max()) < buckets


@every_backend
def test_a_t5_decoder_s_self_attention(on: InReach) -> None:
    """Its module's own steps in float64: unscaled scores, bias of its table, softmax."""
    t5 = pytest.importorskip("transformers.models.t5")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        d_model=64,
        d_kv=64,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=True,
    )
    theirs = modeling.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table = theirs.relative_attention_bias.weight.detach().float() * 5
    theirs.relative_attention_bias.weight.data.copy_(table)
    lengths, steps = [50, 9, 2], 2
    history = random_history(lengths, 4, 64)
    q = random_queries(3, steps, 4, 64) * 0.1
    bias = relative_bias(table, max(lengths), steps, max_distance=20)
    out, _ = on.decode(q, **history.paged(16), attn_bias=bias, sm_scale=1.0)
    for b, length in enumerate(lengths):
        k, v = history.k[b].double(), history.v[b].double()
        added = theirs.compute_bias(length, length)[0, :, length - steps :].double()
        scores = torch.einsum("shd,lhd->hsl", q[b].double(), k) + added
        hidden = torch.arange(length) > torch.arange(length - steps, length)[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        want = torch.einsum("hsl,lhd->shd", weights, v)
        assert torch.allclose(out[b].double(), want, atol=1e-5)
        plain = torch.einsum("shd,lhd->hsl", q[b].double(), k).masked_fill(hidden, -math.inf)
        control = torch.einsum("hsl,lhd->shd", plain.softmax(-1), v)
        assert not torch.allclose(out[b].double(), control, atol=1e-3)


def test_one_bias_serves_requests_of_any_length() -> None:
    """The distance of a column to a query depends on neither's request."""
    table = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    long, short = (relative_bias(table, n, 3, max_distance=20) for n in (40, 10))
    assert long.shape == (1, 2, 3, 40)
    assert torch.equal(long[..., 30:], short)
    assert torch.equal(relative_bias(table, 5, 1)[0, :, 0, -1], table[0])
    assert relative_bias(table, 0).shape == (1, 2, 1, 0)


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (torch.ones(8), {}, r"table must be .*\[buckets, H\]"),
        (torch.ones(1, 2), {}, "num_buckets must be an integer of 2 or more, got 1"),
        (torch.ones(3, 2), {"bidirectional": True}, "num_buckets must be an integer of 4"),
        (torch.ones(8, 2), {"max_distance": 4}, "max_distance must be an integer of 5"),
        (torch.ones(8, 2), {"num_queries": 0}, "num_queries must be an integer of 1"),
    ],
)
def test_what_makes_no_bias_is_refused(
    table: torch.Tensor, options: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        relative_bias(table, 10, **options)


def test_the_last_columns_count_when_there_are_more_than_keys() -> None:
    history, q = random_history([5], 1, 16), random_queries(1, 1, 2, 16)
    wide = relative_bias(torch.randn(8, 2), 30)
    settings = {"backend": "cpu", **history.dense()}
    assert torch.equal(
        splitkv.decode_attention(q, attn_bias=wide, **settings),
        splitkv.decode_attention(q, attn_bias=wide[..., -5:].contiguous(), **settings),
    )
