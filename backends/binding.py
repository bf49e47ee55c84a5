"""What a plan remembers of a call that was checked, so that calls like it are not checked again.

A serving loop makes one call per layer and step with one plan. The first is checked. A later one is
compared with it: the shapes, and what the host can read of lengths and block tables.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.common.cache import PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.validate import Validate

Facts = tuple[object, ...]


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
    indices: Facts

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
            _indices(call),
        )

    def vouches_for(self, call: DecodeCall, level: Validate) -> bool:
        """Whether a check of ``call`` at ``level`` would find nothing that this one's did not."""
        return self._is_like(call) and (level is Validate.NONE or _indices(call) == self.indices)

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


def _indices(call: DecodeCall) -> Facts:
    """Lengths, offsets, table and starts: in values where no device has to be waited for."""
    cache = call.cache
    lengths = cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens
    table = cache.block_table if isinstance(cache, PagedCache) else None
    return _values(lengths), _values(table), _values(call.cu_seqlens_q), _values(call.kv_start)


def _values(indices: Tensor | None) -> Facts | None:
    if indices is None:
        return None
    if not indices.is_cpu:
        return indices.shape, indices.dtype, indices.device
    # with as many requests as q, bytes and dtype fix the shape; torch.equal on a table takes longer
    return indices.dtype, indices.numpy().tobytes()
