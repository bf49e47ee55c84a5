"""Decode calls that may be captured into a graph (aclgraph) and replayed with other lengths.

The operators bake host lengths in at capture, so that a naive replay computes the captured lengths
for ever. ``NPUGraph.update`` hands over others, one entry per recorded operator; everything else
(scale, window, page size) stays as captured, and block tables are device memory that is written in
place. So a call for capture is one operator call over all requests, always of the same shape:

    decode = GraphDecode(spec, batch=8, max_len=32768, device="npu")
    decode.refresh(seq_lens, block_table)                      # outside of the capture
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        for layer in layers:
            state = decode.partial(q[layer], cache[layer])
    ...
    decode.refresh(seq_lens, block_table)                      # every step
    graph.update(cpu_update_input=decode.updates(layers))
    graph.replay()

Unlike the eager route a window goes to the operator as a band, over a table that begins at the
window's first page: keys of that page in front of the window are read and weighted with 0, so that
they must be finite, as keys of the same request are.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import plan_splits
from splitkv.common.profile import ASCEND_910B3
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.state import PartialState
from splitkv.common.visibility import as_lengths
from splitkv.kernels_ascend.checks import lie_of, refuse, tensor_refusals
from splitkv.kernels_ascend.fused_infer import (
    FusedCall,
    Heads,
    Pages,
    compressed_mask,
    packed_call,
    single_call,
)
from splitkv.kernels_ascend.limits import violations
from splitkv.kernels_ascend.lse import normalise
from splitkv.kernels_ascend.pools import pool_of
from splitkv.kernels_ascend.routes import FIA_ROWS, FIA_TND, Route, Wants, unsaid
from splitkv.kernels_ascend.runtime import is_capturing


def graph_route(spec: DecodeSpec) -> Route:
    """Single rows where they serve; layout TND for windows and for several queries."""
    return FIA_TND if spec.num_queries > 1 or spec.sliding_window is not None else FIA_ROWS


def graph_refusals(spec: DecodeSpec, wants: Wants) -> list[str]:
    """Every reason why ``spec`` cannot be captured so that its lengths can change."""
    route = graph_route(spec)
    found = unsaid(spec)
    if spec.anchor_tokens and spec.sliding_window is not None:
        found.append(
            f"anchor_tokens {spec.anchor_tokens} with a window: they are two operator calls, which "
            "doubles the updates of every layer, and the band's pre_tokens cannot be updated when "
            "the window moves off the anchors; serve it eagerly, or with route own"
        )
    if spec.window_block > 1:
        found.append(
            f"window_block {spec.window_block}: the band of a captured call begins a fixed number "
            "of tokens before the query; serve it eagerly"
        )
    if spec.packed_queries or spec.layout is Layout.PACKED:
        found.append(
            "packed queries or keys: their rows change shape with the lengths, and a captured "
            "operator cannot; use a paged cache and the same number of queries everywhere"
        )
    if not spec.causal and spec.sliding_window is not None:
        found.append("causal=False with a window: the band ends at the query; serve it eagerly")
    if not spec.layout.paged and route is FIA_TND:
        found.append(f"layout {spec.layout.value}: layout TND wants pages; use a paged cache")
    if found:
        return found
    facts = route.facts(spec, wants)
    if route is FIA_TND:
        mode = 4 if spec.sliding_window is not None else 3 if spec.causal else 0
        mask = "compressed" if mode else "none"
        facts = replace(facts, sparse_mode=mode, mask=mask)
    return violations(facts, strict=wants.strict)


class GraphDecode:
    """One shape of call, captured once per layer and fed with new lengths before each replay.

    batch: requests of every call; requests that are not there have length 0. max_len: the longest
    length that will ever be handed over, which sizes the workspace and the table.

    Raises:
        UnsupportedError: ``graph_refusals`` has a reason.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        *,
        batch: int,
        max_len: int,
        device: torch.device | str,
        wants: Wants | None = None,
    ) -> None:
        self.spec, self.batch, self.max_len = spec, batch, max_len
        self.wants = wants or Wants()
        if reasons := graph_refusals(spec, self.wants):
            refuse(spec, *reasons)
        self.route = graph_route(spec)
        self._lengths = [0] * batch
        self._table: Tensor | None = None
        if spec.page_size is not None:
            columns = _columns(spec, max_len)
            self._table = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        self._workspace: Tensor | None = None
        self._checked: set[tuple[object, ...]] = set()
        if self.route is FIA_TND:
            compressed_mask(torch.device(device))  # made here: a capture must not copy

    def refresh(self, seq_lens: Sequence[int], block_table: Tensor | None = None) -> None:
        """Take the lengths of the next step, on the host, and copy the part of ``block_table`` int
        [B, blocks] that the window can reach into this call's own table, in place.

        Raises:
            ValueError: another batch, a length above ``max_len``, or fewer keys than queries.
            RuntimeError: the stream is being captured.
        """
        if is_capturing():
            raise RuntimeError("refresh copies to the device: call it outside of the capture")
        seq_lens = as_lengths("seq_lens", seq_lens).tolist()
        if len(seq_lens) != self.batch or max(seq_lens, default=0) > self.max_len:
            raise ValueError(
                f"seq_lens must be {self.batch} lengths up to {self.max_len}, got {seq_lens}"
            )
        queries = self.spec.num_queries
        if any(0 < length < queries for length in seq_lens):
            raise ValueError(f"{queries} queries need as many keys, got lengths {seq_lens}")
        page = self.spec.page_size or 0
        if self._table is not None:
            _check_table(block_table, seq_lens, page)
        firsts = [_first_page(self.spec, length) for length in seq_lens]
        self._lengths = [
            length - first * page for length, first in zip(seq_lens, firsts, strict=True)
        ]
        if self._table is None:
            return
        assert block_table is not None
        self._fill(self._table, firsts, seq_lens, block_table)

    def _fill(
        self, table: Tensor, firsts: list[int], seq_lens: Sequence[int], block_table: Tensor
    ) -> None:
        page = self.spec.page_size or 1
        # columns past a row's last page repeat it: the operator never reads them, nor do we
        last = torch.tensor(
            [max(-(-length // page) - 1, 0) for length in seq_lens], dtype=torch.int64
        )
        first = torch.tensor(firsts, dtype=torch.int64)
        columns = first[:, None] + torch.arange(table.shape[1])
        columns = torch.minimum(columns, last[:, None]).to(block_table.device)
        taken = block_table.gather(1, columns).to(table.dtype)
        seen = torch.tensor([length > 0 for length in seq_lens], dtype=torch.bool).to(table.device)
        table.copy_(torch.where(seen[:, None], taken, 0))

    def updates(self, layers: int = 1) -> list[dict[str, list[int]]]:
        """What ``NPUGraph.update(cpu_update_input=...)`` wants for a graph that holds ``layers``
        calls of ``partial``, one entry per operator; a batch of 0 calls none.
        """
        if not self.batch:
            return []
        if self.route is FIA_ROWS:
            return [{"actual_seq_lengths_kv": list(self._lengths)} for _ in range(layers)]
        queries = self.spec.num_queries
        ends = [queries * (row + 1) for row in range(self.batch)]
        entry = {"actual_seq_qlen": ends, "actual_seq_kvlen": list(self._lengths)}
        return [{name: list(values) for name, values in entry.items()} for _ in range(layers)]

    def partial(self, q: Tensor, cache: Cache) -> PartialState:
        """The state of q [B, S, H, D] over ``cache``; its lengths and table are those of
        ``refresh``, not the cache's own.

        Raises:
            UnsupportedError: the cache's strides or size.
            ValueError: a dense cache that is shorter than a length of ``refresh``.
            RuntimeError: the first call happens inside of a capture, where no workspace can be
                sized.
        """
        spec = self.spec
        if not self.batch:
            return PartialState.empty(
                (0, spec.num_queries, spec.num_q_heads), spec.head_dim_v, device=q.device
            )
        if isinstance(cache, DenseCache) and max(self._lengths) > cache.capacity:
            raise ValueError(
                f"a length is {max(self._lengths)}, the cache's capacity is {cache.capacity} tokens"
            )
        if (lie := lie_of(cache)) not in self._checked:  # layers may differ in their strides
            self._check(q, cache)
            self._checked.add(lie)
        if self._workspace is None:
            self._prepare(q, cache)
        assert self._workspace is not None
        call = self._call(q, cache, self._lengths)
        out, lse = self._buffers(q)
        call.run_into(out, lse, self._workspace)
        if self.route is FIA_TND:
            lse = lse[..., 0]
        else:
            out, lse = out.flatten(1, 2), lse[..., 0, 0]
        rows = (self.batch, spec.num_queries, spec.num_q_heads)
        out, lse = normalise(out.view(*rows, -1), lse.view(rows))
        return PartialState(lse, lse, out)

    def _prepare(self, q: Tensor, cache: Cache) -> None:
        """Size the workspace for the longest lengths: nothing checks it later."""
        if is_capturing():
            raise RuntimeError(
                "the workspace is sized by the first call: make one before the capture"
            )
        longest = self.max_len
        if self._table is not None:
            longest = min(longest, self._table.shape[1] * (self.spec.page_size or 1))
        elif isinstance(cache, DenseCache):
            longest = min(longest, cache.capacity)
        self._workspace = self._call(q, cache, [longest] * self.batch).workspace()

    def _check(self, q: Tensor, cache: Cache) -> None:
        plan = plan_splits(
            self.spec, [self.max_len] * self.batch, profile=ASCEND_910B3, num_splits=1
        )
        if reasons := tensor_refusals(DecodeCall(q, cache, self.spec), plan, self.wants):
            refuse(self.spec, *reasons)

    def _call(self, q: Tensor, cache: Cache, lengths: Sequence[int]) -> FusedCall:
        spec, queries = self.spec, self.spec.num_queries
        heads = Heads(spec.num_q_heads, spec.num_kv_heads, spec.scale)
        rows = q.reshape(-1, spec.num_q_heads, spec.head_dim).contiguous()
        if isinstance(cache, PagedCache):
            assert self._table is not None
            pool = pool_of(replace(cache, block_table=self._table), spec, cache.page_size)
            pages = Pages(pool.k, pool.v, pool.table, pool.page_size)
            if self.route is FIA_TND:
                return packed_call(
                    rows,
                    heads,
                    [queries] * self.batch,
                    lengths,
                    pages=pages,
                    causal=queries > 1 and spec.causal,
                    window=spec.sliding_window,
                )
            layout = self.route.layouts[spec.layout][0]
            return single_call(rows, heads, lengths, layout=layout, pages=pages)
        kv = (cache.k, cache.v)
        return single_call(rows, heads, lengths, layout=spec.layout.value, kv=kv)

    def _buffers(self, q: Tensor) -> tuple[Tensor, Tensor]:
        rows, heads = self.batch * self.spec.num_queries, self.spec.num_q_heads
        lse = [rows, heads, 1]
        shape = [rows, heads]
        if self.route is not FIA_TND:
            lse = [rows, heads, 1, 1]
            by_token = self.route.layouts[self.spec.layout][0] == "BSND"
            shape = [rows, 1, heads] if by_token else [rows, heads, 1]
        out = torch.empty((*shape, self.spec.head_dim_v), dtype=q.dtype, device=q.device)
        return out, torch.empty(lse, dtype=torch.float32, device=q.device)


def _check_table(block_table: Tensor | None, seq_lens: Sequence[int], page: int) -> None:
    if block_table is None:
        raise ValueError("a paged cache needs its block_table")
    wanted = (len(seq_lens), -(-max(seq_lens, default=0) // page))
    if block_table.ndim != 2 or block_table.shape[0] != wanted[0]:
        raise ValueError(
            f"block_table must be [{wanted[0]}, blocks], got {list(block_table.shape)}"
        )
    if block_table.shape[1] < wanted[1]:
        raise ValueError(
            f"block_table has {block_table.shape[1]} columns, a length of {max(seq_lens)} with "
            f"pages of {page} needs {wanted[1]}"
        )


def _first_page(spec: DecodeSpec, length: int) -> int:
    """The page in which the first query's window starts."""
    if spec.sliding_window is None or spec.page_size is None:
        return 0
    first = max(length - spec.num_queries - spec.sliding_window + 1, 0)
    return first // spec.page_size


def _columns(spec: DecodeSpec, max_len: int) -> int:
    """Pages that a request's visible keys can touch."""
    assert spec.page_size is not None
    whole = max(-(-max_len // spec.page_size), 1)
    if spec.sliding_window is None:
        return whole
    seen = spec.sliding_window + spec.num_queries - 1
    return min(whole, (seen + spec.page_size - 2) // spec.page_size + 1)
