"""Questions to an NPU: what the documents say of the operators and leave uncertain, asked of one.

A check is a small function that calls an operator and says what it found. A finding that differs
from the documents is a result, and so is a refusal; what the machine lacks is said.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch


class Agrees(Enum):
    """How a finding stands to the documents."""

    YES = "as documented"
    NO = "not as documented"
    OPEN = "documents disagree or are silent"
    NOT_ASKED = "could not be asked here"


@dataclass(frozen=True, slots=True)
class Found:
    """What an operator did, in a sentence."""

    text: str
    agrees: Agrees


Ask = Callable[[torch.device], Found]


@dataclass(frozen=True, slots=True)
class Check:
    """One question. documents: what they say, with the source as limits.yaml names it."""

    name: str
    question: str
    documents: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    check: str
    question: str
    documents: str
    found: str
    agrees: Agrees


_checks: list[Check] = []


def check(question: str, documents: str) -> Callable[[Ask], Ask]:
    """Register a function under its own name."""

    def keep(ask: Ask) -> Ask:
        _checks.append(Check(ask.__name__.replace("_", "-"), question, documents, ask))
        return ask

    return keep


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order of the files."""
    from splitkv.matrix import (  # noqa: F401 (they register their checks)
        contract_limits,
        contract_masks,
        contract_open,
        contract_rows,
    )

    return tuple(_checks)


def findings(device: torch.device) -> Iterator[Finding]:
    """Ask everything, one after the other."""
    for one in all_checks():
        found = answer(one.ask, device)
        yield Finding(one.name, one.question, one.documents, found.text, found.agrees)


def answer(ask: Ask, device: torch.device) -> Found:
    """The check's own answer, or the refusal that ended it."""
    try:
        return ask(device)
    except NotImplementedError as gap:  # the stand-in's, or torch's for a missing operator
        return Found(f"not here: {first_line(gap)}", Agrees.NOT_ASKED)
    except AttributeError as absent:  # an operator that this torch_npu does not have
        return Found(f"not here: {first_line(absent)}", Agrees.NOT_ASKED)
    except (RuntimeError, ValueError, TypeError, OSError) as refusal:
        return Found(f"refused: {first_line(refusal)}", Agrees.NO)


def as_documented(condition: bool, text: str) -> Found:
    return Found(text, Agrees.YES if condition else Agrees.NO)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
