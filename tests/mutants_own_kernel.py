"""Bugs to plant in the sources of our own Ascend kernels, and the cases that must see each."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from splitkv.kernels_ascend.kernels import decode, merge, split


@dataclass(frozen=True)
class SourceMutant:
    """One edit of a kernel's source. cases: ids that must fail with it and pass without."""

    id: str
    old: str
    new: str
    cases: tuple[str, ...]


MERGE_MUTANTS = (
    SourceMutant(
        "missing-rescale", "weight = tl.exp(lse - base)", "weight = tl.exp(lse)", ("far",)
    ),
    SourceMutant(
        "plain-average",
        "weight = tl.exp(lse - base)",
        'weight = tl.where(lse == float("-inf"), 0.0, 1.0)',
        ("two", "ragged", "to-fp16"),
    ),
    SourceMutant(
        "padding-0",
        'nothing_seen = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)',
        "nothing_seen = tl.zeros([BLOCK_ROWS], tl.float32)",
        ("two", "ragged"),
    ),
    SourceMutant(
        "wrong-row-offset",
        "part_out + state * DV + cells",
        "part_out + state + cells",
        ("two", "ragged", "d512"),
    ),
    SourceMutant(
        "sink-per-split",
        "total += weight",
        "total += weight + tl.exp(0.0 - base)",
        ("two", "d80", "to-bf16"),
    ),
    SourceMutant(
        "unnormalised",
        "merged = tl.where(nothing[:, None], 0.0, summed / divisor[:, None])",
        "merged = tl.where(nothing[:, None], 0.0, summed)",
        ("two", "many-states"),
    ),
    SourceMutant(
        "identity-not-guarded",
        "base = finite_or_zero(base)",
        "base = base",
        ("ragged",),
    ),
)
SPLIT_MUTANTS = (
    SourceMutant(
        "missing-rescale",
        "summed = summed * decay[:, None] + dot(",
        "summed = summed + dot(",
        ("soft-cap", "alibi", "bias"),
    ),
    SourceMutant(
        "padding-0",
        'scores = tl.where(visible, scores, float("-inf"))',
        "scores = tl.where(visible, scores, 0.0)",
        ("soft-cap", "mask-one", "anchors"),
    ),
    SourceMutant(
        "wrong-row-offset",
        "q_rows = q + (request * kv_heads + kv_head) * rows64 * D",
        "q_rows = q + (request * kv_heads) * rows64 * D",
        ("soft-cap", "mask-tree"),
    ),
    SourceMutant(
        "sink-per-split",
        "nothing = total == 0.0",
        "total += tl.exp(0.0 - finite_or_zero(top))\n        nothing = total == 0.0",
        ("soft-cap", "splits-2"),
    ),
    SourceMutant(
        "unnormalised",
        "result = tl.where(nothing[:, None], 0.0, summed / divisor[:, None])",
        "result = tl.where(nothing[:, None], 0.0, summed)",
        ("soft-cap", "bias"),
    ),
    SourceMutant(
        "window-one-wider",
        "(at[None, :] > position[:, None] - window)",
        "(at[None, :] >= position[:, None] - window)",
        ("window-queries", "anchors-queries"),
    ),
    SourceMutant(
        "causal-one-later",
        "visible &= at[None, :] <= position[:, None]",
        "visible &= at[None, :] <= position[:, None] + 1",
        ("queries-4",),
    ),
    SourceMutant(
        "poison-not-silenced",
        "values = tl.where(seen[:, None], values, 0.0)",
        "values = values",
        ("mask-one", "anchors"),
    ),
    SourceMutant(
        "slope-from-zero",
        "(at[None, :] - position[:, None]).to(tl.float32)",
        "(at[None, :] + 0 * position[:, None]).to(tl.float32)",
        ("alibi",),
    ),
    SourceMutant(
        "cap-forgotten", "scores = soft_cap(scores, cap)", "scores = scores", ("soft-cap",)
    ),
    SourceMutant(
        "bias-one-column-off",
        "column = tl.maximum(first - (length - columns), -BLOCK_N) + BLOCK_N",
        "column = tl.maximum(first - (length - columns) - 1, -BLOCK_N) + BLOCK_N",
        ("bias", "mask-one"),
    ),
    SourceMutant(
        "first-page-for-all",
        "request * table_stride + tile // PAGE_TILES)",
        "request * table_stride)",
        ("alibi",),
    ),
    SourceMutant(
        "first-head-for-all",
        "v_tile = v + page * v_first.to(tl.int64) + kv_head * v_head.to(tl.int64)",
        "v_tile = v + page * v_first.to(tl.int64)",
        ("alibi", "layout-bnsd"),
    ),
)


def plant(mutant: SourceMutant, kernel: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make launches use ``kernel`` ("merge" or "split") with the edit.

    Triton reads a kernel's source from its file, so the edited module is written to ``folder``.
    """
    module: ModuleType = {"merge": merge, "split": split}[kernel]
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.id}: the source has changed"
    name = f"{kernel}_{mutant.id.replace('-', '_')}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(mutant.old, mutant.new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    edited = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, edited)
    spec.loader.exec_module(edited)
    user = {"merge": merge, "split": decode}[kernel]
    patch.setattr(user, f"{kernel}_kernel", getattr(edited, f"{kernel}_kernel"))
