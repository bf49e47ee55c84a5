"""benchmarks.aot: kernels compile with no GPU, and what takes too much is said."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.aot import SHARED_LIMIT, Usage, launches_of, main
from splitkv.kernels_cuda.latent import latent_kernel
from splitkv.kernels_cuda.latent_hopper import latent_hopper_kernel
from splitkv.matrix.cases import cases_named

ROOT = Path(__file__).resolve().parent.parent
FITS = Usage(
    "case", "kernel", "shape", 90, registers=255, spilled=0, shared=1024, warps=4, stages=2
)


@pytest.mark.slow
def test_a_case_compiles_for_every_target(tmp_path: Path) -> None:
    found = tmp_path / "usage.json"
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.aot", "--case", "splits-page-3", "--json", str(found)],
        cwd=ROOT,
        env=compiled,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    variants = json.loads(found.read_text())["variants"]
    kernels = ["cut_kernel", "split_kernel", "merge_kernel"]
    assert [usage["kernel"] for usage in variants] == [
        name for name in kernels for _ in SHARED_LIMIT
    ]
    assert {usage["target"] for usage in variants} == set(SHARED_LIMIT)
    assert all(usage["registers"] > 16 and usage["spilled"] == 0 for usage in variants)


@pytest.mark.parametrize(("name", "taken"), [("mla-128", True), ("mla-16", False)])
def test_what_hopper_launches_instead_is_compiled_too(name: str, taken: bool) -> None:
    (case,) = cases_named(name)
    kernels = [launch.kernel for launch in launches_of(case)]
    assert latent_kernel in kernels
    assert (latent_hopper_kernel in kernels) is taken


def test_what_takes_too_much_is_told_apart() -> None:
    assert not FITS.too_much
    assert replace(FITS, spilled=8).too_much
    assert replace(FITS, shared=SHARED_LIMIT[90] + 1).too_much
    assert replace(FITS, target=80, shared=SHARED_LIMIT[90]).too_much
    assert not replace(FITS, warps=8).too_much
    assert replace(FITS, warps=16).too_much


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--case", "no-such-case"], "no case matches"),
        (["--target", "70"], "invalid choice"),
        (["--case", "lengths-one"], "TRITON_INTERPRET is on"),
    ],
)
def test_usage_errors_leave_with_2(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.aot.INTERPRETED", SimpleNamespace(value=True))
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err
