"""Merges for our own Ascend kernel, and what is wrong with its answers; the kernel is run by whom
the caller says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from splitkv.common.state import PartialState, merge_states_torch
from splitkv.kernels_ascend.kernels.budget import Cores
from splitkv.kernels_ascend.kernels.launch import Launch
from splitkv.kernels_ascend.kernels.merge import Parts, merge_launch

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Run = Callable[[Launch], None]


@dataclass(frozen=True)
class Merge:
    """counts: states of each request. rows: of a request. stored, dtype: of parts' and merged out.

    far: log-sum-exps some hundreds apart, so that weights underflow.
    """

    id: str
    counts: tuple[int, ...]
    rows: int
    dim: int
    stored: torch.dtype = FP32
    dtype: torch.dtype = FP32
    far: bool = False


MERGES = (
    Merge("two", (2,), 6, 16),
    Merge("ragged", (3, 0, 1, 9), 8, 64),
    Merge("one-column", (5,), 4, 1),
    Merge("d80", (17,), 6, 80),
    Merge("d192", (4, 2), 12, 192),
    Merge("d512", (3,), 10, 512),
    Merge("many-states", (133,), 4, 64),
    Merge("many-rows", (2, 3), 200, 128),
    Merge("far", (12,), 9, 32, far=True),
    Merge("to-fp16", (3, 5), 16, 128, dtype=FP16),
    Merge("to-bf16", (3, 5), 16, 128, dtype=BF16),
    Merge("from-fp16", (4,), 7, 128, stored=FP16, dtype=FP16),
    Merge("from-bf16", (4,), 7, 128, stored=BF16, dtype=BF16),
)


def drawn(merge: Merge, seed: int = 0) -> tuple[Parts, Tensor]:
    """Random states, about a third of them empty, and the slots of each request."""
    random = torch.Generator().manual_seed(seed)
    shape = (sum(merge.counts), merge.rows)
    lse = torch.randn(shape, generator=random) * (300 if merge.far else 5)
    top = lse - torch.rand(shape, generator=random)
    out = torch.randn(*shape, merge.dim, generator=random)
    empty = torch.rand(shape, generator=random) < 0.3
    lse[empty], top[empty], out[empty] = -math.inf, -math.inf, 0.0
    ends = torch.tensor(merge.counts).cumsum(0)
    slots = torch.cat([torch.zeros(1), ends]).to(torch.int32)
    return Parts(out.to(merge.stored), lse, top), slots


def launched(merge: Merge, cores: Cores, seed: int = 0) -> tuple[Launch, Parts]:
    """The launch, and where its results will be: NaN until they are."""
    parts, slots = drawn(merge, seed)
    shape = (len(merge.counts), merge.rows)
    results = Parts(
        torch.full((*shape, merge.dim), math.nan, dtype=merge.dtype),
        torch.full(shape, math.nan),
        torch.full(shape, math.nan),
    )
    return merge_launch(parts, slots, results, cores), results


def error_and_complaints(merge: Merge, run: Run, seed: int = 0) -> tuple[float, list[str]]:
    """The largest error of out, and what is wrong: twice what plain float32 torch is off is not."""
    launch, results = launched(merge, Cores(3), seed)
    run(launch)
    parts, slots = drawn(merge, seed)
    exact = _merged(parts, slots, torch.float64)
    plain = _merged(parts, slots, torch.float32)
    wrong = []
    if not torch.equal(results.top.double(), exact.max):
        wrong.append("max is not the largest maximum")
    nothing = exact.lse == -math.inf
    if not torch.equal(results.lse == -math.inf, nothing):
        wrong.append("lse is not -inf exactly where nothing was seen")
    if results.out[nothing].any() or results.out.isnan().any():
        wrong.append("out is not 0 where nothing was seen, or NaN")
    lse_error = _worst(results.lse[~nothing], exact.lse[~nothing])
    out_error = _worst(results.out, exact.out)
    rounded = plain.out.to(merge.dtype)
    for name, error, allowed in (
        ("lse", lse_error, _worst(plain.lse[~nothing], exact.lse[~nothing])),
        ("out", out_error, _worst(rounded, exact.out)),
    ):
        bound = 2 * max(allowed, torch.finfo(torch.float32).eps)
        if not error <= bound:
            wrong.append(f"{name} is off by {error:.2e}, allowed {bound:.2e}")
    return out_error, wrong


def _merged(parts: Parts, slots: Tensor, dtype: torch.dtype) -> PartialState:
    """The merge of each request by ``splitkv.common.state``, stacked."""
    states = PartialState(parts.top.to(dtype), parts.lse.to(dtype), parts.out.to(dtype))
    bounds = slots.tolist()
    merged = [merge_states_torch(states[first:last]) for first, last in pairwise(bounds)]
    return PartialState(
        torch.stack([one.max for one in merged]),
        torch.stack([one.lse for one in merged]),
        torch.stack([one.out for one in merged]),
    )


def _worst(got: Tensor, wanted: Tensor) -> float:
    return (got.double() - wanted.double()).abs().max().item() if got.numel() else 0.0
