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
    """A call that was checked: who serves it, its tensors' facts, copies of its host indices.

    What a cache's making has checked already (v, lengths and table against k) is left out.
    """

    backend: Backend
    q: tuple[torch.Size, torch.dtype, torch.device]
    k: tuple[torch.Size, torch.dtype, torch.device]
    v: torch.Size
    may_need_grad: bool
    extras: Facts
    lengths: Tensor
    table: Tensor | None
    cu_seqlens_q: Tensor | None

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
            _copy(_lengths(call)),
            None if (table := _table(call)) is None else _copy(table),
            None if call.cu_seqlens_q is None else _copy(call.cu_seqlens_q),
        )

    def vouches_for(self, call: DecodeCall, level: Validate) -> bool:
        """Whether a check of ``call`` at ``level`` would find nothing that this one's did not."""
        return self._is_like(call) and (level is Validate.NONE or self._has_indices_of(call))

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

    def _has_indices_of(self, call: DecodeCall) -> bool:
        """Whether lengths, offsets and table are the checked ones, as far as the host can read."""
        return (
            _same(self.lengths, _lengths(call))
            and _same(self.table, _table(call))
            and _same(self.cu_seqlens_q, call.cu_seqlens_q)
        )


def _extras(call: DecodeCall) -> Facts:
    a, b, c = call.cu_seqlens_q, call.alibi_slopes, call.attn_bias
    d, e, f = call.attn_mask, call.k_scale, call.v_scale
    if a is b is c is d is e is f is None:
        return ()
    return tuple(
        None if x is None else (x.shape, x.dtype, x.device, x.requires_grad)
        for x in (a, b, c, d, e, f)
    )


def _lengths(call: DecodeCall) -> Tensor:
    cache = call.cache
    return cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens


def _table(call: DecodeCall) -> Tensor | None:
    return call.cache.block_table if isinstance(call.cache, PagedCache) else None


def _copy(indices: Tensor) -> Tensor:
    """Of what lies on the host; of the rest shape and device are enough."""
    return indices.clone() if indices.is_cpu else indices


def _same(checked: Tensor | None, given: Tensor | None) -> bool:
    """In shape and device, and in values where no device has to be waited for."""
    if checked is None or given is None:
        return checked is given
    if given.is_cpu:
        return checked.is_cpu and torch.equal(checked, given)
    return checked.shape == given.shape and checked.device == given.device
