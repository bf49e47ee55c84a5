"""The CPU backend against dense float64 attention written here from the definition alone."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.backends import cpu_attention, cpu_work

HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (300, 1, 64, 129, 0)


@dataclass
class Problem:
    """q [B, S, H, D]; k [B, T, K, D]; v [B, T, K, Dv]; ``lengths`` and keyword arguments of the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...] = LENGTHS
    options: dict = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> "Problem":
        cast = [x.to(dtype) for x in (self.q, self.k, self.v)]
        return Problem(*cast, self.lengths, self.options)


def problem(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    queries: int = 1,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (32, 32),
    **options: object,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(max(lengths), 1), heads[1])
    return Problem(
        torch.randn(len(lengths), queries, heads[0], dims[0], generator=generator),
        torch.randn(*shape, dims[0], generator=generator),
        torch.randn(*shape, dims[1], generator=generator),
        lengths,
        dict(options),
    )


def dense(given: Problem, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Attention over full score rows in ``dtype``: out [B, S, H, Dv], lse [B, S, H]."""
    q, k, v = (x.to(dtype) for x in (given.q, given.k, given.v))
    steps, heads = q.shape[1:3]
    group = heads // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=dtype)
    lse = torch.full(q.shape[:3], -math.inf, dtype=dtype)
    for b, length in enumerate(given.lengths):
        if length == 0:
            continue
        keys = k[b, :length].repeat_interleave(group, 1).transpose(0, 1)  # [H, T, D]
        values = v[b, :length].repeat_interleave(group, 1).transpose(0, 1)
        scores = q[b].transpose(0, 1) @ keys.transpose(1, 2)  # [H, S, T]
        scores = _bend(scores * given.options.get("sm_scale", q.shape[-1] ** -0.5), given, b)
        seen = _seen(given, b, steps, length)
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
        out[b] = (weights @ values).transpose(0, 1)
        lse[b] = scores.masked_fill(~seen, -math.inf).logsumexp(-1).T
    return out, lse


def _bend(scores: Tensor, given: Problem, b: int) -> Tensor:
    heads, steps, length = scores.shape
    cap, slopes, bias = (
        given.options.get(name) for name in ("logits_soft_cap", "alibi_slopes", "attn_bias")
    )
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        own = slopes[b] if slopes.ndim == 2 else slopes
        position = length - steps + torch.arange(steps)
        distance = torch.arange(length) - position[:, None]
        scores = scores + own.to(scores.dtype)[:, None, None] * distance
    if bias is not None:
        last = min(bias.shape[-1], length)
        added = torch.zeros(heads, steps, length, dtype=scores.dtype)
        added[..., length - last :] = bias[b % len(bias), :, :, bias.shape[-1] - last :]
        scores = scores + added
    return scores


def _seen(given: Problem, b: int, steps: int, length: int) -> Tensor:
    i = (length - steps + torch.arange(steps))[:, None]
    j = torch.arange(length)
    seen = torch.ones(steps, length, dtype=torch.bool)
    if given.options.get("causal", True):
        seen &= j <= i
    if (window := given.options.get("sliding_window")) is not None:
        seen &= (i - j < window) | (j < given.options.get("anchor_tokens", 0))
    if (mask := given.options.get("attn_mask")) is not None:
        last = min(mask.shape[-1], length)
        seen[:, length - last :] &= mask[b][:, mask.shape[-1] - last :]
    return seen


def run(given: Problem, layout: str = "BSND", **extra: object) -> tuple[Tensor, Tensor]:
    return splitkv.decode_attention(
        given.q,
        *stored(given, layout),
        **where(given, layout),
        **given.options,
        **extra,
        return_lse=True,
    )


PAGE = 16


def stored(given: Problem, layout: str) -> tuple[Tensor, Tensor]:
    """k and v in ``layout``; whatever no request owns is NaN or inf."""
    made = []
    for x, poison in ((given.k, math.nan), (given.v, math.inf)):
        x = x.clone()
        for b, length in enumerate(given.lengths):
            x[b, length:] = poison
        if layout == "packed":
            x = torch.cat([x[b, :length] for b, length in enumerate(given.lengths)])
        elif layout in ("NHD", "HND"):
            blocks = -(-x.shape[1] // PAGE)
            pad = x.new_full((x.shape[0], blocks * PAGE - x.shape[1], *x.shape[2:]), poison)
            pages = torch.cat([x, pad], 1).unflatten(1, (blocks, PAGE)).flatten(0, 1)
            pool = torch.full((len(pages) + 3, *pages.shape[1:]), poison).to(x.dtype)
            pool[table(given).flatten().long()] = pages
            x = pool
        made.append(x.transpose(1, 2).contiguous() if layout in ("BNSD", "HND") else x)
    return made[0], made[1]


def table(given: Problem) -> Tensor:
    blocks = -(-given.k.shape[1] // PAGE)
    count = given.k.shape[0] * blocks
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))
    return order[:count].view(-1, blocks).to(torch.int32)


def where(given: Problem, layout: str) -> dict:
    if layout == "packed":
        return {"cu_seqlens_k": torch.tensor([0, *itertools.accumulate(given.lengths)])}
    found = {"layout": layout, "seq_lens": torch.tensor(given.lengths)}
    return found | ({"block_table": table(given)} if layout in ("NHD", "HND") else {})


def check(got: tuple[Tensor, Tensor], given: Problem, exact: Problem | None = None) -> None:
    """No worse than twice plain PyTorch in the same dtype, and never worse than 2e-6 in float32."""
    want, want_lse = dense(exact or given)
    dtype = given.q.dtype
    plain, plain_lse = dense(given, dtype)
    floor = 2e-6 if dtype is torch.float32 else 0.0
    bound = max(floor, 2 * float((plain.double() - want).abs().max()))
    assert float((got[0].double() - want).abs().max()) <= bound
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(got[1]), seen)
    assert (got[1][~seen] == -math.inf).all()
    if seen.any():
        bound = max(floor, 2 * float((plain_lse.double() - want_lse)[seen].abs().max()))
        assert float((got[1].double() - want_lse)[seen].abs().max()) <= bound


def _features(queries: int) -> dict[str, dict]:
    generator = torch.Generator().manual_seed(7)
    batch = len(LENGTHS)
    return {
        "window": {"sliding_window": 40},
        "anchors": {"sliding_window": 40, "anchor_tokens": 5},
        "cap": {"logits_soft_cap": 3.0},
        "alibi": {"alibi_slopes": torch.rand(6, generator=generator)},
        "alibi-per-request": {"alibi_slopes": torch.rand(batch, 6, generator=generator)},
        "bias": {"attn_bias": torch.randn(batch, 6, queries, 20, generator=generator)},
        "bias-shared": {"attn_bias": torch.randn(1, 1, queries, 20, generator=generator)},
        "mask": {"attn_mask": torch.rand(batch, queries, 9, generator=generator) > 0.4},
        "scale": {"sm_scale": 0.3},
        "not-causal": {"causal": False},
    }


LAYOUTS = ("BSND", "BNSD", "packed", "NHD", "HND")
SPLITS = ({}, {"num_splits": 7}, {"split_size": 256}, {"num_splits": 1})


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_feature_alone(layout: str, split: dict, queries: int) -> None:
    for options in ({}, *_features(queries).values()):
        given = problem(queries=queries, **options)
        check(run(given, layout, **split), given)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("pair", itertools.combinations(_features(1), 2), ids="+".join)
def test_every_pair_of_features(pair: tuple[str, str], queries: int) -> None:
    features = _features(queries)
    given = problem(queries=queries, **(features[pair[0]] | features[pair[1]]))
    check(run(given, "NHD", num_splits=3), given)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bit_is_no_worse_than_twice_eager(dtype: torch.dtype, layout: str) -> None:
    given = problem(queries=2, dims=(64, 48)).to(dtype)
    check(run(given, layout, num_splits=2), given)
