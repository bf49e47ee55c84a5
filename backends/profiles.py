"""A device's profile as a file: what ``splitkv tune`` writes, and what a user may write by hand.

    profile: {name: my GPU, workers: 132, read_bandwidth: 4.6e+12, launch_seconds: 3.0e-06,
              merge_seconds: 2.0e-09, tile_tokens: 128, source: measured}

Whatever else the file holds (residuals, versions, the date) is for people.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from splitkv.common.profile import DeviceProfile

SUFFIXES = (".json", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class _Limit:
    """Allowed values of a number, both ends included, and its unit."""

    low: float
    high: float
    unit: str


_INTEGERS = {
    "workers": _Limit(1, 1_000_000, "workers"),
    "tile_tokens": _Limit(1, 1_000_000, "tokens"),
    "neighbours": _Limit(1, 1_000, "workers"),
}
_FLOATS = {  # wide enough for any machine, narrow enough to see GB/s or microseconds
    "read_bandwidth": _Limit(1e7, 1e15, "bytes per second"),
    "launch_seconds": _Limit(0, 1, "seconds"),
    "merge_seconds": _Limit(0, 1e-2, "seconds per state row"),
}
_OPTIONAL = {  # a file without them has the profile's defaults
    "split_seconds": _Limit(0, 1e-2, "seconds per split"),
    "alone": _Limit(1e-3, 1, "of the share when alone"),
    "together": _Limit(1e-3, 1, "of the core's share"),
}
_WORDS = ("name", "source")
_NEEDED = (*_WORDS, "workers", "tile_tokens", *_FLOATS)
_FIELDS = (*_NEEDED, "neighbours", *_OPTIONAL)


def read_profile(path: Path | str) -> DeviceProfile:
    """The profile of a JSON or YAML file, for ``plan_splits(profile=...)``.

    Raises:
        ValueError: no such file, no ``profile`` in it, or a field that is unknown, missing or out
        of its range; the text names file, field, value and limit.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ValueError(f"profile {path}: no such file ending in {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
        held = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as fault:
        raise ValueError(f"profile {path} is not {path.suffix[1:]}: {fault}") from fault
    fields = held.get("profile") if isinstance(held, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ValueError(f"profile {path}: needs a mapping 'profile' with {', '.join(_FIELDS)}")
    try:
        return profile_from(fields)
    except ValueError as fault:
        raise ValueError(f"profile {path}: {fault}") from fault


def profile_from(fields: Mapping[object, object]) -> DeviceProfile:
    """The profile of these fields; the first ones must be there.

    Raises:
        ValueError: naming the field, its value and the limit.
    """
    if unknown := [str(name) for name in fields if name not in _FIELDS]:
        raise ValueError(f"unknown {', '.join(unknown)}; fields are {', '.join(_FIELDS)}")
    if missing := [name for name in _NEEDED if name not in fields]:
        raise ValueError(f"{', '.join(missing)} missing; fields are {', '.join(_FIELDS)}")
    optional = {
        name: _number(name, fields[name], limit)
        for name, limit in _OPTIONAL.items()
        if name in fields
    }
    words = {name: _word(name, fields[name]) for name in _WORDS}
    return DeviceProfile(
        name=words["name"],
        source=words["source"],
        workers=_integer("workers", fields["workers"]),
        tile_tokens=_integer("tile_tokens", fields["tile_tokens"]),
        neighbours=_integer("neighbours", fields.get("neighbours", 1)),
        **{name: _number(name, fields[name], limit) for name, limit in _FLOATS.items()},
        **optional,
    )


def write_profile(path: Path, profile: DeviceProfile, measured: Mapping[str, object]) -> Path:
    """Write ``profile``, and how it was measured, as JSON or YAML by the file's ending.

    Raises:
        ValueError: another ending.
    """
    held = {"profile": asdict(profile), "measured": dict(measured)}
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(SUFFIXES)}")
    if path.suffix == ".json":
        text = json.dumps(held, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    else:
        text = yaml.safe_dump(held, sort_keys=False, allow_unicode=True, width=100)
    path.write_text(text, encoding="utf-8")
    return path


def _word(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value


def _integer(name: str, value: object) -> int:
    limit = _INTEGERS[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer ({limit.unit}), got {value!r}")
    return int(_within(name, value, limit))


def _number(name: str, value: object, limit: _Limit) -> float:
    if isinstance(value, str):  # to YAML 1.1 a number like 2e-8, without a point, is a text
        try:
            value = float(value)
        except ValueError as fault:
            raise ValueError(f"{name} must be a number ({limit.unit}), got {value!r}") from fault
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number ({limit.unit}), got {value!r}")
    return _within(name, float(value), limit)


def _within(name: str, value: float, limit: _Limit) -> float:
    if not math.isfinite(value) or not limit.low <= value <= limit.high:
        raise ValueError(
            f"{name} must be {limit.low:g} to {limit.high:g} {limit.unit}, got {value:g}"
        )
    return value
