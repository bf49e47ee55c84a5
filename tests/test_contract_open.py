"""Questions that the stand-in leaves open, asked of operators that answer one way or the other."""

import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitkv.kernels_ascend.standin import device
from splitkv.matrix.contract import Agrees, Found, all_checks, answer
from splitkv.matrix.contract_calls import Request, attend

FIA, FIA_V2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"
SCATTER = "npu::npu_scatter_pa_kv_cache"


@pytest.fixture
def kernels(torch_npu: ModuleType) -> Iterator[dict[str, device.Kernel]]:
    """The stand-in's operators, put back as they were."""
    before = dict(device.kernels)
    yield device.kernels
    device.kernels.update(before)


def asked(name: str) -> Found:
    (check,) = (check for check in all_checks() if check.name == name)
    return answer(check.ask, torch.device("npu"))


def dense(given: Mapping[str, Any]) -> Request:
    return Request(given["query"][0], given["key"][0], given["value"][0])


def result(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """As FIA shapes them for one request in BSND."""
    return out[None].bfloat16(), lse.T[None, ..., None].float()


@pytest.mark.parametrize(
    ("keeps", "said"),
    [(0, "the slot holds [1.0], "), (1, "the slot holds [2.0], "), (None, "[1.0, 2.0]")],
)
def test_duplicate_slots(keeps: int | None, said: str, kernels: dict[str, device.Kernel]) -> None:
    def write(given: Mapping[str, Any]) -> None:
        first, second = given["key"]
        mixed = torch.cat([first[:1], second[1:]])
        given["key_cache"][0, 5] = mixed if keeps is None else (first, second)[keeps]

    assert asked("duplicate-slots").text.startswith("refused")
    kernels[SCATTER] = write
    found = asked("duplicate-slots")
    assert said in found.text
    assert found.agrees is Agrees.OPEN


@pytest.mark.parametrize("honours", [True, False])
def test_a_tree_mask(honours: bool, kernels: dict[str, device.Kernel]) -> None:
    def run(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        one, tree = dense(given), given["atten_mask"][0]
        hidden = torch.zeros(4, len(one.k), dtype=torch.bool)
        hidden[:, -4:] = tree
        return result(*(attend(one, hidden=hidden) if honours else attend(one, causal=True)))

    assert asked("tree-mask").agrees is Agrees.NOT_ASKED
    kernels[FIA] = run
    said = asked("tree-mask").text
    assert said == f"taken; honoured: {honours}, causal instead: {not honours}"


def test_the_shape_of_nbsd(kernels: dict[str, device.Kernel]) -> None:
    right = dict(kernels)

    def run(operator: str, *places: int) -> device.Kernel:
        def answered(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
            out, lse = right[operator]({**given, "input_layout": "BSND"})
            return out.permute(places).contiguous(), lse

        return answered

    kernels[FIA], kernels[FIA_V2] = run(FIA, 0, 2, 1, 3), run(FIA_V2, 2, 0, 1, 3)
    said = asked("nbsd-shape").text
    assert "v1: [2, 32, 1, 512], right as ['(B, N, S, D)']" in said
    assert "v2: [32, 2, 1, 512], right as ['(N, B, S, D)']" in said
    kernels[FIA] = run(FIA, 0, 1, 2, 3)
    assert "v1: [2, 1, 32, 512], right as neither" in asked("nbsd-shape").text


@pytest.mark.parametrize(
    ("right", "agrees"), [((1, 8), Agrees.YES), ((8,), Agrees.YES), ((), Agrees.NO)]
)
def test_shapes_of_pse_shift(
    right: tuple[int, ...], agrees: Agrees, kernels: dict[str, device.Kernel]
) -> None:
    def run(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        bias = given["pse_shift"][0, :, 0]
        return result(*attend(dense(given), bias=bias if len(bias) in right else None))

    kernels[FIA] = run
    found = asked("pse-shapes")
    assert found.agrees is agrees
    assert f"[1, 8, 1, S] right: {8 in right}, ignored: {8 not in right}" in found.text
    assert f"[1, 1, 1, S] right: {1 in right}, ignored: {1 not in right}" in found.text


@pytest.mark.parametrize(("factor", "base"), [(1.0, "base e"), (1 / math.log(2), "base 2")])
def test_the_base_of_atbs_lses(
    factor: float, base: str, torch_npu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
        return torch.einsum("shd,thd->sht", q.double(), k.double()) * scale

    def latent(q: Any, q_rope: Any, k: Any, k_rope: Any, table: Any, lengths: Any, *rest: Any,
               calc_type: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        heads, scale = rest[:2]
        query = torch.cat([q.cpu(), q_rope.cpu()], -1)
        key = torch.cat([k.cpu(), k_rope.cpu()], -1).flatten(0, 1).expand(-1, heads, -1)
        all_scores = scores(query, key, scale)
        values = k.cpu().flatten(0, 1).expand(-1, heads, -1).double()
        out = torch.einsum("sht,thd->shd", all_scores.softmax(-1), values)
        return out, all_scores.logsumexp(-1)[..., None] * factor

    def ring(q: Any, q_rope: Any, k: Any, k_rope: Any, v: Any, mask: Any, lengths: Any, *heads: int,
             qk_scale: float, **modes: str) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert lengths.device.type == "cpu"
        query, key = (torch.cat([a.cpu(), b.cpu()], -1) for a, b in ((q, q_rope), (k, k_rope)))
        all_scores = scores(query, key, qk_scale)
        out = torch.einsum("sht,thd->shd", all_scores.softmax(-1), v.cpu().double())
        return out, all_scores.logsumexp(-1).T * factor

    for name in ("atb-latent-lse", "atb-ring-lse"):
        assert asked(name).agrees is Agrees.NOT_ASKED
    atb = SimpleNamespace(npu_multi_head_latent_attention=latent, npu_ring_mla=ring)
    monkeypatch.setattr(torch_npu, "atb", atb, raising=False)
    for name in ("atb-latent-lse", "atb-ring-lse"):
        found = asked(name)
        assert found.text.startswith("out right: True")
        assert found.text.endswith(base)


def test_an_empty_latent_row_of_another_lse_is_found(kernels: dict[str, device.Kernel]) -> None:
    assert asked("merge-of-empty-latent").agrees is Agrees.YES
    right = kernels[FIA]

    def finite(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        out, lse = right(given)
        return out, torch.where(lse.isinf(), 30.0, lse)

    kernels[FIA] = finite
    found = asked("merge-of-empty-latent")
    assert found.agrees is Agrees.NO
    assert "LSE of the empty row 30" in found.text


def test_heads_that_are_wrong_over_pages_are_found(kernels: dict[str, device.Kernel]) -> None:
    assert asked("mla-heads-paged").agrees is Agrees.YES
    right = kernels[FIA]

    def wrong(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        out, lse = right(given)
        return (out if given["block_table"] is None else out.roll(1, 2)), lse

    kernels[FIA] = wrong
    assert asked("mla-heads-paged").agrees is Agrees.NO
    assert asked("mla-heads").agrees is Agrees.YES


def test_a_refusal_is_an_answer_and_a_mistake_is_not(kernels: dict[str, device.Kernel]) -> None:
    def refusing(given: Mapping[str, Any]) -> Callable[..., Any]:
        raise RuntimeError("561002: no tree here")

    kernels[FIA] = refusing
    assert asked("tree-mask") == Found("refused: 561002: no tree here", Agrees.OPEN)
