"""torch's scaled_dot_product_attention: its own choice, or one of its backends alone."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.grid.peers.protocol import only_uniform
from splitkv.cli.bench_shapes import Step, torch_attention
from splitkv.cli.bench_timing import Candidate


@dataclass(frozen=True, slots=True)
class TorchSdpa:
    """backend: the only one enabled; None leaves the choice to torch."""

    name: str
    backend: SDPBackend | None = None

    def missing(self) -> str | None:
        if self.backend is None or torch.cuda.is_available():
            return None
        return "torch sees no CUDA device"

    def refusal(self, step: Step) -> str | None:
        return only_uniform(step)

    def prepare(self, step: Step) -> Candidate:
        return replace(torch_attention(step), within=self._within)

    def _within(self) -> AbstractContextManager[object]:
        return nullcontext() if self.backend is None else sdpa_kernel([self.backend])


DEFAULT = TorchSdpa("torch sdpa")
CUDNN = TorchSdpa("torch cudnn", SDPBackend.CUDNN_ATTENTION)
FLASH = TorchSdpa("torch flash", SDPBackend.FLASH_ATTENTION)
