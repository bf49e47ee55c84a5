"""Caches in the operator's page form, without copying: which blocks hold which request's keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.limits import limit


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Pages of a cache: k, v [blocks, P, K * D] or [blocks, K, P, D]; table: int32 [B * fold,
    blocks of a request].

    fold: 1, or K where every (request, kv head) is a request of its own.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    page_size: int
    fold: int


def page_size_of(cache: Cache) -> int | None:
    """Tokens per page of a cache seen as pages; None where it cannot be (packed, or T not a
    multiple of 16).
    """
    if isinstance(cache, PagedCache):
        return cache.page_size
    if isinstance(cache, PackedCache) or not cache.capacity:
        return None
    step = limit("page_multiple").number
    sizes = range(limit("page_max").number, 0, -step)
    fitting = [size for size in sizes if cache.capacity % size == 0]
    proven = int(limit("page_proven").choices[0])
    return proven if proven in fitting else next(iter(fitting), None)


def page_step(tensor: Tensor) -> int | None:
    """Pages from one page of a pool to the next (1: contiguous, 2: K and V pages alternate).

    None where pages are torn apart, so that no view of whole pages holds them.
    """
    if tensor.is_contiguous():
        return 1
    page = tensor[0]
    if not page.is_contiguous() or tensor.stride(0) % page.numel():
        return None
    return tensor.stride(0) // page.numel()


def whole_pages(tensor: Tensor, step: int) -> Tensor:
    """A contiguous view [blocks, ...] from a pool's first page to its last, with those that lie
    between.
    """
    if step == 1:
        return tensor
    blocks = (tensor.shape[0] - 1) * step + 1
    return tensor.as_strided((blocks, *tensor.shape[1:]), (tensor[0].numel(), *tensor.stride()[1:]))


def pool_of(cache: Cache, spec: DecodeSpec, page_size: int) -> Pool:
    """``cache`` as pages of ``page_size``; a dense cache is contiguous, a pool in whole pages."""
    if isinstance(cache, PagedCache):
        step = page_step(cache.k)
        assert step is not None
        table = cache.block_table.to(torch.int32).contiguous()
        table = table if step == 1 else table * step
        k, v = whole_pages(cache.k, step), whole_pages(cache.v, step)
        if spec.layout is Layout.NHD:
            k, v = k.flatten(2), v.flatten(2)
        return Pool(k, v, table, page_size, 1)
    assert isinstance(cache, DenseCache)
    fold = spec.num_kv_heads if spec.layout is Layout.BNSD else 1
    rows, blocks = cache.batch * fold, cache.capacity // page_size
    table = torch.arange(rows * blocks, dtype=torch.int32, device=cache.k.device)
    k, v = (
        tensor.reshape(rows * blocks, page_size, -1 if rows * blocks else tensor.shape[-1])
        for tensor in (cache.k, cache.v)
    )
    return Pool(k, v, table.view(rows, blocks), page_size, fold)


def gather_tokens(cache: Cache, request: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of single tokens, k [n, m, K, D] and v, for request [n, 1] and position [n, m] (of the
    packed rows, in a packed cache).
    """
    if isinstance(cache, PackedCache):
        return cache.k[position], cache.v[position]
    if isinstance(cache, DenseCache):
        if cache.layout is Layout.BSND:
            return cache.k[request, position], cache.v[request, position]
        return cache.k[request, :, position], cache.v[request, :, position]
    page = cache.block_table[request, position // cache.page_size].long()
    offset = position % cache.page_size
    if cache.layout is Layout.NHD:
        return cache.k[page, offset], cache.v[page, offset]
    return cache.k[page, :, offset], cache.v[page, :, offset]


def flat_tokens(cache: Cache) -> tuple[Tensor, Tensor]:
    """Views of a contiguous dense or packed cache as k [tokens, K, D] and v; heads of a BNSD cache
    become requests, so that K is 1 there.
    """
    if isinstance(cache, DenseCache):
        if cache.layout is Layout.BNSD:
            return cache.k.flatten(0, 2)[:, None], cache.v.flatten(0, 2)[:, None]
        return cache.k.flatten(0, 1), cache.v.flatten(0, 1)
    return cache.k, cache.v
