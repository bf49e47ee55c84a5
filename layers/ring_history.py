"""A ring cache with a memory: which position each of its slots holds.

A ring is written over. Whether a history may be cut back, or a prefix used again, depends on what
was ever written, which a cache view does not know.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.append import append_kv
from splitkv.common.cache import RingCache
from splitkv.common.visibility import IntArray, as_lengths


class RingHistory:
    """Owns the lengths of a ``RingCache`` that one layer reads through a window.

    cache: its ``seq_lens`` lie on the host and count what was written. They are read once and never
    written to, so layers may share them; take ``history.cache``, which has lengths of its own, anew
    after each ``append`` and ``trim``. Of tokens that the cache comes with, those in the newest
    ring_blocks blocks and in pinned ones count as held. The pages are this history's alone.
    sliding_window: W, of a window of blocks too, which reaches no further back. anchor_tokens: the
    first tokens, visible always, which pinned blocks hold.

    Raises:
        ValueError: not a ``RingCache``, lengths on a device or above its max_seq_len, a ring too
            small for the window, anchors not pinned, or no whole numbers.
    """

    def __init__(self, cache: RingCache, sliding_window: int, anchor_tokens: int = 0) -> None:
        if not isinstance(cache, RingCache):
            raise ValueError(f"cache must be a RingCache, got {type(cache).__name__}")
        _check_int("sliding_window", sliding_window)
        _check_int("anchor_tokens", anchor_tokens)
        page = cache.page_size
        if page < 1:
            raise ValueError(f"the cache's pages hold {page} tokens, a ring needs 1 or more")
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
        self.sliding_window = sliding_window
        self.anchor_tokens = anchor_tokens
        self.cache = cache
        self._lengths = as_lengths("seq_lens", cache.seq_lens)
        self.cache = self._of_lengths(self._lengths)
        columns = cache.block_table.shape[1]
        self._positions = np.full((len(self._lengths), columns * page), -1)  # of each slot
        for request, length in enumerate(self._lengths):
            newest = np.arange(max(length - cache.ring_blocks * page, 0), length)
            first = np.arange(min(pinned, length))
            self._record(np.array([[request]]), np.union1d(first, newest)[None])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request, those that were cut back not counted."""
        lengths: list[int] = self._lengths.tolist()
        return lengths

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write S more tokens of every request; k [B, S, K, D], v [B, S, K, Dv] (or without S).

        Raises:
            ValueError: as ``append_kv``, or more tokens than the cache's max_seq_len; nothing is
                written then, and lengths are what they were.
        """
        # what is no tensor is refused by append_kv
        steps = k.shape[1] if isinstance(k, Tensor) and k.ndim == 4 else 1
        longer = self._lengths + steps
        cache = self._of_lengths(longer)
        append_kv(cache, k, v)
        requests = np.arange(len(longer))[:, None]
        self._record(requests, self._lengths[:, None] + np.arange(steps))
        self.cache, self._lengths = cache, longer

    def trim(self, lengths: Sequence[int] | Tensor) -> None:
        """Cut requests back to ``lengths``, as after rejected draft tokens; then decode or append.

        All that the last token kept sees must be held still: the W positions that end with it, one
        more than the next token will see, and the anchors. A ring that is to give back n tokens at
        any time needs n slots beyond W.

        Raises:
            ValueError: no whole numbers, a length below 0 or above today's, or one whose last token
                would see positions that were written over. Nothing is cut back then.
        """
        given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        shorter = as_lengths("lengths", given)
        if len(shorter) != len(self._lengths):
            raise ValueError(f"lengths must name {len(self._lengths)} requests, got {len(shorter)}")
        for request, (length, old) in enumerate(zip(shorter.tolist(), self.lengths, strict=True)):
            if length > old:
                raise ValueError(f"lengths[{request}] is {length}, allowed are 0 to {old}")
            start = max(length - self.sliding_window, 0)
            seen = (range(min(self.anchor_tokens, length)), range(start, length))
            lost = [r for r in self.lost(request) if any(_meet(r, part) for part in seen)]
            if length < old and lost:
                raise ValueError(
                    f"lengths[{request}] is {length}: the window of its last token begins at "
                    f"position {start}, and {_named(lost)} were written over; compute the history "
                    "again"
                )
        self.cache, self._lengths = self._of_lengths(shorter), shorter
        # a later append may skip a position that it evicts at once: its slot keeps a rejected token
        self._positions[self._positions >= shorter[:, None]] = -1

    def lost(self, request: int) -> list[range]:
        """Positions below the length that the ring does not hold, in rising order.

        A slot is lost to the position written to it last, a rejected one too, until it is written
        anew.

        Raises:
            ValueError: there is no such request.
        """
        _check_int("request", request)
        if not 0 <= request < len(self._lengths):
            raise ValueError(f"request is {request}, the cache has {len(self._lengths)} requests")
        length, held = int(self._lengths[request]), self._positions[request]
        held = np.sort(held[held >= 0])
        edges = np.concatenate(([-1], held, [length]))
        gaps = np.flatnonzero(np.diff(edges) > 1)
        return [range(int(edges[gap]) + 1, int(edges[gap + 1])) for gap in gaps]

    def _of_lengths(self, lengths: IntArray) -> RingCache:
        """The cache with new lengths in a tensor of their own."""
        lengths = as_lengths("seq_lens", lengths)
        most = self.cache.max_seq_len
        if most is not None and lengths.size and lengths.max() > most:
            request = int(lengths.argmax())
            raise ValueError(
                f"seq_lens[{request}] is {lengths[request]}, the cache's max_seq_len is {most}"
            )
        dtype = self.cache.seq_lens.dtype
        return replace(self.cache, seq_lens=torch.tensor(lengths.tolist(), dtype=dtype))

    def _record(self, requests: IntArray, positions: IntArray) -> None:
        """Note what ``append_kv`` wrote of ``positions`` [n, S], which end with the newest, of
        ``requests`` [n, 1].
        """
        cache = self.cache
        page, pinned, around = cache.page_size, cache.anchor_blocks, cache.ring_blocks
        block = positions // page
        written = (block < pinned) | (block > block[:, -1:] - around)
        column = np.where(block < pinned, block, pinned + (block - pinned) % around)
        if cache.block_table.device.type == "cpu":
            ids = cache.block_table.numpy()[requests, column]
            written &= (ids >= 0) & (ids < cache.k.shape[0])
        slot = column * page + positions % page
        request = np.broadcast_to(requests, positions.shape)
        self._positions[request[written], slot[written]] = positions[written]


def missing_prefix(layers: Sequence[RingHistory], request: int, length: int) -> list[str]:
    """Why the first ``length`` tokens of a request cannot be used again; empty if they can.

    Every layer must still hold all of them: the smallest ring decides. One reason a layer.

    Raises:
        ValueError: a layer has no such request, or ``length`` is no whole number from 0 on.
    """
    _check_int("length", length)
    if length < 0:
        raise ValueError(f"length is {length}, allowed are 0 and more")
    reasons = []
    for index, layer in enumerate(layers):
        lost = [range(r.start, min(r.stop, length)) for r in layer.lost(request)]
        lost = [r for r in lost if r]
        written = layer.lengths[request]
        if written < length:
            reasons.append(f"layer {index} holds {written} tokens, {length} were asked for")
        elif lost:
            reasons.append(f"layer {index} has written over positions {_named(lost)}")
    return reasons


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _named(ranges: Sequence[range]) -> str:
    return ", ".join(f"{r.start} to {r.stop - 1}" for r in ranges)


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
