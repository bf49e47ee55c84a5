"""A case as one line of text and back: ``fuzz-0-7 seq_lens=3,130 num_q_heads=4 ... layout=nhd``.

The id comes first, since the numbers of a case are keyed by it; then every field that is unlike its
default. A line has no quotes and no brackets, so that a shell takes it between two quotes.
"""

import math
import operator
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from splitkv.common.spec import FLOAT_DTYPES, QUANTISED_DTYPES, DecodeSpec
from splitkv.common.support import dtype_name
from splitkv.matrix.case import Case, Memory

STANDS_FOR = "a request drawn at random"
_WORDLESS = ("id", "stands_for", "spec", "size")
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (*FLOAT_DTYPES, *QUANTISED_DTYPES, torch.int32, torch.int64)
}


def _of(owner: type) -> dict[str, Any]:
    """Field name -> its type without None, in the order of the class."""
    hints = get_type_hints(owner)
    names = [entry.name for entry in fields(owner) if entry.init and entry.name not in _WORDLESS]
    return {name: _plain(hints[name]) for name in names}


def _plain(hint: Any) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    return next(kind for kind in get_args(hint) if kind is not type(None))


_SPEC, _CASE = _of(DecodeSpec), _of(Case)
_KINDS = _CASE | _SPEC
_DEFAULTS = {
    entry.name: entry.default
    for owner in (Case, DecodeSpec)
    for entry in fields(owner)
    if entry.default is not MISSING
}


def settings(case: Case) -> dict[str, object]:
    """Fields of the case and its spec that are unlike their default; no id."""
    spec = case.spec
    default = _DEFAULTS | {  # what the spec resolves None (or 0) to
        "head_dim_v": spec.head_dim,
        "kv_dtype": spec.dtype,
        "sm_scale": spec.head_dim**-0.5,
    }
    found = {name: getattr(case, name) for name in _CASE}
    found |= {name: getattr(spec, name) for name in _SPEC}
    # as text: NaN is unlike itself
    return {
        name: value
        for name, value in found.items()
        if name not in default or repr(value) != repr(default[name])
    }


def from_settings(id: str, given: Mapping[str, object]) -> Case:
    """The case called ``id``; None stands for a field's default.

    Raises:
        ValueError: a field is unknown or missing, or contradicts another; the text names the field,
        the value and the limit.
    """
    if unknown := sorted(set(given) - set(_KINDS)):
        raise ValueError(f"unknown fields {unknown}, known: {sorted(_KINDS)}")
    kept: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    needed = [name for name in _KINDS if name not in _DEFAULTS and name not in kept]
    if needed:
        raise ValueError(f"a case needs {', '.join(needed)}")
    spec = DecodeSpec(**{name: value for name, value in kept.items() if name in _SPEC})
    of_case = {name: value for name, value in kept.items() if name in _CASE}
    case = Case(id, STANDS_FOR, spec, **of_case)
    _check(case)
    return case


def to_text(case: Case) -> str:
    """The line that ``from_text`` reads back, to a case of the same numbers."""
    return " ".join([case.id, *(f"{name}={_word(x)}" for name, x in settings(case).items())])


def from_text(line: str) -> Case:
    """The case of a line that ``to_text`` wrote, or that somebody typed.

    Raises:
        ValueError: as ``from_settings``, or a word that is no ``field=value``.
    """
    id, *words = line.split() or [""]
    if not id or "=" in id:
        raise ValueError(f"a case begins with its id, as in 'mine seq_lens=3', got {line!r}")
    given: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _KINDS:
            raise ValueError(f"{word!r} is no field=value; fields are {', '.join(_KINDS)}")
        given[name] = _value(name, value)
    return from_settings(id, given)


def _word(value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(name: str, word: str) -> object:
    kind = _KINDS[name]
    if kind is torch.dtype:
        return _known(name, word, _DTYPES)
    if kind is bool:
        return _known(name, word, {"true": True, "false": False})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _known(name, word, {entry.name.lower(): entry for entry in kind})
    try:
        if get_origin(kind) is tuple:
            return tuple(int(part) for part in word.split(",") if part)
        return kind(word)
    except ValueError as fault:
        raise ValueError(f"{name}={word}: {fault}") from fault


def _known(name: str, word: str, known: Mapping[str, object]) -> object:
    if word not in known:
        raise ValueError(f"{name}={word} is not one of {', '.join(known)}")
    return known[word]


def _check(case: Case) -> None:
    """Raise ValueError unless ``matrix.inputs`` can build the case and a backend be given it."""
    if faults := [*_count_faults(case), *_meaning_faults(case)]:
        raise ValueError(f"{'; '.join(faults)}: {to_text(case)}")


def _count_faults(case: Case) -> Iterator[str]:
    """What is wrong with lengths, queries and splits."""
    lengths, queries, planned = case.seq_lens, case.query_lens, case.planned_lens
    if min(lengths, default=0) < 0 or case.columns < 0:
        yield "seq_lens and columns must be 0 or more"
    most, ragged = case.spec.num_queries, case.spec.packed_queries
    if queries is not None and not (
        ragged and len(queries) == len(lengths) and all(0 <= x <= most for x in queries)
    ):
        yield "query_lens needs packed_queries, one per request, 0 to num_queries"
    splits = [one for one in (case.num_splits, case.split_size) if one is not None]
    if len(splits) > 1:
        yield "num_splits and split_size exclude each other"
    if min(splits, default=1) < 1:
        yield "num_splits and split_size must be 1 or more"
    if planned is not None and not (
        len(planned) == len(lengths) and all(map(operator.ge, planned, lengths))
    ):
        yield "planned_lens must be one per request, none below its seq_len"
    if not lengths and not _plain_pages(case.spec):
        yield "a batch of none is of pages, and brings no tensor of its own"


def _meaning_faults(case: Case) -> Iterator[str]:
    """What does not go together."""
    spec = case.spec
    if case.returns_state and spec.sinks:
        yield "returns_state excludes sinks: a partial state never holds one"
    if case.merged_at_block is not None and not _mergeable(case):
        yield "merged_at_block needs a state of single queries over pages, scored by content alone"
    if case.nan is not None and not _takes_nan(case):
        yield (
            "nan is 'k' or 'v', in a floating cache whose first request has keys and queries, and "
            "without bias_hides: whether a bias of -inf hides a NaN is not said"
        )
    if not _fits(case.poison, spec.cache_dtype):
        yield "poison must be a number of the cache's dtype"
    if case.memory in (Memory.FAR, Memory.RING) and not spec.layout.paged:
        yield "memory=far and memory=ring need pages"
    if case.memory is Memory.RING and spec.sliding_window is None:
        yield "memory=ring needs a window"
    if case.memory is Memory.LATENT and spec.head_dim_v > spec.head_dim:
        yield "memory=latent needs head_dim_v of at most head_dim"


def _plain_pages(spec: DecodeSpec) -> bool:
    extras = (spec.kv_start, spec.alibi, spec.attn_bias, spec.attn_mask, spec.k_scale, spec.v_scale)
    return spec.layout.paged and not spec.packed_queries and not any(extras)


def _mergeable(case: Case) -> bool:
    spec = case.spec
    by_place = (spec.sliding_window, spec.kv_start, spec.alibi, spec.attn_bias, spec.attn_mask)
    return (
        case.returns_state
        and spec.layout.paged
        and spec.num_queries == 1
        and not spec.packed_queries
        and not any(by_place)
        and (case.num_splits, case.split_size, case.planned_lens) == (None, None, None)
        and (case.merged_at_block or 0) >= 0
    )


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` has it; a cache of integers takes another in its place."""
    if not dtype.is_floating_point or math.isnan(value):
        return True
    if dtype is torch.float8_e4m3fn and math.isinf(value):
        return False
    return math.isinf(value) or abs(value) <= torch.finfo(dtype).max


def _takes_nan(case: Case) -> bool:
    first = case.seq_lens[:1] + case.queries[:1]
    plain = case.spec.cache_dtype.is_floating_point and not case.bias_hides
    return case.nan in ("k", "v") and plain and len(first) == 2 and min(first) > 0
