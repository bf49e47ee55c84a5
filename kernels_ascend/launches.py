"""Operator calls prepared once per plan: index tensors lie on the device, lengths on the host; a
layer only runs them.

A launch yields states of *slots*: one slot is one query with the heads of one row, so a cache whose
kv heads are folded into the batch has K slots per query. ``slots`` names the slot of each result
row, -1 for a result that nobody wants.
"""

from dataclasses import dataclass

from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.visibility import IntArray
from splitkv.kernels_ascend.fused_infer import (
    Heads,
    Pages,
    latent_queries,
    packed_queries,
    single_queries,
)
from splitkv.kernels_ascend.fusion import packed_rows
from splitkv.kernels_ascend.pools import flat_tokens, gather_tokens, pool_of


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One operator call. slots: int64 [result rows] on the host; pick: the same on the device, None
    where q serves as it is.
    """

    heads: Heads
    slots: IntArray
    pick: Tensor | None
    kv_lens: list[int]

    def queries(self, q: Tensor) -> Tensor:
        """Rows of q [slots, H, D] in the order in which this call wants them."""
        return q if self.pick is None else q[self.pick]

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        """Out [result rows, H, Dv] and lse [result rows, H] as the operator reports them."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class PagedLaunch(Launch):
    """Rows over pages: row r has counts[r] queries and the blocks table[rows[r], columns[r]]."""

    layout: str
    counts: list[int]
    page_size: int
    rows: Tensor | None
    """Rows of the table and columns to read, int64; None where the table serves as it is."""
    columns: Tensor | None
    causal: bool

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        pool = pool_of(call.cache, call.spec, self.page_size)
        table = pool.table if self.rows is None else pool.table[self.rows, self.columns]
        pages = Pages(pool.k, pool.v, table, self.page_size)
        queries = self.queries(q)
        if self.layout == "TND":
            return packed_queries(
                queries, self.heads, self.counts, self.kv_lens, pages=pages, causal=self.causal
            )
        return single_queries(queries, self.heads, self.kv_lens, layout=self.layout, pages=pages)


@dataclass(frozen=True, slots=True, eq=False)
class DenseLaunch(Launch):
    """One query per request over the whole dense cache, as it lies."""

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        kv = (call.cache.k, call.cache.v)
        layout = call.spec.layout.value
        return single_queries(self.queries(q), self.heads, self.kv_lens, layout=layout, kv=kv)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLaunch(Launch):
    """Rows over a packed cache; they follow each other without a gap, so keys that nobody reads
    here have a row of their own.
    """

    counts: list[int]
    causal: bool

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        used = sum(self.kv_lens)
        kv = (call.cache.k[:used], call.cache.v[:used])
        queries = self.queries(q)
        return packed_queries(
            queries, self.heads, self.counts, self.kv_lens, kv=kv, causal=self.causal
        )


@dataclass(frozen=True, slots=True, eq=False)
class CopiedLaunch(Launch):
    """Short ranges that begin inside a page (or overlap), copied out of the cache: request [n, 1],
    position [n, m].
    """

    request: Tensor
    position: Tensor

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        kv = gather_tokens(call.cache, self.request, self.position)
        kv = (kv[0].contiguous(), kv[1].contiguous())
        spec = call.spec
        queries = self.queries(q).reshape(-1, spec.num_q_heads, spec.head_dim)
        out, lse = single_queries(queries, self.heads, self.kv_lens, layout="BSND", kv=kv)
        slot_heads = q.shape[1]
        return out.reshape(-1, slot_heads, out.shape[-1]), lse.reshape(-1, slot_heads)


@dataclass(frozen=True, slots=True, eq=False)
class LatentLaunch(Launch):
    """Ranges of an absorbed MLA cache: latent and rope part lie in one row of 576 there, and the
    operator wants each contiguous, so that they are copied out: request [n, 1], position [n, m].
    """

    request: Tensor
    position: Tensor

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        keys, _ = gather_tokens(call.cache, self.request, self.position)
        split = call.spec.head_dim_v
        latent, rope = keys[..., :split].contiguous(), keys[..., split:].contiguous()
        return latent_queries(self.queries(q), latent, rope, self.heads, self.kv_lens)


@dataclass(frozen=True, slots=True, eq=False)
class FusionLaunch(Launch):
    """Rows for the training operator, one after the other: the first keys of the cache as they lie,
    or the ones at ``tokens`` int64 [sum of kv_lens], copied out.
    """

    counts: list[int]
    causal: bool
    tokens: Tensor | None

    def run(self, call: DecodeCall, q: Tensor) -> tuple[Tensor, Tensor]:
        used = sum(self.kv_lens)
        k, v = (
            flat[:used] if self.tokens is None else flat[self.tokens]
            for flat in flat_tokens(call.cache)
        )
        queries = self.queries(q)
        return packed_rows(queries, k, v, self.heads, self.counts, self.kv_lens, causal=self.causal)
