"""Recordings of real models to take queries, keys and values from; examples/ has what made them."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures"


def recorded(name: str, index: int, length: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a recording: q [queries, H, D], k and v [length, K, D], float64.

    index: which request asks; requests take the recorded layers in turn.

    Raises:
        ValueError: the recording is shorter.
    """
    parts = _load(name)
    for part, wanted in zip(parts, (queries, length, length), strict=True):
        if wanted > part.shape[1]:
            raise ValueError(f"{name} has {part.shape[1]} rows, asked were {wanted}")
    layer = index % len(parts[0])
    q, k, v = (
        part[layer, part.shape[1] - count :].double()
        for part, count in zip(parts, (queries, length, length), strict=True)
    )
    return q, k, v


@cache
def _load(name: str) -> tuple[Tensor, ...]:
    """q [layers, S, H, D], k and v [layers, T, K, D]; kept as bfloat16 bits."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        bits = [torch.from_numpy(arrays[part]) for part in ("q", "k", "v")]
    return tuple(part.view(torch.bfloat16) for part in bits)
