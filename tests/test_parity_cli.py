"""``splitkv parity`` and ``splitkv matrix``: what they print, and what their exit codes say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mutants import averaged
from splitkv.backends import cpu_attention
from splitkv.cli.main import main
from splitkv.matrix import evidence, pages
from splitkv.matrix.cases import CASES
from splitkv.matrix.evidence import load, load_all, save

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *words: str) -> tuple[int, dict]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_pass_is_counted_and_holds(capsys: Capture) -> None:
    code, said = printed(capsys, "parity", "--backend", "cpu", "--case", "soft-cap*")
    assert code == 0
    assert said["held"] is True
    assert said["backends"]["cpu"]["counts"] == {
        "passed": 3,
        "failed": 0,
        "refused": 0,
        "missing": 0,
    }
    assert [case["case"] for case in said["backends"]["cpu"]["cases"]] == [
        case.id for case in CASES if case.id.startswith("soft-cap")
    ]


def test_a_failure_ends_with_1_and_its_reason(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "merge_states_torch", averaged)
    code, said = printed(capsys, "parity", "--backend", "cpu", "--case", "splits-many-fp32")
    assert code == 1
    (case,) = said["backends"]["cpu"]["cases"]
    assert case["outcome"] == "failed"
    assert "allowed" in case["why"][0]


def test_a_backend_asked_for_by_name_must_be_in_reach(capsys: Capture) -> None:
    assert printed(capsys, "parity", "--backend", "ascend", "--case", "page-64")[0] == 1
    assert printed(capsys, "parity", "--case", "page-64")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--case", "nothing*"), "no case matches 'nothing*'"),
        (("--backend", "tpu"), "unknown backend 'tpu'"),
        (("--record", "--case", "soft*"), "--record is of all cases"),
        (("--device", "cuda:1"), "--device cuda:1 needs --backend"),
        (("--against", "nowhere.json"), "no such file"),
    ],
)
def test_malformed_requests_end_with_2(
    words: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert main(["parity", *words]) == 2
    assert message in capsys.readouterr().err


def test_hosts_are_compared(capsys: Capture, tmp_path: Path) -> None:
    words = ("parity", "--backend", "cpu", "--case", "soft-cap*", "--against")
    theirs = next(entry for entry in load_all() if entry.backend == "cpu")
    same = save(theirs, tmp_path / "same.json")
    code, said = printed(capsys, *words, str(same))
    assert (code, said["compared"], said["unlike"]) == (0, 3, [])
    runs = tuple(replace(run, inputs_digest="other") for run in theirs.runs)
    other = save(replace(theirs, runs=runs), tmp_path / "other.json")
    code, said = printed(capsys, *words, str(other))
    assert code == 1
    assert len(said["unlike"]) == 3


def test_the_interpreter_is_asked_for_where_there_is_none(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitkv.cli.parity.find_spec", lambda name: None)
    assert main(["parity", "--interpreter", "--case", "soft-cap*"]) == 2
    assert "triton is not installed" in capsys.readouterr().err


def test_a_record_has_every_case(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "evidence")
    monkeypatch.setattr("splitkv.cli.parity.cases_named", lambda pattern: CASES[:3])
    code, said = printed(capsys, "parity", "--backend", "cpu", "--record")
    assert code == 0
    (path,) = said["written"]
    entry = load(Path(path))
    assert entry.path == Path(path)
    assert [run.case for run in entry.runs] == [case.id for case in CASES[:3]]
    committed = next(old for old in load_all() if old.backend == "cpu")
    assert {run.case: run.inputs_digest for run in entry.runs}.items() <= {
        run.case: run.inputs_digest for run in committed.runs
    }.items()


def test_code_that_changes_while_the_cases_run_is_not_recorded(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(("before", "after"))
    monkeypatch.setattr("splitkv.cli.parity.sources_digest", lambda name: next(digests))
    monkeypatch.setattr("splitkv.cli.parity.cases_named", lambda pattern: CASES[:1])
    assert main(["parity", "--backend", "cpu", "--record"]) == 2
    assert "nothing recorded" in capsys.readouterr().err


def test_the_matrix_prints_what_support_yaml_holds(capsys: Capture) -> None:
    code, said = printed(capsys, "matrix")
    assert code == 0
    assert said == yaml.safe_load(pages.pages()[pages.FOLDER / "support.yaml"])
    assert main(["matrix"]) == 0
    assert "learned sinks" in capsys.readouterr().out


def test_a_page_out_of_date_ends_with_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    code, said = printed(capsys, "matrix", "--check")
    assert code == 1
    assert said["differences"][-1].startswith("the support matrix is out of date")
    pages.write()
    assert printed(capsys, "matrix", "--check") == (0, {"held": True, "differences": []})
