"""Decodes that repeat what their plan has served: checked, selected and prepared only once.

A serving loop makes one call per layer and step with one plan, and on a GPU the host's time for it
counts. Where all that a check reads are facts of tensors (nothing of it lies on the host), calls of
the same facts pass the same checks and start the same kernels; only where they lie differs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from splitkv.common.cache import DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.facts import tensor_facts
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec

Repeated = Callable[[list[int], Tensor | None, Tensor | None], tuple[Tensor, Tensor] | None]
"""Called with where the tensors lie, ``out`` and ``lse``: the results, or None where the call has
to be made the ordinary way, nothing having been started."""

_there = attrgetter("is_cuda")
"""Whether a tensor is where calls are repeated: no other backend keeps any."""
_LEVELS = (None, "shapes", "none")
"""What reads no values of a device."""


class Repeats(ABC):
    """A backend that keeps what it started."""

    @abstractmethod
    def repeated(
        self, call: DecodeCall, plan: SplitPlan, sinks: Tensor | None, out: Tensor, lse: Tensor
    ) -> Repeated | None:
        """What makes calls like ``call``, which was just decoded into ``out`` and ``lse`` (in the
        caller's shape); None where each is to be made the ordinary way.
        """


def request(
    plan: SplitPlan,
    q: Tensor,
    cache: object,
    spec: DecodeSpec,
    others: tuple[Tensor | None, ...],
    backend: str | None,
    validate: str | None,
) -> tuple[tuple[object, ...], list[int]] | None:
    """All that a call's checks and launches depend on but for where its tensors lie; and where they
    lie, in bytes, 0 for None. None where it cannot be repeated. The arguments, unchecked yet, may
    be of any type.

    others: cu_seqlens_q, alibi_slopes, attn_bias, attn_mask, k_scale, v_scale, k_zero, v_zero,
    sinks, out, lse.
    """
    if not isinstance(q, Tensor) or not _there(q) or validate not in _LEVELS:
        return None
    if type(plan) is not SplitPlan or type(spec) is not DecodeSpec:
        return None
    if type(cache) is PagedCache:
        indices: tuple[Tensor | None, ...] = (cache.seq_lens, cache.block_table)
    elif type(cache) is DenseCache:
        indices = (cache.seq_lens, None)
    elif type(cache) is PackedCache:
        indices = (cache.cu_seqlens_k, None)
    else:
        return None
    found = tensor_facts((q, cache.k, cache.v, *indices, *others))
    if found is None:
        return None
    known, places = found
    same = places[1] == places[2]
    return (request, spec, type(cache), cache.layout, backend, validate, same, *known), places
