"""Quantised caches: what scales and zero points of every kind mean, and what is refused."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from histories import STATED_TOLERANCE, random_queries
from operator_calls import assert_operator_agrees
from splitkv import (
    DecodeSpec,
    DenseCache,
    PagedCache,
    ScaleKind,
    decode,
    decode_attention,
    select,
)
from splitkv.backends.cascade.decode import cascade_decode, plan_cascade
from splitkv.backends.cpu_tiles import SCRATCH
from splitkv.common.quantised import scale_shapes
from splitkv.common.spec import Layout

B, T, P, K, G, D, DV = 3, 40, 16, 2, 3, 32, 48
LENGTHS = (40, 1, 23)
LAYOUTS = ("NHD", "HND", "BSND", "BNSD", "packed")
KINDS = tuple(kind for kind in ScaleKind if kind is not ScaleKind.GROUP)  # that is of int4 codes
Call = dict[str, Any]


def numbers(*shape: int, low: float, high: float, seed: int = 0) -> Tensor:
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return low + (high - low) * draw


def codes(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def places(layout: str) -> tuple[Call, tuple[int, ...]]:
    """Arguments that say where tokens lie, and the shape of a cache without its head dim."""
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    if layout == "packed":
        offsets = torch.tensor([0, *torch.cumsum(lengths, 0)], dtype=torch.int32)
        return {"cu_seqlens_k": offsets}, (sum(LENGTHS), K)
    given = {"layout": layout, "seq_lens": lengths}
    if layout in ("NHD", "HND"):
        given["block_table"] = torch.tensor([[4, 0, 7], [2, 9, 9], [5, 1, 9]], dtype=torch.int32)
        return given, ((10, P, K) if layout == "NHD" else (10, K, P))
    return given, ((B, T, K) if layout == "BSND" else (B, K, T))


def case(layout: str, kind: ScaleKind, *, zeros: bool = True) -> Call:
    """A call with int8 codes and a scale (and zero point) of ``kind`` for both k and v."""
    given, shape = places(layout)
    found = given | {"k": codes(*shape, D, seed=1), "v": codes(*shape, DV, seed=2)}
    for seed, (name, width) in enumerate((("k", D), ("v", DV))):
        size = {
            ScaleKind.TENSOR: (1,),
            ScaleKind.HEAD: (K,),
            ScaleKind.REQUEST_HEAD: (B, K),
            ScaleKind.TOKEN: shape,
            ScaleKind.CHANNEL: (K, width),
        }[kind]
        found[f"{name}_scale"] = numbers(*size, low=0.005, high=0.03, seed=3 + seed)
        if zeros:
            found[f"{name}_zero"] = numbers(*size, low=-60, high=60, seed=5 + seed)
    return found


def each(values: Tensor, kind: ScaleKind, layout: str, request: int) -> Tensor:
    """Scales or zero points as they broadcast to one request's part of the cache, [.., D]."""
    head_major = layout in ("HND", "BNSD")
    if kind is ScaleKind.TOKEN:
        return values[..., None]
    if kind is ScaleKind.CHANNEL:
        return values[:, None] if head_major else values
    heads = values[request] if kind is ScaleKind.REQUEST_HEAD else values
    return heads[:, None, None] if head_major else heads[:, None]


def answer(q: Tensor, call: Call, kind: ScaleKind, layout: str) -> Tensor:
    """out and lse, [B, H, Dv + 1], of float32 caches of the values, request by request."""
    where = {
        name: call[name]
        for name in ("cu_seqlens_k", "layout", "seq_lens", "block_table")
        if name in call
    }
    outs = []
    for request in range(B):
        parts = []
        for name in ("k", "v"):
            values = call[name].float()
            if f"{name}_zero" in call:
                values = values - each(call[f"{name}_zero"], kind, layout, request)
            parts.append(values * each(call[f"{name}_scale"], kind, layout, request))
        outs.append(out_and_lse(q, *parts, **where)[request])
    return torch.stack(outs)


def out_and_lse(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """[B, H, Dv + 1]: a zero point of k that is one for all keys shows in the lse alone."""
    out, lse = decode_attention(q, k, v, **given, return_lse=True)
    return torch.cat([out, lse[..., None]], -1)


def far(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_mean_their_values(layout: str, kind: ScaleKind, zeros: bool) -> None:
    call, q = case(layout, kind, zeros=zeros), random_queries(B, G * K, D)
    wanted = answer(q, call, kind, layout)
    bound = STATED_TOLERANCE[torch.float32]
    off = far(out_and_lse(q, **call), wanted)
    assert off <= bound
    # what a mistake would look like: each of them is far outside of the bound
    for name in ("k_zero", "v_zero") if zeros else ():
        forgotten = answer(q, call | {name: call[name] * 0}, kind, layout)
        assert far(forgotten, wanted) > 20 * bound, name
    if kind is not ScaleKind.TENSOR:
        for axis in range(call["k_scale"].ndim):
            if call["k_scale"].shape[axis] == 1:
                continue
            for name in ("k_scale", "v_scale"):
                turned = answer(q, call | {name: call[name].roll(1, axis)}, kind, layout)
                assert far(turned, wanted) > 20 * bound, (name, axis)


def spec_for(call: Call, kind: ScaleKind, **settings: Any) -> DecodeSpec:
    return DecodeSpec(
        num_q_heads=G * K,
        num_kv_heads=K,
        head_dim=D,
        head_dim_v=DV,
        layout=Layout(call["layout"]),
        dtype=torch.float32,
        kv_dtype=torch.int8,
        page_size=P if call["layout"] in ("NHD", "HND") else None,
        k_scale=kind,
        v_scale=kind,
        k_zero=True,
        v_zero=True,
        **settings,
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_kind_has_the_shape_that_is_stated(layout: str) -> None:
    for kind in KINDS:
        call = case(layout, kind)
        cache = PagedCache(
            call["k"], call["v"], call["block_table"], call["seq_lens"], Layout(layout)
        )
        for name in ("k", "v"):
            stated = scale_shapes(kind, call[name], cache)
            assert stated == (tuple(call[f"{name}_scale"].shape),)


SCALES = ("k_scale", "k_zero", "v_scale", "v_zero")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 8])
def test_numbers_of_unseen_tokens_may_be_anything(layout: str, window: int | None) -> None:
    clean, q = case(layout, ScaleKind.TOKEN), random_queries(B, G * K, D)
    dirty = dict(clean)
    token_axis = {"NHD": 1, "HND": 2, "BSND": 1, "BNSD": 2, "packed": 0}[layout]
    for name in SCALES:
        kept = torch.full_like(clean[name], math.nan).movedim(token_axis, -1)
        source = clean[name].movedim(token_axis, -1)
        for request, length in enumerate(LENGTHS):
            for j in range(max(0, length - (window or length)), length):
                if layout == "packed":
                    at: tuple[Any, ...] = (..., sum(LENGTHS[:request]) + j)
                elif layout in ("NHD", "HND"):
                    at = (int(clean["block_table"][request, j // P]), ..., j % P)
                else:
                    at = (request, ..., j)
                kept[at] = source[at]
        dirty[name] = kept.movedim(-1, token_axis).contiguous()
    if layout != "packed" or window:
        assert all(bool(dirty[name].isnan().any()) for name in SCALES)
    outs = [decode_attention(q, **call, sliding_window=window) for call in (clean, dirty)]
    assert isinstance(outs[0], Tensor)
    assert isinstance(outs[1], Tensor)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_seen_tokens_are_finite(layout: str, name: str) -> None:
    call = case(layout, ScaleKind.TOKEN)
    last = {  # the last token of request 2
        "NHD": (1, 6, 1),
        "HND": (1, 1, 6),
        "BSND": (2, 22, 1),
        "BNSD": (2, 1, 22),
        "packed": (63, 1),
    }[layout]
    call[name][last] = math.inf
    with pytest.raises(ValueError, match=f"{name} of every token that a query sees must be finite"):
        decode_attention(random_queries(B, G * K, D), **call)


def test_a_token_that_the_mask_hides_from_all_may_have_any_scale() -> None:
    call = case("NHD", ScaleKind.TOKEN)
    call["k_scale"][1, 6] = math.nan
    mask = torch.ones(B, 1, 4, dtype=torch.bool)
    mask[2, 0, 3] = False
    q = random_queries(B, G * K, D)
    out = decode_attention(q, **call, attn_mask=mask)
    assert isinstance(out, Tensor)
    assert bool(out.isfinite().all())
    mask[2, 0, 3] = True
    with pytest.raises(ValueError, match="k_scale of every token"):
        decode_attention(q, **call, attn_mask=mask)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k_scale": torch.ones(10, P)}, r"k_scale must be .* per token \[10, 16, 2\] or per chan"),
        ({"k_zero": torch.ones(K)}, r"k_zero must be \[10, 16, 2\], got \[2\]"),
        ({"v_scale": None}, r"v_zero needs an int8 cache with a scale .* v_scale None"),
        ({"v_zero": torch.ones(10, P, K).int()}, None),
    ],
)
def test_what_does_not_fit_is_refused(change: Call, words: str | None) -> None:
    call = case("NHD", ScaleKind.TOKEN) | change
    q = random_queries(B, G * K, D)
    if words is None:  # whole zero points may come as integers: one call makes them float32
        assert isinstance(decode_attention(q, **call), Tensor)
        return
    with pytest.raises(ValueError, match=words):
        decode_attention(q, **call)


def test_zero_points_of_8_bit_floats_are_refused() -> None:
    call = case("NHD", ScaleKind.HEAD)
    for name in ("k", "v"):
        call[name] = call[name].float().to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"k_zero needs an int8 cache .*8-bit floats are symmetric"
    ):
        decode_attention(random_queries(B, G * K, D), **call)


def test_a_shape_of_two_kinds_needs_a_spec() -> None:
    # K = B and a cache of as many packed tokens: of a request, or of a token?
    k = v = codes(B, K, D, seed=1)
    offsets = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    scale, q = numbers(B, K, low=0.01, high=0.05), random_queries(B, G * K, D)
    with pytest.raises(ValueError, match="fits REQUEST_HEAD and TOKEN; say which in a DecodeSpec"):
        decode_attention(q, k, v, cu_seqlens_k=offsets, k_scale=scale)


def test_a_plan_does_not_vouch_for_a_call_without_its_zero_points() -> None:
    call, q = case("NHD", ScaleKind.TOKEN), random_queries(B, G * K, D)
    spec = spec_for(call, ScaleKind.TOKEN)
    cache = PagedCache(call["k"], call["v"], call["block_table"], call["seq_lens"], Layout.NHD)
    plan = select(spec, torch.device("cpu")).plan(spec, LENGTHS)
    given = {name: call[name] for name in SCALES}
    decode(q, cache, spec, plan=plan, **given)
    with pytest.raises(ValueError, match="the spec promises v_zero, but v_zero is None"):
        decode(q, cache, spec, plan=plan, **(given | {"v_zero": None}))


@pytest.mark.parametrize("kind", [ScaleKind.TOKEN, ScaleKind.CHANNEL])
def test_the_operator_takes_them(kind: ScaleKind) -> None:
    assert_operator_agrees(random_queries(B, G * K, D), case("HND", kind))


def test_scratch_grows_by_the_scales_of_a_tile_alone() -> None:
    length, heads = 4000, 8
    shape = (1, length, heads)
    cache = DenseCache(
        codes(*shape, D, seed=1), codes(*shape, D, seed=2), torch.tensor([length]), Layout.BSND
    )
    scale = numbers(*shape, low=0.01, high=0.02)
    spec = DecodeSpec(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=D,
        layout=Layout.BSND,
        kv_dtype=torch.int8,
        k_scale=ScaleKind.TOKEN,
        v_scale=ScaleKind.TOKEN,
        k_zero=True,
        v_zero=True,
    )
    backend = select(spec, name="cpu")
    plan = backend.plan(spec, [length])
    q = random_queries(1, heads, D, dtype=torch.bfloat16)
    given = dict.fromkeys(SCALES, scale)

    def held() -> int:
        decode(q, cache, spec, plan=plan, **given)
        return SCRATCH.nbytes

    with ThreadPoolExecutor(1) as pool:  # a fresh thread's scratch
        nbytes = pool.submit(held).result()
    assert 0 < nbytes <= backend.workspace_bytes(plan)


@pytest.mark.parametrize("kind", [ScaleKind.TOKEN, ScaleKind.CHANNEL])
def test_shared_pages_keep_their_scales(kind: ScaleKind) -> None:
    call, q = case("NHD", kind), random_queries(B, G * K, D)
    call["block_table"] = torch.tensor([[4, 0, 7], [4, 0, 9], [4, 0, 2]], dtype=torch.int32)
    call["seq_lens"] = torch.tensor([40, 33, 37], dtype=torch.int32)
    cache = PagedCache(call["k"], call["v"], call["block_table"], call["seq_lens"], Layout.NHD)
    spec = spec_for(call, kind)
    plan = plan_cascade(cache, spec, always=True)
    assert plan.groups
    given = {name: call[name] for name in SCALES}
    out, _ = cascade_decode(q, cache, spec, plan=plan, **given)
    wanted, _ = decode(q, cache, spec, **given)
    assert far(out, wanted) <= STATED_TOLERANCE[torch.float32]
