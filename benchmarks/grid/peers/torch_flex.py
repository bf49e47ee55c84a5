"""FlexAttention, compiled, under a mask that hides nothing."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.grid.peers.protocol import needs_cuda, only_uniform
from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import DenseCache


class TorchFlex:
    name = "torch flex"

    def missing(self) -> str | None:
        return needs_cuda("torch")

    def refusal(self, step: Step) -> str | None:
        group = step.shape.heads // step.shape.kv_heads
        if group & (group - 1):
            return f"its decode kernel takes no {group} query heads per kv head, a power of two"
        return only_uniform(step)

    def prepare(self, step: Step) -> Candidate:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # dynamo gives up after 8 shapes of one function, and computes all scores from then on
        torch.compiler.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        mask = create_block_mask(
            lambda b, h, i, j: j >= 0, None, None, 1, step.shape.lengths[0], device=step.device.type
        )
        q = step.q[:, :, None]
        grouped = step.shape.heads != step.shape.kv_heads

        def call(k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)[:, :, 0]

        views = [cache.bnsd() for cache in step.caches if isinstance(cache, DenseCache)]
        return Candidate([partial(call, k, v) for k, v in views])
