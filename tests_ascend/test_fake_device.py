"""Rung 1 once more: splitkv's own code on fake tensors of device ``npu``, all the way through.

The real torch_npu is imported, its meta functions answer, nothing computes. The recorded calls of
``test_schemas`` are the stand-in's; these are made here, and torch's own operators between them.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import splitkv
from real_operators import fake_tensors
from splitkv.backends.ascend import AscendBackend
from splitkv.common.call import DecodeCall
from splitkv.kernels_ascend import fused_infer, launches
from splitkv.kernels_ascend.routes import ROUTES
from splitkv.matrix import parity
from splitkv.matrix.case import Case, Size
from splitkv.matrix.cases import CASES
from splitkv.matrix.inputs import build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # page sizes; fake data pointers
BACKENDS = {
    "ascend": AscendBackend(),
    "loose": AscendBackend(strict=False),
    **{
        route.name: AscendBackend(route=route.name, strict=False, needs_lse=False)
        for route in ROUTES
    },
}


def on_npu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")


def placed(call: DecodeCall) -> DecodeCall:
    cache = call.cache
    k = on_npu(cache.k)
    shared = cache.v.data_ptr() == cache.k.data_ptr()
    moved = {"k": k, "v": k[..., : cache.v.shape[-1]] if shared else on_npu(cache.v)}
    if hasattr(cache, "block_table"):
        moved["block_table"] = on_npu(cache.block_table)
    return replace(call, q=on_npu(call.q), cache=replace(cache, **moved))


def run(backend: AscendBackend, case: Case) -> tuple[Tensor, Tensor] | None:
    """What the case comes to, or None where its tensors are refused."""
    inputs = build(replace(case, host_lengths=True), parity.SEED)
    plan = backend.plan_for(inputs.call, num_splits=case.num_splits, split_size=case.split_size)
    with fake_tensors():
        call = placed(inputs.call)
        try:
            if case.returns_state:
                state = backend.partial(call, plan)
                return state.out, state.lse
            sinks = None if inputs.sinks is None else on_npu(inputs.sinks)
            return backend.decode(call, plan, sinks=sinks)
        except splitkv.UnsupportedError:
            return None


def taken(backend: AscendBackend) -> list[Case]:
    small = (case for case in CASES if case.size is Size.SMALL)
    return [case for case in small if not parity.refusals(backend, case)]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_case_goes_through(name: str) -> None:
    ran = 0
    for case in taken(BACKENDS[name]):
        answer = run(BACKENDS[name], case)
        if answer is None:
            continue
        ran += 1
        out, lse = answer
        dtype = torch.float32 if case.returns_state else case.spec.dtype
        assert out.device.type == lse.device.type == "npu", case.id
        assert (out.dtype, lse.dtype) == (dtype, torch.float32), case.id
        assert out.shape == (*lse.shape, case.spec.head_dim_v), case.id
    print(f"{name}: {ran} cases")
    assert ran > 50 or name != "ascend"


PLAIN = next(case for case in CASES if case.id == "lengths-ragged")


@pytest.mark.parametrize("old", ["num_heads", "scale", "softmax_lse_flag"])
def test_a_misspelt_keyword_stops_it(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(BACKENDS["ascend"], PLAIN) is not None
    keywords = fused_infer.Heads.keywords

    def misspelt(heads: fused_infer.Heads) -> dict[str, object]:
        given = keywords(heads)
        return given | {f"{old}s": given.pop(old)}

    monkeypatch.setattr(fused_infer.Heads, "keywords", misspelt)
    with pytest.raises(RuntimeError, match=f"{old}s"):
        run(BACKENDS["ascend"], PLAIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, layout: (q[:, None], layout), "queryDims"),
        (lambda q, layout: (q, "BDNS"), "BDNS"),
    ],
)
def test_a_wrong_rank_or_layout_stops_it(
    change: Callable[[Tensor, str], tuple[Tensor, str]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single = launches.single_queries

    def wrong(q: Tensor, *args: object, layout: str, **kwargs: object) -> object:
        q, layout = change(q, layout)
        return single(q, *args, layout=layout, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(launches, "single_queries", wrong)
    with pytest.raises(RuntimeError, match=message):
        run(BACKENDS["ascend"], PLAIN)
