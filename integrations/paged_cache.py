"""A cache of transformers that keeps K and V in pages, which decode steps read in place.

Padding never reaches a page: a left-padded batch of 3, 5 and 9 tokens is stored as 3, 5 and 9
tokens, and a decode step needs no mask for it. The model still counts positions with the padding,
as transformers does everywhere.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, __version__
from transformers.cache_utils import CacheLayerMixin

from splitkv.backends.append import append_kv
from splitkv.common.cache import PagedCache
from splitkv.common.support import UnsupportedError
from splitkv.integrations.blocks import PAGES, Block, length_tensor, ranges
from splitkv.integrations.masks import Hidden, band, remember

try:
    from transformers.cache_utils import get_layer_types_and_kwargs
except ImportError as error:
    raise ImportError(
        f"SplitKVCache needs transformers 5.24 or later, this is {__version__}; use the caches of "
        "transformers, which splitkv.integrations.transformers serves as well"
    ) from error

_SERVED = ("full_attention", "sliding_attention", "chunked_attention")
_LEFT_ONLY = "SplitKVCache takes padding on the left only: tokenizer.padding_side = 'left'"


class PageTable:
    """Which pages a request owns; one table serves the pools of all layers."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.rows: list[list[int]] = []
        self._tensor: Tensor | None = None

    def reserve(self, lengths: Sequence[int]) -> None:
        """Own enough pages for ``lengths`` [B] tokens; they are handed out as they are needed."""
        while len(self.rows) < len(lengths):
            self.rows.append([])
        for row, length in zip(self.rows, lengths, strict=True):
            while len(row) * self.page_size < length:
                row.append(self.num_pages)
                self.num_pages += 1
                self._tensor = None

    def tensor(self, device: torch.device) -> Tensor:
        """int32 [B, max_blocks], -1 where a request owns no page."""
        if self._tensor is None or self._tensor.device != device:
            blocks = max(map(len, self.rows))
            padded = [row + [-1] * (blocks - len(row)) for row in self.rows]
            self._tensor = torch.tensor(padded, dtype=torch.int32, device=device)
        return self._tensor

    def clear(self) -> None:
        """Take all pages back."""
        self.rows, self.num_pages, self._tensor = [], 0, None


class PagedLayer(CacheLayerMixin):
    """One layer's K and V in pages [pages, P, K, D].

    ``update`` only hands this layer to the attention function, which knows the mask, so which
    tokens are padding, and appends.
    """

    is_sliding = False
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, table: PageTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.seen = 0
        """positions, padding included: what transformers calls the sequence length"""
        self.pads: tuple[int, ...] = ()
        """left padding of each request"""
        self.pending = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request that are in pages."""
        return tuple(self.seen - pads for pads in self.pads)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_empty(0, self.table.page_size, states.shape[1], states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new K and V as they are, and put this layer into the attention's keywords.

        Raises:
            UnsupportedError: the model does not hand its keywords over, or the attention of the
                last step was not splitkv's.
        """
        keywords = kwargs.get("kwargs")
        if keywords is None:
            raise UnsupportedError(
                "SplitKVCache: this model does not call cache.update(..., kwargs=kwargs), so its "
                "attention cannot find the pages; use transformers 5.24 or later, or a DynamicCache"
            )
        if self.pending:
            raise UnsupportedError(
                "SplitKVCache: nothing appended the K and V of the last step, so its attention was "
                "not splitkv's; call splitkv.integrations.transformers.register() and "
                "model.set_attn_implementation('splitkv')"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.pending = True
        keywords[PAGES] = self
        return key_states, value_states

    def append(self, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """Write a step's K and V, [B, K, S, D], without padding; True for the first step.

        mask: bool [B, 1, S, seen + S]; a token that does not see itself is padding.

        Raises:
            ValueError: padding that follows a token, or another batch size.
        """
        batch, _, steps, _ = key.shape
        first = not self.pads
        if first:
            self.pads = (0,) * batch
        if batch != len(self.pads):
            raise ValueError(
                f"this cache holds {len(self.pads)} requests, got {batch}; call cache.reset()"
            )
        if mask is not None:
            padding = remember(mask, ("padding", self.seen), lambda: left_padding(mask, self.seen))
            for row, (more, length) in enumerate(zip(padding, self.lengths, strict=True)):
                if more and length:
                    raise ValueError(
                        f"request {row} has padding after its {length} tokens; {_LEFT_ONLY}"
                    )
            self.pads = tuple(old + more for old, more in zip(self.pads, padding, strict=True))
        self.seen += steps
        self.table.reserve(self.lengths)
        self._grow()
        append_kv(self.view(self.lengths), key.transpose(1, 2), value.transpose(1, 2))
        self.pending = False
        return first

    def view(self, lengths: tuple[int, ...]) -> PagedCache:
        """The pages as ``splitkv.decode`` takes them."""
        device = self.keys.device
        table = self.table.tensor(device)
        return PagedCache(self.keys, self.values, table, length_tensor(lengths, device))

    def blocks(self, hidden: Hidden, queries: int, at_most: int) -> Iterator[Block]:
        """Blocks of the queries just appended.

        A mask is in them only where it hides more than padding, the future and the window.
        """
        mask, causal, window = hidden.mask, hidden.causal, hidden.window
        if mask is not None:
            question = ("expected", self.pads, window)
            if remember(mask, question, lambda: self._expected(hidden)):
                mask = None
            else:
                causal, window = False, None
        for start, stop in ranges(queries, at_most):
            later = queries - stop if causal else 0
            lengths = tuple(max(length - later, 0) for length in self.lengths)
            columns = slice(0, self.seen - later)
            yield Block(
                start,
                stop,
                self.view(lengths),
                lengths,
                causal,
                window,
                None if mask is None else mask[:, 0, start:stop, columns],
                None if hidden.bias is None else hidden.bias[:, :, start:stop, columns],
            )

    def _expected(self, hidden: Hidden) -> bool:
        assert hidden.mask is not None
        steps, seen = hidden.mask.shape[2:]
        device = hidden.mask.device
        pads = length_tensor(self.pads, device)
        kept = torch.arange(seen, device=device) >= pads[:, None]
        expected = band(steps, seen, hidden.window, device) & kept[:, None]
        return bool((hidden.mask[:, 0] == expected).all())

    def _grow(self) -> None:
        have, need = self.keys.shape[0], self.table.num_pages
        if need > have:
            more = max(need - have, have)
            self.keys, self.values = (
                torch.cat([pool, pool.new_empty(more, *pool.shape[1:])])
                for pool in (self.keys, self.values)
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget all tokens; the pools stay allocated."""
        self.seen, self.pads, self.pending = 0, (), False
        self.table.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` positions (0 or negative, as in transformers)."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.seen:
            raise ValueError(f"tokens_to_remove must be {-self.seen} to 0, got {tokens_to_remove}")
        self.seen += tokens_to_remove
        self.pads = tuple(min(pads, self.seen) for pads in self.pads)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Request b becomes a copy of request ``beam_idx[b]``, as beam search asks."""
        beams: list[int] = beam_idx.tolist()
        lengths = tuple(self.lengths[beam] for beam in beams)
        self.table.reserve(lengths)
        self._grow()
        source: list[int] = []
        target: list[int] = []
        for row, (beam, length) in enumerate(zip(beams, lengths, strict=True)):
            blocks = -(-length // self.table.page_size)
            source += self.table.rows[beam][:blocks]
            target += self.table.rows[row][:blocks]
        for pool in (self.keys, self.values):
            pool[target] = pool[source]
        self.pads = tuple(self.pads[beam] for beam in beams)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError(f"SplitKVCache keeps its batch, asked to repeat it {repeats} times")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedError("SplitKVCache keeps its batch, asked to select some of its requests")

    def offload(self) -> None:
        raise UnsupportedError("SplitKVCache keeps its pages on the device; use a DynamicCache")


def left_padding(mask: Tensor, seen: int) -> tuple[int, ...]:
    """How many of the new tokens are padding, for each request.

    Raises:
        ValueError: a token before padding, or a mask that is not [B, 1, S, seen + S].
    """
    columns = seen + mask.shape[2]
    if mask.shape[-1] != columns:
        raise ValueError(f"attention_mask must have {columns} columns, got {mask.shape[-1]}")
    itself = mask[:, 0].diagonal(seen, 1, 2).tolist()
    pads = tuple(row.count(False) for row in itself)
    for index, (row, count) in enumerate(zip(itself, pads, strict=True)):
        if any(row[:count]):
            raise ValueError(f"request {index} has padding after a token; {_LEFT_ONLY}")
    return pads


class SplitKVCache(Cache):
    """A paged cache: ``model.generate(..., cache=SplitKVCache(model.config, page_size=16))``.

    For a model whose attention is splitkv's and that hands its keywords to ``cache.update``
    (transformers 5.24 does). page_size: tokens per page. Sliding and chunked layers keep all their
    tokens; the window or the mask hides the old ones.

    Raises:
        ValueError: page_size is not a positive integer.
        UnsupportedError: a layer that is not full, sliding or chunked attention with its own K, V.
    """

    def __init__(self, config: PreTrainedConfig, *, page_size: int = 16) -> None:
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size must be a positive integer, got {page_size!r}")
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        if others := sorted(set(layer_types) - set(_SERVED)):
            raise UnsupportedError(
                f"SplitKVCache holds layers of {', '.join(_SERVED)}; this model has "
                f"{', '.join(others)}: use a DynamicCache"
            )
        self.table = PageTable(page_size)
        self._paged = [PagedLayer(self.table) for _ in layer_types]
        super().__init__(layers=[*self._paged])

    @property
    def page_size(self) -> int:
        return self.table.page_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request, padding not counted."""
        return self._paged[0].lengths
