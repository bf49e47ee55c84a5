"""Tiles of K and V in compute precision: the only place where the CPU backend touches the cache.

Every layout, dtype and page size ends in the same form, a padded scratch that the products read
while it is hot. Products on the cache itself are slower: its rows lie a power of two apart, which
maps them to a few sets of the CPU's own cache, and a head's share of a token is too short to be
fetched ahead (a sketch in float32 on two Zen 4 cores: 11 GB/s in place, 15 with the copy).
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.cpu_work import ROW_PADDING, Strands
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.quantised import INT4_MIDDLE, token_major
from splitkv.common.spec import FINE_SCALES, INT4, Layout, ScaleKind
from splitkv.common.visibility import IntArray


class Scratch(threading.local):
    """Memory that a thread keeps between calls: fresh pages cost more than reading the cache."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, role: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised [*shape], valid until this thread takes the role and dtype again."""
        size = math.prod(shape)
        buffer = self.buffers.get((role, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # a tensor made inside could not be written outside
                buffer = torch.empty(size, dtype=dtype)
            self.buffers[role, dtype] = buffer
        return buffer[:size].view(*shape)

    @property
    def nbytes(self) -> int:
        """Bytes held for this thread."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


SCRATCH = Scratch()

BLOCK_BYTES = 16 << 10
"""Most bytes that are gathered as one row. Rows of one token (2 KiB) took a fifth longer; torch
shares out rows beyond 256 KiB piece by piece, so that no thread finds what it has read itself."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of a tile lie; ``tokens`` of each of ``count`` strands.

    One of three is set. run: outer and inner index of the first strand's first token, the steps of
    both from strand to strand, and the tokens to copy. blocks: int64 [count * n], pieces of
    ``step`` tokens, which divides a page, counted from the first page on. outer, inner: int64 that
    broadcast to [count, n], token by token, or page by page where ``step`` is above 1. A strand
    begins at place ``phase`` of its first piece.
    """

    count: int
    tokens: int
    run: tuple[int, int, int, int, int] | None = None
    outer: IntArray | None = None
    inner: IntArray | None = None
    blocks: Tensor | None = None
    step: int = 1
    phase: int = 0


@dataclass(frozen=True, slots=True)
class Codes:
    """Scale and zero point (None: 0, of int4 8), as views that broadcast to tiles [g, K, tokens,
    D]; per token like key and value of ``Tiles`` with D = 1, and of groups with one for each in
    place of D, to be read as they are.
    """

    kind: ScaleKind
    scale: Tensor
    zero: Tensor | None

    @classmethod
    def of(
        cls, scale: Tensor | None, zero: Tensor | None, kind: ScaleKind | None, cache: Cache
    ) -> "Codes | None":
        """None where one factor on queries or results says it all."""
        if scale is None or kind is None or (zero is None and kind not in FINE_SCALES):
            return None

        def view(numbers: Tensor) -> Tensor:
            if kind is ScaleKind.TOKEN:
                return token_major(numbers, cache)[..., None]
            if kind is ScaleKind.GROUP:
                return token_major(numbers, cache)
            return numbers[:, None] if kind is ScaleKind.CHANNEL else numbers[..., None, None]

        return cls(kind, view(scale), None if zero is None else view(zero))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Reads tiles of one cache.

    key, value: [outer, inner, K, D] views of the cache, any strides; outer is a request, a page, or
    the one row of a packed cache. first: int64 [B + 1], where requests begin in a packed cache.
    table: int [B, max_blocks]. key_codes, value_codes: what turns codes into values tile by tile;
    None where there are none, or where one factor on queries or results does.
    """

    key: Tensor
    value: Tensor
    dtype: torch.dtype
    head_major: bool = False
    first: IntArray | None = None
    table: IntArray | None = None
    key_codes: Codes | None = None
    value_codes: Codes | None = None

    @classmethod
    def of(cls, call: DecodeCall, dtype: torch.dtype) -> "Tiles":
        """Tiles of ``dtype``, in memory head-major or token-major like the cache."""
        spec, cache = call.spec, call.cache
        return replace(
            cls._of_cache(cache, dtype),
            key_codes=Codes.of(call.k_scale, call.k_zero, spec.k_scale, cache),
            value_codes=Codes.of(call.v_scale, call.v_zero, spec.v_scale, cache),
        )

    @classmethod
    def _of_cache(cls, cache: Cache, dtype: torch.dtype) -> "Tiles":
        if isinstance(cache, PagedCache):
            key, value = cache.nhd()
            head_major = cache.layout is Layout.HND
            return cls(key, value, dtype, head_major, table=cache.block_table.numpy())
        if isinstance(cache, PackedCache):
            first = cache.cu_seqlens_k.numpy().astype(np.int64)
            return cls(cache.k[None], cache.v[None], dtype, first=first)
        assert isinstance(cache, DenseCache)
        key, value = cache.k, cache.v
        if cache.layout is Layout.BSND:
            return cls(key, value, dtype)
        return cls(key.transpose(1, 2), value.transpose(1, 2), dtype, True)

    def locate(self, strands: Strands, offset: int, tokens: int, pieces: int = 1) -> Places:
        """Tokens [start + offset, + ``tokens``) of each strand; past its end, its last one. With
        ``pieces`` above 1: those of one strand, and as many again for each further piece.
        """
        request, start = strands.request, strands.start + offset
        if len(strands) == 1 and self.table is None:
            return self._locate_run(int(request[0]), int(start[0]), strands, tokens, pieces)
        if len(strands) == 1 and self.table is not None and not self.head_major:
            places = self._locate_lone(self.table, strands, int(start[0]), tokens, pieces)
            if places is not None:
                return places
        if pieces > 1:
            request, start = request.repeat(pieces), start + np.arange(pieces) * tokens
        count = len(start)
        valid = np.minimum(strands.end - start, tokens)
        if self.table is not None:
            return self._locate_pages(self.table, request, start, valid, tokens)
        outer = request if self.first is None else np.zeros_like(start)
        inner = start if self.first is None else start + self.first[request]
        steps = int(outer[1] - outer[0]), int(inner[1] - inner[0])
        even = (np.diff(outer) == steps[0]).all() and (np.diff(inner) == steps[1]).all()
        if even and steps[1] >= 0 and (valid == valid[0]).all():
            run = (int(outer[0]), int(inner[0]), *steps, int(valid[0]))
            return Places(count, tokens, run=run)
        within = np.minimum(np.arange(tokens), valid[:, None] - 1)
        return Places(count, tokens, outer=outer[:, None], inner=inner[:, None] + within)

    def _locate_run(
        self, request: int, start: int, strands: Strands, tokens: int, pieces: int
    ) -> Places:
        valid = min(int(strands.end[0]) - start, tokens)
        if self.first is not None:
            request, start = 0, start + int(self.first[request])
        return Places(pieces, tokens, run=(request, start, 0, tokens, valid))

    def _locate_lone(
        self, table: IntArray, strands: Strands, start: int, tokens: int, pieces: int
    ) -> Places | None:
        """Whole blocks of one strand from ``start`` on; None where they do not fit."""
        page, step, end = self.key.shape[1], self._step(tokens), start + pieces * tokens
        if step == 1 or start % step or tokens % step or end > strands.end[0]:
            return None
        pages = table[strands.request[0], start // page : -(-end // page)].astype(np.int64)
        pages = np.minimum(np.maximum(pages, 0), len(self.key) - 1)
        per = page // step
        blocks = (pages[:, None] * per + np.arange(per)).reshape(-1)
        lead = start % page // step
        flat = torch.from_numpy(blocks[lead : lead + (end - start) // step])
        return Places(pieces, tokens, step=step, blocks=flat)

    def _locate_pages(
        self, table: IntArray, request: IntArray, start: IntArray, valid: IntArray, tokens: int
    ) -> Places:
        count, page, step = len(start), self.key.shape[1], self._step(tokens)
        phase = int(start[0]) % step
        if count > 1 and not (start % step == phase).all():
            step, phase = 1, 0
        position = start[:, None] + np.arange(-phase, tokens, step)
        position = np.minimum(position, (start + valid - 1)[:, None])
        # an entry whose tokens are masked altogether may hold anything
        column = position // page
        pages = table[request[:, None], column].astype(np.int64)
        pages = np.minimum(np.maximum(pages, 0, out=pages), len(self.key) - 1, out=pages)
        inner = position - column * page
        if self.head_major or step == 1:
            return Places(count, tokens, outer=pages, inner=inner, step=step, phase=phase)
        blocks = torch.from_numpy((pages * (page // step) + inner // step).reshape(-1))
        return Places(count, tokens, step=step, phase=phase, blocks=blocks)

    def _step(self, tokens: int) -> int:
        """Tokens of a page that are copied together; few beside ``tokens``, so that little is
        copied in vain at either end."""
        page = self.key.shape[1]
        if self.head_major:
            return page if page * 4 <= tokens else 1
        if self.key.dtype == self.dtype:
            return 1  # straight into the tile, whose tokens lie apart
        row = max(x.shape[2] * x.shape[3] * x.itemsize for x in (self.key, self.value))
        most = max(min(tokens // 16, BLOCK_BYTES // row), 1)
        step = page
        while step > most and step % 2 == 0:
            step //= 2
        return step if step <= most else 1

    def read(self, places: Places, request: IntArray) -> tuple[Tensor, Tensor]:
        """K and V in scratch, [g, K, tokens, D or Dv]; rows past a strand's end are arbitrary.

        request: int64 [strands]. Valid until the next call.
        """
        key = self._elements("key", self.key, places)
        value = self._elements("value", self.value, places)
        for role, tile, codes in (("key", key, self.key_codes), ("value", value, self.value_codes)):
            if codes is not None:
                self._dequantise(role, tile, codes, places, request)
        return key, value

    def _elements(self, role: str, source: Tensor, places: Places) -> Tensor:
        """``_read`` with int4 codes unpacked: [g, K, tokens, D]."""
        if source.dtype != INT4:
            return self._read(role, source, places)
        packed = self._read(f"{role} bytes", source, places)
        shape = source.shape[2], 2 * source.shape[3]
        tile = self._tile(role, shape, places.count, places.tokens).transpose(1, 2)
        low, high = tile[..., 0::2], tile[..., 1::2]
        torch.div(packed, 16, rounding_mode="floor", out=high)
        torch.sub(packed, high, alpha=16, out=low)
        return tile

    def _dequantise(
        self, role: str, tile: Tensor, codes: Codes, places: Places, request: IntArray
    ) -> None:
        """(code - zero) * scale in place."""
        if codes.kind is ScaleKind.GROUP:
            tile = tile.unflatten(-1, (codes.scale.shape[-1], -1))
            if codes.zero is None:
                tile.sub_(INT4_MIDDLE)
        for name, numbers, change in (
            ("zero", codes.zero, tile.sub_),
            ("scale", codes.scale, tile.mul_),
        ):
            if numbers is None:
                continue
            if codes.kind is ScaleKind.GROUP:
                change(self._read(f"{role} {name}", numbers, places)[..., None])
            elif codes.kind is ScaleKind.TOKEN:
                change(self._read(f"{role} {name}", numbers, places))
            elif codes.kind is ScaleKind.REQUEST_HEAD:
                change(numbers[torch.from_numpy(request)].to(self.dtype))
            else:
                change(numbers.to(self.dtype))

    def _read(self, role: str, source: Tensor, places: Places) -> Tensor:
        if places.run is not None:
            tile = self._tile(role, source.shape[2:], places.count, places.tokens)
            tile[:, : places.run[-1]].copy_(_run(source, places.count, places.run))
            return tile.transpose(1, 2)
        if places.blocks is not None:
            return self._read_blocks(role, source, places.blocks, places)
        outer, inner = places.outer, places.inner
        assert outer is not None
        assert inner is not None
        if places.step > 1:
            return self._read_pages(role, source, outer, places)
        tile = self._tile(role, source.shape[2:], places.count, places.tokens)
        _read_rows(source, tile, outer, inner)
        return tile.transpose(1, 2)

    def _tile(self, role: str, shape: Sequence[int], count: int, tokens: int) -> Tensor:
        """[count, tokens, K, D] without values; shape: (K, D)."""
        heads, dim = shape
        if self.head_major:
            return SCRATCH.take(role, (count, heads, tokens, dim), self.dtype).transpose(1, 2)
        width = heads * dim
        rows = SCRATCH.take(role, (count, tokens, width + ROW_PADDING), self.dtype)
        return rows[..., :width].view(count, tokens, heads, dim)

    def _read_blocks(self, role: str, source: Tensor, blocks: Tensor, places: Places) -> Tensor:
        """Several tokens of a token-major page at a time."""
        step = places.step
        _, length, heads, dim = source.shape
        width = heads * dim
        tile = self._tile(role, (heads, dim), places.count, len(blocks) // places.count * step)
        if source.is_contiguous():
            _stage(source.view(-1, step * width), blocks, tile.view(-1, width))
        else:
            picked = _bits(source.unflatten(1, (length // step, step)))
            outer, inner = blocks // (length // step), blocks % (length // step)
            tile.view(-1, step, heads, dim).copy_(picked[outer, inner].view(source.dtype))
        return tile[:, places.phase : places.phase + places.tokens].transpose(1, 2)

    def _read_pages(self, role: str, source: Tensor, pages: IntArray, places: Places) -> Tensor:
        """Whole pages of a head-major cache: a (page, head) is one contiguous piece of the tile."""
        count, blocks = pages.shape
        _, page, heads, dim = source.shape
        tile = self._tile(role, (heads, dim), count, blocks * page).transpose(1, 2)
        wanted = tile.view(count, heads, blocks, page * dim)
        pieces = source.transpose(1, 2)
        if pieces.is_contiguous():
            piece = pages[:, None, :] * heads + np.arange(heads)[:, None]
            _select(pieces.view(-1, page * dim), piece, wanted.view(-1, page * dim))
        else:
            picked = _bits(pieces)[torch.from_numpy(pages)].view(
                source.dtype
            )  # [g, blocks, K, P, D]
            wanted.unflatten(-1, (page, dim)).copy_(picked.transpose(1, 2))
        return tile[:, :, places.phase : places.phase + places.tokens]


def _run(source: Tensor, count: int, run: tuple[int, int, int, int, int]) -> Tensor:
    """[count, tokens, K, D], a view."""
    outer, inner, outer_step, inner_step, tokens = run
    strides = source.stride()
    return source.as_strided(
        (count, tokens, *source.shape[2:]),
        (outer_step * strides[0] + inner_step * strides[1], *strides[1:]),
        source.storage_offset() + outer * strides[0] + inner * strides[1],
    )


def _read_rows(source: Tensor, tile: Tensor, outer: IntArray, inner: IntArray) -> None:
    """Token by token."""
    length, heads, dim = source.shape[1:]
    strides = source.stride()
    joined = (dim, 1)  # strides of a token's heads that lie one after the other
    if strides[0] == length * strides[1] and strides[2:] == tile.stride()[2:] == joined:
        rows = source.as_strided(
            (len(source) * length, heads * dim), strides[1::2], source.storage_offset()
        )
        _select(rows, outer * length + inner, tile.view(-1, heads * dim))
    else:
        index = torch.from_numpy(outer), torch.from_numpy(inner)
        tile.copy_(_bits(source)[index].view(source.dtype))


def _select(rows: Tensor, index: IntArray, out: Tensor) -> None:
    """``rows[index]`` [n, width] into ``out`` [n, width], whose dtype may be another."""
    picked = torch.from_numpy(index.reshape(-1))
    if rows.dtype == out.dtype:
        wide_rows, wide_out = _wide(rows), _wide(out)
        if wide_rows.dtype == wide_out.dtype:
            torch.index_select(wide_rows, 0, picked, out=wide_out)
            return
    _stage(rows, picked, out)


def _stage(rows: Tensor, picked: Tensor, out: Tensor) -> None:
    """The elements of ``rows[picked]`` into ``out``, whose shape and dtype may be others."""
    wide = _wide(rows)
    staged = SCRATCH.take("staged", (len(picked), wide.shape[1]), wide.dtype)
    torch.index_select(wide, 0, picked, out=staged)
    out.copy_(staged.view(rows.dtype).view(out.shape))


def _wide(rows: Tensor) -> Tensor:
    """The same bytes as int64 if they divide: a gather of rows then runs twice as fast."""
    per = 8 // rows.itemsize
    parts = (rows.shape[1], rows.stride(0), rows.storage_offset())
    if rows.stride(1) == 1 and all(part % per == 0 for part in parts):
        return rows.view(torch.int64)
    return _bits(rows)


def _bits(x: Tensor) -> Tensor:
    """8-bit floats as integers: torch gathers no float8 on the CPU."""
    return x.view(torch.uint8) if x.itemsize == 1 else x
