"""How a backend states what it takes, and what a refusal says.

A declaration is complete or it does not exist: every feature is stated, and every "no" says whose
move it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from splitkv.common.spec import DecodeSpec, Feature


class UnsupportedError(NotImplementedError):
    """A well-formed request that the asked backend, or every backend, refuses; the text lists the
    reasons.
    """


class Why(Enum):
    """Whose move it is."""

    NOT_YET = "not implemented here yet"
    UPSTREAM = "needs a vendor change"
    NEVER = "not meant to"


@dataclass(frozen=True, slots=True)
class No:
    """A declared "no": whose move, the reason in a sentence, and what to do instead."""

    why: Why
    reason: str
    remedy: str | None = None

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.reason} ({self.why.value}){remedy}"


@dataclass(frozen=True, slots=True)
class Range:
    """Integers from ``low`` to ``high`` (both included; None: no bound) that ``multiple_of``
    divides.
    """

    low: int = 1
    high: int | None = None
    multiple_of: int = 1

    def __contains__(self, value: int) -> bool:
        above = self.high is not None and value > self.high
        return value >= self.low and not above and value % self.multiple_of == 0

    def __str__(self) -> str:
        top = "any" if self.high is None else str(self.high)
        step = f" in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.low}..{top}{step}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A closed set of integers."""

    values: tuple[int, ...]

    def __contains__(self, value: int) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


IntSet = Range | OneOf


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Support:
    """A backend's whole claim. Anything not listed is a bug in the declaration, not a "yes".

    Raises:
        TypeError: a feature is left unstated.
    """

    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    head_dim: IntSet
    head_dim_v: IntSet
    group: IntSet
    page_size: IntSet
    num_queries: IntSet
    features: Mapping[Feature, No | None]

    def __post_init__(self) -> None:
        if unstated := set(Feature) - set(self.features):
            names = sorted(feature.name for feature in unstated)
            raise TypeError(f"support must state every feature, missing: {names}")

    def refusals(self, spec: DecodeSpec) -> list[str]:
        """Every reason why ``spec`` cannot run; an empty list means it can."""
        reasons = [
            f"{feature.value}: {no}"
            for feature in spec.features
            if (no := self.features[feature]) is not None
        ]
        reasons += self._dtype_refusals("dtype", spec.dtype, self.dtypes)
        if Feature.KV_SCALES not in spec.features or self.features[Feature.KV_SCALES] is None:
            reasons += self._dtype_refusals("kv_dtype", spec.cache_dtype, self.kv_dtypes)
        limits = [
            ("head_dim", spec.head_dim, self.head_dim),
            ("head_dim_v", spec.head_dim_v, self.head_dim_v),
            ("query heads per kv head", spec.group, self.group),
            ("num_queries", spec.num_queries, self.num_queries),
        ]
        if spec.page_size is not None:
            limits.append(("page_size", spec.page_size, self.page_size))
        reasons += [
            f"{name} {value} is not in {allowed}"
            for name, value, allowed in limits
            if value not in allowed
        ]
        return reasons

    @staticmethod
    def _dtype_refusals(
        name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]
    ) -> list[str]:
        if dtype in allowed:
            return []
        names = ", ".join(map(dtype_name, allowed))
        return [
            f"{name} {dtype_name(dtype)} is not one of {names}; convert or choose another backend"
        ]
