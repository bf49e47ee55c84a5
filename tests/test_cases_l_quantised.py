"""Faults that users met elsewhere: quantised caches."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backends_in_reach import InReach, every_backend
from histories import (
    STATED_TOLERANCE,
    History,
    assert_near,
    assert_near_lse,
    attend,
    lengths32,
    offsets32,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import DenseCache, append_kv, decode_attention

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def meaning(dtype: torch.dtype) -> Tensor:
    """What each of the 256 codes means, float64, from the definition (OCP 8-bit floating point)."""
    mantissa_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    code = np.arange(256)
    sign = np.where(code >= 128, -1.0, 1.0)
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + fraction) * 2.0 ** (exponent.astype(np.float64) - bias)
    value = sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    if dtype == torch.float8_e4m3fn:
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        value[(code & 0x7F) == 0x7C] *= np.inf
        value[(code & 0x7F) > 0x7C] = np.nan
    return torch.from_numpy(value)


def codes_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest finite code as uint8, ties to the even one; NaN as 0x7F."""
    magnitude = meaning(dtype)[:128]
    magnitude = magnitude[torch.isfinite(magnitude)]
    wanted = values.double().abs().clamp(max=float(magnitude[-1]))
    above = torch.searchsorted(magnitude, wanted.nan_to_num()).clamp(1, len(magnitude) - 1)
    low, high = wanted - magnitude[above - 1], magnitude[above] - wanted
    even = above - above % 2  # of the two neighbours, the even code
    nearest = torch.where(low < high, above - 1, torch.where(high < low, above, even))
    code = nearest + 128 * torch.signbit(values)
    return torch.where(torch.isnan(values), 0x7F, code).to(torch.uint8)


def dequantised(history: History, k_scale: Tensor, v_scale: Tensor) -> History:
    """scales: [B, K]."""
    return History(
        [rows.float() * scale[:, None] for rows, scale in zip(history.k, k_scale, strict=True)],
        [rows.float() * scale[:, None] for rows, scale in zip(history.v, v_scale, strict=True)],
    )


def assert_near_scaled(out: Tensor, wanted: Tensor, exact: History) -> None:
    """The stated tolerance, of values from N(0, 1), times how much larger these values are."""
    largest = max(float(rows.abs().max()) for rows in exact.v)
    assert_near(out, wanted, bound=STATED_TOLERANCE[out.dtype] * max(1.0, largest / 4))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("place", ["packed", "pages of 16"])
@pytest.mark.parametrize("scales", ["numbers", "tensors"])
@every_backend
def test_L01_scales_reach_every_path(on: InReach, scales: str, place: str, steps: int) -> None:
    original = random_history([40, 7], 2, 64)
    k_scale, v_scale = 0.25, 0.5
    history = History(
        [(rows / k_scale).to(torch.float8_e4m3fn) for rows in original.k],
        [(rows / v_scale).to(torch.float8_e4m3fn) for rows in original.v],
    )
    exact = dequantised(history, torch.full((2, 2), k_scale), torch.full((2, 2), v_scale))
    q = random_queries(2, steps, 8, 64, dtype=torch.bfloat16)
    cache = history.packed() if place == "packed" else history.paged(16)
    given: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if scales == "tensors":
        given = {name: torch.tensor([value]) for name, value in given.items()}
    out, lse = on.decode(q, **cache, **given)
    packed, packed_lse = on.decode(
        q.flatten(0, 1), **cache, **given, cu_seqlens_q=offsets32([steps, steps])
    )
    wanted, wanted_lse = attend(q, exact)
    for got, got_lse in (
        (out, lse),
        (packed.view(out.shape), packed_lse.view(lse.shape)),
    ):
        assert_near(got, torch.stack(wanted))
        assert_near_lse(got_lse, torch.stack(wanted_lse))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@every_backend
def test_L03_scale_of_the_request_and_the_kv_head_is_used(on: InReach, dtype: torch.dtype) -> None:
    history = random_history([20, 1, 50], 4, 64)
    history = History(
        [(rows * 10).to(dtype) for rows in history.k],
        [torch.ones_like(rows).to(dtype) for rows in history.v],
    )
    k_scale = 0.01 * torch.arange(1.0, 13.0).view(3, 4)
    v_scale = torch.tensor([0.5, 0.75, 1.25, 3.0])
    q = random_queries(3, 12, 64)
    cache = history.paged(16)
    out, lse = on.decode(q, **cache, k_scale=k_scale, v_scale=v_scale)
    _, wanted_lse = attend(q[:, None], dequantised(history, k_scale, v_scale.expand(3, 4)))
    shown = v_scale.repeat_interleave(3)[:, None].expand(3, 12, 64)
    assert_near(out, shown)
    assert_near_lse(lse, torch.cat(wanted_lse))
    by_request = 2.0 ** torch.arange(12.0).view(3, 4)
    out, _ = on.decode(q, **cache, k_scale=torch.tensor([0.01]), v_scale=by_request)
    shown = by_request.repeat_interleave(3, 1)[..., None].expand(3, 12, 64)
    assert bool(((out - shown).abs() <= 1e-5 * shown).all())


@pytest.mark.parametrize("shape", [(12,), (3, 12), (4, 3), (3, 1), (1, 4)])
def test_L03_scale_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    history = random_history([20, 1, 50], 4, 64)
    cache = History(
        [rows.to(torch.int8) for rows in history.k], [rows.to(torch.int8) for rows in history.v]
    ).paged(16)
    for name in ("k_scale", "v_scale"):
        scale: dict[str, Any] = {name: torch.ones(shape)}
        with pytest.raises(ValueError, match=rf"{name} must be .*\[4\].*\[3, 4\]"):
            decode_attention(random_queries(3, 12, 64), **cache, **scale)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", FP8)
def test_L07_append_saturates_beyond_the_formats_range(dtype: torch.dtype, scaled: bool) -> None:
    top = 448.0 if dtype == torch.float8_e4m3fn else 57344.0
    values = [447.0, 448.0, 449.0, 464.0, 465.0, 1e4, -1e4, math.inf, -math.inf, math.nan]
    values += [0.001953125, 0.0009, 1e5, -1e5, 1e30, top]
    rows = torch.tensor(values).view(1, 1, 1, 16)
    cache = DenseCache(
        torch.zeros(1, 1, 1, 16).to(dtype), torch.zeros(1, 1, 1, 16).to(dtype), lengths32([1])
    )
    scale = torch.tensor([1.0]) if scaled else None
    append_kv(cache, rows, rows, k_scale=scale, v_scale=scale)
    stored = cache.k.flatten().float()
    assert torch.equal(torch.isnan(stored), torch.isnan(rows.flatten()))
    assert float(stored.nan_to_num(0.0).abs().max()) == top
    for index, value in enumerate(values):
        if abs(value) > top:
            assert float(stored[index]) == math.copysign(top, value)
    wanted = codes_of(rows.flatten(), dtype)
    exact = ~torch.isnan(stored)
    assert torch.equal(cache.k.flatten().view(torch.uint8)[exact], wanted[exact])
    assert same_bits((cache.k,), (cache.v,))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("part", ["v", "k"])
@every_backend
def test_L08_all_codes_are_decoded_as_the_format_says(
    on: InReach, part: str, dtype: torch.dtype
) -> None:
    # One request per code. In V a code is the output; in K, times a query of 1, the score and lse.
    codes = CODES.view(dtype).view(256, 1, 1, 1).expand(256, 1, 1, 16).contiguous()
    zeros = torch.zeros(256, 1, 1, 16).to(dtype)
    q = torch.zeros(256, 1, 16)
    k, v = (zeros, codes) if part == "v" else (codes, zeros)
    q[..., 0] = 0.0 if part == "v" else 1.0
    out, lse = on.decode(
        q, k, v, seq_lens=torch.ones(256, dtype=torch.int32), layout="BSND", sm_scale=1.0
    )
    expected = meaning(dtype)
    finite = torch.isfinite(expected)
    shown = (out[:, 0, 0] if part == "v" else lse[:, 0]).double()
    assert torch.equal(shown[finite], expected[finite])
    if part == "v":
        assert torch.equal(torch.isnan(shown), torch.isnan(expected))
        infinite = torch.isinf(expected)
        assert torch.equal(shown[infinite], expected[infinite])
    else:
        assert bool(torch.isnan(shown[torch.isnan(expected)]).all())


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FP8)
def test_L08_every_16_bit_value_is_encoded_as_the_format_says(
    dtype: torch.dtype, source: torch.dtype
) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(source)
    rows = values.view(1, 4096, 1, 16)
    empty = torch.zeros(1, 4096, 1, 16).to(dtype)
    cache = DenseCache(empty, empty.clone(), lengths32([4096]))
    append_kv(cache, rows, rows)
    stored, wanted = cache.k.flatten(), codes_of(values, dtype)
    not_nan = ~torch.isnan(values)
    assert bool(torch.isnan(stored.float()[~not_nan]).all())
    assert torch.equal(stored.view(torch.uint8)[not_nan], wanted[not_nan])


@pytest.mark.parametrize("window_left", [-1, 3])
@every_backend
def test_L05_zero_points_of_unfilled_slots_are_not_read(on: InReach, window_left: int) -> None:
    lengths, heads = [5, 17], 4
    zeros = [torch.randint(-90, 90, (n, heads, 1)).float() for n in lengths]
    scales = [0.5 + torch.rand(n, heads, 1) for n in lengths]
    shape = (heads, 32)
    codes = History(
        [torch.randint(-128, 128, (n, *shape)).to(torch.int8) for n in lengths],
        [(zero + 1).expand(-1, *shape).to(torch.int8) for zero in zeros],
    ).paged(16, fill=127)
    beside = History(scales, zeros).paged(16)  # the same pages; NaN where no token is
    scale, zero = beside["k"][..., 0], beside["v"][..., 0].nan_to_num(127.0)
    one_step = torch.tensor([0.25])
    q = random_queries(2, heads, 32)
    given: dict[str, Any] = {"k_scale": scale, "k_zero": zero, "window_left": window_left}
    out, lse = on.decode(q, **codes, **given, v_scale=scale * 0 + one_step, v_zero=zero)
    assert_near(out, one_step.expand(out.shape))
    exact = History([], [])
    for code, zeros_, scales_ in zip(_rows(codes["k"], codes, lengths), zeros, scales, strict=True):
        exact.k.append((code.float() - zeros_) * scales_)
        exact.v.append(torch.zeros(len(code), *shape))
    seen = [slice(max(0, n - window_left - 1) if window_left >= 0 else 0, n) for n in lengths]
    visible = History(
        [rows[at] for rows, at in zip(exact.k, seen, strict=True)],
        [rows[at] for rows, at in zip(exact.v, seen, strict=True)],
    )
    _, wanted_lse = attend(q[:, None], visible)
    assert_near_lse(lse, torch.cat(wanted_lse))


def _rows(pool: Tensor, cache: dict[str, Any], lengths: list[int]) -> list[Tensor]:
    """What lies in the pages of each request, [L, K, D]."""
    tables = cache["block_table"].tolist()
    return [
        torch.cat([pool[page] for page in table if page >= 0])[:length]
        for table, length in zip(tables, lengths, strict=True)
    ]
