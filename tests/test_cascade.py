"""Shared prefixes: the flat answer, each shared page read once, nothing shared that must not be."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import splitkv
from histories import offsets32
from shared_pages import cache_of_names, named
from splitkv.backends.ascend import AscendBackend
from splitkv.backends.cascade import calls as cascade_calls
from splitkv.backends.cascade import plan as cascade_plan
from splitkv.backends.cascade.decode import cascade_decode, cascade_partial, plan_cascade
from splitkv.backends.cascade.plan import CascadePlan, plan_groups
from splitkv.backends.cpu_tiles import Places, Tiles
from splitkv.backends.cuda import InterpretedCudaBackend
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind
from splitkv.common.state import finish
from splitkv.common.visibility import IntArray
from splitkv.kernels_ascend import standin
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

H = 4
EXTRAS = ("attn_mask", "attn_bias", "alibi_slopes", "k_scale", "v_scale")


def call_of(cache: PagedCache, *, queries: Sequence[int] | int = 1, **more: Any) -> DecodeCall:
    """Random queries over ``cache``: S of each request, or as many as listed (packed).

    more: the call's extra tensors, and fields of the spec.
    """
    extras = {name: more.pop(name) for name in EXTRAS if name in more}
    packed = not isinstance(queries, int)
    dim = cache.k.shape[-1]
    random = torch.Generator().manual_seed(7)
    shape = (sum(queries), H, dim) if packed else (cache.batch, queries, H, dim)
    dtype = more.pop("dtype", cache.k.dtype)
    spec = DecodeSpec(
        num_q_heads=H,
        num_kv_heads=cache.num_kv_heads,
        head_dim=dim,
        layout=cache.layout,
        page_size=cache.page_size,
        dtype=dtype,
        kv_dtype=cache.k.dtype,
        num_queries=max(queries, default=1) if packed else queries,
        packed_queries=packed,
        attn_mask="attn_mask" in extras,
        attn_bias="attn_bias" in extras,
        alibi="alibi_slopes" in extras,
        **more,
    )
    q = torch.randn(shape, generator=random).to(dtype)
    offsets = offsets32(queries) if packed else None
    return DecodeCall(q, cache, spec, offsets, **extras)


def planned(call: DecodeCall, **options: Any) -> CascadePlan:
    masks = [x.shape[-1] for x in (call.attn_mask, call.attn_bias) if x is not None]
    options = {"always": True, "mask_tokens": max(masks, default=None), **options}
    return plan_cascade(call.cache, call.spec, cu_seqlens_q=call.cu_seqlens_q, **options)


def run(call: DecodeCall, plan: CascadePlan, sinks: Tensor | None = None, **options: Any) -> Any:
    extras = {name: getattr(call, name) for name in (*EXTRAS, "cu_seqlens_q")}
    return cascade_decode(
        call.q, call.cache, call.spec, plan=plan, sinks=sinks, **extras, **options
    )


def complaints(call: DecodeCall, plan: CascadePlan, sinks: Tensor | None = None) -> list[str]:
    """What is wrong with the cascade's answer, by the bounds of the case table."""
    answer = reference(call, sinks)
    return errors(*run(call, plan, sinks), answer).exceeds(bounds(call, sinks, answer))


def groups(plan: CascadePlan, names: Sequence[Sequence[Any]]) -> set[tuple[str, str]]:
    """(pages by their last letters, members) of each group."""
    found = set()
    for group in plan.groups:
        pages = names[group.members[0]][group.first : group.first + len(group.pages)]
        found.add(("".join(page[-1] for page in pages), "".join(map(str, group.members))))
    return found


# --- the same answer ----------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, list[int], list[str], set[tuple[str, str]]]] = {
    "no sharing": (4, [9, 0, 4], ["", "", ""], set()),
    "all share": (4, [13, 9, 30], ["ab", "ab", "ab"], {("ab", "012")}),
    "two groups, shuffled": (
        4,
        [9, 20, 11, 8, 3, 12],
        ["ab", "xy", "a", "ab", "", "xyz"],
        {("a", "023"), ("b", "03"), ("xy", "15")},
    ),
    "nested, some empty": (
        2,
        [0, 12, 9, 6, 7, 0, 5],
        ["", "abcd", "abc", "ab", "abcx", "", "a"],
        {("a", "12346"), ("b", "1234"), ("c", "124")},
    ),
    "a suffix of nothing": (4, [8, 8, 12], ["ab", "ab", "ab"], {("ab", "012")}),
    "no suffix at all": (4, [8, 8], ["ab", "ab"], {("ab", "01")}),
    "page size 1": (1, [3, 5, 4], ["abc", "abc", "ab"], {("ab", "012"), ("c", "01")}),
    "page size 16": (16, [40, 33, 60], ["ab", "ab", "ab"], {("ab", "012")}),
    "page size 128": (128, [300, 129], ["a", "a"], {("a", "01")}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_answer_is_the_flat_one(shape: str, dtype: torch.dtype) -> None:
    page, lengths, prefixes, expected = SHAPES[shape]
    names = named(page, lengths, *prefixes)
    layout = Layout.NHD if dtype is torch.float32 else Layout.HND
    call = call_of(cache_of_names(names, lengths, page, dtype=dtype, layout=layout))
    plan = planned(call)
    assert groups(plan, names) == expected
    assert complaints(call, plan) == []


SEMANTICS: dict[str, dict[str, Any]] = {
    "several causal queries": {"queries": 3},
    "several queries that see everything": {"queries": 3, "causal": False},
    "ragged queries": {"queries": [2, 0, 5, 1, 3]},
    "window longer than all": {"sliding_window": 64, "queries": 2},
    "window and anchors, some longer": {"sliding_window": 15, "anchor_tokens": 5},
    "soft cap": {"logits_soft_cap": 2.0},
    "tree mask": {"queries": 3, "attn_mask": torch.rand(5, 3, 6).round().bool()},
    "bias": {"queries": 2, "attn_bias": torch.linspace(-3, 3, 7).expand(1, 1, 2, 7)},
    "float64 is exact": {"dtype": torch.float64},
    "one kv head": {"kv_heads": 1},
    "int64 table": {"index": torch.int64, "unused": 2**40},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_semantics(semantics: str) -> None:
    fields = dict(SEMANTICS[semantics])
    made = {name: fields.pop(name) for name in ("kv_heads", "index", "unused") if name in fields}
    if "dtype" in fields:
        made["dtype"] = fields["dtype"]
    lengths = [14, 9, 27, 12, 16]
    cache = cache_of_names(named(4, lengths, "abc", "ab", "abc", "", "abcd"), lengths, 4, **made)
    call = call_of(cache, **fields)
    sinks = torch.linspace(-1, 2, H) if call.spec.sinks else None
    plan = planned(call)
    assert plan.groups
    assert complaints(call, plan, sinks) == []


def test_a_quantised_cache_keeps_its_scales() -> None:
    lengths = [9, 13, 11]
    cache = cache_of_names(named(4, lengths, "ab", "ab", "ab"), lengths, 4)
    codes = [x.nan_to_num().mul(40).clamp(-127, 127).to(torch.int8) for x in (cache.k, cache.v)]
    call = call_of(
        PagedCache(*codes, cache.block_table, cache.seq_lens),
        dtype=torch.float32,
        k_scale=torch.tensor([0.02, 0.03]),
        v_scale=torch.tensor([0.025]),
    )
    call = replace(call, spec=replace(call.spec, k_scale=ScaleKind.HEAD, v_scale=ScaleKind.TENSOR))
    plan = planned(call)
    assert plan.groups
    assert complaints(call, plan) == []


@st.composite
def families(draw: st.DrawFn) -> tuple[int, list[int], list[str], int]:
    """Page size, lengths, prefixes of up to four pages from two letters, queries."""
    page = draw(st.sampled_from([1, 2, 5]))
    prefixes = draw(st.lists(st.text("ab", max_size=4), min_size=1, max_size=7))
    tails = st.lists(st.integers(-page, 9), min_size=len(prefixes), max_size=len(prefixes))
    # below 0: a length that ends inside the last page of the prefix
    lengths = [
        max(len(prefix) * page + tail, 0)
        for prefix, tail in zip(prefixes, draw(tails), strict=True)
    ]
    return page, lengths, prefixes, draw(st.integers(1, 3))


@given(families(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_family_of_requests(case: tuple[int, list[int], list[str], int], causal: bool) -> None:
    page, lengths, prefixes, queries = case
    cache = cache_of_names(named(page, lengths, *prefixes), lengths, page, head_dim=8)
    call = call_of(cache, queries=queries, causal=causal)
    plan = planned(call)
    assert complaints(call, plan) == []
    read = np.zeros(len(lengths), np.int64)
    for group in plan.groups:  # outer ones first: each begins where its members' last one ended
        assert (read[group.members] == group.first * page).all()
        read[group.members] += len(group.pages) * page
    assert (read == plan.shared).all()


# --- each shared byte once ----------------------------------------------------------------------


def tokens_read(call: DecodeCall, work: Any) -> Tensor:
    """How often each slot of the pool is read, [pages, P]."""
    read = torch.zeros(call.cache.k.shape[:2], dtype=torch.int64)
    honest = Tiles.read

    def counted(tiles: Tiles, places: Places, request: IntArray) -> tuple[Tensor, Tensor]:
        outer, inner = np.broadcast_arrays(places.outer, places.inner)
        np.add.at(read.numpy(), (outer, inner), 1)
        return honest(tiles, places, request)

    with patch.object(Tiles, "read", counted):
        work()
    return read


def test_a_shared_page_is_read_once() -> None:
    page, lengths = 16, [64 + 128 + 5, 64 + 128 + 70, 64 + 9, 40]
    names = named(page, lengths, "a" * 4 + "b" * 8, "a" * 4 + "b" * 8, "a" * 4, "")
    call = call_of(cache_of_names(names, lengths, page))
    plan = planned(call)
    outer, inner = (
        call.cache.block_table[0, columns].long() for columns in (slice(4), slice(4, 12))
    )
    read = tokens_read(call, lambda: run(call, plan))
    assert (read[outer] == 1).all()
    assert (read[inner] == 1).all()
    flat = tokens_read(call, lambda: splitkv.decode(call.q, call.cache, call.spec))
    assert (flat[outer] == 3).all()
    assert (flat[inner] == 2).all()
    per_token = call.spec.kv_bytes_per_token
    assert plan.flat_kv_bytes == sum(lengths) * per_token
    assert plan.kv_bytes == (sum(lengths) - 2 * 64 - 128) * per_token
    assert plan.summary()["saved_bytes"] == (2 * 64 + 128) * per_token


# --- what must not be shared --------------------------------------------------------------------


def generous(spec: DecodeSpec, lengths: Any, counts: Any, mask_tokens: int | None) -> Any:
    """All begun pages, as though every query saw all of every page."""
    return -(-lengths // spec.page_size) * spec.page_size


TOO_MUCH: dict[str, dict[str, Any]] = {
    "keys after a query": {"queries": 5},
    "a window's far side": {"sliding_window": 6},
    "masked positions": {"queries": 2, "attn_mask": torch.arange(12).lt(6).expand(2, 2, 12)},
}


@pytest.mark.parametrize("wrong", TOO_MUCH)
def test_sharing_more_would_be_seen(wrong: str) -> None:
    names = named(4, [16, 16], "abcd", "abcd")
    call = call_of(cache_of_names(names, [16, 16], 4), **TOO_MUCH[wrong])
    assert complaints(call, planned(call)) == []
    with patch.object(cascade_plan, "shareable_tokens", generous):
        assert complaints(call, planned(call, mask_tokens=99)) != []


def test_a_page_that_one_request_fills_in_part_is_not_shared() -> None:
    lengths = [11, 16]
    call = call_of(cache_of_names(named(4, lengths, "abc", "abcd"), lengths, 4))
    plan = planned(call)
    assert [len(group.pages) for group in plan.groups] == [2]
    assert complaints(call, plan) == []
    with (
        patch.object(cascade_plan, "shareable_tokens", generous),
        pytest.raises(ValueError, match=r"seq_lens\[0\] is -1"),
    ):
        run(call, planned(call))


def test_the_same_page_elsewhere_is_no_prefix() -> None:
    names = [["x", "s", "t"], ["y", "s", "t"], ["s", "t", "z"]]
    call = call_of(cache_of_names(names, [12, 12, 12], 4))
    plan = planned(call)
    assert plan.groups == ()
    assert plan.why == ("no two requests begin with the same whole page",)
    assert complaints(call, plan) == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "alibi": ({"alibi_slopes": torch.linspace(0.1, 1, H)}, "ALiBi: a score depends on how far"),
    "mask": ({"attn_mask": torch.ones(2, 1, 3).bool()}, "say how many positions in mask_tokens"),
    "window": ({"sliding_window": 5}, "2 of 2 requests are longer than the window of 5"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_not_shared_says_why_and_is_right(refused: str) -> None:
    fields, sentence = REFUSED[refused]
    call = call_of(cache_of_names(named(4, [9, 9], "ab", "ab"), [9, 9], 4), **fields)
    plan = planned(call, mask_tokens=None)
    assert plan.groups == ()
    assert sentence in str(plan.summary()["why"])
    assert complaints(call, plan) == []


def test_scales_of_each_request_are_not_shared() -> None:
    call = call_of(cache_of_names(named(4, [9, 9], "ab", "ab"), [9, 9], 4))
    spec = replace(call.spec, kv_dtype=torch.int8, k_scale=ScaleKind.REQUEST_HEAD)
    codes = [x.nan_to_num().to(torch.int8) for x in (call.cache.k, call.cache.v)]
    cache = PagedCache(*codes, call.cache.block_table, call.cache.seq_lens)
    plan = plan_cascade(cache, spec, always=True)
    assert (plan.groups, plan.why) == (
        (),
        ("scales of each request: shared codes would mean different values",),
    )


def test_groups_cut_to_what_a_backend_takes() -> None:
    lengths = [9, 9, 9]
    call = call_of(cache_of_names(named(4, lengths, "ab", "ab", "ab"), lengths, 4), queries=2)
    cut = plan_groups(
        call.spec,
        call.cache.block_table.numpy(),
        lengths,
        profile=splitkv.PROFILES["cpu"],
        most_queries=5,
        always=True,
    )
    assert [group.members.tolist() for group in cut.groups] == [[0, 1], [2]]
    assert complaints(call, cut) == []


# --- step by step -------------------------------------------------------------------------------


def test_lengths_grow_and_the_plan_goes_on() -> None:
    lengths, names = [9, 8, 14], named(4, [16, 16, 16], "ab", "ab", "ab")
    whole = cache_of_names(names, [16, 16, 16], 4)
    call = call_of(replace(whole, seq_lens=torch.tensor(lengths)))
    plan = planned(call)
    held = plan.groups
    for step in range(3):
        grown = [length + step for length in lengths]
        if step:
            with pytest.raises(ValueError, match=r"call plan.refresh\(seq_lens\)"):
                run(replace(call, cache=replace(whole, seq_lens=torch.tensor(grown))), plan)
            plan.refresh(grown)
        now = replace(call, cache=replace(whole, seq_lens=torch.tensor(grown)))
        for layer in range(2):  # every layer has a pool of its own
            cache = replace(now.cache, k=now.cache.k * (1 + layer))
            assert complaints(replace(now, cache=cache), plan) == []
    assert plan.groups is held
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 7: of its 8 shared tokens"):
        plan.refresh([9, 7, 14])
    assert plan.seq_lens.tolist() == [11, 10, 16]


def test_a_history_that_outgrows_its_window_needs_another_plan() -> None:
    call = call_of(cache_of_names(named(4, [12, 12], "ab", "ab"), [12, 12], 4), sliding_window=12)
    plan = planned(call)
    assert plan.groups
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 13: of its 8 shared tokens"):
        plan.refresh([12, 13])


def test_a_stale_plan_is_refused() -> None:
    lengths = [9, 9]
    call = call_of(cache_of_names(named(4, lengths, "ab", "ab"), lengths, 4))
    plan = planned(call)
    run(call, plan)
    table = call.cache.block_table.clone()
    table[1, 1] = table[1, 2]
    with pytest.raises(ValueError, match="group 0 of the plan shares columns 0 to 2"):
        run(replace(call, cache=replace(call.cache, block_table=table)), plan)
    with pytest.raises(ValueError, match="plan was made for"):
        run(replace(call, spec=replace(call.spec, sm_scale=1.0)), plan)
    with pytest.raises(ValueError, match="cache must be a PagedCache, got DenseCache"):
        plan_cascade(
            splitkv.DenseCache(call.cache.k, call.cache.v, torch.zeros(6).int()), call.spec
        )
    with pytest.raises(ValueError, match="plan must be a CascadePlan, got SplitPlan"):
        run(call, splitkv.select(call.spec, "cpu").plan(call.spec, lengths))


def test_a_partial_state_goes_on_to_be_merged() -> None:
    lengths = [9, 13]
    call = call_of(cache_of_names(named(4, lengths, "ab", "ab"), lengths, 4))
    state = cascade_partial(call.q[:, 0], call.cache, call.spec, plan=planned(call))
    assert state.out.shape == (2, H, 16)
    nothing = splitkv.PartialState.empty((2, H), 16)
    out, lse = finish(splitkv.merge_states([nothing, state]))
    answer = reference(call)
    assert not errors(out[:, None], lse[:, None], answer).exceeds(bounds(call, None, answer))


# --- the other backends -------------------------------------------------------------------------


def test_the_cuda_kernels_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, the interpreter is off")
    lengths = [37, 16, 0, 21]
    cache = cache_of_names(named(16, lengths, "ab", "a", "", "a"), lengths, 16, dtype=torch.float16)
    call = call_of(cache, queries=2)
    backend = InterpretedCudaBackend()
    assert cascade_calls.queries_per_read(backend, call.spec) == 64 // 2  # tile rows / G
    plan = planned(call)
    assert len(plan.groups) == 1
    out, lse = finish(cascade_calls.attend(backend, call, plan, plan.seq_lens), dtype=torch.float16)
    answer = reference(call)
    assert not errors(out, lse, answer).exceeds(bounds(call, None, answer))


@pytest.fixture
def stand_in() -> Iterator[None]:
    with standin.installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="page size")
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ascend_on_the_stand_in(dtype: torch.dtype, stand_in: None) -> None:
    lengths = [300, 130, 257, 40]
    names = named(128, lengths, "ab", "a", "ab", "")
    cache = cache_of_names(names, lengths, 128, dtype=dtype, head_dim=128)
    call = call_of(cache, queries=2)
    # layout TND shares rows and takes bfloat16 only; float16 goes row by row, so nothing pays
    shares = dtype is torch.bfloat16
    assert cascade_calls.queries_per_read(AscendBackend(), call.spec) == (None if shares else 1)
    placed = replace(call, q=standin.NpuTensor(call.q), cache=_placed(call.cache))
    plan = planned(placed)
    assert [len(group.members) for group in plan.groups] == [3, 2]
    out, lse = (x.cpu() for x in run(placed, plan))
    answer = reference(call)
    allowed = bounds(call, None, answer, plan.levels + 1)
    assert not errors(out, lse, answer).exceeds(allowed)


def _placed(cache: PagedCache) -> PagedCache:
    npu = standin.NpuTensor
    return replace(cache, k=npu(cache.k), v=npu(cache.v), block_table=npu(cache.block_table))
