"""Which positions a query sees: one predicate, and the contiguous ranges that follow from it.

A request of length L brings S queries; query t sits at position i = L - S + t (bottom-right
alignment) and sees key j iff

    0 <= j < L,    j <= i (causal),    j >= (i // b + 1) * b - W or j < a

(window of W positions, a multiple of the block of b; a anchors). With b = 1 the window is the W
newest positions, own one included. With larger b it begins at a block: W = n * b shows the n newest
blocks, the own one included, and W = b is the chunked attention of Llama 4, where i sees its own
chunk alone (``chunked_overlay`` of transformers' ``masking_utils``: i // b == j // b).

Positions are logical, 0-based and never reset: also those of cross-attention (not causal, the
queries of another origin than the keys), to which windows, anchors and ALiBi slopes refer all the
same. Masks of the caller narrow this further, and so does ``kv_start``, a position of each request
below which nothing is seen, anchors included (left padding, a history that was cut); positions go
on counting from 0, and a plan, which knows no such starts, reads nothing less for them: who
executes it clips its splits.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.spec import DecodeSpec

IntArray = npt.NDArray[np.int64]
_Positions = TypeVar("_Positions", IntArray, Tensor, int)


def window_start(position: _Positions, spec: DecodeSpec) -> _Positions:
    """(i // b + 1) * b - W: where the window of queries at these positions starts; negative where
    it reaches over the beginning.
    """
    assert spec.sliding_window is not None
    block = spec.window_block
    return position - position % block - (spec.sliding_window - block)


def visible_bounds(
    seq_lens: IntArray, num_queries: IntArray | int, spec: DecodeSpec
) -> tuple[IntArray, IntArray]:
    """What any query of each request sees: positions [0, anchor_end) and [start, seq_len), which do
    not overlap.

    seq_lens: [B]; num_queries: S, or [B] of each request's own count. Returns ``(anchor_end,
    start)``, int64 [B] each; without a window that is (0, 0). An anchor range that touches the
    window is joined to it (``start`` 0).
    """
    zeros = np.zeros_like(seq_lens)
    if spec.sliding_window is None:
        return zeros, zeros
    first_query = seq_lens - num_queries
    start = np.clip(window_start(first_query, spec), 0, seq_lens)
    anchor_end = np.minimum(spec.anchor_tokens, seq_lens)
    joined = anchor_end >= start
    return np.where(joined, 0, anchor_end), np.where(joined, 0, start)


def visible_mask(q_positions: Tensor, k_positions: Tensor, spec: DecodeSpec) -> Tensor | None:
    """The predicate for broadcastable int64 positions of queries and keys; None where every pair
    passes.

    Says nothing of ``0 <= j < L``: lengths are the caller's.
    """
    mask = None
    if spec.causal and spec.num_queries > 1:
        mask = k_positions <= q_positions
    if spec.sliding_window is not None:
        near = k_positions >= window_start(q_positions, spec)
        if spec.anchor_tokens:
            near = near | (k_positions < spec.anchor_tokens)
        mask = near if mask is None else mask & near
    return mask


def query_positions(seq_lens: Tensor, num_queries: int) -> Tensor:
    """Position of each query, int64 [B, S]: ``seq_len - S + t`` (negative where a request is
    shorter than S).
    """
    steps = torch.arange(num_queries, device=seq_lens.device)
    return seq_lens.to(torch.int64)[:, None] - num_queries + steps


def window_from(sliding_window: int | None = None, window_left: int | None = None) -> int | None:
    """``sliding_window`` from either spelling; ``window_left = W - 1``, and -1 means unlimited.

    Raises:
        ValueError: both are given, or ``window_left`` is below -1.
    """
    if window_left is None:
        return sliding_window
    if sliding_window is not None:
        raise ValueError(
            f"give sliding_window or window_left, not both: got {sliding_window} and {window_left} "
            "(sliding_window = window_left + 1)"
        )
    if window_left < -1:
        raise ValueError(f"window_left must be -1 (unlimited) or more, got {window_left}")
    return None if window_left == -1 else window_left + 1


def as_lengths(name: str, lengths: "Sequence[int] | IntArray | Tensor") -> IntArray:
    """Host lengths as int64 [B].

    Raises:
        ValueError: not one-dimensional, not integers, negative, or above 2**31 - 1; the text names
        index and value.
    """
    if isinstance(lengths, Tensor):
        if lengths.dtype.is_floating_point or lengths.dtype.is_complex:
            raise ValueError(f"{name} must be integers, got {lengths.dtype}")
        lengths = lengths.detach().cpu().numpy()
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int64).reshape(-1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be one-dimensional integers, got {array.ndim}-d {array.dtype}"
        )
    array = array.astype(np.int64)
    # a negative length is a large number without its sign
    if np.maximum.reduce(array.view(np.uint64), initial=0) > 2**31 - 1:
        index = int(np.flatnonzero((array < 0) | (array > 2**31 - 1))[0])
        raise ValueError(f"{name}[{index}] is {array[index]}, allowed are 0 to {2**31 - 1}")
    return array
