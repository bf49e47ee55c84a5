"""Tiles of K or V in compute precision: the only place where the CPU backend touches the cache.

Every layout, dtype and page size ends in the same form, a small padded scratch that the matrix products read while it is hot.
Products on the cache itself would be slower: its rows are a power of two apart, which maps them to a few cache sets.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.cpu_work import Strands
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.spec import QUANTISED_DTYPES, Layout
from splitkv.common.visibility import IntArray

ROW_PADDING = 16
"""Elements between token rows of a tile, so that equal columns of successive rows fall into different cache sets."""
STAGED_PAGE_TOKENS = 64
"""Pages below this many tokens are collected in one gather; larger ones are read in place, one by one."""


class Scratch(threading.local):
    """Memory that a thread keeps from call to call: fresh pages of it would cost more than reading the cache does."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, role: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised [*shape]; valid until the next ``take`` of this role and dtype on this thread."""
        size = math.prod(shape)
        buffer = self.buffers.get((role, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # also writable outside of inference mode, later
                buffer = torch.empty(size, dtype=dtype)
            self.buffers[role, dtype] = buffer
        return buffer[:size].view(*shape)

    @property
    def nbytes(self) -> int:
        """Bytes held for this thread."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


SCRATCH = Scratch()


@dataclass(frozen=True, slots=True)
class TileReader:
    """Reads tiles of one operand.

    source: [outer, inner, K, D] view of the cache, any strides; outer is a request, a page, or 1 for a packed cache. outer, inner:
    int64 [B], where position 0 of each request lies (unused with pages). table: block table on the host, or None.
    """

    source: Tensor
    dtype: torch.dtype
    head_major: bool
    outer: IntArray
    inner: IntArray
    table: IntArray | None

    def read(self, strands: Strands, offset: int, tokens: int) -> Tensor:
        """Tokens [start + offset, + ``tokens``) of each strand: [g, K, tokens, D]; past a strand's end rows are arbitrary."""
        start = strands.start + offset
        valid = np.clip(strands.end - start, 1, tokens)
        if self.table is None:
            tile = self._scratch(len(strands), tokens)
            self._read_rows(tile, strands.request, start, valid)
            return tile.transpose(1, 2)
        page = self.source.shape[1]
        phase = int(start[0]) % page  # the same for all strands of a group
        blocks = -(-(phase + tokens) // page)
        last = (start + valid - 1) // page
        column = np.minimum((start // page)[:, None] + np.arange(blocks), last[:, None])
        # an entry that masks hide altogether may hold anything
        pages = self.table[strands.request[:, None], column].clip(0, len(self.source) - 1)
        if page < STAGED_PAGE_TOKENS:
            tile = self._gather_pages(pages)
        else:
            tile = self._read_pages(pages, phase, valid)
        return tile[:, phase : phase + tokens].transpose(1, 2)

    def _scratch(self, count: int, tokens: int) -> Tensor:
        """[count, tokens, K, D] without values; its memory is head-major or token-major like the source."""
        heads, dim = self.source.shape[2:]
        if self.head_major:
            return SCRATCH.take("tile", (count, heads, tokens, dim), self.dtype).transpose(1, 2)
        row = heads * dim + ROW_PADDING
        rows = SCRATCH.take("tile", (count, tokens, row), self.dtype)
        return rows[..., : heads * dim].unflatten(-1, (heads, dim))

    def _read_rows(self, tile: Tensor, request: IntArray, start: IntArray, valid: IntArray) -> None:
        outer, inner = self.outer[request], self.inner[request] + start
        count, tokens = len(request), int(valid.max())
        strides = self.source.stride()
        places = outer * strides[0] + inner * strides[1]
        steps = np.diff(places)
        if (valid == tokens).all() and (count == 1 or (steps == steps[0]).all() and steps[0] >= 0):
            step = int(steps[0]) if count > 1 else 0
            run = self.source.as_strided(
                (count, tokens, *self.source.shape[2:]),
                (step, *strides[1:]),
                self.source.storage_offset() + int(places[0]),
            )
            tile[:, :tokens].copy_(run)
            return
        token = inner[:, None] + np.minimum(np.arange(tokens), valid[:, None] - 1)
        tile[:, :tokens].copy_(_bits(self.source)[_index(outer[:, None]), _index(token)].view(self.source.dtype))

    def _gather_pages(self, pages: IntArray) -> Tensor:
        count, blocks = pages.shape
        _, page, heads, dim = self.source.shape
        tile = self._scratch(count, blocks * page)
        bits = _bits(self.source)
        staged = SCRATCH.take("pages", (count * blocks, *bits.shape[1:]), bits.dtype)
        torch.index_select(bits, 0, _index(pages.reshape(-1)), out=staged)
        shape = (count, blocks, page, heads, dim)
        tile.unflatten(1, (blocks, page)).copy_(staged.view(self.source.dtype).view(shape))
        return tile

    def _read_pages(self, pages: IntArray, phase: int, valid: IntArray) -> Tensor:
        count, blocks = pages.shape
        page = self.source.shape[1]
        tile = self._scratch(count, blocks * page)
        for index, row in enumerate(pages.tolist()):
            end = phase + int(valid[index])
            for block, number in enumerate(row):
                low = phase if block == 0 else 0
                high = min(end - block * page, page)
                if high > low:
                    place = block * page
                    tile[index, place + low : place + high].copy_(self.source[number, low:high])
        return tile


def tile_readers(cache: Cache, dtype: torch.dtype) -> tuple[TileReader, TileReader]:
    """Readers of K and V that give tiles of ``dtype``."""
    count = np.arange(cache.batch)
    zeros = np.zeros(cache.batch, dtype=np.int64)
    if isinstance(cache, PagedCache):
        table = cache.block_table.numpy()
        head_major = cache.layout is Layout.HND
        return tuple(  # type: ignore[return-value]
            TileReader(view, dtype, head_major, zeros, zeros, table) for view in cache.nhd()
        )
    if isinstance(cache, PackedCache):
        first = cache.cu_seqlens_k[:-1].numpy().astype(np.int64)
        return tuple(  # type: ignore[return-value]
            TileReader(x[None], dtype, False, zeros, first, None) for x in (cache.k, cache.v)
        )
    assert isinstance(cache, DenseCache)
    head_major = cache.layout is Layout.BNSD
    return tuple(  # type: ignore[return-value]
        TileReader(view.transpose(1, 2), dtype, head_major, count, zeros, None)
        for view in cache.bnsd()
    )


def _index(values: IntArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _bits(tensor: Tensor) -> Tensor:
    """Integers in place of 8-bit floats, which torch cannot gather on the CPU."""
    return tensor.view(torch.uint8) if tensor.dtype in QUANTISED_DTYPES else tensor
