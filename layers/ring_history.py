"""A ring cache with a memory: what was written to it, and what of that it still holds.

A ring is written over. Whether a history may be cut back, or a prefix used again, depends on what
was ever written, which a cache view does not know.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitkv.backends.append import append_kv
from splitkv.common.cache import RingCache
from splitkv.common.visibility import as_lengths


class RingHistory:
    """Owns the lengths of a ``RingCache`` that one layer reads through a window.

    cache: its ``seq_lens`` lie on the host, count what was written, and are changed in place.
    sliding_window: W. anchor_tokens: the first tokens, visible always, which pinned blocks hold.

    Raises:
        ValueError: lengths on a device, a ring too small for the window, anchors not pinned.
    """

    def __init__(self, cache: RingCache, sliding_window: int, anchor_tokens: int = 0) -> None:
        page = cache.page_size
        pinned = cache.anchor_blocks * page
        needed = -(-(sliding_window - 1) // page) + 1
        if sliding_window < 1 or cache.ring_blocks < needed:
            raise ValueError(
                f"sliding_window is {sliding_window}, the ring has {cache.ring_blocks} blocks of "
                f"{page} tokens; a window of W >= 1 needs ceil((W - 1) / {page}) + 1"
            )
        if not 0 <= anchor_tokens <= pinned:
            raise ValueError(
                f"anchor_tokens is {anchor_tokens}, pinned are {cache.anchor_blocks} blocks of "
                f"{page} tokens: give the cache more anchor_blocks"
            )
        if cache.seq_lens.device.type != "cpu":
            raise ValueError(
                f"seq_lens lie on {cache.seq_lens.device}; a RingHistory keeps them on the host"
            )
        self.cache = cache
        self.sliding_window = sliding_window
        self._written = as_lengths("seq_lens", cache.seq_lens).tolist()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, those that were cut back not counted."""
        lengths: list[int] = self.cache.seq_lens.tolist()
        return lengths

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write S more tokens of every request; k [B, S, K, D], v [B, S, K, Dv] (or without S).

        Raises:
            ValueError: as ``append_kv``; lengths are then what they were.
        """
        longer = self.cache.seq_lens + (k.shape[1] if k.ndim == 4 else 1)
        append_kv(replace(self.cache, seq_lens=longer), k, v)
        self.cache.seq_lens.copy_(longer)
        self._written = [max(pair) for pair in zip(self._written, self.lengths, strict=True)]

    def trim(self, lengths: Sequence[int]) -> None:
        """Cut requests back to ``lengths``, as after rejected draft tokens; then go on appending.

        Raises:
            ValueError: a length below 0 or above today's, or one whose next token would see
                positions that were written over. Nothing is cut back then.
        """
        today = self.lengths
        if len(lengths) != len(today):
            raise ValueError(f"lengths must name {len(today)} requests, got {len(lengths)}")
        for request, (length, old) in enumerate(zip(lengths, today, strict=True)):
            if not 0 <= length <= old:
                raise ValueError(f"lengths[{request}] is {length}, allowed are 0 to {old}")
            lost = self.lost(request)
            first = max(length - self.sliding_window + 1, lost.start)
            if first < min(length, lost.stop):
                raise ValueError(
                    f"lengths[{request}] is {length}: its window begins at position "
                    f"{max(length - self.sliding_window + 1, 0)}, and {lost.start} to "
                    f"{lost.stop - 1} were written over; compute the history again"
                )
        self.cache.seq_lens.copy_(torch.tensor(list(lengths)))

    def lost(self, request: int) -> range:
        """Positions that newer tokens have been written over, rejected ones among them."""
        page = self.cache.page_size
        pinned = self.cache.anchor_blocks * page
        newest = (self._written[request] - 1) // page
        return range(pinned, max((newest - self.cache.ring_blocks + 1) * page, pinned))


def missing_prefix(layers: Sequence[RingHistory], request: int, length: int) -> list[str]:
    """Why the first ``length`` tokens of a request cannot be used again; empty if they can.

    Every layer must still hold all of them: the smallest ring decides. One reason a layer.
    """
    reasons = []
    for index, layer in enumerate(layers):
        written, lost = layer.lengths[request], layer.lost(request)
        if written < length:
            reasons.append(f"layer {index} holds {written} tokens, {length} were asked for")
        elif lost and lost.start < length:
            end = min(lost.stop, length) - 1
            reasons.append(f"layer {index} has written over positions {lost.start} to {end}")
    return reasons
