"""``splitkv doctor`` beside the real torch_npu, where no CANN is and torch fails."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
ROOT = Path(__file__).resolve().parent.parent


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_torch_itself_does_not_import() -> None:
    done = python("-c", "import torch")
    assert done.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in done.stderr


def test_doctor_says_what_is_missing_and_names_the_variable() -> None:
    done = python("-m", "splitkv", "doctor", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    by_torch, by_torch_npu = report["imports"]
    assert f"set {AUTOLOAD}=0" in by_torch["remedy"]
    assert "libhccl.so" in by_torch_npu["why"]
    assert "set_env.sh" in by_torch_npu["remedy"]
    assert report["versions"]["torch-npu"] == version("torch-npu")
    assert report["ascend"]["mismatch"] is None
    assert all(part["why"] is not None for part in report["ascend"]["parts"])
    assert report["backends"] == []


def test_with_the_variable_set_the_cpu_backend_works() -> None:
    report = json.loads(python("-m", "splitkv", "doctor", "--json", **{AUTOLOAD: "0"}).stdout)
    why = {entry["backend"]: entry["why"] for entry in report["backends"]}
    assert why["cpu"] is None
    assert "libhccl.so" in why["ascend"]
    words = ("-m", "splitkv", "parity", "--backend", "cpu", "--case", "lengths-*", "--json")
    done = python(*words, **{AUTOLOAD: "0"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backends"]["cpu"]["counts"]["passed"] > 1
    assert python(*words).returncode == 1
