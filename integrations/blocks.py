"""A block of queries and the history it sees, in splitkv's terms; both kinds of cache become it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from splitkv.common.cache import DenseCache, PagedCache
from splitkv.common.spec import Layout
from splitkv.integrations.masks import Hidden, Visible, read_mask

PAGES = "splitkv_pages"
"""The keyword under which a layer's ``Pages`` reach the attention function."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Queries [start, stop) of a step, ready for ``splitkv.decode``.

    lengths: tokens of each request, those of ``cache`` on the host. mask: bool [B, S, n]; bias:
    [B or 1, H or 1, S, n]; both cover the last n positions.
    """

    start: int
    stop: int
    cache: DenseCache | PagedCache
    lengths: tuple[int, ...]
    causal: bool
    window: int | None
    mask: Tensor | None
    bias: Tensor | None


class Pages(Protocol):
    """A layer's history that is kept outside the K and V which the model passes around."""

    def append(self, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """Take a step's K and V, [B, K, S, D]; True where they are all there is."""
        ...

    def blocks(self, hidden: Hidden, queries: int, at_most: int) -> Iterator[Block]:
        """Blocks of the queries of the step just appended."""
        ...


@lru_cache(maxsize=64)
def length_tensor(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """``lengths`` as int32 [B]; one tensor for all layers of a step, never written to."""
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def ranges(queries: int, at_most: int) -> Iterator[tuple[int, int]]:
    """[0, queries) cut into ranges of ``at_most``."""
    for start in range(0, queries, at_most):
        yield start, min(start + at_most, queries)


def dense_blocks(
    key: Tensor, value: Tensor, hidden: Hidden, queries: int, at_most: int
) -> Iterator[Block]:
    """Blocks over a cache that hands out all its keys, [B, K, T, D], padding and empty slots too.

    K and V are cut, by a view, to what a block's queries see.
    """
    batch, _, keys, _ = key.shape
    for start, stop in ranges(queries, at_most):
        if hidden.mask is not None:
            visible, window = read_mask(hidden.mask, start, stop), None
        else:
            later = queries - stop if hidden.causal else 0
            visible, window = Visible(0, keys - later, causal=hidden.causal), hidden.window
        columns = slice(visible.start, visible.stop)
        lengths = (visible.stop - visible.start,) * batch
        yield Block(
            start,
            stop,
            DenseCache(
                key[:, :, columns],
                value[:, :, columns],
                length_tensor(lengths, key.device),
                Layout.BNSD,
            ),
            lengths,
            visible.causal,
            window,
            visible.mask,
            None if hidden.bias is None else hidden.bias[:, :, start:stop, columns],
        )
