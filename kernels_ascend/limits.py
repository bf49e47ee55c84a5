"""The operators' limits as data: ``limits.yaml``, each with its sentence and its source."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True, slots=True)
class Limit:
    """One documented limit: a number or a closed set of numbers, what the document says, and which
    document.
    """

    name: str
    value: int | tuple[int, ...]
    unit: str
    says: str
    source: str

    @property
    def number(self) -> int:
        """The value of a limit that is one number."""
        assert isinstance(self.value, int)
        return self.value

    @property
    def choices(self) -> tuple[int, ...]:
        """The value of a limit that is a set."""
        assert isinstance(self.value, tuple)
        return self.value


@cache
def limits() -> dict[str, Limit]:
    """Every limit by name.

    Raises:
        ValueError: an entry of ``limits.yaml`` lacks a field, has one too many, or has a value of
            another kind.
    """
    text = files("splitkv.kernels_ascend").joinpath("limits.yaml").read_text()
    return {name: _limit(name, entry) for name, entry in yaml.safe_load(text).items()}


def limit(name: str) -> Limit:
    """The limit called ``name``."""
    return limits()[name]


def _limit(name: str, entry: object) -> Limit:
    fields = ("value", "unit", "says", "source")
    if not isinstance(entry, dict) or set(entry) != set(fields):
        raise ValueError(f"limits.yaml: {name} must have exactly {fields}, got {entry!r}")
    value = entry["value"]
    if isinstance(value, list) and all(type(item) is int for item in value):
        value = tuple(value)
    elif type(value) is not int:
        raise ValueError(
            f"limits.yaml: {name}.value must be an integer or a list of them, got {value!r}"
        )
    texts = [entry[field] for field in fields[1:]]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"limits.yaml: {name} needs texts for {fields[1:]}, got {texts!r}")
    return Limit(name, value, *(" ".join(text.split()) for text in texts))
