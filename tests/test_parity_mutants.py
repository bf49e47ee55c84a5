"""Planted bugs, one at a time: parity fails, and the support matrix says "broken" in their rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.backends import cpu_attention, cpu_scores, cpu_work
from splitkv.backends.base import Backend
from splitkv.backends.cpu import CpuBackend
from splitkv.backends.cpu_tiles import TileReader, tile_readers
from splitkv.backends.registry import backend_named
from splitkv.common import plan
from splitkv.common.cache import Cache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState, as_list, merge_states_torch
from splitkv.common.support import UnsupportedError
from splitkv.matrix import parity
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import Word, cell, tables
from splitkv.matrix.evidence import record
from splitkv.matrix.parity import SEED, Outcome, Result, run_case

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A planted bug; ``touched`` cases and rows must notice it, ``spared`` ones must not."""

    plant: Callable[[Patch], None]
    touched: tuple[str, ...]
    broken: tuple[str, ...]
    spared: tuple[str, ...]
    whole: tuple[str, ...]


def plain_average(patch: Patch) -> None:
    def merge(states: Sequence[PartialState] | PartialState) -> PartialState:
        parts = as_list(states)
        right = merge_states_torch(parts)
        if len(parts) == 1:
            return right
        return PartialState(right.max, right.lse, torch.stack([part.out for part in parts]).mean(0))

    patch.setattr(cpu_attention, "merge_states_torch", merge)


def window_one_wider(patch: Patch) -> None:
    def wider(spec: DecodeSpec) -> DecodeSpec:
        window = spec.sliding_window
        return spec if window is None else replace(spec, sliding_window=window + 1)

    for module in (plan, cpu_work):
        bounds = module.visible_bounds
        patch.setattr(module, "visible_bounds", lambda x, s, spec, f=bounds: f(x, s, wider(spec)))
    mask = cpu_scores.visible_mask
    patch.setattr(cpu_scores, "visible_mask", lambda q, k, spec: mask(q, k, wider(spec)))


def next_page(patch: Patch) -> None:
    def readers(cache: Cache, dtype: torch.dtype) -> tuple[TileReader, ...]:
        found = tile_readers(cache, dtype)
        return tuple(
            reader
            if reader.table is None
            else replace(reader, table=(reader.table + 1) % len(reader.source))
            for reader in found
        )

    patch.setattr(cpu_attention, "tile_readers", readers)


def interleaved_heads(patch: Patch) -> None:
    scaled = cpu_attention._scaled_queries

    def queries(call: DecodeCall, *rest: Any) -> Tensor:
        q = scaled(call, *rest)
        count, kv_heads, group, dim = q.shape
        return q.reshape(count, group, kv_heads, dim).transpose(1, 2)

    patch.setattr(cpu_attention, "_scaled_queries", queries)


def sink_per_split(patch: Patch) -> None:
    right = CpuBackend.decode

    def decode(
        self: CpuBackend, call: DecodeCall, plan: SplitPlan, *, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            sinks = sinks + math.log(max(plan.max_splits, 1))  # n times exp(sink)
        return right(self, call, plan, sinks=sinks)

    patch.setattr(CpuBackend, "decode", decode)


def unseen_times_zero(patch: Patch) -> None:
    for name in ("_clear_unseen", "_keep_apart"):
        patch.setattr(cpu_attention, name, lambda *_: None)


def noise(patch: Patch) -> None:
    right = CpuBackend.partial

    def partial(self: CpuBackend, call: DecodeCall, plan: SplitPlan) -> PartialState:
        state = right(self, call, plan)
        return replace(state, out=state.out * (1 + 1e-6 * torch.rand(())))

    patch.setattr(CpuBackend, "partial", partial)


MUTANTS = (
    Mutant(
        plain_average,
        ("splits-many-fp32", "sinks-fp32", "anchors"),
        ("learned sinks", "anchor tokens with a window"),
        ("soft-cap", "layout-bsnd"),
        ("logit soft cap", "dense cache (BSND, BNSD)"),
    ),
    Mutant(
        window_one_wider,
        ("window-1", "window-fp32", "window-queries", "anchors-fp32"),
        ("sliding window", "anchor tokens with a window"),
        ("soft-cap", "sinks", "alibi"),
        ("logit soft cap", "learned sinks", "ALiBi slopes"),
    ),
    Mutant(
        next_page,
        ("page-16", "layout-hnd", "sinks"),
        ("paged cache (NHD, HND)", "learned sinks"),
        ("layout-bsnd", "layout-packed"),
        ("dense cache (BSND, BNSD)", "packed cache (cu_seqlens_k)"),
    ),
    Mutant(
        interleaved_heads,
        ("group-3", "sinks", "queries-4"),
        ("learned sinks", "several queries per request (S > 1)"),
        ("group-1",),
        (),
    ),
    Mutant(
        sink_per_split,
        ("sinks-fp32",),
        ("learned sinks",),
        ("splits-many-fp32", "state-fp32"),
        ("partial state (max, lse, out) returned",),
    ),
    Mutant(
        unseen_times_zero,
        ("mask-one", "lengths-pages"),
        ("boolean mask (trees)", "paged cache (NHD, HND)"),
        (),
        (),
    ),
    Mutant(
        noise,
        ("soft-cap-tight", "state-fp32"),
        ("logit soft cap", "partial state (max, lse, out) returned"),
        ("lengths-zero",),
        (),
    ),
)


def results_of(backend: Backend, ids: Sequence[str]) -> list[Result]:
    by_id = {case.id: case for case in CASES}
    return [run_case(backend, by_id[name]) for name in ids]


def words_of(backend: Backend, results: Sequence[Result]) -> dict[str, Word]:
    """What the feature table says of ``backend`` if these are all the runs there are."""
    by_id = {case.id: case for case in CASES}
    evidence = record(backend, CPU, [by_id[result.case] for result in results], results, SEED)
    rows = tables(CASES)["Feature"]
    return {row.title: cell(row, backend, [evidence], CASES).word for row in rows}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_a_planted_bug_turns_parity_red(mutant: Mutant, monkeypatch: Patch) -> None:
    cpu = backend_named("cpu")
    ids = (*mutant.touched, *mutant.spared)
    before = results_of(cpu, ids)
    assert [result.outcome for result in before] == [Outcome.PASSED] * len(ids)
    assert set(mutant.broken + mutant.whole) <= {
        title for title, word in words_of(cpu, before).items() if word is Word.PASSED
    }

    mutant.plant(monkeypatch)
    after = results_of(cpu, ids)
    failed = tuple(result.case for result in after if result.outcome is Outcome.FAILED)
    assert failed == mutant.touched
    words = words_of(cpu, after)
    assert {title: words[title] for title in mutant.broken} == dict.fromkeys(
        mutant.broken, Word.BROKEN
    )
    assert {title: words[title] for title in mutant.whole} == dict.fromkeys(
        mutant.whole, Word.PASSED
    )


def test_a_refusal_in_other_words_fails(monkeypatch: Patch) -> None:
    def vague(*_: object, **__: object) -> None:
        raise UnsupportedError("not supported")

    monkeypatch.setattr(parity, "decode", vague)
    (result,) = results_of(backend_named("ascend"), ["soft-cap"])
    assert result.outcome is Outcome.FAILED
    assert any("not in the refusal" in reason for reason in result.why)


def test_a_refused_call_that_runs_fails(monkeypatch: Patch) -> None:
    monkeypatch.setattr(parity, "decode", lambda *_, **__: None)
    (result,) = results_of(backend_named("ascend"), ["soft-cap"])
    assert result.outcome is Outcome.FAILED
    assert "it ran" in result.why[0]
