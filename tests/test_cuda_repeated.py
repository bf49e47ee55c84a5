"""Decodes that a plan repeats start and return what they would alone, and checks still refuse."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitkv.common.plan import plan_splits
from splitkv.common.profile import H200
from splitkv.kernels_cuda import bound
from splitkv.kernels_cuda.plan import bind
from tests.bound_calls import Asked, asked
from tests.outside_the_interpreter import printed_by


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return printed_by("tests.repeated_calls")


def test_a_repeated_decode_starts_and_returns_what_it_would_alone(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert found["repeated"] > 80


@pytest.mark.parametrize("missing", ["strides", "alignments", "whether k is v"])
def test_with_a_fact_missing_decodes_would_go_wrong(found: dict[str, Any], missing: str) -> None:
    assert found[f"without {missing}"]


def test_results_that_are_held_share_no_memory(found: dict[str, Any]) -> None:
    assert len(set(found["held"])) == len(found["held"]) == 8
    assert len(set(found["held without new memory"])) < 8


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("nothing", ""),
        ("shape of q", "q must be [2, 1, 4, 16]"),
        ("dtype of q", "q is torch.float16, spec.dtype is torch.bfloat16"),
        ("sinks", "spec.sinks is False, but sinks is given"),
        ("shape of out", "out must be [2, 4, 16]"),
        ("expanded out", "out must not require grad nor be expanded"),
        ("out of grad", "out must not require grad nor be expanded"),
        ("out meets lse", "out and lse must not share memory"),
        ("grad", "q requires grad"),
        ("spec", "plan was made for"),
        ("validate", "unknown validate 'some'"),
        ("list for validate", "unknown validate []"),
        ("backend", "unknown backend 'none such'"),
        ("values", "block_table[0, 0] is 99"),
        ("two ways to split", "plan fixes the splits already"),
        ("no tensor", "q must be a torch tensor, got NoneType"),
        ("no plan", "plan must be a SplitPlan, got int"),
    ],
)
def test_a_mistake_after_a_good_call_is_refused(
    found: dict[str, Any], mistake: str, said: str
) -> None:
    text = found["refused"][mistake]
    assert text.startswith(said)
    assert bool(text) == bool(said)


@pytest.mark.parametrize("fact", ["grad", "reach"])
def test_without_what_tells_it_would_not_be(found: dict[str, Any], fact: str) -> None:
    assert found[f"without {fact}"] == ""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_lies_elsewhere_is_looked_at_at_every_call(
    monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool
) -> None:
    monkeypatch.setattr(bound, "can_start", lambda device: True)
    made = asked()
    if elsewhere:
        call = made.call
        lengths = call.cache.seq_lens.to("meta")
        made = replace(made, call=replace(call, cache=replace(call.cache, seq_lens=lengths)))
    assert (_kept(made) is None) == elsewhere


def test_nothing_is_repeated_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda index: 7)
    monkeypatch.setattr(bound, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(bound, "can_start", lambda device: True)
    kept = _kept(asked())
    assert kept is not None
    for capturing in (False, True):
        monkeypatch.setattr(bound, "_free", lambda index, now=capturing: not now)
        assert (kept([0] * 16, None, None) is None) == capturing
    monkeypatch.setattr(bound, "can_start", lambda device: False)
    assert _kept(asked()) is None


def _kept(made: Asked) -> bound.RepeatedDecode | None:
    """What repeats a call whose kernels were kept."""
    plan = bind(plan_splits(made.call.spec, [128, 128], profile=H200), torch.device("cpu"))
    found = bound.facts(made.call, plan, made.destination, made.sinks)
    assert found is not None
    memo = {found[0]: bound.Bound((), None)}
    where = made.destination
    return bound.repeated_decode(made.call, plan, memo, made.sinks, where.out, where.lse)
