"""int4 caches: two codes a byte, and a scale for each token, head and group of the head dim."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backends_in_reach import NOT_NATIVE, InReach, backends
from histories import (
    STATED_LSE_TOLERANCE,
    STATED_TOLERANCE,
    Arguments,
    History,
    attend,
    random_history,
    random_queries,
)
from operator_calls import assert_operator_agrees
from splitkv import (
    DecodeSpec,
    DenseCache,
    Layout,
    PagedCache,
    ScaleKind,
    UnsupportedError,
    append_kv,
    decode,
    decode_attention,
)
from splitkv.backends.cascade.decode import cascade_decode, plan_cascade
from splitkv.common.quantised import group_sizes, pack_int4, quantise_int4, unpack_int4

LENGTHS, K, G, D, DV, P = [40, 1, 23], 2, 3, 64, 32, 16
GROUPS = (16, 32)
"""Of k and of v."""
LAYOUTS = ("BSND", "BNSD", "NHD", "HND", "packed")
BF16, FP32 = torch.bfloat16, torch.float32
Part = list[Tensor]


def test_two_codes_lie_in_a_byte_the_even_one_in_its_lower_half() -> None:
    assert pack_int4(torch.tensor([[1, 2, 15, 0]])).tolist() == [[0x21, 0x0F]]
    codes = torch.randint(0, 16, (3, 5, 32))
    packed = pack_int4(codes)
    assert packed.dtype is torch.uint8
    assert packed.shape == (3, 5, 16)
    assert torch.equal(unpack_int4(packed), codes.to(torch.uint8))
    for bad in (torch.tensor([1, 16]), torch.tensor([-1, 0]), torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="int4 codes must be"):
            pack_int4(bad)
    with pytest.raises(ValueError, match=r"must be integers .* got torch.float32"):
        pack_int4(torch.ones(2))


def dequantised(packed: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The formula said anew: float64 [.., D]."""
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2).double()
    width = codes.shape[-1] // scale.shape[-1]
    zeros = 8.0 if zero is None else zero.double().repeat_interleave(width, -1)
    return (codes - zeros) * scale.double().repeat_interleave(width, -1)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_no_value_is_off_by_more_than_half_a_step_of_its_group(group: int, zeros: bool) -> None:
    random = torch.Generator().manual_seed(group)
    size = torch.logspace(-6, 4, 33)[:, None, None]
    values = size * torch.randn(33, 7, 64, generator=random)
    values[:, 1] = 0.0
    values[:, 2] = 3.0 * size[:, 0]
    values[:, 3] += 20.0 * size[:, 0]
    packed, scale, zero = quantise_int4(values, group, zeros=zeros)
    assert (zero is not None) == zeros
    off = (dequantised(packed, scale, zero) - values.double()).abs()
    steps = scale.double().repeat_interleave(group, -1)
    shifted = 1e-5 * values.abs().double()  # by the rounding of a zero point far from its codes
    assert bool((off <= 0.5001 * steps + shifted).all())
    assert float((off / steps)[steps > 0].max()) > 0.45  # and the bound is met
    turned = dequantised(packed.roll(1, -1), scale, zero) - values.double()
    assert not bool((turned.abs() <= 0.5001 * steps + shifted).all())


@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32])
@pytest.mark.parametrize("zeros", [True, False])
def test_scales_and_zero_points_find_room_in_their_dtype(dtype: torch.dtype, zeros: bool) -> None:
    """Constant groups, nearly constant ones, and spreads below the smallest number."""
    ramp = torch.linspace(0.0, 1.0, 32)
    rows = [torch.zeros(32), ramp * 0 + 1e3, 5 + ramp * 1e-3, ramp * 1e-8, -7 - ramp * 1e-4, ramp]
    values = torch.stack(rows)
    packed, scale, zero = quantise_int4(values, 32, zeros=zeros, dtype=dtype)
    assert bool(torch.isfinite(scale).all())
    assert zero is None or bool(torch.isfinite(zero).all())
    off = (dequantised(packed, scale, zero) - values.double()).abs().amax(-1)
    limits = torch.finfo(dtype)
    largest = values.abs().amax(-1).double()
    coarse = (values.amax(-1) - values.amin(-1)).double() / 15 if zeros else largest / 7
    assert bool((off <= 0.51 * coarse + largest * limits.eps + limits.tiny).all()), off


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        (torch.full((1, 32), math.nan), FP32, "must be finite"),
        (torch.full((1, 32), -math.inf), BF16, "must be finite"),
        (torch.linspace(1.0, 2e6, 32)[None], torch.float16, r"133333.* is beyond torch.float16"),
        (torch.ones(1, 32), torch.int8, "dtype must be a float's, got torch.int8"),
    ],
)
def test_what_cannot_be_quantised(values: Tensor, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantise_int4(values, 32, dtype=dtype)


@backends()
def test_what_is_unseen_takes_no_bits_from_small_values(on: InReach) -> None:
    """A scale of 0 beside others, as of tokens past the history in a tile, sets no common unit."""
    call, _ = quantised("BSND")
    small = call | {"v_scale": call["v_scale"] * 1e-6}
    q = random_queries(len(LENGTHS), G * K, D, dtype=BF16)
    usual, shrunk = on.decode(q, **call)[0].double(), on.decode(q, **small)[0].double()
    assert float((shrunk * 1e6 - usual).norm() / usual.norm()) < 4e-3


def test_one_token_of_one_head_and_one_group() -> None:
    cache = torch.full((1, 1, 1, 8), 0x9C, dtype=torch.uint8)
    scale = torch.full((1, 1, 1, 1), 0.5)
    got = decode_attention(
        torch.ones(1, 1, 16),
        cache,
        cache,
        seq_lens=torch.ones(1, dtype=torch.int32),
        layout="BSND",
        k_scale=scale,
        v_scale=scale,
    )
    assert isinstance(got, Tensor)
    assert torch.equal(got, torch.tensor([2.0, 0.5] * 8).view(1, 1, 16))


def laid_out(layout: str, k: Part, v: Part) -> Arguments:
    """Two parts of a cache; whatever is nobody's holds 255, or NaN."""
    history = History(k, v)
    if layout == "packed":
        return history.packed()
    if layout in ("NHD", "HND"):
        return history.paged(P, layout=layout, unused=9)
    return history.dense(45, layout=layout)


def quantised(layout: str, *, zeros: bool = True) -> tuple[Arguments, History]:
    """A call's cache and scales, and the values they stand for in float64."""
    exact = random_history(LENGTHS, K, D, head_dim_v=DV, seed=3)
    parts, values = [], []
    for rows, group in zip((exact.k, exact.v), GROUPS, strict=True):
        made = [quantise_int4(one, group, zeros=zeros) for one in rows]
        parts.append([list(part) for part in zip(*made, strict=True)])
        values.append([dequantised(*one) for one in made])
    (k, k_scale, k_zero), (v, v_scale, v_zero) = parts
    call = laid_out(layout, k, v)
    scales = laid_out(layout, k_scale, v_scale)
    call |= {"k_scale": scales["k"], "v_scale": scales["v"]}
    if zeros:
        offsets = laid_out(layout, k_zero, v_zero)
        call |= {"k_zero": offsets["k"], "v_zero": offsets["v"]}
    return call, History(*values)


def far(got: tuple[Tensor, Tensor], wanted: tuple[list[Tensor], list[Tensor]]) -> float:
    """The larger error of out and lse, in tolerances."""
    out, lse = (torch.stack(part) for part in wanted)
    by_out = (got[0].reshape(out.shape) - out).abs().max() / STATED_TOLERANCE[got[0].dtype]
    by_lse = (got[1].reshape(lse.shape) - lse).abs().max() / STATED_LSE_TOLERANCE
    return max(float(by_out), float(by_lse))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("layout", LAYOUTS)
@backends()
def test_codes_mean_their_values(on: InReach, layout: str, dtype: torch.dtype, zeros: bool) -> None:
    if on.name in NOT_NATIVE and layout in ("BSND", "HND"):
        return  # their strides are those of BNSD and NHD in another order
    call, exact = quantised(layout, zeros=zeros)
    q = random_queries(len(LENGTHS), G * K, D, dtype=dtype)
    wanted = attend(q[:, None], exact)
    assert far(on.decode(q, **call), wanted) <= 1
    if on.name != "cpu":
        return
    # what mistakes would look like
    swapped = {name: (call[name] >> 4) | (call[name] << 4) for name in ("k", "v")}
    assert far(on.decode(q, **call | swapped), wanted) > 5
    for name in ("k_scale", "v_scale"):
        if call[name].shape[-1] > 1:
            turned = {name: call[name].roll(1, -1)}
            assert far(on.decode(q, **call | turned), wanted) > 5
    for name in ("k_zero", "v_zero") if zeros else ():
        assert far(on.decode(q, **call | {name: call[name] + 1}), wanted) > 5


@backends()
def test_masks_windows_and_queries_meet_them(on: InReach) -> None:
    call, exact = quantised("NHD")
    q = random_queries(len(LENGTHS), 4, G * K, D, dtype=BF16)
    longest = max(LENGTHS)
    mask = torch.rand(len(LENGTHS), 4, longest, generator=torch.Generator().manual_seed(0)) < 0.7
    both = on.decode(q, **call, attn_mask=mask, sliding_window=11, logits_soft_cap=20.0)
    masks = [mask[b, :, longest - length :] for b, length in enumerate(LENGTHS)]
    outs, lses = [], []
    for b in range(len(LENGTHS)):
        one = History([exact.k[b]], [exact.v[b]])
        out, lse = attend(
            q[b : b + 1], one, mask=masks[b][None], window_left=10, logits_soft_cap=20.0
        )
        outs += out
        lses += lse
    seen = torch.isfinite(torch.stack(lses))
    assert bool(seen.any())
    assert torch.equal(torch.isfinite(both[1]), seen)
    finite = [torch.where(torch.isfinite(x), x, 0.0) for x in (both[1], torch.stack(lses))]
    assert far((both[0], finite[0]), (outs, list(finite[1]))) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_scales_may_be_of_16_bits(dtype: torch.dtype) -> None:
    call, _ = quantised("NHD")
    narrow = {name: call[name].to(dtype) for name in ("k_scale", "k_zero", "v_scale", "v_zero")}
    q = random_queries(len(LENGTHS), G * K, D)
    got = decode_attention(q, **call | narrow)
    wide = decode_attention(q, **call | {name: x.float() for name, x in narrow.items()})
    assert isinstance(got, Tensor)
    assert isinstance(wide, Tensor)
    assert torch.equal(got, wide)


def test_a_token_that_is_seen_has_finite_scales() -> None:
    call, _ = quantised("packed")
    call["v_scale"][3, 1, 0] = math.inf
    q = random_queries(len(LENGTHS), G * K, D)
    with pytest.raises(ValueError, match="v_scale of every token that a query sees must be finite"):
        decode_attention(q, **call)


def spec(**changes: Any) -> DecodeSpec:
    given: dict[str, Any] = {
        "num_q_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "layout": Layout.BSND,
        "kv_dtype": torch.uint8,
        "k_scale": ScaleKind.GROUP,
        "v_scale": ScaleKind.GROUP,
    }
    return DecodeSpec(**given | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 40}, "head_dim of int4 codes must be a multiple of 16.*got 40; use int8"),
        ({"head_dim_v": 33}, "head_dim_v of int4 codes must be a multiple of 16.*got 33"),
        ({"v_scale": None}, "int4 codes .* go together: .* v_scale None"),
        ({"k_scale": ScaleKind.TOKEN}, r"k_scale ScaleKind.TOKEN"),
        ({"kv_dtype": torch.int8}, "go together: kv_dtype is torch.int8, k_scale ScaleKind.GROUP"),
    ],
)
def test_what_a_spec_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(**changes)


def test_a_token_takes_a_quarter_of_the_bytes() -> None:
    wide = spec(kv_dtype=None, k_scale=None, v_scale=None)
    assert 4 * spec().kv_bytes_per_token == wide.kv_bytes_per_token


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"k_scale": torch.ones(3, 45, 2, 8)},
            r"k_scale of int4 codes .* \[3, 45, 2, 4\] or \[3, ",
        ),
        ({"k_scale": torch.ones(3, 45, 2)}, r"k_scale of int4 codes .* got \[3, 45, 2\]"),
        ({"k_scale": 0.5}, r"k_scale of int4 codes .* got 0.5"),
        ({"v_scale": None, "v_zero": None}, "int4 codes .* go together"),
        (
            {"k_zero": torch.ones(3, 45, 2, 2)},
            r"k_zero must be \[3, 45, 2, 4\], got \[3, 45, 2, 2\]",
        ),
        ({"q": torch.ones(3, 6, 32)}, r"k_scale of int4|k has head dim 64, spec says 32"),
    ],
)
def test_what_a_call_refuses(change: dict[str, Any], words: str) -> None:
    call, _ = quantised("BSND")
    call["q"] = random_queries(len(LENGTHS), G * K, D)
    with pytest.raises(ValueError, match=words):
        decode_attention(**call | change)


def test_groups_are_powers_of_two_that_divide() -> None:
    assert [group_sizes(dim) for dim in (64, 80, 96, 40)] == [[16, 32, 64], [16], [16, 32], []]
    with pytest.raises(
        ValueError, match=r"group must be one of \[16\] for a head dim of 80, got 8"
    ):
        quantise_int4(torch.ones(80), 8)


def test_append_takes_packed_codes_only() -> None:
    cache = DenseCache(
        *(torch.zeros(2, 4, K, 32, dtype=torch.uint8) for _ in range(2)), torch.tensor([3, 1])
    )
    codes = torch.arange(2 * K * 32).reshape(2, K, 32).to(torch.uint8)
    append_kv(cache, codes, codes)
    assert torch.equal(cache.k[[0, 1], [2, 0]], codes)
    assert int((cache.k != 0).any(-1).sum()) == 2 * K
    with pytest.raises(UnsupportedError, match=r"does not quantise to uint8.*append the codes"):
        append_kv(cache, torch.ones(2, K, 64), torch.ones(2, K, 64))


def test_the_operator_says_the_shape_of_values() -> None:
    call, _ = quantised("HND")
    assert_operator_agrees(random_queries(len(LENGTHS), G * K, D), call)


def test_shared_pages_keep_their_groups() -> None:
    call, _ = quantised("NHD")
    shared = call["block_table"][0].clone()
    call["block_table"] = shared.expand(3, -1).contiguous()
    call["seq_lens"] = torch.tensor([40, 33, 37], dtype=torch.int32)
    cache = PagedCache(call["k"], call["v"], call["block_table"], call["seq_lens"], Layout.NHD)
    form = spec(
        num_q_heads=G * K,
        head_dim_v=DV,
        layout=Layout.NHD,
        page_size=P,
        dtype=FP32,
        k_zero=True,
        v_zero=True,
    )
    plan = plan_cascade(cache, form, always=True)
    assert plan.groups
    q = random_queries(3, G * K, D)
    given = {name: call[name] for name in ("k_scale", "k_zero", "v_scale", "v_zero")}
    got, _ = cascade_decode(q, cache, form, plan=plan, **given)
    wanted, _ = decode(q, cache, form, **given)
    assert float((got - wanted).abs().max()) <= STATED_TOLERANCE[FP32]
