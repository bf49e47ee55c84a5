"""Writing new tokens into a cache."""

from torch import Tensor

from splitkv.common.cache import Cache, RingCache


def append_kv(cache: Cache | RingCache, k: Tensor, v: Tensor) -> None:
    """Being written."""
    raise NotImplementedError
