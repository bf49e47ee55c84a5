"""How large a tile the split kernel works on: a function of the spec alone, so that bits do not depend on the batch."""

from dataclasses import dataclass

import torch

from splitkv.common.spec import DecodeSpec


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: S * G rows of queries (at least 16, the smallest that ``tl.dot`` takes); tokens: keys and values of one step."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def padded(head_dim: int) -> int:
    """What a head dim is padded to in registers; memory past ``head_dim`` is never touched."""
    return max(power_of_two(head_dim), 16)


def tile_for(spec: DecodeSpec) -> Tile:
    """The tile of ``spec``: the largest that ``benchmarks.aot`` compiles without spilled registers, whatever masks it has."""
    rows = max(power_of_two(spec.num_queries * spec.group), 16)
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    if spec.dtype == torch.float32:
        return Tile(16, tokens=16, num_warps=4, num_stages=2)
    if rows == 16:
        return Tile(16, tokens=64 if widest <= 128 else 32, num_warps=4, num_stages=3)
    return Tile(
        min(rows, 64 if widest <= 64 else 32),
        tokens=32 if widest <= 128 else 16,
        num_warps=4,
        num_stages=2,
    )
