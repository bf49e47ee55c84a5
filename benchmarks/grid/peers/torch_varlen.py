"""torch.nn.attention.varlen: packed requests of several lengths (torch 2.10 and newer)."""

from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from benchmarks.grid.peers.protocol import needs_cuda
from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import DenseCache, PackedCache


class TorchVarlen:
    name = "torch varlen"

    def missing(self) -> str | None:
        if find_spec("torch.nn.attention.varlen") is None:
            return f"torch {torch.__version__} has no torch.nn.attention.varlen"
        return needs_cuda("torch")

    def refusal(self, step: Step) -> str | None:
        # its table came with torch 2.12, for flash-attention 2, whose pages are multiples of 256
        return None if step.page_size is None else f"takes no pages of {step.page_size}"

    def prepare(self, step: Step) -> Candidate:
        from torch.nn.attention.varlen import varlen_attn

        shape, device = step.shape, step.device
        lengths = torch.tensor([0, *shape.lengths], device=device)
        starts = lengths.cumsum(0, dtype=torch.int32)
        queries = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
        settings: dict[str, Any] = {}
        if "enable_gqa" in signature(varlen_attn).parameters:  # since torch 2.12
            settings["enable_gqa"] = shape.heads != shape.kv_heads
        longest = max(shape.lengths)

        def call(k: Tensor, v: Tensor) -> Tensor:
            found = varlen_attn(step.q, k, v, queries, starts, 1, longest, **settings)
            assert isinstance(found, Tensor)
            return found

        rows = [_rows(cache) for cache in step.caches if not hasattr(cache, "block_table")]
        return Candidate([partial(call, k, v) for k, v in rows])


def _rows(cache: object) -> tuple[Tensor, Tensor]:
    """K and V as [tokens, K, D]."""
    if isinstance(cache, PackedCache):
        return cache.k, cache.v
    assert isinstance(cache, DenseCache)
    return cache.k.flatten(0, 1), cache.v.flatten(0, 1)
