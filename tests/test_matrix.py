"""The support matrix: what cells say, what goes stale when, and that the committed page is true."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from splitkv.backends.registry import BACKENDS, backend_named
from splitkv.common.spec import Feature
from splitkv.kernels_ascend.kernels.budget import UB_BYTES
from splitkv.matrix import kernel_record
from splitkv.matrix.case import Case
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import Cell, Word, cell, of_today, tables
from splitkv.matrix.evidence import (
    ROOT,
    Evidence,
    Kind,
    Run,
    canonical,
    differences,
    load,
    load_all,
    one_digit,
    save,
    sources_digest,
)
from splitkv.matrix.pages import check, evidence_of_today
from splitkv.matrix.parity import Outcome
from splitkv.matrix.render import broken, cell_text, support_page, support_yaml

CPU = backend_named("cpu")
WINDOWED = tuple(case for case in CASES if Feature.SLIDING_WINDOW in case.features)
(WINDOW_ROW,) = (row for row in tables(CASES)["Feature"] if row.title == "sliding window")
SOURCES = {backend.name: "today" for backend in BACKENDS}


def evidence(
    outcome: Outcome = Outcome.PASSED, kind: Kind = Kind.DEVICE, cases: tuple[Case, ...] = CASES
) -> Evidence:
    runs = tuple(Run(case.id, case.digest, "", outcome, 2e-3, 2e-2, 1e-7) for case in cases)
    versions = {"python": "3.13", "torch": "2.13.0", "triton": "3.6.0"}
    return Evidence("cpu", kind, "Some Device", None, "2026-11-30", versions, 0, "today", runs)


def said(*entries: Evidence) -> Cell:
    return cell(WINDOW_ROW, CPU, entries, CASES)


def test_a_pass_names_device_day_versions_and_error() -> None:
    assert cell_text(said(evidence())) == (
        "passed on Some Device (2026-11-30, torch 2.13.0, triton 3.6.0, worst error 2e-3, "
        f"{len(WINDOWED)} of {len(WINDOWED)} cases)"
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.INTERPRETER, "checked in the interpreter (2026-11-30, "),
        (Kind.STAND_IN, "checked against a stand-in (2026-11-30, "),
        (Kind.AOT, "compiles for Some Device ("),
    ],
)
def test_weaker_evidence_is_called_what_it_is(kind: Kind, text: str) -> None:
    assert cell_text(said(evidence(kind=kind))).startswith(text)
    assert said(evidence(kind=kind), evidence()).word is Word.PASSED


def test_without_runs_a_yes_is_only_declared() -> None:
    assert cell_text(said()) == "declared, not run"


def test_one_failed_run_breaks_the_row_whatever_else_passed() -> None:
    bad = evidence(Outcome.FAILED, cases=WINDOWED[:1])
    assert said(evidence(), bad).word is Word.BROKEN
    assert cell_text(said(bad)) == f"**broken**: {WINDOWED[0].id} on Some Device"
    assert any(line.startswith("cpu: sliding window:") for line in broken([CPU], [bad], CASES))


def test_a_failure_of_code_that_has_changed_is_listed_and_breaks_nothing() -> None:
    bad = evidence(Outcome.FAILED, cases=WINDOWED[:1])
    assert of_today([bad], {"cpu": "today"}) == (bad,)
    assert said(*of_today([evidence(), bad], {"cpu": "tomorrow"})).word is not Word.BROKEN
    page = support_page([CPU], [bad], CASES, {"cpu": "tomorrow"})
    assert f"{WINDOWED[0].id} failed then and has not run since" in page
    broken_cell = f"**broken**: {WINDOWED[0].id}"
    assert broken_cell not in page
    assert broken_cell in support_page([CPU], [bad], CASES, SOURCES)


def test_runs_of_a_case_that_has_changed_do_not_count() -> None:
    old = evidence()
    changed = replace(old, runs=tuple(replace(run, case_digest="old") for run in old.runs))
    assert said(changed).word is Word.DECLARED


def test_a_declared_no_gives_whose_move_and_the_sentence() -> None:
    row = next(row for row in tables(CASES)["Feature"] if row.title == Feature.SOFT_CAP.value)
    no = backend_named("ascend").support.features[Feature.SOFT_CAP]
    assert no is not None
    assert cell_text(cell(row, backend_named("ascend"), [], CASES)).startswith(
        f"no, upstream: {no.reason}"
    )


def test_a_value_out_of_range_is_a_no() -> None:
    row = next(row for row in tables(CASES)["Page size P"] if row.title == "3")
    found = cell(row, backend_named("ascend"), [], CASES)
    assert found.word is Word.NO
    assert "3 is not in" in found.sentence


def test_staleness_is_one_line_under_the_runs_and_in_no_cell() -> None:
    fresh = support_page([CPU], [evidence()], CASES, SOURCES)
    stale = support_page([CPU], [evidence()], CASES, {"cpu": "tomorrow"})
    new = set(stale.splitlines()) - set(fresh.splitlines())
    assert len(new) == 1
    assert f"its {len(CASES)} runs predate the last change" in new.pop()


def test_a_new_case_is_reported_as_not_yet_run() -> None:
    fresh = support_page([CPU], [evidence()], CASES, SOURCES)
    page = support_page([CPU], [evidence(cases=CASES[1:])], CASES, SOURCES)
    head = "passed | failed | refused | not run yet"
    row = f"2026-11-30 |  | python 3.13, torch 2.13.0, triton 3.6.0 | 0 | {len(CASES) - 1} | 0 | 0"
    assert head in fresh
    assert f"{row} | 1 |" in page
    assert "changed since" not in page, "what ran is as good as it was"
    assert f"{len(CASES) - 1} of {len(CASES)} cases" not in fresh


def test_a_case_that_has_changed_makes_its_run_stale_and_is_not_called_new() -> None:
    old = evidence()
    changed = replace(old, runs=(replace(old.runs[0], case_digest="old"), *old.runs[1:]))
    page = support_page([CPU], [changed], CASES, SOURCES)
    assert "1 cases have changed since" in page
    assert f"| {len(CASES) - 1} | 0 | 0 | 0 |" in page


def test_rendering_is_pure_and_yaml_holds_every_cell() -> None:
    rest = (BACKENDS, [evidence()], CASES, SOURCES)
    assert support_page(*rest) == support_page(*rest)
    content = yaml.safe_load(support_yaml(*rest))
    for title, rows in tables(CASES).items():
        for row in rows:
            assert set(content["tables"][title][row.title]) == {b.name for b in BACKENDS}


def test_the_page_is_what_code_and_runs_say() -> None:
    assert check() == []


def test_evidence_survives_its_file(tmp_path: Path) -> None:
    entry = evidence()
    path = save(entry, tmp_path / "runs.json")
    assert load(path) == entry
    assert json.loads(path.read_text())["kind"] == "device"
    assert len(path.read_text().splitlines()) > len(CASES), "one line per run"


def test_recorded_files_are_named_after_backend_and_device() -> None:
    for entry in load_all():
        assert entry.path.is_file(), entry.path


def test_errors_keep_one_digit() -> None:
    assert [one_digit(x) for x in (0.0, 1.24e-3, 9.6e-8, float("inf"))] == [0.0, 1e-3, 1e-7, None]


def test_comments_and_layout_leave_evidence_fresh_code_does_not() -> None:
    plain = canonical('def f(x):\n    """Doc."""\n    return x + 1\n')
    assert canonical("def f(x):  # why\n\n    return (x+1)\n") == plain
    assert canonical("def f(x):\n    return x + 2\n") != plain
    assert canonical("def f(x): return None\n") != canonical("def f(x): return 0\n")


@pytest.mark.parametrize(
    ("path", "touches"),
    [
        ("common/state.py", {"cpu", "cuda", "ascend"}),
        ("backends/cpu.py", {"cpu"}),
        ("backends/cuda.py", {"cuda"}),
        ("kernels_ascend/merge.py", {"ascend"}),
        ("cli/main.py", set()),
    ],
)
def test_a_change_makes_only_its_own_backends_stale(
    path: str, touches: set[str], tmp_path: Path
) -> None:
    for folder in ("common", "backends", "cli", "kernels_cuda", "kernels_ascend"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    names = [backend.name for backend in BACKENDS]
    before = {name: sources_digest(name, tmp_path) for name in names}
    with (tmp_path / path).open("a") as file:
        file.write("\nADDED = 1\n")
    after = {name: sources_digest(name, tmp_path) for name in names}
    assert {name for name in names if before[name] != after[name]} == touches


def test_hosts_compare_by_inputs_and_outcome() -> None:
    theirs = evidence()
    assert differences(theirs, theirs) == []
    run, *rest = theirs.runs
    other = replace(theirs, runs=(replace(run, inputs_digest="other"), *rest))
    assert differences(other, theirs) == [f"{run.case}: inputs other here,  there"]
    failed = replace(theirs, runs=(replace(run, outcome=Outcome.FAILED), *rest))
    assert differences(failed, theirs) == [f"{run.case}: failed here, passed on Some Device"]
    assert differences(replace(theirs, seed=1), theirs)


def test_the_interpreter_and_the_gpu_bear_each_other_out() -> None:
    files = {entry.kind: entry for entry in evidence_of_today() if entry.backend == "cuda"}
    gpu, interpreted = files[Kind.DEVICE], files[Kind.INTERPRETER]
    assert differences(gpu, interpreted) == []
    assert differences(interpreted, gpu) == []
    on_gpu = {run.case: run for run in gpu.runs}
    both = [run for run in interpreted.runs if run.case in on_gpu]
    assert len(both) >= 139
    assert on_gpu.keys() <= {run.case for run in interpreted.runs}
    for run in both:  # the rest is new, and no GPU has run it yet
        other = on_gpu[run.case]
        assert run.outcome is other.outcome
        if run.error is not None and other.error is not None:
            # of one rounding each, which another order of sums moves by that much at most
            assert run.error <= 3 * other.error
            assert other.error <= 3 * run.error


def test_what_is_said_of_own_kernels_follows_their_record() -> None:
    record = kernel_record.load()
    assert "changed since" not in kernel_record.section(record, record["sources"])
    assert "changed since" in kernel_record.section(record, "other sources")
    split = next(name for name in record["hivm"] if name.startswith("split"))
    before = kernel_record.kernel_rows(record)["split"]
    assert before["compiled"]["Ascend910B3"] == before["variants"]
    assert before["right"] == before["cases"]
    assert before["ub_bytes"] <= UB_BYTES
    record["hivm"][split]["Ascend910B3"] = "ub overflow"
    record["linalg"]["split"]["lengths-one"] = ["wrong"]
    after = kernel_record.kernel_rows(record)["split"]
    assert after["compiled"]["Ascend910B3"] == before["variants"] - 1
    assert after["right"] == before["cases"] - 1
