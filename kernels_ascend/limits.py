"""The operators' limits as data: ``limits.yaml``, typed, and the validator that enforces them.

The vendor's own shape functions check almost nothing, and a device answers a call outside of its
limits with an error code at best. So what a call would be is written down as ``Facts`` and held
against every limit of its operator before anything is launched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from splitkv.kernels_ascend.soc import Soc

Value = int | float | str


class Reading(Enum):
    """Which reading of sources that disagree a limit belongs to."""

    BOTH = "both"
    STRICT = "strict"
    """the narrower text; what is enforced unless ``strict=False``"""
    LOOSE = "loose"
    """what stands in place of the strict limits with ``strict=False``"""


class Rule(Enum):
    """How a fact is held against a limit's value."""

    MAX = "max"
    BELOW = "below"
    MIN = "min"
    MULTIPLE = "multiple"
    ONE_OF = "one_of"
    SAME_AS = "same_as"
    """the value names another fact"""
    AT_MOST = "at_most"
    """the same, the other fact is an upper bound"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one operator call would be; None is not known yet, and no limit speaks of it.

    layout: ``input_layout``. head_dim: of q and k without rope. cache_form: dimensions of a paged
    cache, 0 where it is not paged. query_row: query heads x head dim. odd_bytes: of a head, beyond
    a multiple of 32. queries, keys: of the longest row. tokens: queries of all rows. slots: token
    places of a cache that is written. entries: of the key length list. mask: "none", "compressed"
    or "full". state: whether an LSE (or max and sum) is asked for.
    """

    operator: str
    soc: Soc = Soc.A2
    layout: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    rope_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    group: int | None = None
    page_size: int | None = None
    cache_form: int | None = None
    cache_row: int | None = None
    query_row: int | None = None
    odd_bytes: int | None = None
    kv_elements: int | None = None
    slots: int | None = None
    rows: int | None = None
    entries: int | None = None
    queries: int | None = None
    tokens: int | None = None
    keys: int | None = None
    sparse_mode: int | None = None
    mask: str | None = None
    inner_precise: int | None = None
    scale: float | None = None
    sinks: int | None = None
    state: int | None = None
    shards: int | None = None


_FACTS = frozenset(entry.name for entry in fields(Facts)) - {"operator", "soc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One documented limit: which fact of which operators, what the document says, and which
    document.

    when: facts that must hold for the limit to apply, each by a rule of its own. socs: empty is
    every generation that has the operator. cann: the releases that the text is of; empty is all.
    """

    name: str
    operators: tuple[str, ...]
    of: str
    rule: Rule
    value: Value | tuple[Value, ...]
    says: str
    source: str
    unit: str = ""
    advice: str = ""
    reading: Reading = Reading.BOTH
    warns: bool = False
    socs: tuple[Soc, ...] = ()
    cann: str = ""
    when: Mapping[str, tuple[Rule, Value | tuple[Value, ...]]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The value of a limit that is one integer."""
        assert isinstance(self.value, int)
        return self.value

    @property
    def choices(self) -> tuple[Value, ...]:
        """The value of a limit that is a set."""
        assert isinstance(self.value, tuple)
        return self.value

    def applies(self, facts: Facts) -> bool:
        """Whether the limit speaks of such a call, as far as its facts are known."""
        if facts.operator not in self.operators or (self.socs and facts.soc not in self.socs):
            return False
        return all(
            getattr(facts, name) is not None and _holds(rule, getattr(facts, name), value, facts)
            for name, (rule, value) in self.when.items()
        )

    def broken_by(self, facts: Facts) -> str | None:
        """The sentence of a refusal, or None."""
        got = getattr(facts, self.of)
        if got is None or not self.applies(facts) or _holds(self.rule, got, self.value, facts):
            return None
        advice = f"; {self.advice}" if self.advice else ""
        return f"{_PLAIN.get(self.of, self.of)} {got}: {self.says} ({self.source}){advice}"


_PLAIN = {
    "heads": "num_q_heads",
    "group": "query heads per kv head",
    "cache_row": "kv heads x head_dim",
    "query_row": "query heads x head_dim",
}
"""How sentences call a fact whose field name is not what a caller gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What an operator is: where it exists, what it reports, what it needs besides CANN."""

    name: str
    socs: tuple[Soc, ...]
    lse: bool
    says: str
    source: str
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """All of ``limits.yaml``, by name."""

    operators: Mapping[str, Operator]
    limits: Mapping[str, Limit]


@cache
def load() -> Limits:
    """``limits.yaml``, parsed once.

    Raises:
        ValueError: an entry lacks a field, has one too many, or has a value of another kind.
    """
    text = files("splitkv.kernels_ascend").joinpath("limits.yaml").read_text()
    content = yaml.safe_load(text)
    operators = {name: _operator(name, entry) for name, entry in content["operators"].items()}
    found = {name: _limit(name, entry) for name, entry in content["limits"].items()}
    for entry in found.values():
        if unknown := set(entry.operators) - set(operators):
            raise ValueError(f"limits.yaml: {entry.name} speaks of unknown operators {unknown}")
    return Limits(operators, found)


def limits() -> Mapping[str, Limit]:
    """Every limit by name."""
    return load().limits


def limit(name: str) -> Limit:
    """The limit called ``name``."""
    return limits()[name]


def operator_named(name: str) -> Operator:
    """What ``limits.yaml`` says of an operator."""
    return load().operators[name]


def violations(facts: Facts, *, strict: bool = True) -> list[str]:
    """Every reason why the operator would not take such a call, each with value, limit and source.

    strict: where sources disagree, the narrower (default) or the wider reading.
    """
    operator = operator_named(facts.operator)
    found = []
    if facts.soc not in operator.socs:
        names = ", ".join(soc.value for soc in operator.socs)
        found.append(
            f"{facts.soc} has no {operator.name}, only {names} have it ({operator.source})"
        )
    if facts.state and not operator.lse:
        found.append(
            f"{operator.name} reports no LSE ({operator.source}), so that its result is no state "
            "and cannot be merged; AscendBackend(needs_lse=False) takes the output alone"
        )
    return found + [
        sentence
        for entry in _enforced(strict)
        if not entry.warns and (sentence := entry.broken_by(facts)) is not None
    ]


def doubts(facts: Facts, *, strict: bool = True) -> list[str]:
    """What is documented and yet doubtful of such a call: to be warned of, not refused."""
    return [
        sentence
        for entry in _enforced(strict)
        if entry.warns and (sentence := entry.broken_by(facts)) is not None
    ]


def _enforced(strict: bool) -> list[Limit]:
    left_out = Reading.LOOSE if strict else Reading.STRICT
    return [entry for entry in limits().values() if entry.reading is not left_out]


def _holds(rule: Rule, got: Value, value: Value | tuple[Value, ...], facts: Facts) -> bool:
    if rule is Rule.ONE_OF:
        assert isinstance(value, tuple)
        return got in value
    if rule in (Rule.SAME_AS, Rule.AT_MOST):
        assert isinstance(value, str)
        other = getattr(facts, value)
        return other is None or (got == other if rule is Rule.SAME_AS else got <= other)
    assert isinstance(got, int | float)
    assert isinstance(value, int | float)
    match rule:
        case Rule.MAX:
            return got <= value
        case Rule.BELOW:
            return got < value
        case Rule.MIN:
            return got >= value
    return got % value == 0


def _operator(name: str, entry: object) -> Operator:
    given = _entry(name, entry, {"socs", "lse", "says", "source"}, {"needs"})
    if not isinstance(given["lse"], bool):
        raise ValueError(f"limits.yaml: {name}.lse must be true or false, got {given['lse']!r}")
    return Operator(
        name=name,
        socs=_socs(name, given["socs"]),
        lse=given["lse"],
        says=_text(name, given["says"]),
        source=_text(name, given["source"]),
        needs=_text(name, given.get("needs", "CANN")),
    )


_OPTIONAL = {"unit", "advice", "reading", "warns", "socs", "cann", "when"}


def _limit(name: str, entry: object) -> Limit:
    rules = {rule.value for rule in Rule}
    given = _entry(name, entry, {"operators", "of", "says", "source"}, rules | _OPTIONAL)
    if given["of"] not in _FACTS:
        raise ValueError(f"limits.yaml: {name}.of must be a field of Facts, got {given['of']!r}")
    rule, value = _rule(name, {key: given[key] for key in given if key in rules})
    when = {fact: _rule(f"{name}.when", each) for fact, each in given.get("when", {}).items()}
    if unknown := set(when) - _FACTS:
        raise ValueError(f"limits.yaml: {name}.when speaks of unknown facts {unknown}")
    return Limit(
        name=name,
        operators=tuple(given["operators"]),
        of=given["of"],
        rule=rule,
        value=value,
        says=_text(name, given["says"]),
        source=_text(name, given["source"]),
        unit=given.get("unit", ""),
        advice=given.get("advice", ""),
        reading=Reading(given.get("reading", "both")),
        warns=bool(given.get("warns", False)),
        socs=_socs(name, given.get("socs", [])),
        cann=given.get("cann", ""),
        when=when,
    )


def _entry(name: str, entry: object, needed: set[str], allowed: set[str]) -> dict[str, Any]:
    if not isinstance(entry, dict) or not needed <= set(entry) <= needed | allowed:
        raise ValueError(
            f"limits.yaml: {name} must have {sorted(needed)}, and of the rest only "
            f"{sorted(allowed)}, got {entry!r}"
        )
    return entry


def _rule(name: str, given: Mapping[str, object]) -> tuple[Rule, Value | tuple[Value, ...]]:
    if len(given) != 1:
        raise ValueError(f"limits.yaml: {name} must have exactly one rule, got {dict(given)!r}")
    ((word, value),) = given.items()
    rule = Rule(word)
    if rule is Rule.ONE_OF and isinstance(value, list) and value:
        return rule, tuple(value)
    if rule in (Rule.SAME_AS, Rule.AT_MOST) and value in _FACTS:
        return rule, str(value)
    if rule in (Rule.MAX, Rule.BELOW, Rule.MIN, Rule.MULTIPLE) and type(value) in (int, float):
        assert isinstance(value, int | float)
        return rule, value
    raise ValueError(f"limits.yaml: {name} has {word}: {value!r}, which is of another kind")


def _socs(name: str, given: object) -> tuple[Soc, ...]:
    if not isinstance(given, list):
        raise ValueError(f"limits.yaml: {name}.socs must be a list, got {given!r}")
    return tuple(Soc(str(value)) for value in given)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"limits.yaml: {name} needs texts, got {value!r}")
    return " ".join(value.split())
