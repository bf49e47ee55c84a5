"""The pieces that quantised caches add to the CUDA kernels, one by one."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from cuda_calls import BACKEND, DEVICE
from splitkv.common.spec import Layout, ScaleKind
from splitkv.kernels_cuda import quantised
from splitkv.kernels_cuda.quantised import (
    power_below,
    scale_arguments,
    scale_weights,
    widen,
)
from splitkv.matrix.case import make
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.inputs import build
from splitkv.matrix.reference import reference

ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def launch(kernel: Any, *arguments: object) -> None:
    kernel[(1,)](*arguments)


@triton.jit
def widen_kernel(codes, out, DTYPE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, widen(tl.load(codes + at), DTYPE, True))


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, tl.float16), (torch.float32, tl.float32)]
)
@pytest.mark.parametrize("of", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_is_widened_exactly(of: torch.dtype, dtype: torch.dtype, wide: Any) -> None:
    codes = ALL.to(DEVICE).view(of)
    out = torch.empty(256, dtype=dtype, device=DEVICE)
    launch(widen_kernel, codes, out, wide)
    assert torch.equal(out.isnan(), codes.float().isnan())
    assert torch.equal(out.float().nan_to_num(9.0), codes.float().nan_to_num(9.0))


@triton.jit
def power_kernel(x, power, inverse, N: tl.constexpr):
    at = tl.arange(0, N)
    found, one_over = power_below(tl.load(x + at))
    tl.store(power + at, found)
    tl.store(inverse + at, one_over)


def test_a_power_of_two_loses_no_bit() -> None:
    edges = [0.0, 1e-45, 2.0**-126, 1e-30, 0.75, 1.0, 1.5, 2.0, 65504.0, 2.0**126, 3e38, math.inf]
    x = torch.tensor([*edges, math.nan, 3.0, 0.1, 7.0], device=DEVICE)
    power, inverse = torch.empty_like(x), torch.empty_like(x)
    launch(power_kernel, x, power, inverse, 16)
    assert torch.equal(power * inverse, torch.ones_like(x))
    assert bool((torch.frexp(power)[0] == 0.5).all())
    normal = (x >= 2.0**-126) & (x < 2.0**127)
    scaled = (x * inverse)[normal]
    assert bool(((scaled >= 1) & (scaled < 2)).all())
    assert torch.equal((scaled * power[normal]), x[normal])


@triton.jit
def weights_kernel(weights, scale, zero, out, units, drifts, DTYPE: tl.constexpr):
    row, token = tl.arange(0, 2), tl.arange(0, 4)
    given = tl.load(weights + row[:, None] * 4 + token[None, :])
    seen = token < 3
    # tokens 0 and 1 in slots of page 1, tokens 2 and 3 in page 0, and head 1 of two
    page = 1 - token // 2
    narrowed, unit, drift = scale_weights(
        given,
        tl.zeros([2], tl.float32) + 1.0,
        scale,
        zero,
        (4, 2, 1),
        (4, 2, 1),
        page,
        (token % 2).to(tl.int64),
        1,
        seen,
        DTYPE,
        2,
    )
    tl.store(out + row[:, None] * 4 + token[None, :], narrowed.to(tl.float32) * unit)
    tl.store(units + row[:, None], unit + tl.zeros([2, 1], tl.float32))
    tl.store(drifts + row, drift)


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_weights_times_scales_keep_float16_in_range(size: float) -> None:
    weights = torch.tensor([[1.0, 0.5, 0.125, 1.0], [0.0, 1.0, 0.75, 1.0]], device=DEVICE)
    scale = torch.full((2, 2, 2), math.nan)
    zero = scale.clone()
    scale[1, :, 1], zero[1, :, 1] = torch.tensor([3.0, 0.01]) * size, torch.tensor([7.0, -50.0])
    scale[0, 0, 1], zero[0, 0, 1] = 1.25 * size, 0.5
    scale, zero = scale.to(DEVICE), zero.to(DEVICE)
    out, units, drifts = (torch.empty(n, device=DEVICE) for n in (8, 2, 2))
    launch(weights_kernel, weights, scale, zero, out, units, drifts, tl.float16)
    by_token = torch.tensor([3.0, 0.01, 1.25, 0.0]) * size
    wanted = weights.cpu() * by_token
    got = out.cpu().view(2, 4)
    assert bool(((got - wanted).abs() <= wanted * 2.0**-11 + size * 2.0**-24).all())
    shares = (got * torch.tensor([7.0, -50.0, 0.5, 0.0])).sum(1)
    torch.testing.assert_close(drifts.cpu(), 1.0 + shares)


def test_without_a_unit_small_scales_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    if not quantised.INTERPRETED.value:
        pytest.skip("compiled kernels cannot be patched")
    monkeypatch.setattr(quantised, "power_below", lambda x: (x * 0.0 + 1.0, x * 0.0 + 1.0))
    with pytest.raises(AssertionError):
        test_weights_times_scales_keep_float16_in_range(1e-6)


FULL = {
    "kv_dtype": torch.int8,
    "k_scale": ScaleKind.CHANNEL,
    "v_scale": ScaleKind.TOKEN,
    "k_zero": True,
    "v_zero": True,
}


def measured(**settings: Any) -> list[str]:
    """What is out of bounds when a small case runs in the kernels; nothing, if all is well."""
    given = {"num_q_heads": 4, "head_dim": 32, "page_size": 16, "num_splits": 2, **settings}
    case = make("quantised-pieces", "pieces", (70, 5), **given)
    here, host = build(case, 3, DEVICE), build(case, 3)
    plan = BACKEND.plan_for(here.call, num_splits=2)
    out, lse = BACKEND.decode(here.call, plan)
    answer = reference(host.call)
    return errors(out.cpu(), lse.cpu(), answer).exceeds(bounds(host.call, None, answer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "settings",
    [
        FULL,
        {"kv_dtype": torch.int8, "scales": ScaleKind.TOKEN, "k_zero": True, "v_zero": True},
        {"kv_dtype": torch.int8, "scales": ScaleKind.REQUEST_HEAD, "k_zero": True, "v_zero": True},
        {"kv_dtype": torch.float8_e4m3fn, "scales": ScaleKind.HEAD, "num_queries": 4},
        {"kv_dtype": torch.float8_e5m2, "k_scale": ScaleKind.CHANNEL, "layout": Layout.HND},
    ],
)
def test_the_kernels_stay_within_the_bounds_of_plain_torch(
    dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    assert measured(dtype=dtype, **settings) == []


def forget(name: str) -> Any:
    """``scale_arguments`` that leaves one tensor out."""
    return lambda call: scale_arguments(replace(call, **{name: None}))


def swap(name: str) -> Any:
    """``scale_arguments`` that reads a tensor along the wrong axes."""

    def swapped(call: Any) -> dict[str, Any]:
        values = getattr(call, name)
        turned = values.transpose(-1, -2).reshape(values.shape)
        return scale_arguments(replace(call, **{name: turned}))

    return swapped


@pytest.mark.parametrize(
    "mistake",
    [forget("k_zero"), forget("v_zero"), swap("k_scale"), swap("v_scale"), swap("v_zero")],
    ids=["no k_zero", "no v_zero", "k_scale turned", "v_scale turned", "v_zero turned"],
)
def test_a_mistake_is_out_of_bounds(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitkv.kernels_cuda.split_launch.scale_arguments", mistake)
    settings = FULL | {"head_dim": 2 * 8, "num_kv_heads": 2}
    assert measured(**settings) != []


def test_one_float16_term_of_queries_by_channel_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not quantised.INTERPRETED.value:
        pytest.skip("compiled kernels cannot be patched")
    assert measured(**FULL) == []
    alone = quantised.dot
    monkeypatch.setattr(
        quantised, "dot", lambda q, keys, sums=None: alone(q, keys) if sums is None else sums
    )
    assert any("lse" in sentence for sentence in measured(**FULL))
