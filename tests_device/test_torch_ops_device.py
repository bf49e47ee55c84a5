"""The operators on a GPU: opcheck, compiled by Inductor, captured in a graph. From the root:

    python -m pytest tests_device/test_torch_ops_device.py

Not part of ``make test``. Without a GPU these tests fail, they are never skipped.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import splitkv
from splitkv.backends import torch_ops

DEVICE = torch.device("cuda", 0)
H, K, D, P, COLUMNS = 32, 8, 128, 16, 64
OPS = torch.ops.splitkv


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def call(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    random = torch.Generator(DEVICE).manual_seed(0)
    pages = len(lengths) * COLUMNS
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=random)
        for shape in ((len(lengths), H, D), (pages, P, K, D), (pages, P, K, D))
    )
    table = torch.randperm(pages, device=DEVICE, generator=random).view(-1, COLUMNS).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return q, k, v, {"layout": "NHD", "block_table": table, "seq_lens": seq_lens}


def layer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return torch_ops.decode_attention(q * 2, k, v, **options)


def assert_layer(got: tuple[Tensor, Tensor], q: Tensor, *rest: Tensor, **options: Any) -> None:
    want = splitkv.decode_attention(q * 2, *rest, return_lse=True, **options)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("host_lengths", [False, True])
def test_opcheck(host_lengths: bool) -> None:
    q, k, v, options = call([1000, 0, 17])
    if host_lengths:
        options["seq_lens"] = options["seq_lens"].cpu()
    opcheck(OPS.decode_attention.default, (q, k, v), options)
    opcheck(OPS.partial_attention.default, (q, k, v), options)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1], device=DEVICE)
    opcheck(OPS.decode_attention_out.default, (q, k, v, out, lse), options)
    new = torch.ones(3, K, D, dtype=q.dtype, device=DEVICE)
    opcheck(OPS.append_kv.default, (k, v, new, new), options)
    state = torch_ops.partial_attention(q, k, v, **options)
    opcheck(OPS.merge_states.default, (state.max[None], state.lse[None], state.out[None]))


def test_inductor_with_a_growing_batch() -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    lengths = [1000, 1, 17, 64, 900]
    q, k, v, options = call(lengths)
    assert_layer(compiled(q, k, v, **options), q, k, v, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (3, 7, 12):
            q, k, v, options = call((lengths * 3)[:batch])
            assert_layer(compiled(q, k, v, **options), q, k, v, **options)


def test_graph_trees_follow_growing_lengths() -> None:
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    q, k, v, options = call([900, 1, 17, 64])
    for _ in range(12):
        options["seq_lens"] += 1
        torch.compiler.cudagraph_mark_step_begin()
        assert_layer(compiled(q, k, v, **options), q, k, v, **options)


def test_a_captured_operator_follows_growing_lengths() -> None:
    q, k, v, options = call([900, 1, 17, 64])
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1], device=DEVICE)
    torch_ops.decode_attention(q, k, v, out=out, lse=lse, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_ops.decode_attention(q, k, v, out=out, lse=lse, **options)
    for _ in range(12):
        options["seq_lens"] += 1
        graph.replay()
        assert_layer((out, lse), q / 2, k, v, **options)
