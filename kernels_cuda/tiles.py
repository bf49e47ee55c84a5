"""The split kernel's tile: a function of the spec alone, so that bits do not depend on batches."""

from dataclasses import dataclass

import torch

from splitkv.common.spec import DecodeSpec


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of S * G query rows, 16 or more, as ``tl.dot`` needs; tokens: keys of one step."""

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
    """The tile of ``spec``, one that ``benchmarks.aot`` saw compile without spilled registers."""
    rows = max(power_of_two(spec.num_queries * spec.group), 16)
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    masked = spec.attn_mask or spec.attn_bias
    if spec.dtype == torch.float32:
        return Tile(16, tokens=16, num_warps=4, num_stages=2)
    if rows == 16:
        tokens = 64 if widest <= 128 and not masked else 32
        return Tile(16, tokens, num_warps=4, num_stages=3)
    return Tile(
        min(rows, 64 if widest <= 64 and not masked else 32),
        tokens=32 if widest <= 128 else 16,
        num_warps=4,
        num_stages=2,
    )
