"""Paged caches whose requests name their pages: equal names are one page."""

from collections.abc import Hashable, Sequence

import torch

from splitkv.common.cache import PagedCache
from splitkv.common.spec import Layout


def cache_of_names(
    names: Sequence[Sequence[Hashable]],
    lengths: Sequence[int],
    page_size: int,
    *,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: Layout = Layout.NHD,
    index: torch.dtype = torch.int32,
    unused: int = -1,
    seed: int = 0,
) -> PagedCache:
    """Pages at shuffled places, from N(0, 1); NaN in every slot that no request's length covers.

    names: for each request as many as its length needs, or more.
    """
    random = torch.Generator().manual_seed(seed)
    every = list(dict.fromkeys(name for row in names for name in row))
    place = dict(
        zip(every, torch.randperm(len(every) + 2, generator=random).tolist(), strict=False)
    )
    shape = (len(every) + 2, page_size, kv_heads, head_dim)
    seen = torch.zeros(shape[:2], dtype=torch.bool)
    width = max((len(row) for row in names), default=0)
    table = torch.full((len(names), width), unused, dtype=index)
    for row, (own, length) in enumerate(zip(names, lengths, strict=True)):
        for column, name in enumerate(own):
            table[row, column] = place[name]
            seen[place[name], : max(length - column * page_size, 0)] = True
    k, v = (
        torch.randn(shape, generator=random)
        .masked_fill(~seen[..., None, None], torch.nan)
        .to(dtype)
        for _ in range(2)
    )
    if layout is Layout.HND:
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return PagedCache(k, v, table, torch.tensor(list(lengths), dtype=torch.int32), layout)


Names = list[list[Hashable]]


def named(page_size: int, lengths: Sequence[int], *prefixes: str) -> Names:
    """Names for each request: a page for each letter of its prefix, then pages of its own."""
    rows: Names = []
    for request, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        # a page's name holds what stands before it: other beginnings are other pages
        shared: list[Hashable] = [prefix[: place + 1] for place in range(len(prefix))]
        own = max(-(-length // page_size) - len(prefix), 0)
        rows.append(shared + [(request, place) for place in range(own)])
    return rows
