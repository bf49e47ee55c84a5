"""Views of K and V: what the tensors, lengths and tables of a call become. A cache owns no policy
and copies nothing.

Lengths and tables may live on the host or on the device; int32 and int64 are accepted. Construction
checks shapes and dtypes only; values are read by ``splitkv.common.validate`` when the caller asks
for it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from splitkv.common.spec import Layout

_INDEX_DTYPES = (torch.int32, torch.int64)


def check_index(name: str, tensor: Tensor, shape: str, ndim: int) -> None:
    """Raise ValueError unless ``tensor`` is an int32 or int64 tensor of ``ndim`` dimensions."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor {shape}, got {type(tensor).__name__}")
    if tensor.dtype not in _INDEX_DTYPES:
        raise ValueError(
            f"{name} must be int32 or int64, got {tensor.dtype}; convert it with .to(torch.int32)"
        )
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")


def _check_pair(k: Tensor, v: Tensor, ndim: int, shape: str) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor {shape}, got {type(tensor).__name__}")
        if tensor.ndim != ndim:
            raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in all but the last dimension, got {list(k.shape)} and "
            f"{list(v.shape)}"
        )
    if k.device != v.device:
        raise ValueError(f"k and v must be on one device, got {k.device} and {v.device}")
    if k.dtype != v.dtype:
        raise ValueError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")


def _check_batch(name: str, got: int, want: int, other: str) -> None:
    if got != want:
        raise ValueError(f"{name} has {got} requests, {other} has {want}")


@dataclass(frozen=True, slots=True, eq=False)
class DenseCache:
    """One row of capacity T per request.

    k: [B, T, K, D] for layout BSND, [B, K, T, D] for BNSD; v: the same with Dv (of int4 codes in
        all caches half of these, ``splitkv.common.quantised``). seq_lens: int [B], valid positions.
    """

    k: Tensor
    v: Tensor
    seq_lens: Tensor
    layout: Layout = Layout.BSND

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(self.layout))
        if self.layout not in (Layout.BSND, Layout.BNSD):
            raise ValueError(f"layout of a dense cache is BSND or BNSD, got {self.layout.value}")
        _check_pair(self.k, self.v, 4, "[B, T, K, D] (BSND) or [B, K, T, D] (BNSD)")
        check_index("seq_lens", self.seq_lens, "[B]", 1)
        _check_batch("seq_lens", self.seq_lens.shape[0], self.k.shape[0], "k")

    @property
    def batch(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2 if self.layout is Layout.BSND else 1]

    @property
    def capacity(self) -> int:
        """T, the most tokens that a request can hold."""
        return self.k.shape[1 if self.layout is Layout.BSND else 2]

    @property
    def page_size(self) -> None:
        return None

    def bnsd(self) -> tuple[Tensor, Tensor]:
        """Views of k and v as [B, K, T, D], whatever the layout."""
        if self.layout is Layout.BNSD:
            return self.k, self.v
        return self.k.transpose(1, 2), self.v.transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class PackedCache:
    """Requests one after the other.

    k: [sum of T, K, D]; v: [sum of T, K, Dv]; cu_seqlens_k: int [B + 1], starts at 0, ends at the
        row count of k.
    """

    k: Tensor
    v: Tensor
    cu_seqlens_k: Tensor

    def __post_init__(self) -> None:
        _check_pair(self.k, self.v, 3, "[tokens, K, D]")
        check_index("cu_seqlens_k", self.cu_seqlens_k, "[B + 1]", 1)
        if self.cu_seqlens_k.shape[0] < 1:
            raise ValueError("cu_seqlens_k must be [B + 1], got shape [0]")

    @property
    def layout(self) -> Layout:
        return Layout.PACKED

    @property
    def batch(self) -> int:
        return self.cu_seqlens_k.shape[0] - 1

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """All tokens: an upper bound for one request."""
        return self.k.shape[0]

    @property
    def page_size(self) -> None:
        return None

    @property
    def seq_lens(self) -> Tensor:
        """int [B], on the device of ``cu_seqlens_k``."""
        return self.cu_seqlens_k.diff()


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Pages of a pool, found through a table.

    k: [pages, P, K, D] for layout NHD, [pages, K, P, D] for HND; v: the same with Dv, any strides.
    block_table: int [B, max_blocks], page of each logical block; an entry is used iff its page
    holds a position that some query may see, and no other entry is read. seq_lens: int [B].
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    layout: Layout = Layout.NHD

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(self.layout))
        if not self.layout.paged:
            raise ValueError(f"layout of a paged cache is NHD or HND, got {self.layout.value}")
        _check_pair(self.k, self.v, 4, "[pages, P, K, D] (NHD) or [pages, K, P, D] (HND)")
        check_index("block_table", self.block_table, "[B, max_blocks]", 2)
        check_index("seq_lens", self.seq_lens, "[B]", 1)
        _check_batch("seq_lens", self.seq_lens.shape[0], self.block_table.shape[0], "block_table")

    @classmethod
    def from_indptr(
        cls,
        k: Tensor,
        v: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        *,
        seq_lens: Tensor | None = None,
        last_page_len: Tensor | None = None,
        layout: Layout = Layout.NHD,
    ) -> "PagedCache":
        """From FlashInfer's page lists: pages of request b are kv_indices[kv_indptr[b]:kv_indptr[b
        + 1]].

        Lengths come as ``seq_lens`` or as ``last_page_len`` (1 to P for a request with pages, a
        full last page is P, never 0). Reads kv_indptr (and last_page_len) on the host, once;
        seq_lens only where they are on the host already.

        Raises:
            ValueError: indptr not rising from 0 to len(kv_indices), both or neither length
                argument, or lengths that the pages do not hold.
        """
        _check_pair(k, v, 4, "[pages, P, K, D] (NHD) or [pages, K, P, D] (HND)")
        check_index("kv_indptr", kv_indptr, "[B + 1]", 1)
        check_index("kv_indices", kv_indices, "[pages of all requests]", 1)
        bounds = check_offsets("kv_indptr", kv_indptr, kv_indices.shape[0])
        counts = [high - low for low, high in pairwise(bounds)]
        page_size = k.shape[1 if Layout(layout) is Layout.NHD else 2]
        if (seq_lens is None) == (last_page_len is None):
            raise ValueError("kv_indptr needs exactly one of seq_lens and last_page_len")
        if seq_lens is None:
            assert last_page_len is not None
            seq_lens = _lengths_from_last_page(counts, last_page_len, page_size)
        _check_held(counts, seq_lens, page_size)
        table = kv_indices.new_full((len(counts), max(counts, default=0)), -1)
        for row, (low, count) in enumerate(zip(bounds, counts, strict=False)):
            table[row, :count] = kv_indices[low : low + count]
        return cls(k, v, table, seq_lens, layout)

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2 if self.layout is Layout.NHD else 1]

    @property
    def page_size(self) -> int:
        return self.k.shape[1 if self.layout is Layout.NHD else 2]

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        """The most tokens that a table row can address."""
        return self.block_table.shape[1] * self.page_size

    def nhd(self) -> tuple[Tensor, Tensor]:
        """Views of k and v as [pages, P, K, D], whatever the layout."""
        if self.layout is Layout.NHD:
            return self.k, self.v
        return self.k.transpose(1, 2), self.v.transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class RingCache:
    """Pages that are reused in a circle, with pinned pages for the anchors: a short block table.

    k, v, layout: as for ``PagedCache``. block_table: int [B, anchor_blocks + ring_blocks]; logical
    block n is column n while n < anchor_blocks, and column anchor_blocks + (n - anchor_blocks) %
    ring_blocks after that. seq_lens: int [B], the whole history's length (positions are never
    reset). Which positions are still resident is the window's affair: with W = sliding_window, a
    ring evicted in whole blocks needs ceil((W - 1) / P) + 1 blocks. max_seq_len: upper bound of
    ``seq_lens`` on the host (None: read from ``seq_lens``, which waits for a device).
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    layout: Layout = Layout.NHD
    anchor_blocks: int = 0
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        check_index("block_table", self.block_table, "[B, max_blocks]", 2)
        columns = self.block_table.shape[1]
        if self.max_seq_len is not None and not 0 <= self.max_seq_len <= 2**31 - 1:
            raise ValueError(f"max_seq_len must be 0 to {2**31 - 1}, got {self.max_seq_len}")
        if not 0 <= self.anchor_blocks < max(columns, 1):
            raise ValueError(
                f"anchor_blocks must be 0 to {max(columns, 1) - 1} (the table has {columns} "
                "columns), "
                f"got {self.anchor_blocks}"
            )
        object.__setattr__(self, "layout", Layout(self.layout))
        PagedCache(self.k, self.v, self.block_table, self.seq_lens, self.layout)

    @property
    def ring_blocks(self) -> int:
        return self.block_table.shape[1] - self.anchor_blocks

    @property
    def page_size(self) -> int:
        return self.k.shape[1 if self.layout is Layout.NHD else 2]

    def as_paged(self) -> PagedCache:
        """The same pages under a full-length table, so that paged kernels serve a ring
        unchanged.
        """
        longest = self.max_seq_len
        if longest is None:
            longest = int(self.seq_lens.max()) if len(self.seq_lens) else 0
        block = torch.arange(-(-longest // self.page_size), device=self.block_table.device)
        around = self.anchor_blocks + (block - self.anchor_blocks) % max(self.ring_blocks, 1)
        column = torch.where(block < self.anchor_blocks, block, around)
        return PagedCache(self.k, self.v, self.block_table[:, column], self.seq_lens, self.layout)


Cache = DenseCache | PackedCache | PagedCache


def check_offsets(name: str, offsets: Tensor, total: int) -> list[int]:
    """Offsets as host integers, checked to rise from 0 to ``total``.

    Raises:
        ValueError: naming the index and value that break the rule.
    """
    values: list[int] = offsets.tolist()
    if not values or values[0] != 0:
        raise ValueError(f"{name}[0] must be 0, got {values[0] if values else 'no entry'}")
    for index, (low, high) in enumerate(pairwise(values)):
        if high < low:
            raise ValueError(f"{name} must not fall: {name}[{index + 1}] is {high} after {low}")
    if values[-1] != total:
        raise ValueError(
            f"{name}[{len(values) - 1}] must be the row count {total}, got {values[-1]}"
        )
    return values


def _check_held(counts: list[int], seq_lens: Tensor, page_size: int) -> None:
    check_index("seq_lens", seq_lens, "[B]", 1)
    _check_batch("seq_lens", seq_lens.shape[0], len(counts), "kv_indptr")
    if seq_lens.device.type != "cpu":
        return
    for index, (count, length) in enumerate(zip(counts, seq_lens.tolist(), strict=True)):
        if length > count * page_size:
            raise ValueError(
                f"seq_lens[{index}] is {length}, its {count} pages hold {count * page_size} tokens"
            )


def _lengths_from_last_page(counts: list[int], last_page_len: Tensor, page_size: int) -> Tensor:
    check_index("last_page_len", last_page_len, "[B]", 1)
    _check_batch("last_page_len", last_page_len.shape[0], len(counts), "kv_indptr")
    lengths = []
    for index, (count, last) in enumerate(zip(counts, last_page_len.tolist(), strict=True)):
        if count and not 1 <= last <= page_size:
            raise ValueError(
                f"last_page_len[{index}] is {last}, allowed are 1 to {page_size} (a full last page "
                f"is {page_size})"
            )
        lengths.append((count - 1) * page_size + last if count else 0)
    return torch.tensor(lengths, dtype=torch.int32, device=last_page_len.device)
