"""Dense attention written from the definition alone, and caches of every layout beside it."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import splitkv

LAYOUTS = ("BSND", "BNSD", "packed", "NHD", "HND")
LENGTHS = (300, 1, 64, 129, 0)


@dataclass
class Problem:
    """q [B, S, H, D]; k [B, T, K, D]; v [B, T, K, Dv]; options: keyword arguments of the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...] = LENGTHS
    options: dict[str, Any] = field(default_factory=dict)

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
    **options: Any,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(1, *lengths), heads[1])
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
        block = given.options.get("window_block", 1)
        near = i // block - j // block < window // block
        seen &= near | (j < given.options.get("anchor_tokens", 0))
    if (mask := given.options.get("attn_mask")) is not None:
        last = min(mask.shape[-1], length)
        seen[:, length - last :] &= mask[b][:, mask.shape[-1] - last :]
    return seen


def run(given: Problem, layout: str = "BSND", **extra: Any) -> tuple[Tensor, Tensor]:
    """``decode_attention`` on a cache of ``layout``: out, lse."""
    k, v = stored(given, layout)
    options = where(given, layout) | given.options | extra
    result = splitkv.decode_attention(given.q, k, v, backend="cpu", return_lse=True, **options)
    assert isinstance(result, tuple)
    return result


PAGE = 16


def stored(
    given: Problem, layout: str, poison: tuple[float, float] = (math.nan, math.inf)
) -> tuple[Tensor, Tensor]:
    """k and v in ``layout``; whatever no request owns is ``poison``."""
    made = []
    for x, filler in ((given.k, poison[0]), (given.v, poison[1])):
        x = x.clone()
        for b, length in enumerate(given.lengths):
            x[b, length:] = filler
        if layout == "packed":
            x = torch.cat([x[b, :length] for b, length in enumerate(given.lengths)])
        elif layout in ("NHD", "HND"):
            blocks = -(-x.shape[1] // PAGE)
            pad = x.new_full((x.shape[0], blocks * PAGE - x.shape[1], *x.shape[2:]), filler)
            pages = torch.cat([x, pad], 1).unflatten(1, (blocks, PAGE)).flatten(0, 1)
            pool = torch.full((len(pages) + 3, *pages.shape[1:]), filler, dtype=x.dtype)
            pool[table(given).flatten().long()] = pages
            x = pool
        made.append(x.transpose(1, 2).contiguous() if layout in ("BNSD", "HND") else x)
    return made[0], made[1]


def table(given: Problem) -> Tensor:
    """Pages in an order that is no request's own."""
    blocks = -(-given.k.shape[1] // PAGE)
    count = given.k.shape[0] * blocks
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))
    return order[:count].view(-1, blocks).to(torch.int32)


def where(given: Problem, layout: str) -> dict[str, Any]:
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
