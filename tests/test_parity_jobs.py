"""``splitkv parity --jobs``: the same answers in the same order, also where a process dies."""

import json
import os
from dataclasses import replace

import pytest

from splitkv.cli.main import main
from splitkv.cli.parity_jobs import Asked, run
from splitkv.matrix import parity
from splitkv.matrix.case import Size
from splitkv.matrix.cases import cases_named
from splitkv.matrix.parity import Outcome


class Deadly:
    """Ends the process that is to run it: reading it there is a call of ``os._exit``."""

    id = "deadly"
    size = Size.LARGE

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (7,)


def test_answers_are_those_of_one_process_but_for_the_case_that_kills_it() -> None:
    backends = parity.backends_for("cpu")
    good = cases_named("soft-cap*")
    odd = replace(good[0], id="odd", fixture="nowhere")
    cases = [good[0], odd, Deadly(), *good[1:]]
    found = [
        result
        for _, result in run(backends, cases, Asked(False, False, None, 0, 1), jobs=2)  # type: ignore[arg-type]
    ]
    assert [result.case for result in found] == [case.id for case in cases]
    dead = found.pop(2)
    assert dead.outcome is Outcome.FAILED
    assert dead.why == ("the process that ran it ended with exit code 7",)
    alone = [result for _, result in parity.run(backends, [good[0], odd, *good[1:]])]
    assert found == alone
    assert [result.outcome for result in alone] == [
        Outcome.PASSED,
        Outcome.FAILED,
        *[Outcome.PASSED] * (len(good) - 1),
    ]
    assert "nowhere" in alone[1].why[0]


def test_the_command_says_the_same_with_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for jobs in ("1", "2"):
        words = ["parity", "--case", "soft-cap-*", "--json", "--jobs", jobs]
        assert main(words) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    assert main(["parity", "--jobs", "0"]) == 2
    assert "--jobs must be 1 or more, got 0" in capsys.readouterr().err
