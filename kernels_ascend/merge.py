"""Merging on the NPU: the vendor's operator within its limits, our own kernel where triton is, else
torch operators.
"""

import math
from collections.abc import Sequence

import torch

from splitkv.common.state import PartialState, as_list, merge_states_torch
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.limits import limit
from splitkv.kernels_ascend.runtime import operators


def merge(states: Sequence[PartialState] | PartialState) -> PartialState:
    """Merge states of the same queries over disjoint keys; the mathematics is
    ``splitkv.common.state``'s.

    ``npu_attention_update`` does up to 16 states of float32 in one launch; its NaN for a row that
    no state has seen is put right. Our own kernel takes any number of them, and any Dv up to 512.
    Everything else goes through torch operators.

    Raises:
        ValueError: no state, or states that differ in shape, dtype or device.
    """
    parts = as_list(states)
    if len(parts) == 1:
        return parts[0]
    if fits_operator(parts):
        return _fused(parts)
    return own.merge_states(parts) if fits_own_kernel(parts) else merge_states_torch(parts)


def fits_operator(parts: Sequence[PartialState]) -> bool:
    """Whether ``npu_attention_update`` takes these states."""
    dim = parts[0].out.shape[-1]
    return (
        len(parts) <= limit("update_shards_max").number
        and dim % limit("update_dim_multiple").number == 0
        and dim <= limit("update_dim_max").number
        and parts[0].out.dtype == torch.float32
    )


def fits_own_kernel(parts: Sequence[PartialState]) -> bool:
    """Whether our own kernel takes these states, and there is a triton to compile it."""
    return own.mergeable(parts[0]) and own.missing() is None


def _fused(parts: Sequence[PartialState]) -> PartialState:
    shape = parts[0].lse.shape
    out, lse = operators().npu_attention_update(
        [part.lse.reshape(-1) for part in parts],
        [part.out.reshape(-1, part.out.shape[-1]) for part in parts],
        1,
    )
    top = torch.stack([part.max for part in parts]).amax(0)
    nothing = torch.stack([part.lse for part in parts]).amax(0) == -math.inf
    return PartialState(
        top,
        torch.where(nothing, -math.inf, lse.view(shape)),
        torch.where(nothing[..., None], 0.0, out.view(*shape, -1)),
    )
