"""Rung 1 once more: splitkv's own code on fake tensors of device ``npu``, all the way through.

The real torch_npu is imported, its meta functions answer, nothing computes. The recorded calls of
``test_schemas`` are the stand-in's; these are made here, and torch's own operators between them.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    UnsupportedOperatorException,
)

import splitkv
from real_operators import fake_tensors
from splitkv.backends.ascend import AscendBackend
from splitkv.common.call import DecodeCall
from splitkv.kernels_ascend import cache_write, fused_infer, launches
from splitkv.kernels_ascend.routes import ROUTES
from splitkv.matrix import contract_open, parity
from splitkv.matrix.case import Case, Size
from splitkv.matrix.cases import CASES
from splitkv.matrix.contract import Check, all_checks
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


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "NHD", "HND"])
def test_an_append_goes_through(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lengths-ragged" if layout == "NHD" else f"layout-{layout.lower()}"
    case = next(case for case in CASES if case.id == name)
    inputs = build(replace(case, host_lengths=True), parity.SEED)
    made: list[object] = []
    write = cache_write.write
    monkeypatch.setattr(cache_write, "write", lambda *given: made.append(write(*given)) or made[-1])
    with fake_tensors():
        cache = placed(inputs.call).cache
        cache = replace(cache, seq_lens=on_npu(cache.seq_lens))  # a fake one on the host is read
        shape = (cache.batch, 1, cache.num_kv_heads)
        k, v = (
            torch.empty((*shape, each.shape[-1]), dtype=each.dtype, device="npu")
            for each in (cache.k, cache.v)
        )
        splitkv.append_kv(cache, k, v)
        assert made == [True]
        right = getattr(torch_npu, cache_write.OPERATOR)
        monkeypatch.setattr(
            torch_npu, cache_write.OPERATOR, lambda *given, cache_mode: right(*given, mode="Norm")
        )
        with pytest.raises(RuntimeError, match="mode"):
            splitkv.append_kv(cache, k, v)


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


QUESTIONS = [check for check in all_checks() if check.ask.__module__ == contract_open.__name__]
ENDS = {
    "duplicate-slots": "_local_scalar_dense",  # a number is asked for
    "merge-of-empty-latent": "_local_scalar_dense",
    "atb-ring-lse": "npu_ring_mla.default",  # there is no meta function
}
"""Where questions end on tensors without numbers: behind the operator's call."""


def ask(check: Check, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(contract_open, "near", lambda got, wanted: True)
    monkeypatch.setattr(contract_open, "error", lambda got, wanted: 0.0)
    with fake_tensors():
        try:
            return check.ask(torch.device("npu")).text
        except (UnsupportedOperatorException, DataDependentOutputException) as end:
            return str(end)


@pytest.mark.parametrize("check", QUESTIONS, ids=lambda check: check.name)
def test_an_open_question_binds(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the stand-in cannot answer are called here alone: names and kinds are right."""
    said = ask(check, monkeypatch)
    print(check.name, said)
    if check.name in ENDS:
        assert ENDS[check.name] in said
    else:
        assert "refused" not in said


@pytest.mark.parametrize("name", ["atb-latent-lse", "atb-ring-lse"])
def test_a_misspelt_question_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = (check for check in QUESTIONS if check.name == name)
    right = contract_open._atb
    monkeypatch.setattr(
        contract_open, "_atb", lambda name: lambda *a, **k: right(name)(*a, **k, calc_typ="ring")
    )
    with pytest.raises(RuntimeError, match="calc_typ"):
        ask(check, monkeypatch)
