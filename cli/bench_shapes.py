"""A decode step to be timed: its shape, and the tensors that all candidates read.

K and V lie in several sets that are used in turn, more bytes in all than a cache holds. Every
layout is a view of the same memory: contiguous, or pages in random order.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.backends.decode import decode
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Layout

COLD_BYTES = 192 << 20
"""That all sets of K and V hold together at least: over three times the L2 of an H200, 60 MB."""
_MOST_SETS = 512
"""More would only take time to capture: a set of a point worth timing is not that small."""
_RANDOM = 1 << 20
"""Random numbers made on a CPU, then repeated: it is slow at making them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One step. lengths: [B] cached tokens per request, the step's own included."""

    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def kv_bytes(self) -> int:
        """K and V of all requests, each byte once: what any method must read."""
        return 2 * sum(self.lengths) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """One token of K."""
        return self.kv_heads * self.dim * self.dtype.itemsize

    def slots(self, page_size: int | None) -> int:
        """Tokens that this layout takes up."""
        page = page_size or 1
        return sum(-(-length // page) * page for length in self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One layout of a shape's tensors.

    q: [B, H, D]. caches: one per set of buffers, all of one table and the same lengths. memory:
    [sets, elements], K and V of each set in one piece, unused slots included.
    """

    shape: Shape
    page_size: int | None
    spec: DecodeSpec
    q: Tensor
    caches: tuple[Cache, ...]
    memory: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    def necessary(self) -> list[Tensor]:
        """As many elements of each set as the step must read, flat."""
        elements = self.shape.kv_bytes // self.shape.dtype.itemsize
        return [part[:elements] for part in self.memory]


def steps(
    shape: Shape,
    page_sizes: Sequence[int | None],
    device: torch.device,
    *,
    cold_bytes: int = COLD_BYTES,
    seed: int = 0,
) -> dict[int | None, Step]:
    """The shape in each layout; page size None is contiguous.

    Contiguous is dense ("BSND") where all lengths are equal, and packed where they are not.

    Raises:
        ValueError: a shape without a single token, or one that the device has no memory for.
    """
    if not shape.kv_bytes:
        raise ValueError(f"nothing to read: lengths {list(shape.lengths)[:8]}")
    slots = max(shape.slots(size) for size in page_sizes)
    sets = min(max(2, math.ceil(cold_bytes / shape.kv_bytes)), _MOST_SETS)
    elements = sets * 2 * slots * shape.kv_heads * shape.dim
    needed, room = elements * shape.dtype.itemsize, _room(device)
    if needed > room:
        raise ValueError(
            f"{sets} sets of K and V take {needed / 1e9:.1f} GB, {device} has {room / 1e9:.1f} GB: "
            "fewer or shorter lengths"
        )
    memory = _random(elements, shape.dtype, device, seed).view(sets, -1)
    q = _random(shape.batch * shape.heads * shape.dim, shape.dtype, device, seed + 1)
    q = q.view(shape.batch, shape.heads, shape.dim)
    found = {}
    for size in page_sizes:
        spec = DecodeSpec(
            num_q_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            layout=_layout(shape, size),
            dtype=shape.dtype,
            page_size=size,
        )
        caches = _caches(shape, size, memory, device, seed)
        found[size] = Step(shape, size, spec, q, caches, memory)
    return found


def ours(step: Step, backend: Backend, plan: SplitPlan | None) -> Candidate:
    """``splitkv.decode`` into one output, by a plan made beforehand."""
    out = torch.empty_like(step.q)

    def call(cache: Cache) -> Tensor:
        return decode(step.q, cache, step.spec, plan=plan, backend=backend.name, out=out)[0]

    return Candidate([partial(call, cache) for cache in step.caches])


def torch_attention(step: Step) -> Candidate:
    """torch's ``scaled_dot_product_attention``, as torch chooses to compute it.

    Raises:
        ValueError: the step has pages, or several lengths.
    """
    q = step.q[:, :, None]

    def call(k: Tensor, v: Tensor) -> Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, enable_gqa=True)[:, :, 0]

    views = []
    for cache in step.caches:
        if not isinstance(cache, DenseCache):
            raise ValueError("torch's attention takes neither pages nor lengths that differ")
        views.append(cache.bnsd())
    return Candidate([partial(call, k, v) for k, v in views])


def _room(device: torch.device) -> int:
    """Bytes of memory: what is free of a GPU's, all of a host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _layout(shape: Shape, page_size: int | None) -> Layout:
    if page_size is not None:
        return Layout.NHD
    return Layout.BSND if shape.uniform else Layout.PACKED


def _caches(
    shape: Shape, page_size: int | None, memory: Tensor, device: torch.device, seed: int
) -> tuple[Cache, ...]:
    slots = shape.slots(page_size)
    rows = [
        tuple(part[:slots] for part in one.view(2, -1, shape.kv_heads, shape.dim)) for one in memory
    ]
    # Ascend's operators take lengths from the host, CUDA's kernels from the device
    at = device if device.type == "cuda" else torch.device("cpu")
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=at)
    if page_size is not None:
        table = _table(shape, page_size, seed).to(device)
        size = (-1, page_size, shape.kv_heads, shape.dim)
        return tuple(PagedCache(k.view(size), v.view(size), table, lengths) for k, v in rows)
    if shape.uniform:
        size = (shape.batch, -1, shape.kv_heads, shape.dim)
        return tuple(DenseCache(k.view(size), v.view(size), lengths) for k, v in rows)
    offsets = torch.tensor([0, *accumulate(shape.lengths)], dtype=torch.int32, device=at)
    return tuple(PackedCache(k, v, offsets) for k, v in rows)


def _table(shape: Shape, page_size: int, seed: int) -> Tensor:
    """[B, pages of the longest], int32: every page once, in random order; -1 past a request's."""
    counts = [-(-length // page_size) for length in shape.lengths]
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts), generator=random).int()
    table = torch.full((shape.batch, max(counts)), -1, dtype=torch.int32)
    for row, (count, pages) in enumerate(zip(counts, order.split(counts), strict=True)):
        table[row, :count] = pages
    return table


def _random(count: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    if device.type == "cuda":
        random = torch.Generator(device).manual_seed(seed)
        return torch.empty(count, dtype=dtype, device=device).normal_(generator=random)
    random = torch.Generator().manual_seed(seed)
    some = torch.randn(min(count, _RANDOM), generator=random).to(dtype)
    return some.repeat(-(-count // len(some)))[:count].to(device)
