"""``splitkv fuzz`` finds planted bugs, makes them small, replays them, draws the whole space."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import mutants_ascend
import mutants_cpu
import mutants_cuda
from mutants import Mutant, Patch
from splitkv.backends.base import Backend
from splitkv.cli.main import main
from splitkv.common.spec import Feature, Layout
from splitkv.kernels_ascend import standin
from splitkv.matrix import parity, verdict
from splitkv.matrix.case import Case, Memory, make
from splitkv.matrix.case_text import from_settings, from_text, settings, to_text
from splitkv.matrix.fuzz import draw
from splitkv.matrix.inputs import build
from splitkv.matrix.parity import Outcome, Result, backends_for, run_case
from splitkv.matrix.shrink import reduce, shrink, simpler_cases
from splitkv.matrix.verdict import Verdict, judge

Capture = pytest.CaptureFixture[str]
(CPU,) = backends_for("cpu")
GPU = torch.cuda.is_available()
MODEST = 150
"""Draws within which a planted bug has to show."""
SMALL = 140
"""Tokens of a request where many are run."""


# What is drawn


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return [draw(0, index) for index in range(500)]


def test_every_feature_is_drawn_often_and_left_out_often(drawn: list[Case]) -> None:
    found = Counter(feature for case in drawn for feature in case.features)
    assert min(found[feature] for feature in Feature) >= 15
    assert max(found.values()) <= 400


def test_fields_that_are_no_feature_are_drawn_too(drawn: list[Case]) -> None:
    unlike_default = Counter(name for case in drawn for name in settings(case))
    rare = {"nan", "merged_at_block", "fixture"}
    known = {name for index in range(3000) for name in settings(draw(0, index))}
    assert {entry for entry in Case.__dataclass_fields__ if entry not in unlike_default} <= rare | {
        "id",
        "stands_for",
        "spec",
        "size",
    }
    assert rare - known == {"fixture"}
    assert {case.spec.layout for case in drawn} == set(Layout)
    assert {case.memory for case in drawn} == set(Memory) - {Memory.FAR, Memory.LATENT}
    lengths = {length for case in drawn for length in case.seq_lens}
    assert {0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257} <= lengths
    assert {case.spec.dtype for case in drawn} >= {torch.float16, torch.bfloat16, torch.float64}


def test_draws_are_well_formed_and_the_same_again(drawn: list[Case]) -> None:
    for index, case in enumerate(drawn):
        assert draw(0, index) == case
        assert from_text(to_text(case)) == case
        assert max(case.seq_lens, default=0) <= 600
    assert draw(1, 0) != draw(0, 0)


def test_what_is_drawn_can_be_built(drawn: list[Case]) -> None:
    for index in range(150):
        case = draw(3, index, SMALL)
        assert build(case, 0, poisoned=True, moved=True).call.batch == len(case.seq_lens)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "begins with its id"),
        ("seq_lens=3", "begins with its id"),
        ("mine seq_lens=3", "a case needs num_q_heads"),
        ("mine sequence=3", "'sequence=3' is no field=value"),
        ("mine seq_lens=three", "seq_lens=three: invalid literal"),
        ("mine layout=nhd2", "layout=nhd2 is not one of bsnd"),
        ("mine {} num_q_heads=3 num_kv_heads=2", "num_q_heads 3 is not divisible"),
        ("mine {} query_lens=1", "query_lens needs packed_queries"),
        ("mine {} num_splits=0", "must be 1 or more"),
        ("mine {} num_splits=2 split_size=9", "exclude each other"),
        ("mine {} planned_lens=2", "none below its seq_len"),
        ("mine {} sinks=true returns_state=true", "never holds one"),
        ("mine {} nan=k kv_dtype=int8", "nan is 'k' or 'v'"),
        ("mine {} kv_dtype=float8_e4m3fn poison=inf", "a number of the cache's dtype"),
        ("mine {} memory=ring", "memory=ring needs a window"),
        ("mine {} memory=latent head_dim_v=17", "head_dim_v of at most head_dim"),
    ],
)
def test_malformed_lines_say_what_is_wrong(line: str, message: str) -> None:
    whole = "seq_lens=3 num_q_heads=2 num_kv_heads=2 head_dim=16 layout=bsnd"
    with pytest.raises(ValueError, match=message):
        from_text(line.format(whole))


# What is found: a planted bug, within a modest count


def first_failure(backend: Backend) -> tuple[Case, Result] | None:
    for index in range(MODEST):
        case = draw(7, index, SMALL)
        result = judge(backend, case).result
        if result.outcome is Outcome.FAILED:
            return case, result
    return None


@pytest.fixture
def in_reach(backend: Backend) -> Iterator[None]:
    with standin.installed() if backend.name == "ascend" else nullcontext():
        if (missing := backend.missing()) is not None:
            pytest.skip(missing)
        yield


def _planted() -> list[object]:
    by_backend = (
        (CPU, mutants_cpu.MUTANTS, ()),
        (backends_for("ascend")[0], mutants_ascend.MUTANTS, ()),
        (backends_for("cuda", interpreter=not GPU)[0], mutants_cuda.MUTANTS, (pytest.mark.slow,)),
    )
    return [
        pytest.param(backend, mutant, marks=marks, id=f"{backend.name}-{mutant.plant.__name__}")
        for backend, mutants, marks in by_backend
        for mutant in mutants
    ]


@pytest.mark.filterwarnings("ignore:page size")
@pytest.mark.usefixtures("in_reach")
@pytest.mark.parametrize(("backend", "mutant"), _planted())
def test_a_planted_bug_is_found(backend: Backend, mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.plant(monkeypatch)
    found = first_failure(backend)
    assert found is not None
    monkeypatch.undo()  # the case alone is no failure
    assert judge(backend, found[0]).result.outcome is Outcome.PASSED


# What is made small


def size(case: Case) -> tuple[int, int]:
    spec = case.spec
    numbers = sum(case.seq_lens) * spec.num_kv_heads * (spec.head_dim + spec.head_dim_v)
    return len(settings(case)), numbers + spec.num_q_heads + sum(case.queries)


@pytest.mark.parametrize("name", ["window_one_wider", "sink_per_split"])
def test_shrinking_keeps_the_failure_and_makes_it_small(name: str, monkeypatch: Patch) -> None:
    mutant = next(one for one in mutants_cpu.MUTANTS if one.plant.__name__ == name)
    mutant.plant(monkeypatch)
    found = first_failure(CPU)
    assert found is not None
    case, result = found
    small = shrink(CPU, case, result, most_tries=60)
    assert all(now < then for now, then in zip(size(small.case), size(case), strict=True))
    assert small.result.outcome is Outcome.FAILED
    needed = {"window_one_wider": "sliding_window", "sink_per_split": "sinks"}
    if (feature := needed.get(name)) is not None:
        assert feature in settings(small.case)
    assert shrink(CPU, case, result, most_tries=60) == small

    again = judge(CPU, from_text(to_text(small.case))).result
    assert again == small.result
    monkeypatch.undo()
    assert judge(CPU, small.case).result.outcome is Outcome.PASSED


def needs(*checks: Callable[[Case], bool]) -> Callable[[Case], bool]:
    return lambda case: all(check(case) for check in checks)


def test_the_smallest_case_has_what_the_failure_needs_and_no_more() -> None:
    crowded = next(
        case
        for case in (draw(0, index) for index in range(2000))
        if {Feature.PAGED, Feature.SINKS, Feature.ALIBI} <= set(case.features)
        and max(case.seq_lens, default=0) > 200
        and len(case.seq_lens) > 2
    )
    small = reduce(crowded, needs(lambda c: c.spec.sinks, lambda c: sum(c.seq_lens) >= 37))
    assert settings(small) == {
        "seq_lens": (37,),
        "num_q_heads": 1,
        "num_kv_heads": 1,
        "head_dim": small.spec.head_dim,
        "layout": Layout.BSND,
        "dtype": torch.float32,
        "sinks": True,
    }
    assert small.id == crowded.id
    assert reduce(crowded, lambda _: False) is crowded


def test_shrinking_ends_where_it_is_told() -> None:
    tries = 0

    def fails(_: Case) -> bool:
        nonlocal tries
        tries += 1
        return True

    reduce(draw(0, 5), fails, most_tries=7)
    assert tries == 7


def test_simpler_cases_are_well_formed(drawn: list[Case]) -> None:
    for case in drawn[:60]:
        for simpler in simpler_cases(case):
            assert from_settings(case.id, settings(simpler)) == simpler
            assert simpler != case


# What is a failure


def judged(monkeypatch: Patch, *excesses: float, rounding: float = 0.0) -> Verdict:
    """The verdict on a case whose error over its bound is this, seed by seed."""
    small = draw(7, 0, SMALL)
    right = run_case(CPU, small)
    errors, allowed = right.errors, right.allowed
    assert errors is not None
    assert allowed is not None
    left = iter(excesses)

    def as_told(*_: object, seed: int = 0) -> Result:
        over = type(errors)(norm=0.0, worst=next(left) * allowed.worst, lse=0.0)
        why = tuple(over.exceeds(allowed))
        return Result("case", Outcome.FAILED if why else Outcome.PASSED, over, why, allowed)

    monkeypatch.setattr(verdict, "run_case", as_told)
    monkeypatch.setattr(verdict, "score_rounding", lambda _: rounding * allowed.worst)
    return judge(CPU, small)


@pytest.mark.parametrize(
    ("excesses", "rounding"), [((1.5, 1.2, 0.8), 0.0), ((3.0,), 2.5), ((3.0, 0.9), 1.0)]
)
def test_slightly_out_of_bounds_on_some_numbers_or_by_rounding_is_close(
    excesses: tuple[float, ...], rounding: float, monkeypatch: Patch
) -> None:
    close = judged(monkeypatch, *excesses, rounding=rounding)
    assert close.close
    assert close.result.outcome is Outcome.PASSED
    assert "worst element" in close.result.why[0]
    assert not judged(monkeypatch, 0.9).close


@pytest.mark.parametrize(
    ("excesses", "rounding"),
    [((2.1,), 0.0), ((math.inf,), 9.0), ((1.5, 1.2, 1.1, 1.3), 0.0), ((3.0, 3.0, 3.0, 3.0), 1.5)],
)
def test_far_out_of_bounds_or_on_all_numbers_is_a_failure(
    excesses: tuple[float, ...], rounding: float, monkeypatch: Patch
) -> None:
    found = judged(monkeypatch, *excesses, rounding=rounding)
    assert found.result.outcome is Outcome.FAILED
    assert not found.close


def test_an_infinite_bound_excuses_nothing_else() -> None:
    right = run_case(CPU, draw(7, 0, SMALL))
    assert right.errors is not None
    assert right.allowed is not None
    allowed = replace(right.allowed, norm=math.inf, worst=math.inf)
    errors = replace(right.errors, norm=math.inf, lse=3 * allowed.lse)
    assert verdict.excess(replace(right, errors=errors, allowed=allowed)) == pytest.approx(3)


def test_rounding_of_scores_follows_their_size_and_precision() -> None:
    single = make("mine", "", (40,), dtype=torch.float32)
    of = verdict.score_rounding
    assert 1e-6 < of(single) < 2e-5
    assert of(replace(single, q_gain=10.0)) == pytest.approx(10 * of(single), rel=1e-5)
    assert of(make("mine", "", (40,), dtype=torch.float64)) < 1e-13
    assert of(make("mine", "", (0,))) == 0


# The command


def said(capsys: Capture, *words: str) -> tuple[int, dict]:
    code = main(["fuzz", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_clean_run_counts_everything_and_is_the_same_again(capsys: Capture) -> None:
    words = ("--backend", "cpu", "--count", "12", "--tokens", "60", "--seed", "2")
    code, first = said(capsys, *words)
    assert code == 0
    assert first["held"] is True
    assert first["drawn"] == 12
    counts = first["backends"]["cpu"]["counts"]
    assert counts["passed"] + counts["refused"] + counts["failed"] == 12
    assert first["backends"]["cpu"]["worst_error"] > 0
    assert sum(first["features"].values()) > 12
    again = said(capsys, *words)[1]
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    assert main(["fuzz", *words]) == 0
    assert "a second" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:page size")
def test_refusals_are_counted_by_reason(capsys: Capture) -> None:
    with standin.installed():
        words = ("--backend", "ascend", "cpu", "--count", "15", "--tokens", "40")
        code, found = said(capsys, *words)
        assert code == 0
        ascend = found["backends"]["ascend"]
        assert ascend["counts"]["refused"] > 0
        assert sum(ascend["refusals"].values()) >= ascend["counts"]["refused"]
        assert found["backends"]["cpu"]["counts"]["refused"] == 0
        assert main(["fuzz", *words]) == 0
        assert "why ascend refused" in capsys.readouterr().out


def test_a_failure_ends_with_1_and_a_line_that_replays_it(
    capsys: Capture, monkeypatch: Patch
) -> None:
    mutant = next(one for one in mutants_cpu.MUTANTS if one.plant.__name__ == "sink_per_split")
    mutant.plant(monkeypatch)
    code, found = said(capsys, "--backend", "cpu", "--tokens", "60")
    assert code == 1
    (failure,) = found["failures"]
    assert found["drawn"] < 300
    code, replayed = said(capsys, "--backend", "cpu", "--case", failure["case"])
    assert code == 1
    assert replayed["backends"]["cpu"]["why"] == failure["why"]
    assert failure["replay"].endswith(f"--case '{failure['case']}'")
    monkeypatch.undo()
    assert said(capsys, "--backend", "cpu", "--case", failure["case"])[0] == 0


def test_a_case_of_the_table_can_be_given_as_text(capsys: Capture) -> None:
    case = make("mine", "typed", (5, 0), sliding_window=3, dtype=torch.float32)
    assert said(capsys, "--backend", "cpu", "--case", to_text(case))[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--count", "0"), "--count must be 1 or more, got 0"),
        (("--seconds", "nan"), "--seconds must be above 0"),
        (("--tokens", "2"), "--tokens must be 3 or more"),
        (("--backend", "tpu"), "unknown backend 'tpu'"),
        (("--case", "mine"), "a case needs seq_lens"),
    ],
)
def test_malformed_requests_end_with_2(
    words: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert main(["fuzz", *words]) == 2
    assert message in capsys.readouterr().err


def test_bits_are_compared_but_not_those_of_a_nan() -> None:
    def computed(*values: float) -> parity.Computed:
        return parity.Computed(torch.tensor(values), torch.zeros(1), 0)

    nan = computed(math.nan, 1.0)
    other = computed(math.nan, 1.0)
    other.out.view(torch.int32)[0] = -1
    assert not torch.equal(nan.out.view(torch.int32), other.out.view(torch.int32))
    assert parity._same_bits(nan, other)
    assert not parity._same_bits(nan, computed(0.0, 1.0))
    assert not parity._same_bits(computed(0.0), computed(-0.0))
