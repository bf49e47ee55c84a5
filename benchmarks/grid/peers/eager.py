"""Plain torch expressions: the adapter to copy, and a peer that runs everywhere."""

from functools import partial

from torch import Tensor

from benchmarks.grid.peers.protocol import only_uniform
from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import DenseCache


class TorchEager:
    """Two matrix products and a softmax, as a model without a kernel would compute it."""

    name = "torch eager"

    def missing(self) -> str | None:
        return None

    def refusal(self, step: Step) -> str | None:
        return only_uniform(step)

    def prepare(self, step: Step) -> Candidate:
        grouped = step.q.unflatten(1, (step.shape.kv_heads, -1)) * step.shape.dim**-0.5

        def call(k: Tensor, v: Tensor) -> Tensor:
            weights = (grouped @ k.mT).float().softmax(-1).to(v.dtype)
            return (weights @ v).flatten(1, 2)

        views = [cache.bnsd() for cache in step.caches if isinstance(cache, DenseCache)]
        return Candidate([partial(call, k, v) for k, v in views])
