"""What the operators must know on the host: lengths and offsets as integers, read at most once per
plan.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from splitkv.common.cache import PackedCache
from splitkv.common.call import DecodeCall
from splitkv.kernels_ascend.runtime import is_capturing

Memo = MutableMapping[object, object]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host integers of one call.

    lengths: [B] keys. counts: [B] queries. query_starts: [B], row of each request's first query in
    q [queries, H, D]. key_starts: [B], row of each request's first key in a packed cache, else
    empty.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]


def read_facts(call: DecodeCall, memo: Memo) -> HostFacts:
    """The facts of ``call``; a tensor on the device is copied once, and again only when torch saw
    it change.

    memo: the plan's ``bound``. Lengths that a foreign kernel rewrites in place, or that change
    under ``inference_mode``, are not seen to change: call ``plan.refresh`` then.

    Raises:
        RuntimeError: a copy would be needed while the stream is being captured.
    """
    if isinstance(call.cache, PackedCache):
        bounds = host_integers("cu_seqlens_k", call.cache.cu_seqlens_k, memo)
        lengths = tuple(end - start for start, end in pairwise(bounds))
        key_starts = bounds[:-1]
    else:
        lengths, key_starts = host_integers("seq_lens", call.cache.seq_lens, memo), ()
    if call.cu_seqlens_q is not None:
        bounds = host_integers("cu_seqlens_q", call.cu_seqlens_q, memo)
        counts = tuple(end - start for start, end in pairwise(bounds))
        return HostFacts(lengths, counts, bounds[:-1], key_starts)
    queries = call.spec.num_queries
    starts = tuple(request * queries for request in range(len(lengths)))
    return HostFacts(lengths, (queries,) * len(lengths), starts, key_starts)


def host_integers(name: str, tensor: Tensor, memo: Memo) -> tuple[int, ...]:
    """The values of an integer tensor, through ``memo`` where it lives on the device."""
    if tensor.device.type == "cpu":
        return tuple(tensor.tolist())
    version = None if tensor.is_inference() else tensor._version
    key = (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    copied = memo.get(key)
    if not isinstance(copied, _Copied) or copied.version != version:
        if is_capturing():
            raise RuntimeError(
                f"{name} is on {tensor.device} and the stream is being captured: the operators "
                f"take host integers; pass {name} as a CPU tensor, or run one call with this plan "
                "before the capture"
            )
        copied = _Copied(tensor, version, tuple(tensor.tolist()))
        memo[key] = copied
    return copied.values


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    tensor: Tensor
    """Kept, so that no other tensor can come to lie at its address."""
    version: int | None
    values: tuple[int, ...]
