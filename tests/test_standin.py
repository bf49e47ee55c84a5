"""The CPU stand-in for torch_npu: what it is, and that every documented quirk is tested twice.

Per entry of ``QUIRKS`` the ``test_standin_*`` files hold ``test_contract_<name>``, which states the
behaviour, and ``test_naive_<name>``, in which the code that one would write first is compared with
a dense float64 computation and found wrong, or is refused.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.standin.schemas import SCHEMAS
from standin_calls import bsnd, request

FOLDER = Path(__file__).parent.parent / "kernels_ascend" / "standin"


pytestmark = pytest.mark.usefixtures("torch_npu")


def test_every_quirk_has_its_line_its_contract_test_and_its_naive_test() -> None:
    source = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    modelled = {
        name.strip()
        for line in source.splitlines()
        if "quirk: " in line and "<name>" not in line
        for name in line.split("quirk: ")[1].split(" (")[0].split(",")
    }
    elsewhere = {"num-heads-default", "one-device"}  # a schema's default; the device's own rule
    assert modelled == set(standin.QUIRKS) - elsewhere
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_standin_*.py"))
    for quirk in standin.QUIRKS:
        for kind in ("contract", "naive"):
            assert f"test_{kind}_{quirk.replace('-', '_').lower()}" in tests


def test_schemas_parse_and_refuse_unknown_keywords(torch_npu: ModuleType) -> None:
    for name, schema in SCHEMAS.items():
        parsed = torch._C.parse_schema(f"npu::{schema}")
        packet, _, overload = name.partition(".")
        assert (parsed.name, parsed.overload_name) == (f"npu::{packet}", overload)
        operator: Callable[..., object] = getattr(torch_npu, packet)
        operator = getattr(operator, overload) if overload else operator
        with pytest.raises(RuntimeError, match=r"Unknown keyword argument|missing value"):
            operator(no_such_keyword=1)


def test_host_tensors_do_not_reach_the_operators(torch_npu: ModuleType) -> None:
    one = request(8)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        torch_npu.npu_fused_infer_attention_score(*(tensor[None] for tensor in one))


def test_recording_tells_operators_and_waits(torch_npu: ModuleType) -> None:
    one = request(8)
    with standin.recording() as calls:
        bsnd(torch_npu, one)
        torch.ones(2).npu().sum().item()
    names = [call.name for call in calls]
    assert names.count("npu::npu_fused_infer_attention_score") == 1
    fused_call = next(call for call in calls if call.name.startswith("npu::"))
    assert fused_call.arguments["input_layout"] == "BSND"
    assert fused_call.arguments["block_size"] == 0
    assert calls[-1].syncs


def test_device_keeps_views_and_factories_honest(torch_npu: ModuleType) -> None:
    base = torch.zeros(2, 3, device="npu")
    base.view(6)[1] = 5
    assert base.cpu().tolist() == [[0, 5, 0], [0, 0, 0]]
    base.cpu().fill_(9)
    assert base.cpu().sum() == 5
    assert torch.arange(4, device="npu").shape == (4,)
    assert base.is_npu
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device="npu:1")
    with pytest.raises(RuntimeError, match="resized"):
        torch.add(base, base, out=torch.empty(0, device="npu"))


def test_uninstalling_leaves_no_torch_npu_behind(torch_npu: ModuleType) -> None:
    standin.uninstall()
    with pytest.raises(ImportError):
        import torch_npu as gone  # noqa: F401
    assert not torch.npu.is_available()
    assert not torch.accelerator.is_available()
    assert standin.install() is not torch_npu
    assert standin.is_standin(standin.install())
    assert torch.npu.is_available()


def test_cpu_autograd_survives_the_stand_in() -> None:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_the_package_says_what_it_is() -> None:
    documentation = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text())) or ""
    assert "Nothing here is Huawei's code" in documentation
    assert "proves nothing about a device" in documentation.replace("\n", " ")
