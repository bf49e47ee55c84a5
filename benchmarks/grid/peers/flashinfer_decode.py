"""FlashInfer's paged decode, planned outside the clock as a server plans once a step.

The calls are those of FlashInfer 0.6.18 (flashinfer/decode.py, flashinfer/attention/_core.py).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.grid.peers.protocol import needs_cuda
from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import PagedCache

_WORKSPACE_BYTES = 512 << 20
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8)
"""Query heads per kv head for which 0.6.18 has such kernels (include/flashinfer/utils.cuh)."""


@dataclass(frozen=True, slots=True)
class Pages:
    """A block table as FlashInfer takes it, on the host but for ``indices``.

    indptr: int32 [B + 1]; indices: int32 [pages], on the device; last: int32 [B], tokens on each
    request's last page; lengths: int32 [B].
    """

    indptr: Tensor
    indices: Tensor
    last: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, step: Step) -> "Pages":
        cache, page = step.caches[0], step.page_size
        assert isinstance(cache, PagedCache)
        assert page is not None
        lengths = torch.tensor(step.shape.lengths, dtype=torch.int32)
        counts = (lengths + page - 1) // page
        used = torch.arange(cache.block_table.shape[1]) < counts[:, None]
        zero = torch.zeros(1, dtype=torch.int32)
        return cls(
            torch.cat([zero, counts.cumsum(0, dtype=torch.int32)]),
            cache.block_table[used.to(cache.block_table.device)].contiguous(),
            lengths - (counts - 1).clamp(min=0) * page,
            lengths,
        )


@dataclass(frozen=True, slots=True)
class FlashInferDecode:
    """BatchDecodeWithPagedKVCacheWrapper; tensor_cores: its prefill kernel on decode, or not."""

    name: str
    tensor_cores: bool

    def missing(self) -> str | None:
        return needs_cuda("flashinfer")

    def refusal(self, step: Step) -> str | None:
        if step.page_size is None:
            return "takes pages alone"
        group = step.shape.heads // step.shape.kv_heads
        if not self.tensor_cores and group not in _CUDA_CORE_GROUPS:
            return f"no CUDA-core kernel for {group} query heads per kv head"
        return None

    def prepare(self, step: Step) -> Candidate:
        import flashinfer

        shape, pages = step.shape, Pages.of(step)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=step.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_tensor_cores=self.tensor_cores,
            backend="fa2" if self.tensor_cores else "auto",
        )
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            step.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        out = torch.empty_like(step.q)

        def call(k: Tensor, v: Tensor) -> Tensor:
            return wrapper.run(step.q, (k, v), out=out)

        return Candidate([partial(call, cache.k, cache.v) for cache in step.caches])


@dataclass(frozen=True, slots=True)
class FlashInferBatchAttention:
    """BatchAttention: one persistent kernel that balances its work."""

    name: str = "flashinfer batch"

    def missing(self) -> str | None:
        return needs_cuda("flashinfer")

    def refusal(self, step: Step) -> str | None:
        return "takes pages alone" if step.page_size is None else None

    def prepare(self, step: Step) -> Candidate:
        import flashinfer

        shape, pages = step.shape, Pages.of(step)
        attention = flashinfer.BatchAttention(kv_layout="NHD", device=str(step.device))
        attention.plan(
            torch.arange(shape.batch + 1, dtype=torch.int32),
            pages.indptr,
            pages.indices,
            pages.lengths,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.dim,
            step.page_size,
            sm_scale=shape.dim**-0.5,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        out = torch.empty_like(step.q)
        lse = torch.empty(shape.batch, shape.heads, device=step.device)

        def call(k: Tensor, v: Tensor) -> Tensor:
            attention.run(step.q, (k, v), out=out, lse=lse)
            return out

        return Candidate([partial(call, cache.k, cache.v) for cache in step.caches])


TENSOR_CORES = FlashInferDecode("flashinfer tc", tensor_cores=True)
CUDA_CORES = FlashInferDecode("flashinfer cc", tensor_cores=False)
BATCH = FlashInferBatchAttention()
