"""The two ways in which the stand-in says no: as the operator would, and for itself."""

from typing import NoReturn


class StandinGapError(NotImplementedError):
    """The operator may well take this; the stand-in does not model it."""


def refuse(operator: str, reason: str) -> NoReturn:
    """Raise what a refused call looks like: the tiling's error code and a reason.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"561002: {operator}: {reason}")
