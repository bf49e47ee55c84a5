"""The real torch_npu, imported without CANN, and the operator calls that splitkv makes."""

import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ASCEND_910B3 = 223
"""As torch_npu's NpuVariables.h numbers it."""
sys.path.insert(0, str(HERE))  # the helpers beside the tests

from cann_stub import import_torch_npu  # noqa: E402

with tempfile.TemporaryDirectory() as folder:  # before any test module imports torch
    import_torch_npu(Path(folder))

# npu_fusion_attention's meta function asks the device for its generation, to warn on Ascend 950
import torch  # noqa: E402
import torch_npu.op_plugin.meta._meta_registrations as meta_functions  # noqa: E402

meta_functions.get_soc_version = lambda: ASCEND_910B3
# it logs every refusal that a test provokes
logging.getLogger("torch._subclasses.fake_tensor").disabled = True


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``ran``: what each piece of work called, or why not; ``calls``: each different call once."""
    path = tmp_path_factory.mktemp("calls") / "calls.json"
    command = [sys.executable, "-W", "ignore", "-m", f"{HERE.name}.record_calls", str(path)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(autouse=True)
def idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 910B3 that captures nothing: what splitkv asks before it computes."""
    monkeypatch.setattr(torch.npu, "is_available", lambda: True)
    monkeypatch.setattr(torch.npu, "get_device_name", lambda device=None: "Ascend910B3")
    monkeypatch.setattr(torch.npu, "is_current_stream_capturing", lambda: False)
