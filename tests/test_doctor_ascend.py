"""``splitkv doctor`` on a host with torch_npu and without what it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from splitkv.cli import ascend_host, doctor
from splitkv.cli.main import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, is an installed torch_npu whose libraries are missing."""
    package, facts = tmp_path / "torch_npu", tmp_path / "torch_npu-2.6.0.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libhccl.so: cannot open")\n')
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.6.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def splitkv(host: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != doctor.AUTOLOAD}
    return subprocess.run(
        [sys.executable, "-m", "splitkv", *words],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(host), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_answers_where_nothing_else_does(host: Path) -> None:
    broken = splitkv(host, "parity", "--backend", "cpu", "--case", "lengths-one")
    assert broken.returncode == 1
    assert "Failed to load the backend extension" in broken.stderr
    done = splitkv(host, "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"set {doctor.AUTOLOAD}=0" in done.stdout
    assert "libhccl.so: cannot open" in done.stdout
    for library, of in ascend_host.PARTS.items():
        assert f"{library}" in done.stdout
        assert of in " ".join(done.stdout.split())


def test_with_the_variable_set_the_cpu_works(host: Path) -> None:
    ready = {doctor.AUTOLOAD: "0"}
    assert (
        splitkv(host, "parity", "--backend", "cpu", "--case", "lengths-one", **ready).returncode
        == 0
    )
    report = json.loads(splitkv(host, "doctor", "--json", **ready).stdout)
    assert report["ok"] is True
    backends = {entry["backend"]: entry["why"] for entry in report["backends"]}
    assert backends["cpu"] is None
    assert (
        backends["ascend"] == "torch_npu cannot be imported: ImportError: libhccl.so: cannot open"
    )
    assert {part["library"] for part in report["ascend"]["parts"]} == set(ascend_host.PARTS)


def test_releases_that_do_not_go_together_are_named(host: Path) -> None:
    report = json.loads(splitkv(host, "doctor", "--json").stdout)
    said = report["ascend"]["mismatch"]
    assert f"torch {torch.__version__} and torch_npu 2.6.0 do not go together" in said
    assert "pip install 'torch-npu==" in said
    assert said in splitkv(host, "doctor").stdout


@pytest.mark.parametrize(
    ("torch_release", "npu_release", "pairs"),
    [
        ("2.13.0+cpu", "2.13.0", True),
        ("2.10.0", "2.10.0.post7", True),
        ("2.1.0", "2.10.0", False),
        ("2.10.0", "2.1.0", False),
    ],
)
def test_releases_pair_by_their_first_two_numbers(
    torch_release: str, npu_release: str, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = {"torch": torch_release, "torch-npu": npu_release}
    monkeypatch.setattr(ascend_host, "version", releases.__getitem__)
    assert (ascend_host.mismatch() is None) is pairs


def test_a_host_without_torch_npu_is_not_bothered(capsys: Any) -> None:
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ascend"] == {"parts": [], "mismatch": None}


def test_a_library_that_loads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ascend_host, "PARTS", {"libc.so.6": "the C library", "libnone.so": "nobody"}
    )
    found = {part.library: part.why for part in ascend_host.parts(60)}
    assert found["libc.so.6"] is None
    assert "libnone.so" in str(found["libnone.so"])


def test_a_driver_that_hangs_or_kills_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("no answer in 0.001 s" in str(part.why) for part in ascend_host.parts(0.001))
    monkeypatch.setattr(ascend_host, "_TRY", "import os; os.abort()")
    assert all("ended with code" in str(part.why) for part in ascend_host.parts(60))
