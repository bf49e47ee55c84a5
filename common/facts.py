"""What can be known of tensors without their values: two calls of the same facts are alike."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGNED = 16
"""Bytes; whether a tensor begins at a multiple of it is a fact that kernels are compiled for."""


def tensor_facts(tensors: Iterable[Tensor | None]) -> tuple[list[object], list[int]] | None:
    """Shape, strides, dtype, device, alignment and ``requires_grad`` of each tensor, in one flat
    list, None for None; and where each begins, in bytes, 0 for None. None for anything else than
    plain tensors and parameters.
    """
    known: list[object] = [torch.is_grad_enabled()]
    places = []
    for tensor in tensors:
        if tensor is None:
            known.append(None)
            places.append(0)
        elif type(tensor) is Tensor or type(tensor) is Parameter:
            places.append(place := tensor.data_ptr())
            # one list, as a tuple for each tensor would cost a good part of what is saved
            known += (
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.device,
                place % ALIGNED,
                tensor.requires_grad,
            )
        else:
            return None
    return known, places
