"""``splitkv verify``: what it says without an NPU, a dry run on the stand-in, and what it sees."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mutants import averaged
from splitkv.cli import verify
from splitkv.cli.main import main
from splitkv.kernels_ascend.standin import device
from splitkv.matrix import contract
from splitkv.matrix.cases import CASES
from splitkv.matrix.contract import Agrees, Found, all_checks, answer, findings
from splitkv.matrix.evidence import Kind, load

Capture = pytest.CaptureFixture[str]
ONE = ("--case", "lengths-one")


def printed(capsys: Capture, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_without_an_npu_it_says_so_and_exits_1(capsys: Capture) -> None:
    code, said = printed(capsys)
    assert (code, said["held"], said["device"]) == (1, False, None)
    assert "torch_npu is not installed" in said["why"]
    assert main(["verify"]) == 1
    assert "no NPU to verify: torch_npu is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "here", *ONE), "--out is of all cases"),
        (("--device", "cpu"), "invalid choice: 'cpu'"),
        (("--case", "nothing*"), "no case matches"),
    ],
)
def test_malformed_requests_end_with_2(
    words: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_check_is_told_in_full() -> None:
    names = [check.name for check in all_checks()]
    assert len(names) == len(set(names)) >= 30
    for check in all_checks():
        assert check.question.endswith("?"), check.name
        assert "(" in check.documents, f"{check.name} has no source"


def test_a_refusal_and_a_gap_are_answers() -> None:
    def refusing(device: torch.device) -> Found:
        raise RuntimeError("561002: no\nsecond line")

    def unknown(device: torch.device) -> Found:
        raise NotImplementedError("not modelled")

    def broken(device: torch.device) -> Found:
        raise KeyError("a mistake of ours")

    cpu = torch.device("cpu")
    assert answer(refusing, cpu) == Found("refused: 561002: no", Agrees.NO)
    assert answer(unknown, cpu) == Found("not here: not modelled", Agrees.NOT_ASKED)
    with pytest.raises(KeyError):
        answer(broken, cpu)


@pytest.fixture
def kernels(torch_npu: ModuleType) -> Iterator[dict[str, device.Kernel]]:
    """The stand-in's operators, put back as they were."""
    before = dict(device.kernels)
    yield device.kernels
    device.kernels.update(before)


def answers() -> dict[str, contract.Finding]:
    return {found.check: found for found in findings(torch.device("npu"))}


def test_the_stand_in_answers_as_documented(kernels: dict[str, device.Kernel]) -> None:
    differing = {
        name: found.found for name, found in answers().items() if found.agrees is Agrees.NO
    }
    assert not differing


UPDATE = "npu::npu_attention_update"
FIA, FIA_V2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"


def unguarded(kernel: device.Kernel) -> device.Kernel:
    """An update that takes +inf for a number."""

    def run(given: Mapping[str, Any]) -> Any:
        out, lse = kernel(given)
        empty = torch.stack(list(given["lse"])).eq(math.inf).any(0)
        return out.masked_fill(empty[:, None], math.nan), lse

    return run


def wider(kernel: device.Kernel) -> device.Kernel:
    """A band that excludes its end: one key fewer."""
    return lambda given: kernel({**given, "pre_tokens": given["pre_tokens"] - 1})


def base_two(kernel: device.Kernel) -> device.Kernel:
    def run(given: Mapping[str, Any]) -> Any:
        out, lse = kernel(given)
        return out, lse / math.log(2)

    return run


def unsteady(kernel: device.Kernel) -> device.Kernel:
    calls = iter(range(1000))

    def run(given: Mapping[str, Any]) -> Any:
        out, lse = kernel(given)
        return out + 0.01 * next(calls), lse

    return run


def always_zero(kernel: device.Kernel) -> device.Kernel:
    def run(given: Mapping[str, Any]) -> Any:
        out, lse = kernel(given)
        return out, torch.where(lse.abs() > 1e30, 0.0, lse)

    return run


@pytest.mark.parametrize(
    ("operator", "behaves", "seen"),
    [
        (UPDATE, unguarded, {"update-of-valid-and-empty"}),
        (FIA_V2, wider, {"window-packed"}),
        (FIA, base_two, {"lse-of-rows"}),
        (FIA_V2, base_two, {"lse-of-packed", "sink-in-lse"}),
        (FIA_V2, unsteady, {"same-bits"}),
        (FIA, always_zero, {"empty-row-dense", "empty-keys"}),
        (FIA_V2, always_zero, {"empty-row-packed"}),
    ],
)
def test_another_behaviour_is_found(
    operator: str, behaves: Any, seen: set[str], kernels: dict[str, device.Kernel]
) -> None:
    kernels[operator] = behaves(kernels[operator])
    differing = {name for name, found in answers().items() if found.agrees is Agrees.NO}
    assert seen <= differing


def test_a_dry_run_holds(kernels: dict[str, device.Kernel], capsys: Capture) -> None:
    code, said = printed(capsys, "--standin", *ONE)
    assert (code, said["held"], said["kind"]) == (0, True, "stand-in")
    assert len(said["contract"]) == len(all_checks())
    assert {entry["agrees"] for entry in said["contract"]} <= {kind.value for kind in Agrees}
    assert said["parity"]["counts"]["passed"] == 1
    ways = {entry["way"] for entry in said["timings"]}
    assert {"FIA v1, called as it is", "splitkv, automatic", "splitkv, 4 splits"} <= ways
    assert "not a device" in said["device"]


def test_it_prints_for_people(kernels: dict[str, device.Kernel], capsys: Capture) -> None:
    kernels[FIA] = base_two(kernels[FIA])
    main(["verify", "--standin", *ONE])
    out = capsys.readouterr().out
    assert "not as documented" in " ".join(out.split())
    assert "lse-of-rows: What is the LSE of a dense call? Documents: natural logarithm" in out


def test_a_finding_is_no_failure_and_a_wrong_answer_is_one(
    kernels: dict[str, device.Kernel], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels[UPDATE] = unguarded(kernels[UPDATE])
    assert printed(capsys, "--standin", *ONE)[0] == 0
    monkeypatch.setattr("splitkv.kernels_ascend.attention.merge", averaged)
    code, said = printed(capsys, "--standin", "--case", "queries-d128-splits")
    assert (code, said["held"]) == (1, False)
    assert "allowed" in said["parity"]["failed"]["queries-d128-splits"][0]


def test_evidence_is_written_to_be_committed(
    kernels: dict[str, device.Kernel],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(verify, "CASES", CASES[:2])
    monkeypatch.setattr(verify, "cases_named", lambda pattern: CASES[:2])
    code, said = printed(capsys, "--standin", "--out", str(tmp_path / "new"))
    assert code == 0
    runs, answered = map(Path, said["written"])
    entry = load(runs)
    assert (entry.backend, entry.kind, len(entry.runs)) == ("ascend", Kind.STAND_IN, 2)
    kept = json.loads(answered.read_text())
    assert kept["contract"] == said["contract"]
    assert kept["timings"] == said["timings"]
    assert answered.parent == runs.parent == tmp_path / "new"
