"""What one named request of the case table is: spec, lengths, splits, and how its memory looks."""

import hashlib
import math
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from splitkv.common.spec import DecodeSpec, Feature, Layout


class Memory(Enum):
    """How the tensors of a cache lie in their storage."""

    PLAIN = "contiguous"
    JOINT = "K and V are slices of one buffer's last dimension"
    STRIDED = "the last dimension has stride 2"
    FAR = "the pool has more than 2**31 elements and the used pages are its last"
    RING = "pages are reused in a circle, so that what left the window is overwritten"
    LATENT = "V is the view of K's first columns, as in absorbed MLA"


class Size(Enum):
    """What a run of the case costs."""

    SMALL = "small"
    """at most seconds on a CPU"""
    LARGE = "large"
    """gigabytes of address space, or minutes"""


@dataclass(frozen=True)
class Case:
    """A named request that stands for rows of the matrix; ``id`` is stable, evidence refers to it.

    seq_lens: tokens of each request; query_lens: queries of each (None: ``spec.num_queries``).
    num_splits, split_size: as for ``plan_splits``; planned_lens: what the plan is made for.
    columns: n of attn_mask and attn_bias. bias_batch, bias_heads: False for a 1 in that dimension;
    bias_hides: a third of the bias is -inf. merged_at_block: pages before and after are attended to
    apart, and merged. nan: "k" or "v" puts a NaN where the first request's last query sees it.
    poison: what fills slots that no query may see. q_gain: factor on q, to make scores large.
    odd_capacity: T of a dense cache is no multiple of 128. fixture: a recording in matrix/fixtures
    to take q, k and v from.
    """

    id: str
    stands_for: str
    spec: DecodeSpec
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None
    num_splits: int | None = None
    split_size: int | None = None
    planned_lens: tuple[int, ...] | None = None
    columns: int = 0
    bias_batch: bool = True
    bias_heads: bool = True
    bias_hides: bool = False
    alibi_per_request: bool = False
    memory: Memory = Memory.PLAIN
    odd_capacity: bool = False
    index_dtype: torch.dtype = torch.int32
    host_lengths: bool = False
    returns_state: bool = False
    merged_at_block: int | None = None
    nan: str | None = None
    poison: float = math.nan
    q_gain: float = 1.0
    fixture: str | None = None
    size: Size = Size.SMALL

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """The matrix rows that this case touches, in the enum's order."""
        touched = (*self.spec.features, *((Feature.STATE,) if self.returns_state else ()))
        return tuple(feature for feature in Feature if feature in touched)

    @property
    def queries(self) -> tuple[int, ...]:
        """S of each request."""
        return self.query_lens or (self.spec.num_queries,) * len(self.seq_lens)

    @property
    def fixes_splits(self) -> bool:
        """Whether a request's splits, and so its bits, do not depend on its batch mates."""
        return self.num_splits is not None or self.split_size is not None

    @cached_property
    def digest(self) -> str:
        """Of everything but the words: runs of a case that has changed are runs of another case."""
        mine = _unlike_default(self, skip=("id", "stands_for", "spec", "size"))
        text = repr((_unlike_default(self.spec), mine))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _unlike_default(instance: Any, skip: tuple[str, ...] = ()) -> list[tuple[str, object]]:
    """Fields that differ from their default, so that a new field leaves old digests alone."""
    found = []
    for entry in fields(instance):
        if not entry.init or entry.name in skip:
            continue
        value = getattr(instance, entry.name)
        if entry.default is MISSING or repr(value) != repr(entry.default):
            found.append((entry.name, value))
    return found


_SPEC_FIELDS = frozenset(entry.name for entry in fields(DecodeSpec) if entry.init)


def make(id: str, stands_for: str, seq_lens: tuple[int, ...], **settings: Any) -> Case:
    """A case with 8 query heads on 2 kv heads of 64, bfloat16 in NHD pages of 128.

    settings: other fields of ``DecodeSpec`` and ``Case``; ``scales`` is k_scale and v_scale.
    """
    of_spec = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "layout": Layout.NHD}
    of_spec |= {name: value for name, value in settings.items() if name in _SPEC_FIELDS}
    if of_spec["layout"].paged:  # type: ignore[attr-defined]
        of_spec.setdefault("page_size", 128)
    if (scales := settings.pop("scales", None)) is not None:
        of_spec |= {"k_scale": scales, "v_scale": scales}
    of_case = {name: value for name, value in settings.items() if name not in _SPEC_FIELDS}
    if queries := of_case.get("query_lens"):
        of_spec |= {"packed_queries": True, "num_queries": max(queries)}
    return Case(id, stands_for, DecodeSpec(**of_spec), seq_lens, **of_case)  # type: ignore[arg-type]
