"""Inputs, the dense reference, and the bounds that parity measures with."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from splitkv.common.cache import PagedCache
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.visibility import query_positions, visible_mask
from splitkv.matrix.case import Case, Memory, make
from splitkv.matrix.cases import CASES
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.draw import digest, normal
from splitkv.matrix.draw import request as drawn_request
from splitkv.matrix.inputs import build
from splitkv.matrix.reference import Answer, gather, reference, visible

BY_ID = {case.id: case for case in CASES}
LAYOUTS = ("layout-bsnd", "layout-bnsd", "layout-packed", "layout-hnd", "page-3", "memory-strided")


def test_numbers_are_the_same_on_every_host() -> None:
    raw = np.random.Philox(key=7).random_raw(2)  # a stream that NumPy promises never to change
    assert raw.tolist() == [16086915834549238692, 5448529601018347655]
    assert normal(0, "case", "q", 4).tolist() == [
        -0.22446147931949575,
        1.444688313204003,
        -1.430205222344815,
        -1.2963423478889988,
    ]
    assert digest(BY_ID["lengths-ragged"], 0) == "b788318466a8"


def test_numbers_are_nearly_normal() -> None:
    values = normal(0, "case", "many", 100_000)
    assert abs(values.mean().item()) < 0.01
    assert abs(values.var().item() - 1) < 0.01
    assert values.abs().max().item() <= 2 * math.sqrt(3)


def test_seed_case_and_tensor_each_change_the_numbers() -> None:
    keys = [(0, "a", "q"), (1, "a", "q"), (0, "b", "q"), (0, "a", "k")]
    drawn = {tuple(normal(*key, 4).tolist()) for key in keys}
    assert len(drawn) == len(keys)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved"])
def test_a_request_has_the_same_keys_wherever_it_lies(name: str, moved: bool) -> None:
    case = BY_ID[name]
    plain = make("plain", "", case.seq_lens, layout=Layout.PACKED)
    here, there = build(case, 0, moved=moved), build(case, 0, moved=not moved)
    for request in range(len(case.seq_lens)):
        places = [inputs.order.index(request) for inputs in (here, there)]
        k, v = gather(here.call.cache, places[0])
        other_k, other_v = gather(there.call.cache, places[1])
        assert len(k) == plain.seq_lens[request]
        assert torch.equal(k, other_k)
        assert torch.equal(v, other_v)
        assert torch.equal(here.call.q[places[0]], there.call.q[places[1]])


@pytest.mark.parametrize("name", ["window-ragged", "anchors-queries", "mask-tree", "layout-bsnd"])
def test_poison_lies_only_where_no_query_looks(name: str) -> None:
    case = BY_ID[name]
    clean, poisoned = build(case, 0), build(case, 0, poisoned=True)
    storage = poisoned.call.cache.k
    assert torch.isnan(storage).any()
    answer = reference(clean.call, clean.sinks)
    for request, length in enumerate(case.seq_lens):
        mask = None if clean.call.attn_mask is None else clean.call.attn_mask[request]
        seen = visible(case.spec, length, case.queries[request], mask).any(0)
        cache = poisoned.call.cache
        if isinstance(cache, PagedCache):
            seen_pages = torch.nonzero(seen).flatten() // cache.page_size
            assert (cache.block_table[request, seen_pages] >= 0).all()
        else:
            k, _ = gather(cache, request)
            assert torch.equal(torch.isnan(k).any(-1).any(-1), ~seen)
    assert torch.isfinite(answer.out).all()


def test_unused_table_entries_are_garbage() -> None:
    cache = build(BY_ID["window-128"], 0, poisoned=True).call.cache
    assert isinstance(cache, PagedCache)
    assert (cache.block_table[0, :3] < 0).any()
    assert (cache.block_table == 2**31 - 1).any()


RINGS = [case for case in CASES if case.memory is Memory.RING]


@pytest.mark.parametrize("case", RINGS, ids=lambda case: case.id)
def test_a_ring_forgets_what_no_query_sees(case: Case) -> None:
    ring, whole = build(case, 0), build(replace(case, memory=Memory.PLAIN), 0)
    answers = [reference(inputs.call, inputs.sinks) for inputs in (ring, whole)]
    assert torch.equal(answers[0].out, answers[1].out)
    assert torch.equal(answers[0].lse, answers[1].lse)


LATENTS = [case for case in CASES if case.memory is Memory.LATENT]


@pytest.mark.parametrize("case", LATENTS, ids=lambda case: case.id)
@pytest.mark.parametrize("poisoned", [False, True])
def test_latent_values_are_the_first_columns_of_the_keys(case: Case, poisoned: bool) -> None:
    latent, apart = (
        build(one, 0, poisoned=poisoned).call.cache
        for one in (case, replace(case, memory=Memory.PLAIN))
    )
    assert latent.v.untyped_storage().data_ptr() == latent.k.untyped_storage().data_ptr()
    assert apart.v.untyped_storage().data_ptr() != apart.k.untyped_storage().data_ptr()
    for index in range(0 if poisoned else len(case.seq_lens)):  # poisoned tables hold garbage
        drawn = drawn_request(case, 0, index)
        assert torch.equal(gather(latent, index)[0], drawn.k)
        assert torch.equal(gather(latent, index)[1], drawn.v)
        assert torch.equal(gather(apart, index)[0], drawn.k)


def test_rings_of_the_table_go_round_and_keep_no_more_than_the_window() -> None:
    around = []
    for case in RINGS:
        cache = build(case, 0).call.cache
        assert isinstance(cache, PagedCache)
        rows = zip(cache.block_table.tolist(), case.seq_lens, strict=True)
        blocks = [row[: -(-length // cache.page_size)] for row, length in rows]
        around.append(any(len(set(row)) < len(row) for row in blocks))
    assert sum(around) >= 3
    case = RINGS[around.index(True)]
    wider = replace(case.spec, sliding_window=4096)
    ring, whole = (build(one, 0).call for one in (case, replace(case, memory=Memory.PLAIN)))
    answers = [reference(replace(call, spec=wider)).out for call in (ring, whole)]
    assert not torch.equal(*answers), "what left the window is gone from the ring"


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.spec.packed_queries and case.spec.attn_mask is False],
    ids=lambda case: case.id,
)
def test_the_reference_sees_what_the_predicate_says(case: Case) -> None:
    """Two statements of visibility, written apart."""
    for length, queries in zip(case.seq_lens, case.queries, strict=True):
        position = query_positions(torch.tensor([length]), queries)[0][:, None]
        rule = visible_mask(position, torch.arange(length)[None, :], case.spec)
        everything = torch.ones(queries, length, dtype=torch.bool)
        expected = everything if rule is None else everything & rule
        if case.spec.causal:
            expected = expected & (torch.arange(length)[None, :] <= position)
        assert torch.equal(visible(case.spec, length, queries), expected)


def test_the_reference_by_hand() -> None:
    """Scores 0, ln 2, ln 3, ln 4 and values 1, 2, 4, 8 give (1 + 4 + 12 + 32) / 10."""
    spec = DecodeSpec(
        num_q_heads=1, num_kv_heads=1, head_dim=1, layout=Layout.PACKED, dtype=torch.float64
    )
    case = Case("hand", "", spec, (4,))
    call = build(case, 0).call
    call.q.fill_(1.0)
    call.cache.k.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).log().view(4, 1, 1))
    call.cache.v.copy_(torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64).view(4, 1, 1))
    answer = reference(call)
    assert answer.out.item() == pytest.approx(4.9, abs=1e-15)
    assert answer.lse.item() == pytest.approx(math.log(10), abs=1e-15)
    sunk = reference(call, torch.tensor([math.log(10)], dtype=torch.float64))
    assert sunk.out.item() == pytest.approx(2.45, abs=1e-15)
    assert sunk.lse.item() == pytest.approx(math.log(20), abs=1e-15)


def test_the_table_has_rows_that_see_nothing() -> None:
    for name in ("lengths-zero", "queries-beyond-keys", "mask-wide", "sinks"):
        inputs = build(BY_ID[name], 0)
        answer = reference(inputs.call)
        nothing = answer.lse == -math.inf
        assert nothing.any(), name
        assert (answer.out[nothing] == 0).all(), name


def near(answer: Answer, **changes: torch.Tensor) -> bool:
    call = build(BY_ID["lengths-ragged"], 0).call
    found = errors(changes.get("out", answer.out), changes.get("lse", answer.lse), answer)
    return not found.exceeds(bounds(call, None, answer))


@pytest.fixture(scope="module")
def answer() -> Answer:
    inputs = build(BY_ID["lengths-ragged"], 0)
    return reference(inputs.call)


def test_the_reference_and_its_rounding_pass(answer: Answer) -> None:
    assert near(answer)
    assert near(answer, out=answer.out.bfloat16(), lse=answer.lse.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_one_wrong_element_fails(answer: Answer, value: float) -> None:
    for row in ((0, 0, 3), (2, 0, 3)):  # a row of 641 keys, and a row that sees nothing
        out = answer.out.clone()
        out[*row, 5] = value
        assert not near(answer, out=out)


def test_a_wrong_lse_fails(answer: Answer) -> None:
    for row, value in (((0, 0, 3), answer.lse[0, 0, 3] + 2e-5), ((2, 0, 3), -1e30)):
        lse = answer.lse.clone()
        lse[row] = value
        assert not near(answer, lse=lse)


def test_a_nan_that_is_due_must_come_out() -> None:
    inputs = build(BY_ID["nan-in-v"], 0)
    answer = reference(inputs.call)
    assert torch.isnan(answer.out).any()
    hidden = torch.nan_to_num(answer.out)
    assert errors(hidden, answer.lse, answer).norm == math.inf
    assert errors(answer.out, answer.lse, answer).norm == 0


def test_rounded_partials_widen_the_bound_by_half_a_spacing_each() -> None:
    inputs = build(BY_ID["splits-2"], 0)
    answer = reference(inputs.call)
    plain = bounds(inputs.call, None, answer)
    rounded = bounds(inputs.call, None, answer, rounded_splits=2)
    assert rounded.norm - plain.norm == pytest.approx(torch.finfo(torch.bfloat16).eps)
    assert rounded.lse == plain.lse
