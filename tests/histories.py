"""Requests with known content, ways to lay them out in a cache, and what attention over them is.

A history is a list with one [T, K, D] tensor per request. ``attend`` is the reference: a dense
softmax in float64, one request and one head at a time, sharing no code with the library.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]

STATED_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute, for inputs from N(0, 1): what the log of faults states where a case names no other."""
STATED_LSE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """K and V of several requests: [T, K, D] and [T, K, Dv] each."""

    k: list[Tensor]
    v: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        return [len(k) for k in self.k]

    def dense(
        self, capacity: int | None = None, *, fill: float = math.nan, layout: str = "BSND"
    ) -> Arguments:
        """One row of ``capacity`` tokens per request, unused slots holding ``fill``."""
        capacity = max(self.lengths, default=0) if capacity is None else capacity
        k, v = (
            torch.stack([_filled(rows, capacity, fill) for rows in part])
            for part in (self.k, self.v)
        )
        if layout == "BNSD":
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        return {"k": k, "v": v, "seq_lens": lengths32(self.lengths), "layout": layout}

    def packed(self) -> Arguments:
        """Requests one after the other."""
        return {
            "k": torch.cat(self.k),
            "v": torch.cat(self.v),
            "cu_seqlens_k": offsets32(self.lengths),
        }

    def paged(
        self,
        page_size: int,
        *,
        fill: float = math.nan,
        layout: str = "NHD",
        spare_pages: int = 3,
        unused: int = -1,
        width: int | None = None,
        seed: int = 0,
    ) -> Arguments:
        """Pages in shuffled order; unused slots and spare pages hold ``fill``."""
        counts = [-(-length // page_size) for length in self.lengths]
        pages = sum(counts) + spare_pages
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        width = max(counts, default=0) if width is None else width
        table = torch.full((len(counts), width), unused, dtype=torch.int32)
        pools = [_pool(rows[0], pages, page_size, fill) for rows in (self.k, self.v)]
        taken = 0
        for row, count in enumerate(counts):
            ids = order[taken : taken + count]
            taken += count
            table[row, :count] = ids.to(torch.int32)
            for pool, rows in zip(pools, (self.k[row], self.v[row]), strict=True):
                pool[ids] = _filled(rows, count * page_size, fill).unflatten(0, (count, page_size))
        k, v = (pool.transpose(1, 2).contiguous() if layout == "HND" else pool for pool in pools)
        lengths = lengths32(self.lengths)
        return {"k": k, "v": v, "block_table": table, "seq_lens": lengths, "layout": layout}


def lengths32(lengths: Sequence[int]) -> Tensor:
    """int32 [B]."""
    return torch.tensor(list(lengths), dtype=torch.int32)


def offsets32(counts: Sequence[int]) -> Tensor:
    """int32 [B + 1], rising from 0."""
    return lengths32([sum(counts[:index]) for index in range(len(counts) + 1)])


def _filled(rows: Tensor, capacity: int, fill: float) -> Tensor:
    tail = full((capacity - len(rows), *rows.shape[1:]), fill, rows.dtype)
    return torch.cat([rows, tail])


def _pool(like: Tensor, pages: int, page_size: int, fill: float) -> Tensor:
    return full((pages, page_size, *like.shape[1:]), fill, like.dtype)


def full(shape: Sequence[int], fill: float, dtype: torch.dtype) -> Tensor:
    """``fill`` in any dtype; an integer dtype, which has no NaN, gets its largest value instead."""
    if not dtype.is_floating_point:
        value = int(fill) if math.isfinite(fill) else torch.iinfo(dtype).max
        return torch.full(tuple(shape), value, dtype=dtype)
    return torch.full(tuple(shape), fill, dtype=torch.float32).to(dtype)


def random_history(
    lengths: Sequence[int],
    kv_heads: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> History:
    """K and V from N(0, 1), rounded to ``dtype``."""
    random = torch.Generator().manual_seed(seed)
    dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
    k, v = (
        [torch.randn(length, kv_heads, dim, generator=random).to(dtype) for length in lengths]
        for dim in dims
    )
    return History(k, v)


def position_history(
    lengths: Sequence[int], kv_heads: int, head_dim: int, *, dtype: torch.dtype = torch.float32
) -> History:
    """The uniform probe's V: position j holds j; K is random, and a query of 0 ignores it."""
    history = random_history(lengths, kv_heads, head_dim, dtype=dtype)
    v = [
        torch.arange(length)
        .to(dtype)[:, None, None]
        .expand(length, kv_heads, head_dim)
        .contiguous()
        for length in lengths
    ]
    return History(history.k, v)


def random_queries(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """From N(0, 1), rounded to ``dtype``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(
    queries: Sequence[Tensor] | Tensor,
    history: History,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int | None = None,
    logits_soft_cap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Reference ``(out, lse)`` per request in float64: out [S, H, Dv], lse [S, H] with the sink.

    queries: one [S, H, D] per request. bias and mask: [B, S, T], all requests of one length T.
    """
    outs, lses = [], []
    for index, (q, k, v) in enumerate(zip(queries, history.k, history.v, strict=True)):
        steps, heads, dim = q.shape
        group = heads // k.shape[1]
        position = torch.arange(len(k)) - (len(k) - steps + torch.arange(steps))[:, None]
        visible = torch.ones_like(position, dtype=torch.bool)
        if causal:
            visible &= position <= 0
        if window_left is not None and window_left >= 0:
            visible &= -position <= window_left
        if mask is not None:
            visible &= mask[index]
        out = torch.zeros(steps, heads, v.shape[-1], dtype=torch.float64)
        lse = torch.full((steps, heads), -math.inf, dtype=torch.float64)
        for head in range(heads):
            scores = q[:, head].double() @ k[:, head // group].double().T
            scores = scores * (dim**-0.5 if sm_scale is None else sm_scale)
            if logits_soft_cap is not None:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            if bias is not None:
                scores = scores + bias[index].double()
            scores = scores.masked_fill(~visible, -math.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().expand(steps, 1)], 1)
            lse[:, head] = torch.logsumexp(scores, 1)
            seen = lse[:, head] > -math.inf
            weights = torch.softmax(scores[seen], 1)[:, : len(k)]
            out[seen, head] = weights @ v[:, head // group].double()
        outs.append(out)
        lses.append(lse)
    return outs, lses


def assert_near(out: Tensor, expected: Tensor, *, bound: float | None = None) -> None:
    """Within the stated tolerance of ``out``'s dtype (or ``bound``); NaN and inf never pass."""
    error = (out.double() - expected.double()).abs()
    limit = STATED_TOLERANCE[out.dtype] if bound is None else bound
    assert out.shape == expected.shape
    assert bool((error <= limit).all()), (
        f"worst error {error.max().item():.3g}, allowed {limit:.3g}"
    )


def assert_near_lse(lse: Tensor, expected: Tensor) -> None:
    """-inf exactly where expected, elsewhere within the stated tolerance and float32's spacing."""
    assert lse.dtype == torch.float32
    empty = expected == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    error = (lse.double() - expected)[~empty].abs()
    spacing = torch.finfo(torch.float32).eps * expected[~empty].abs()
    assert bool((error <= STATED_LSE_TOLERANCE + spacing).all()), (
        f"worst error {error.max().item():.3g}"
    )


def assert_rounded(out: Tensor, expected: Tensor | float) -> None:
    """Equal but for one rounding to ``out``'s dtype and float32 sums of positive terms."""
    wanted = torch.as_tensor(expected, dtype=torch.float64).expand(out.shape)
    relative = max(torch.finfo(out.dtype).eps, 1e-5)
    error = (out.double() - wanted).abs()
    assert bool((error <= relative * wanted.abs()).all()), f"worst error {error.max().item():.3g}"


def same_bits(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Whether all tensors agree bit for bit, NaN included."""
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )
