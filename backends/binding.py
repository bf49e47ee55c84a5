"""What a plan remembers of a call that was checked, so that calls like it are not checked again.

A serving loop makes one call per layer and step with one plan. The first is checked. A later one is
compared with it: the shapes, and what the host can read of lengths and block tables.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.common.cache import PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.validate import Validate

Facts = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Indices:
    """Lengths, offsets, a table or starts as they were: in values where no device has to be waited
    for.

    place, view: address, shape, strides and dtype of ``tensor`` on the host, and an array there
    (None: not contiguous): while the tensor stays in place, its values are looked at where they
    are. values: dtype and bytes; None on a device, where ``place`` has shape, dtype and device.
    """

    tensor: Tensor
    place: Facts
    view: npt.NDArray[np.generic] | None
    values: tuple[torch.dtype, bytearray] | None

    @classmethod
    def of(cls, tensor: Tensor) -> "Indices":
        if not tensor.is_cpu:
            return cls(tensor, _facts(tensor), None, None)
        array = tensor.numpy()
        view = array if array.flags.c_contiguous else None
        return cls(tensor, _place(tensor), view, (tensor.dtype, bytearray(array.tobytes())))

    def still(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is like the one of then, values and all where they are on the host."""
        if self.values is None:
            return _facts(tensor) == self.place
        dtype, values = self.values
        view = self.view
        if tensor is self.tensor and view is not None and _place(tensor) == self.place:
            # bytearray first: it compares memory; Tensor.numpy() alone takes longer than that
            return values == view
        # with as many requests as q, bytes and dtype fix the shape
        return tensor.is_cpu and tensor.dtype == dtype and values == tensor.numpy().tobytes()


def _facts(tensor: Tensor) -> Facts:
    return tensor.shape, tensor.dtype, tensor.device


def _place(tensor: Tensor) -> Facts:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """A call that was checked: who serves it, its tensors' facts, what the host reads of indices.

    What a cache's making has checked already (v, lengths and table against k) is left out.
    """

    backend: Backend
    q: tuple[torch.Size, torch.dtype, torch.device]
    k: tuple[torch.Size, torch.dtype, torch.device]
    v: torch.Size
    may_need_grad: bool
    extras: Facts
    indices: tuple[Indices | None, ...]

    @classmethod
    def of(cls, backend: Backend, call: DecodeCall) -> "Checked":
        q, k, v = call.q, call.cache.k, call.cache.v
        return cls(
            backend,
            (q.shape, q.dtype, q.device),
            (k.shape, k.dtype, k.device),
            v.shape,
            torch.is_grad_enabled(),
            _extras(call),
            tuple(None if x is None else Indices.of(x) for x in _indices(call)),
        )

    def vouches_for(self, call: DecodeCall, level: Validate) -> bool:
        """Whether a check of ``call`` at ``level`` would find nothing that this one's did not."""
        if not self._is_like(call):
            return False
        if level is Validate.NONE:
            return True
        for known, tensor in zip(self.indices, _indices(call), strict=True):
            if known is None or tensor is None:
                if known is not None or tensor is not None:
                    return False
            elif not known.still(tensor):
                return False
        return True

    def _is_like(self, call: DecodeCall) -> bool:
        """Whether the tensors of ``call`` are like the checked ones in all but values."""
        q, cache = call.q, call.cache
        k, v = cache.k, cache.v
        if torch.is_grad_enabled() and (
            not self.may_need_grad or q.requires_grad or k.requires_grad or v.requires_grad
        ):
            return False
        return (
            (q.shape, q.dtype, q.device) == self.q
            and (k.shape, k.dtype, k.device) == self.k
            and v.shape == self.v
            and _extras(call) == self.extras
        )


def _extras(call: DecodeCall) -> Facts:
    a, b, c = call.cu_seqlens_q, call.alibi_slopes, call.attn_bias
    d, e, f, g, h = call.attn_mask, call.k_scale, call.v_scale, call.k_zero, call.v_zero
    i = call.kv_start
    if a is b is c is d is e is f is g is h is i is None:
        return ()
    return tuple(
        None if x is None else (x.shape, x.dtype, x.device, x.requires_grad)
        for x in (a, b, c, d, e, f, g, h, i)
    )


def _indices(call: DecodeCall) -> tuple[Tensor | None, ...]:
    """Lengths or offsets, table, and what counts queries and skips positions."""
    cache = call.cache
    lengths = cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens
    table = cache.block_table if isinstance(cache, PagedCache) else None
    return lengths, table, call.cu_seqlens_q, call.kv_start
