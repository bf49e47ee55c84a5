"""Quirks of captured graphs and of the ``.out`` forms."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from standin_calls import Dense, bsnd, refused, request, right

LENGTHS = "actual_seq_lengths_kv"


def into(
    torch_npu: ModuleType, one: Dense, length: int, workspace: Tensor | None
) -> tuple[Tensor, Tensor]:
    """FIA v1 in BSND into buffers; they are returned on the device."""
    out = torch.empty(1, 1, *one.q.shape[1:], dtype=torch.float16, device="npu")
    lse = torch.empty(1, one.q.shape[1], 1, 1, device="npu")
    torch_npu.npu_fused_infer_attention_score.out(
        *(tensor[None].npu() for tensor in one) if workspace is None else DEVICE[id(one)],
        **_keywords(one, length),
        workspace=workspace,
        out=[out, lse],
    )
    return out, lse


def _keywords(one: Dense, length: int) -> dict[str, Any]:
    return {
        "input_layout": "BSND",
        "num_heads": one.q.shape[1],
        "num_key_value_heads": one.k.shape[1],
        "scale": one.sm_scale,
        "softmax_lse_flag": True,
        LENGTHS: [length],
    }


ONE = request(1200)
DEVICE: dict[int, list[Tensor]] = {}


@pytest.fixture(autouse=True)
def on_device(torch_npu: ModuleType) -> None:
    DEVICE[id(ONE)] = [tensor[None].npu() for tensor in ONE]


def sized(torch_npu: ModuleType, length: int) -> Tensor:
    helper = torch_npu._npu_fused_infer_attention_score_get_max_workspace
    return helper(*DEVICE[id(ONE)], **_keywords(ONE, length))


def judged(out: Tensor, lse: Tensor, length: int) -> bool:
    one = Dense(ONE.q, ONE.k[:length], ONE.v[:length])
    return right(out.cpu()[0], lse.cpu()[0, :, :, 0].T, one)


def captured(torch_npu: ModuleType, length: int, **options: Any) -> tuple[Any, Tensor, Tensor]:
    workspace, graph = sized(torch_npu, 1200), torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        out, lse = into(torch_npu, ONE, length, workspace)
    return graph, out, lse


def test_contract_capture_bakes_lengths(torch_npu: ModuleType) -> None:
    graph, out, lse = captured(torch_npu, 300, auto_dispatch_capture=True)
    graph.update(cpu_update_input=[{LENGTHS: [1100]}])
    graph.replay()
    assert judged(out, lse, 1100)


def test_naive_capture_bakes_lengths(torch_npu: ModuleType) -> None:
    graph, out, lse = captured(torch_npu, 300)
    graph.replay()
    assert not judged(out, lse, 1100)
    assert judged(out, lse, 300)


def test_contract_capture_update_count(torch_npu: ModuleType) -> None:
    workspace, graph = sized(torch_npu, 1200), torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        found = [into(torch_npu, ONE, 300, workspace) for _ in range(2)]
    graph.update(cpu_update_input=[{LENGTHS: [500]}, {LENGTHS: [700]}])
    graph.replay()
    assert judged(*found[0], 500)
    assert judged(*found[1], 700)
    graph.update(cpu_update_input=[{LENGTHS: [900]}])
    graph.replay()
    assert all(judged(*one, 900) for one in found)


def test_naive_capture_update_count(torch_npu: ModuleType) -> None:
    graph, _, _ = captured(torch_npu, 300, auto_dispatch_capture=True)
    with pytest.raises(ValueError, match="Currently, there are 1 operators"):
        graph.update(cpu_update_input=[{LENGTHS: [500]}] * 2)
    with pytest.raises(ValueError, match="cannot be updated"):
        graph.update(cpu_update_input=[{"pre_tokens": [500]}])
    with pytest.raises(RuntimeError, match="auto_dispatch_capture"):
        captured(torch_npu, 300)[0].update(cpu_update_input=[{LENGTHS: [500]}])


def test_contract_capture_no_wait(torch_npu: ModuleType) -> None:
    graph = torch.npu.NPUGraph()
    x = torch.ones(3).npu()
    assert not torch.npu.is_current_stream_capturing()
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        doubled = x * 2
    x.copy_(torch.full((3,), 5.0))
    graph.replay()
    assert doubled.cpu().tolist() == [10, 10, 10]


def test_naive_capture_no_wait(torch_npu: ModuleType) -> None:
    x = torch.ones(3).npu()
    with torch.npu.graph(torch.npu.NPUGraph()):
        for naive in (lambda: torch.tensor([1, 2]).npu(), x.tolist, lambda: x.sum().item(), x.cpu):
            with pytest.raises(RuntimeError, match="Not allow to synchronize captured-stream"):
                naive()


def test_contract_out_workspace_unchecked(torch_npu: ModuleType) -> None:
    assert sized(torch_npu, 1200).numel() > sized(torch_npu, 300).numel()
    assert sized(torch_npu, 300).dtype == torch.float16
    assert judged(*into(torch_npu, ONE, 1100, sized(torch_npu, 1200)), 1100)
    eager = bsnd(torch_npu, ONE, **{LENGTHS: [1100]})
    assert torch.equal(into(torch_npu, ONE, 1100, None)[0].cpu()[0], eager[0])


def test_naive_out_workspace_unchecked(torch_npu: ModuleType) -> None:
    """A workspace of the first step's lengths: a device would go on past its end."""
    short = sized(torch_npu, 9)[: sized(torch_npu, 9).numel() // 2]
    with refused("workspace of .* bytes are needed"):
        into(torch_npu, ONE, 1100, short)
