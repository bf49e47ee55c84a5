"""Calls for the Ascend tests: made on the host, run on the stand-in's device, compared with the
dense reference.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import splitkv
from splitkv.backends.registry import backend_named
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.standin import NpuTensor
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

LAYOUTS = ("BSND", "BNSD", "packed", "NHD", "HND")


def make_call(
    layout: str,
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    D: int = 128,
    page: int = 128,
    capacity: int = 640,
    queries: int = 1,
    counts: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **semantics: Any,
) -> DecodeCall:
    """Normal q, k, v; NaN in every slot past a length or in no request, and garbage in unused table
    entries.

    counts: [B] queries of a packed query batch. capacity: T of a dense cache.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    H, K = heads
    tokens = [(normal(length, K, D), normal(length, K, D)) for length in lengths]
    cache = _cache(layout, tokens, (K, D), page, capacity, generator, dtype)
    cu = None if counts is None else torch.tensor([0, *itertools.accumulate(counts)])
    q = normal(len(lengths), queries, H, D) if counts is None else normal(sum(counts), H, D)
    spec = DecodeSpec(
        num_q_heads=H,
        num_kv_heads=K,
        head_dim=D,
        layout=Layout(layout),
        dtype=dtype,
        page_size=cache.page_size,
        num_queries=queries if counts is None else max(*counts, 1),
        packed_queries=counts is not None,
        **semantics,
    )
    return DecodeCall(q, cache, spec, cu)


def _cache(
    layout: str,
    tokens: Sequence[tuple[Tensor, Tensor]],
    row: tuple[int, int],
    page: int,
    capacity: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Cache:
    lengths = torch.tensor([len(k) for k, _ in tokens], dtype=torch.int32)
    if layout == "packed":
        k, v = (torch.cat(part) for part in zip(*tokens, strict=True))
        return PackedCache(k, v, torch.tensor([0, *itertools.accumulate(lengths.tolist())]))
    if layout in ("BSND", "BNSD"):
        tensors = torch.full((2, len(tokens), capacity, *row), math.nan, dtype=dtype)
        for request, pair in enumerate(tokens):
            for tensor, part in zip(tensors, pair, strict=True):
                tensor[request, : len(part)] = part
        if layout == "BNSD":
            tensors = tensors.transpose(2, 3).contiguous()
        return DenseCache(*tensors.clone(), lengths, Layout(layout))
    blocks = [-(-length // page) for length in lengths.tolist()]
    order = torch.randperm(sum(blocks) + 2, generator=generator).tolist()
    pools = torch.full((2, sum(blocks) + 2, page, *row), math.nan, dtype=dtype)
    table = torch.full((len(tokens), max(blocks, default=0) + 1), 10**6, dtype=torch.int32)
    for request, pair in enumerate(tokens):
        for block in range(blocks[request]):
            table[request, block] = order.pop()
            for pool, part in zip(pools, pair, strict=True):
                part = part[block * page : (block + 1) * page]
                pool[table[request, block], : len(part)] = part
    if layout == "HND":
        pools = pools.transpose(2, 3).contiguous()
    return PagedCache(*pools.clone(), table, lengths, Layout(layout))


def on_npu(value: Any) -> Any:
    """A tensor or cache on the stand-in's device, strides and all; lengths and offsets stay on the
    host.
    """
    if isinstance(value, Tensor):
        return NpuTensor(value)
    placed = {"k": NpuTensor(value.k), "v": NpuTensor(value.v)}
    if isinstance(value, PagedCache):
        placed["block_table"] = NpuTensor(value.block_table)
    return replace(value, **placed)


def decode(
    call: DecodeCall, *, sinks: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """``splitkv.decode`` of the call on device npu; results on the host."""
    out, lse = splitkv.decode(
        on_npu(call.q),
        on_npu(call.cache),
        call.spec,
        cu_seqlens_q=call.cu_seqlens_q,
        sinks=None if sinks is None else on_npu(sinks),
        **arguments,
    )
    return out.cpu(), lse.cpu()


def complaints(call: DecodeCall, *, sinks: Tensor | None = None, **arguments: Any) -> list[str]:
    """What is wrong with the backend's answer, by the bound that plain 16-bit PyTorch sets; [] if
    nothing.
    """
    out, lse = decode(call, sinks=sinks, **arguments)
    answer = reference(call, sinks)
    plan = backend_named("ascend").plan_for(
        call,
        num_splits=arguments.get("num_splits"),
        split_size=arguments.get("split_size"),
    )
    allowed = bounds(call, sinks, answer, plan.max_splits + 1)
    return errors(out, lse, answer).exceeds(allowed)


def windows() -> Iterator[dict[str, Any]]:
    """Windows and anchors: none, within a page, several pages, longer than the history, joined and
    apart; of blocks.
    """
    for window, anchors in ((None, 0), (1, 0), (100, 0), (200, 7), (3, 150), (1000, 5)):
        yield {"sliding_window": window, "anchor_tokens": anchors}
    yield {"sliding_window": 128, "window_block": 128}
    yield {"sliding_window": 96, "window_block": 48, "anchor_tokens": 7}
