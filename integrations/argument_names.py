"""Other libraries' argument names: the table, the check that nothing is dropped, and its page.

``argument_names.yaml`` lists every argument of every call, each with what becomes of it and with
the source that says so. The functions ``from_...`` beside this file turn a call of theirs into
keywords of ``splitkv.decode_attention``. ``python -m splitkv.integrations.argument_names`` writes
docs/names.md of a checkout anew.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from splitkv.common.spec import QUANTISED_DTYPES
from splitkv.common.support import UnsupportedError

PAGE = Path("docs/names.md")


class How(Enum):
    """What becomes of an argument."""

    SAME = "same"
    CONVERTED = "converted"
    SPEED = "speed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of theirs.

    ours: keywords of ``decode_attention`` that carry it (None: none does). also: other spellings.
    unless: values of a refused argument that mean what is done here anyway. says: a sentence.
    """

    name: str
    how: How
    says: str
    ours: str | None = None
    also: tuple[str, ...] = ()
    unless: tuple[Any, ...] = ()
    required: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One function of theirs. function: dotted name of ours that takes its keywords."""

    name: str
    function: str
    source: str
    says: str
    arguments: tuple[Argument, ...]


@cache
def calls() -> dict[str, Call]:
    """The table by the name of their function."""
    text = files("splitkv.integrations").joinpath("argument_names.yaml").read_text("utf-8")
    return {name: _call(name, entry) for name, entry in yaml.safe_load(text)["calls"].items()}


def _call(name: str, entry: dict[str, Any]) -> Call:
    arguments = tuple(
        Argument(
            name=argument,
            how=How(fields.pop("how")),
            ours=None if (ours := fields.pop("ours", None)) in (None, "none") else ours,
            also=tuple(fields.pop("also", ())),
            unless=tuple(fields.pop("unless", ())),
            **fields,
        )
        for argument, fields in entry.pop("arguments").items()
    )
    return Call(name=name, arguments=arguments, **entry)


def screened(name: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the keywords ``given`` for their function ``name``.

    Returns:
        ``(ours, theirs)``: keywords of ``decode_attention`` whose values need no change, and what
        is still to be converted, under their first spelling.

    Raises:
        ValueError: an argument that their function does not have, one given in two spellings, or a
            required one that is missing.
        UnsupportedError: an argument without a counterpart, with the reason.
    """
    call = calls()[name]
    known = {word: entry for entry in call.arguments for word in (entry.name, *entry.also)}
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    met: dict[str, str] = {}
    refused = []
    for word, value in given.items():
        entry = known.get(word)
        if entry is None:
            raise ValueError(f"{name} has no argument {word!r}; it has {', '.join(known)}")
        if entry.name in met:
            raise ValueError(f"{name}: {met[entry.name]} and {word} are one argument, give one")
        met[entry.name] = word
        if entry.how is How.SAME:
            ours[entry.ours or entry.name] = value
        elif entry.how is How.CONVERTED:
            theirs[entry.name] = value
        elif entry.how is How.REFUSED and not _harmless(value, entry.unless):
            refused.append(f"{word} {_shown(value)}: {entry.says}")
    missing = [entry.name for entry in call.arguments if entry.required and entry.name not in met]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}")
    if refused:
        raise UnsupportedError(f"{name}: {'; '.join(refused)}")
    return ours, theirs


def _harmless(value: Any, unless: tuple[Any, ...]) -> bool:
    return value is None or (not isinstance(value, Tensor) and value in unless)


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def must_be(name: str, given: int | torch.dtype | str | None, actual: int | torch.dtype) -> None:
    """Raise ValueError unless a fact that is ``given`` (None: it is not) is that of the tensors."""
    if given is not None and not same(given, actual):
        raise ValueError(f"{name} is {given}, the tensors have {actual}")


def same(given: int | torch.dtype | str, actual: int | torch.dtype) -> bool:
    """Whether both are one number, or one dtype in either spelling."""
    return str(given).removeprefix("torch.") == str(actual).removeprefix("torch.")


def soft_cap(name: str, value: float | None) -> float | None:
    """None for their two ways of saying off, None and 0.0.

    Raises:
        ValueError: below 0.
    """
    if value is None or value == 0:
        return None
    if value < 0:
        raise ValueError(f"{name} must be 0 (off) or more, got {value}")
    return value


def cache_scales(cache: Tensor, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """``k_scale`` and ``v_scale`` where the cache is quantised; another cache has none to apply."""
    scaled = cache.dtype in QUANTISED_DTYPES
    given = {"k_scale": k_scale, "v_scale": v_scale}
    return {name: value for name, value in given.items() if value is not None and scaled}


def page() -> str:
    """docs/names.md."""
    lines = [
        "# Other libraries' argument names",
        "",
        "Made from `integrations/argument_names.yaml` by `python -m "
        "splitkv.integrations.argument_names`; edit that file, not this one.",
        "",
        "Each function below takes the keywords of the call it is named for and returns those of "
        "`splitkv.decode_attention`:",
        "",
        "```python",
        "import splitkv",
        "from splitkv.integrations.flash_attention_names import from_flash_attn_with_kvcache",
        "",
        "ours = from_flash_attn_with_kvcache(",
        "    q=q, k_cache=k, v_cache=v, cache_seqlens=lengths, causal=True, window_size=(127, 0)",
        ")",
        "out = splitkv.decode_attention(**ours)",
        "```",
        "",
        "- **same**: at most another name. **converted**: a value or a form changes.",
        "- **speed**: changes no result there; it is taken and left out.",
        "- **refused**: `UnsupportedError` with the sentence in the table, unless it is None or "
        "has a value listed as harmless. An argument that is not listed is a `ValueError`.",
        "",
        "States of other libraries are converted by `splitkv.integrations.states`.",
    ]
    for call in calls().values():
        lines += ["", f"## {call.name}", "", f"`{call.function}`: {call.says}.", ""]
        lines += [f"Source: {call.source}.", ""]
        lines += ["| theirs | ours | how | |", "| --- | --- | --- | --- |"]
        lines += [_row(entry) for entry in call.arguments]
    return "\n".join(lines) + "\n"


def _row(entry: Argument) -> str:
    names = ", ".join(f"`{word}`" for word in (entry.name, *entry.also))
    ours = "" if entry.ours is None else f"`{entry.ours}`"
    says = entry.says.replace("|", "\\|")
    if entry.unless:
        says += f" (harmless: {', '.join(map(repr, entry.unless))})"
    return f"| {names} | {ours} | {entry.how.value} | {says} |"


def main() -> int:
    """Write the page of the checkout in the working directory."""
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
