"""Malformed requests end in a ValueError that names argument, value and limit; nothing runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import splitkv
from malformed import (
    LENGTHS,
    MALFORMED,
    META,
    NAN,
    B,
    D,
    H,
    K,
    P,
    Request,
    dense,
    int8,
    ints,
    listed,
    other_plan,
    packed,
    paged,
    several,
    table,
)
from splitkv.backends.binding import Indices
from splitkv.backends.cpu import CpuBackend
from splitkv.common.call import DecodeCall
from splitkv.common.plan import plan_splits
from splitkv.common.profile import CPU
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind
from splitkv.common.validate import Validate, check_call, check_sinks


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("a malformed request reached the backend")

    monkeypatch.setattr(CpuBackend, "decode", run)
    monkeypatch.setattr(CpuBackend, "partial", run)


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.usefixtures("nothing_runs")
def test_malformed(request_: tuple[Request, str]) -> None:
    arguments, message = request_
    with pytest.raises(ValueError, match=message):
        splitkv.decode_attention(**arguments)


WELL_FORMED: dict[str, Request] = {
    "paged": paged(),
    "paged, int64": paged(block_table=table().long(), seq_lens=torch.tensor(LENGTHS)),
    "lengths in a list": paged(seq_lens=LENGTHS),
    "lengths in an array": paged(seq_lens=np.array(LENGTHS, dtype=np.int32)),
    "dense": dense(),
    "packed": packed(),
    "ragged queries": several(),
    "page lists": listed(),
    "int8": int8(),
    "window_left -1": paged(window_left=-1),
    "grad tensors under no_grad": paged(q=torch.zeros(B, H, D, requires_grad=True)),
    "no request": paged(q=torch.zeros(0, H, D), block_table=table()[:0], seq_lens=ints()),
    "table of no request and no column": paged(
        q=torch.zeros(0, H, D), block_table=table()[:0, :0], seq_lens=ints()
    ),
    "lengths of 0 need no page": paged(seq_lens=ints(0, 0), block_table=table(r0c0=-1, r1c0=-1)),
    "garbage in unused columns": paged(block_table=table(r1c1=-(2**31), r1c2=2**31 - 1)),
    "garbage before the window": paged(block_table=table(r0c0=-9, r0c1=99), sliding_window=1),
    "garbage between anchors and window": paged(
        block_table=table(r0c1=99), sliding_window=1, anchor_tokens=8
    ),
    "garbage before a window of ragged queries": several(
        block_table=table(r0c0=-9), sliding_window=8, seq_lens=ints(17, 8)
    ),
    "garbage for a request without queries": several(
        q=torch.zeros(2, H, D), cu_seqlens_q=ints(0, 2, 2), block_table=table(r1c0=-1)
    ),
}


@pytest.mark.parametrize("request_", WELL_FORMED.values(), ids=WELL_FORMED)
def test_well_formed(request_: Request) -> None:
    with torch.no_grad():
        out = splitkv.decode_attention(**request_)
    assert isinstance(out, Tensor)
    assert out.shape == request_["q"].shape
    assert not out.isnan().any()


# The levels


def test_level_none_checks_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[DecodeCall] = []

    def decode(self: object, call: DecodeCall, plan: object, **_: object) -> tuple[Tensor, Tensor]:
        reached.append(call)
        return call.q, call.q[..., 0]

    monkeypatch.setattr(CpuBackend, "decode", decode)
    for level in ("none", "shapes"):
        splitkv.decode_attention(**paged(block_table=table(r0c0=99), validate=level))
    assert len(reached) == 2
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is 99"):
        splitkv.decode_attention(**paged(block_table=table(r0c0=99), validate="full"))
    with pytest.raises(ValueError, match="k has head dim 16"):
        splitkv.decode_attention(**paged(q=torch.zeros(B, H, 8), validate="shapes"))


def on(device: torch.device, tensors: Request) -> Request:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in tensors.items()}


def call_of(tensors: Request, layout: Layout, **fields: Any) -> DecodeCall:
    """A call with every kind of tensor that may come along."""
    spec = DecodeSpec(
        num_q_heads=H,
        num_kv_heads=K,
        head_dim=D,
        layout=layout,
        page_size=P if layout.paged else None,
        dtype=torch.float32,
        **fields,
    )
    k, v = tensors["k"], tensors["v"]
    cache: Any
    if layout.paged:
        cache = splitkv.PagedCache(k, v, tensors["block_table"], tensors["seq_lens"], layout)
    elif layout is Layout.PACKED:
        cache = splitkv.PackedCache(k, v, tensors["cu_seqlens_k"])
    else:
        cache = splitkv.DenseCache(k, v, tensors["seq_lens"], layout)
    q = tensors["q"] if spec.packed_queries else tensors["q"][:, None]
    extras = {
        name: tensors[name]
        for name in ("cu_seqlens_q", "alibi_slopes", "attn_bias", "attn_mask", "k_scale", "v_scale")
        if name in tensors
    }
    return DecodeCall(q, cache, spec, **extras)


CALLS: dict[str, Callable[[torch.device], DecodeCall]] = {
    "paged": lambda device: call_of(on(device, paged()), Layout.NHD),
    "dense": lambda device: call_of(on(device, dense()), Layout.BSND),
    "packed": lambda device: call_of(on(device, packed()), Layout.PACKED),
    "ragged queries": lambda device: call_of(
        on(device, several()), Layout.NHD, num_queries=2, packed_queries=True
    ),
    "masks and slopes": lambda device: call_of(
        on(
            device,
            paged(
                alibi_slopes=torch.full((H,), NAN),
                attn_bias=torch.zeros(B, 1, 1, 5),
                attn_mask=torch.zeros(B, 1, 5, dtype=torch.bool),
            ),
        ),
        Layout.NHD,
        alibi=True,
        attn_bias=True,
        attn_mask=True,
    ),
    "scales": lambda device: call_of(
        on(
            device,
            int8(k_scale=torch.full((1,), NAN), v_scale=torch.full((B, K), NAN)),
        ),
        Layout.NHD,
        kv_dtype=torch.int8,
        k_scale=ScaleKind.TENSOR,
        v_scale=ScaleKind.REQUEST_HEAD,
    ),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_level_shapes_reads_no_data(make: Callable[[torch.device], DecodeCall]) -> None:
    # a meta tensor has no data: whoever reads it gets an exception
    call = make(META)
    plan = plan_splits(call.spec, LENGTHS, profile=CPU)
    check_call(call, plan, Validate.SHAPES)
    with pytest.raises((NotImplementedError, RuntimeError)):
        check_call(call, plan, Validate.FULL)


def test_level_shapes_reads_no_sinks() -> None:
    spec = CALLS["paged"](META).spec
    check_sinks(None, spec, META)
    with pytest.raises(ValueError, match=r"spec.sinks is False, but sinks is given"):
        check_sinks(torch.zeros(H, device=META), spec, META)


def test_tensors_on_a_device_without_backend_are_checked_and_then_refused() -> None:
    with pytest.raises(splitkv.UnsupportedError, match=r"the tensors are on meta, it takes cpu"):
        splitkv.decode_attention(**on(META, paged()))


@pytest.mark.parametrize("bound", [False, True])
def test_a_bound_plan_does_not_hide_what_changed(bound: bool) -> None:
    plan = other_plan(LENGTHS)
    request = paged(plan=plan)
    if bound:
        splitkv.decode_attention(**request)
        splitkv.decode_attention(**{**request, "validate": "shapes"})
    for level in ("full", "shapes"):
        with pytest.raises(ValueError, match="k has head dim 16, spec says 8"):
            splitkv.decode_attention(**{**request, "q": torch.zeros(B, H, 8), "validate": level})
        with pytest.raises(ValueError, match="block_table must be int32 or int64"):
            splitkv.decode_attention(
                **{**request, "block_table": table().short(), "validate": level}
            )
        q = torch.zeros(B, H, D, requires_grad=True)
        with pytest.raises(ValueError, match="q requires grad"):
            splitkv.decode_attention(**{**request, "q": q, "validate": level})
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 9, the plan was made for 8"):
        splitkv.decode_attention(
            **{**request, "seq_lens": ints(17, 9), "block_table": table(r1c1=4)}
        )
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is 99"):
        splitkv.decode_attention(**{**request, "block_table": table(r0c0=99)})


@pytest.mark.parametrize("level", ["full", "shapes"])
@pytest.mark.parametrize("through", ["torch", "numpy", "another tensor"])
def test_values_that_change_in_place_are_found_again(level: str, through: str) -> None:
    lengths = ints(17, 8)
    request = paged(plan=other_plan(LENGTHS), seq_lens=lengths, validate=level)
    pages = request["block_table"] = request["block_table"].clone()
    splitkv.decode_attention(**request)
    splitkv.decode_attention(**request)  # vouched for
    if through == "torch":
        lengths[1] = 9
    elif through == "numpy":
        lengths.numpy()[1] = 9
    else:
        request["seq_lens"] = ints(17, 9)
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 9"):
        splitkv.decode_attention(**request)
    lengths[1] = 8
    request["seq_lens"] = lengths
    splitkv.decode_attention(**request)
    if level == "full":
        pages.numpy()[0, 0] = 99
        plan = request["plan"]
        request.pop("validate")  # the default relies on what the plan has seen
        with pytest.raises(ValueError, match=r"block_table\[0, 0\] is 99"):
            splitkv.decode_attention(**request)
        assert plan.bound


def test_a_vouched_tensor_that_moves_or_turns_is_looked_at_again() -> None:
    kept = torch.zeros(4, 4, dtype=torch.int32)
    known = Indices.of(kept)
    assert known.still(kept)
    assert known.still(kept.clone())
    assert not known.still(kept.long())
    kept.data = torch.ones(4, 4, dtype=torch.int32)
    assert not known.still(kept)
    turned = torch.arange(16, dtype=torch.int32).view(4, 4)
    known = Indices.of(turned)
    turned.t_()
    assert not known.still(turned)
    odd = torch.arange(32, dtype=torch.int32).view(4, 8)[:, ::2]  # no array of one piece
    known = Indices.of(odd)
    assert known.still(odd)
    odd[3, 3] = 7
    assert not known.still(odd)


def test_lse_inside_out_is_refused_and_beside_it_is_not() -> None:
    request = paged(return_lse=True)
    wanted, wanted_lse = splitkv.decode_attention(**request)
    room = torch.zeros(B, H, D + 1)
    out, beside, inside = room[..., :D], room[..., D], room[..., D - 1]
    with pytest.raises(ValueError, match="out and lse must not share memory"):
        splitkv.decode_attention(**request, out=out, lse=inside)
    splitkv.decode_attention(**request, out=out, lse=beside)
    assert torch.equal(out, wanted)
    assert torch.equal(beside, wanted_lse)


# What only the form with a spec can get wrong


def promised(**fields: Any) -> tuple[Tensor, splitkv.PagedCache, DecodeSpec]:
    call = call_of(paged(), Layout.NHD, **fields)
    assert isinstance(call.cache, splitkv.PagedCache)
    return call.q[:, 0], call.cache, call.spec


PROMISES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "slopes missing": (
        {"alibi": True},
        {},
        "the spec promises alibi_slopes, but alibi_slopes is None",
    ),
    "bias missing": ({"attn_bias": True}, {}, "the spec promises attn_bias, but attn_bias is None"),
    "mask missing": ({"attn_mask": True}, {}, "the spec promises attn_mask, but attn_mask is None"),
    "sinks missing": ({"sinks": True}, {}, "spec.sinks is True, but sinks is None"),
    "slopes not promised": ({}, {"alibi_slopes": torch.zeros(H)}, "does not promise alibi_slopes"),
    "sinks not promised": (
        {},
        {"sinks": torch.zeros(H)},
        "spec.sinks is False, but sinks is given",
    ),
    "scale not promised": ({}, {"k_scale": torch.ones(1)}, "does not promise k_scale"),
    "offsets not promised": ({}, {"cu_seqlens_q": ints(0, 1, 2)}, "spec.packed_queries is False"),
    "offsets missing": ({"packed_queries": True}, {}, "spec.packed_queries is True"),
    "q of another dtype": (
        {},
        {"q": torch.zeros(B, H, D).half()},
        "q is torch.float16, spec.dtype is torch.float32",
    ),
    "more queries than num_queries": (
        {"packed_queries": True, "num_queries": 2},
        {"q": torch.zeros(4, H, D), "cu_seqlens_q": ints(0, 1, 4)},
        "cu_seqlens_q gives request 1 3 queries, spec.num_queries is 2",
    ),
}


@pytest.mark.parametrize("case", PROMISES.values(), ids=PROMISES)
@pytest.mark.usefixtures("nothing_runs")
def test_a_call_that_breaks_its_spec(case: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    fields, tensors, message = case
    q, cache, spec = promised(**fields)
    with pytest.raises(ValueError, match=message):
        splitkv.decode(**{"q": q, "cache": cache, "spec": spec, **tensors})


@pytest.mark.usefixtures("nothing_runs")
def test_a_cache_that_is_not_the_specs() -> None:
    q, cache, _ = promised()
    others = {
        "num_kv_heads": (1, r"k has 2 kv heads, spec.num_kv_heads is 1"),
        "page_size": (16, r"cache page size 8 is not spec.page_size 16"),
        "layout": (Layout.HND, r"cache layout NHD is not spec.layout HND"),
        "head_dim_v": (8, r"v has head dim 16, spec says 8"),
        "kv_dtype": (torch.bfloat16, r"k is torch.float32, spec.kv_dtype is torch.bfloat16"),
    }
    facts: dict[str, Any] = {
        "num_q_heads": H,
        "num_kv_heads": K,
        "head_dim": D,
        "layout": Layout.NHD,
        "page_size": P,
    }
    for name, (value, message) in others.items():
        spec = DecodeSpec(**{**facts, "dtype": torch.float32, name: value})
        with pytest.raises(ValueError, match=message):
            splitkv.decode(q, cache, spec)


def test_a_partial_state_takes_no_sinks() -> None:
    q, cache, spec = promised(sinks=True)
    with pytest.raises(ValueError, match="a partial state never holds a sink"):
        splitkv.partial(q, cache, spec)
