"""The contract sheet row by row: its tables of LSEs and of chips, its constraint blocks, and the
reported bugs that our calls could run into. Each entry names its row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import splitkv
from ascend_calls import complaints, decode, make_call, on_npu
from splitkv.backends.ascend import AscendBackend
from splitkv.backends.registry import backend_named
from splitkv.common.state import PartialState, merge_states_torch
from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.graphs import GraphDecode
from splitkv.kernels_ascend.limits import Facts, doubts, limits, load, violations
from splitkv.kernels_ascend.lse import normalise
from splitkv.kernels_ascend.merge import merge
from splitkv.kernels_ascend.soc import Soc

FIA, FIA2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
INCRE, PROMPT = "npu_incre_flash_attention", "npu_prompt_flash_attention"
FUSION, ATB, UPDATE = "npu_fusion_attention", "_npu_paged_attention", "npu_attention_update"
SCATTER = "npu_scatter_pa_kv_cache"
ASCEND = backend_named("ascend")


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


# --- 2.1: which operators give a usable LSE -----------------------------------------------------

LSES = [
    ("FIA v1", FIA, True),
    ("FIA v2", FIA2, True),
    ("npu_fusion_attention: max and sum", FUSION, True),
    ("npu_incre_flash_attention: none", INCRE, False),
    ("npu_prompt_flash_attention: none", PROMPT, False),
    ("_npu_paged_attention: none", ATB, False),
]


@pytest.mark.parametrize(("row", "operator", "usable"), LSES)
def test_2_1_states_come_from_operators_with_an_lse(row: str, operator: str, usable: bool) -> None:
    found = violations(Facts(operator=operator, state=1))
    assert (not found) == usable
    assert usable or f"{operator} reports no LSE" in found[0]
    assert violations(Facts(operator=operator, state=0)) == []


# How a row of 2.1 that no route here calls reports its softmax over [B, H, S, T] scores, and how
# that becomes a state [B, S, H] by what common.state has: B 2, H 4, S 3, two kv heads.
UNROUTED = {
    "npu_block_sparse_attention, BNSD: LSE (B, N, S, 1)": (
        lambda top, total: (top + total.log())[..., None],
        lambda out, lse: PartialState.from_lse(out, lse[..., 0].transpose(1, 2)),
    ),
    "npu_block_sparse_attention, TND: LSE (T, N, 1)": (
        lambda top, total: (top + total.log()).transpose(1, 2).reshape(6, 4, 1),
        lambda out, lse: PartialState.from_lse(out, lse.view(2, 3, 4)),
    ),
    "npu_sparse_flash_attention, BSND: max and sum [B, N_kv, S, G]": (
        lambda top, total: tuple(x.view(2, 2, 2, 3).transpose(2, 3) for x in (top, total)),
        lambda out, sums: PartialState.from_lse(
            out, (sums[0] + sums[1].log()).permute(0, 2, 1, 3).reshape(2, 3, 4)
        ),
    ),
    "npu_multi_head_latent_attention.lse: (T, N, 1) in the query's dtype": (
        lambda top, total: (top + total.log()).transpose(1, 2).reshape(6, 4, 1).half(),
        lambda out, lse: PartialState.from_lse(out, lse.float().view(2, 3, 4)),
    ),
    "npu_ring_mla: (N_q, T), heads first": (
        lambda top, total: (top + total.log()).transpose(0, 1).reshape(4, 6),
        lambda out, lse: PartialState.from_lse(out, lse.T.reshape(2, 3, 4)),
    ),
    "cann_ops_transformer.flash_attn and flash_attn_npu_3: (B, N, S)": (
        lambda top, total: top + total.log(),
        lambda out, lse: PartialState.from_lse(out, lse.transpose(1, 2)),
    ),
}


@pytest.mark.parametrize("row", UNROUTED)
def test_2_1_what_other_operators_report_becomes_a_state(row: str) -> None:
    report, state_of = UNROUTED[row]
    scores = torch.randn(2, 4, 3, 40, generator=torch.Generator().manual_seed(1)) * 3
    values = torch.randn(2, 4, 40, 8, generator=torch.Generator().manual_seed(2))

    def shard(keys: slice) -> PartialState:
        part = scores[..., keys]
        top = part.amax(-1)
        total = (part - top[..., None]).exp().sum(-1)
        out = part.softmax(-1) @ values[:, :, keys]
        return state_of(out.transpose(1, 2), report(top, total))

    merged = merge_states_torch([shard(slice(0, 7)), shard(slice(7, 40))])
    whole = (scores.softmax(-1) @ values).transpose(1, 2)
    rounded = 2e-3 if ".lse" in row else 2e-6  # an LSE of 16 bits costs that much
    assert torch.linalg.norm(merged.out - whole) <= rounded * torch.linalg.norm(whole)
    assert torch.allclose(merged.lse, scores.logsumexp(-1).transpose(1, 2), rtol=rounded)


# --- 2.2: three ways of saying "nothing attended" -----------------------------------------------

SENTINELS = [
    ("the whole key tensor is empty", math.inf),
    ("a row of length 0, not legacy", math.inf),
    ("a row of length 0, legacy", -3.4e38),
    ("a row found invalid", math.inf),
    ("a filler of our own or vllm-ascend's", -math.inf),
]


@pytest.mark.parametrize(("row", "sentinel"), SENTINELS)
def test_2_2_sentinels_are_normalised_before_a_merge(row: str, sentinel: float) -> None:
    seen = PartialState(torch.ones(2), torch.ones(2), torch.ones(2, 8))
    raw = torch.zeros(2, 8), torch.full((2,), sentinel)
    out, lse = normalise(*raw)
    assert torch.equal(lse, torch.full((2,), -math.inf))
    assert torch.equal(out, torch.zeros(2, 8))
    nothing = PartialState(lse, lse, out)
    for states in ([seen, nothing], [nothing, seen]):
        merged = merge([PartialState(*map(on_npu, (s.max, s.lse, s.out))) for s in states])
        assert torch.equal(merged.out.cpu(), seen.out)
    both = merge([PartialState(*map(on_npu, (lse, lse, out)))] * 2)
    assert torch.equal(both.lse.cpu(), lse)
    assert torch.equal(both.out.cpu(), out)


def test_2_2_a_row_hidden_by_a_mask_is_never_asked_for() -> None:
    """Its LSE of -1e12 + log n is a number like any other, so that no call of ours hands over a
    full mask.
    """
    for layout in ("NHD", "BSND", "packed"):
        for fields in ({}, {"queries": 3}, {"sliding_window": 9}):
            with standin.recording() as calls:
                decode(make_call(layout, [300, 2], **fields))
            masks = [one.arguments.get("atten_mask") for one in calls if "npu::" in one.name]
            assert all(mask is None or tuple(mask.shape) == (2048, 2048) for mask in masks)
    assert violations(Facts(operator=FIA, queries=1, mask="full"))


def test_2_2_windows_are_never_given_to_the_route_that_drops_them() -> None:
    for layout in ("NHD", "HND", "BSND", "BNSD", "packed"):
        call = make_call(layout, [300, 129], sliding_window=100)
        assert complaints(call) == []
        with standin.recording() as calls:
            decode(call)
        assert all(one.arguments.get("sparse_mode", 0) in (0, 3) for one in calls)
    legacy = Facts(operator=FIA, layout="BNSD", queries=1, rope_dim=0, sparse_mode=4)
    assert any("dropped without a word" in reason for reason in violations(legacy))
    assert not violations(replace(legacy, layout="TND", operator=FIA2, mask="compressed"))


# --- 3: chips -----------------------------------------------------------------------------------

CHIPS = [
    (FIA, "yes yes no yes"),
    (FIA2, "yes yes no yes"),
    (INCRE, "yes no yes no"),  # A3: the two documents disagree, the narrower holds
    (PROMPT, "yes yes yes no"),
    (FUSION, "yes yes no no"),  # 950: on the DT only
    (ATB, "yes yes no no"),  # 310P: NZ cache; 950: limited
    (UPDATE, "yes yes no yes"),
    (SCATTER, "yes yes no no"),  # 950: by aclnn alone
]


@pytest.mark.parametrize(("operator", "answers"), CHIPS)
def test_3_operators_by_chip(operator: str, answers: str) -> None:
    for soc, answer in zip(Soc, answers.split(), strict=True):
        assert (not violations(Facts(operator=operator, soc=soc))) == (answer == "yes"), soc


# --- 4: constraint blocks -----------------------------------------------------------------------

BF16, FP16, FP32 = (
    {"dtype": name, "kv_dtype": name} for name in ("bfloat16", "float16", "float32")
)
A310 = {"soc": Soc.ATLAS_310P}
TND = {"layout": "TND", "rope_dim": 0}
MLA = {"rope_dim": 64, "head_dim": 512, "kv_heads": 1, "layout": "BSND"}

# limit, operator, facts of a call at the limit, what makes it one too many
BLOCKS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("fia_dtype", FIA, BF16, FP32),
    ("fia_kv_dtype", FIA, BF16, {"kv_dtype": "float16"}),
    ("decode_dtype", INCRE, FP16, FP32),
    ("dtype_310p", INCRE, {**A310, **FP16}, BF16),
    ("fusion_dtype", FUSION, FP32, {"dtype": "float64", "kv_dtype": "float64"}),
    ("tnd_dtype", FIA2, {**TND, **BF16}, FP16),
    ("head_dim_multiple", FIA, {"head_dim": 80}, {"head_dim": 72}),
    ("head_dim_max", FIA, {"head_dim": 512}, {"head_dim": 528}),
    ("head_dim_v_same", FIA, {"head_dim": 128, "head_dim_v": 128}, {"head_dim_v": 64}),
    ("tnd_head_dims", FIA2, {**TND, "head_dim": 192}, {"head_dim": 64}),
    ("fusion_head_dim_max", FUSION, {"head_dim": 768}, {"head_dim": 769}),
    ("fusion_head_dim_v", FUSION, {"head_dim": 192, "head_dim_v": 192}, {"head_dim_v": 193}),
    ("atb_head_dim_max", ATB, {"head_dim": 576}, {"head_dim": 577}),
    ("atb_head_dim_v_max", ATB, {"head_dim_v": 576}, {"head_dim_v": 577}),
    ("heads_max", FIA, {"heads": 256}, {"heads": 257}),
    ("group_max", FIA, {"group": 64, "rope_dim": 0}, {"group": 65}),
    ("mla_rope_dim", FIA, {"rope_dim": 64}, {"rope_dim": 32}),
    ("mla_head_dim", FIA, MLA, {"head_dim": 128}),
    ("mla_kv_heads", FIA, MLA, {"kv_heads": 2}),
    ("mla_heads", FIA, {**MLA, "heads": 16}, {"heads": 12}),
    ("mla_state", FIA, {**MLA, "state": 0}, {"state": 1}),
    ("page_multiple", FIA, {"page_size": 16, "queries": 1}, {"page_size": 24}),
    ("page_multiple_many", FIA, {"page_size": 128, "queries": 2}, {"page_size": 64}),
    ("page_max", FIA, {"page_size": 512}, {"page_size": 528}),
    ("page_max_tnd", FIA2, {**TND, "page_size": 128}, {"page_size": 256}),
    ("page_max_atb", ATB, {"page_size": 128, "head_dim": 272}, {"page_size": 256}),
    ("page_max_atb_v", ATB, {"page_size": 128, "head_dim_v": 272}, {"page_size": 256}),
    ("page_none", FUSION, {"cache_form": 0}, {"cache_form": 3}),
    ("cache_row_max", FIA, {"cache_form": 3, "cache_row": 65535}, {"cache_row": 65536}),
    ("cache_form_4d", FIA, {"cache_form": 4, "layout": "BNSD"}, {"layout": "BSND"}),
    ("cache_form_4d_incre", INCRE, {"cache_form": 4, "layout": "BNSD"}, {"layout": "BSND"}),
    ("cache_form_atb", ATB, {"cache_form": 4}, {"cache_form": 3}),
    ("kv_elements_max", FIA, {"kv_elements": 2**31 - 1}, {"kv_elements": 2**31}),
    ("keys_per_row_max", FIA, {"keys": 262144, "queries": 1}, {"keys": 262145}),
    ("keys_per_row_max_310p", INCRE, {**A310, "keys": 65536}, {"keys": 65537}),
    ("keys_per_row_max_many", FIA, {"keys": 20 * 2**20, "queries": 2}, {"keys": 20 * 2**20 + 1}),
    ("rows_max", FIA, {"rows": 65536, "layout": "BSND"}, {"rows": 65537}),
    ("rows_tnd_max", FIA2, {**TND, "rows": 4096}, {"rows": 4097}),
    ("rows_incre_max", INCRE, {"rows": 65535}, {"rows": 65536}),
    ("rows_incre_310p_max", INCRE, {**A310, "rows": 256}, {"rows": 257}),
    ("rows_unaligned_max", FIA, {"queries": 2, "odd_bytes": 16, "rows": 128}, {"rows": 129}),
    (
        "query_row_max",
        PROMPT,
        {"queries": 2, "layout": "BSND", "query_row": 65534},
        {"query_row": 65535},
    ),
    ("rows_prompt_310p_max", PROMPT, {**A310, "rows": 128}, {"rows": 129}),
    ("keys_prompt_310p_max", PROMPT, {**A310, "keys": 65535}, {"keys": 65536}),
    ("queries_prompt_310p_max", PROMPT, {**A310, "queries": 65535}, {"queries": 65536}),
    ("group_prompt_310p", PROMPT, {**A310, "group": 1}, {"group": 2}),
    ("lengths_prompt_310p", PROMPT, {**A310, "entries": 0}, {"entries": 1}),
    ("mode_prompt_310p", PROMPT, {**A310, "sparse_mode": 0}, {"sparse_mode": 3}),
    ("scatter_dtype", SCATTER, {"dtype": "uint8"}, {"dtype": "float8_e4m3fn"}),
    ("scatter_kv_dtype", SCATTER, FP16, {"kv_dtype": "bfloat16"}),
    ("scatter_form", SCATTER, {"cache_form": 4}, {"cache_form": 3}),
    ("scatter_slots_max", SCATTER, {"slots": 2**31 - 1}, {"slots": 2**31}),
    ("rows_fusion_strict", FUSION, {**TND, "rows": 1024}, {"rows": 1025}),
    ("tnd_tokens_max", FIA2, {**TND, "tokens": 2**20}, {"tokens": 2**20 + 1}),
    ("entries_are_rows", FIA, {"rows": 21, "entries": 21}, {"entries": 20}),
    ("single_query", INCRE, {"queries": 1}, {"queries": 2}),
    ("layouts_fia", FIA, {"layout": "BSH"}, {"layout": "SBH"}),
    ("layouts_incre", INCRE, {"layout": "BSH"}, {"layout": "TND"}),
    ("layouts_prompt", PROMPT, {"layout": "BNSD_BSND"}, {"layout": "TND"}),
    ("layouts_fusion", FUSION, {"layout": "SBH"}, {"layout": "NTD"}),
    ("mask_of_mode", FIA2, {"sparse_mode": 3, "mask": "compressed"}, {"mask": "none"}),
    ("mask_of_mode_1", FIA2, {"sparse_mode": 1, "mask": "full"}, {"mask": "none"}),
    ("mask_single", FIA, {"mask": "none", "queries": 1}, {"mask": "full"}),
    ("mask_tnd", FIA2, {**TND, "mask": "none", "sparse_mode": 0}, {"mask": "compressed"}),
    ("mode_known", FIA, {"sparse_mode": 4}, {"sparse_mode": 9}),
    (
        "mode_legacy",
        FIA,
        {"layout": "BSND", "queries": 1, "rope_dim": 0, "sparse_mode": 0},
        {"sparse_mode": 3},
    ),
    (
        "inner_precise_single",
        FIA,
        {"queries": 1, "rope_dim": 0, "inner_precise": 1},
        {"inner_precise": 2},
    ),
    ("inner_precise_bf16", FIA, {**BF16, "inner_precise": 0}, {"inner_precise": 1}),
    ("sink_v2", FIA, {"sinks": 0}, {"sinks": 1}),
    ("sink_layout", FIA2, {"sinks": 1, "layout": "TND"}, {"layout": "BSND"}),
    ("sink_dtype", FIA2, {"sinks": 1, **BF16}, FP16),
    ("sink_head_dim", FIA2, {"sinks": 1, "head_dim_v": 128}, {"head_dim_v": 144}),
    ("update_shards_max", UPDATE, {"shards": 16}, {"shards": 17}),
    ("update_dim_multiple", UPDATE, {"head_dim": 8}, {"head_dim": 12}),
    ("update_dim_max", UPDATE, {"head_dim": 512}, {"head_dim": 520}),
]  # fmt: skip

# the wider reading, and what it refuses in its turn
LOOSE: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("tnd_head_dims_4d", FIA2, {**TND, "cache_form": 4, "head_dim": 64}, {"head_dim": 96}),
    ("tnd_head_dims_3d", FIA2, {**TND, "cache_form": 3, "head_dim": 256}, {"head_dim": 272}),
    ("group_head_dims", FIA, {"group": 65, "head_dim": 128, "rope_dim": 0}, {"head_dim": 96}),
    ("group_max_old", INCRE, {"group": 64}, {"group": 65}),
    ("mla_state_tnd", FIA2, {**MLA, "state": 1}, {"layout": "TND"}),
    ("rows_fusion_loose", FUSION, {**TND, "rows": 2048}, {"rows": 2049}),
    (
        "mode_tnd_unmasked",
        FIA2,
        {**TND, "queries": 2, "dtype": "float16", "sparse_mode": 3},
        {"sparse_mode": 0},
    ),
]
WARNED = {"page_proven"}
ELSEWHERE = {"scale_950"}  # no chip that has the operator here is a 950


@pytest.mark.parametrize(("name", "operator", "good", "bad"), BLOCKS, ids=lambda x: str(x)[:24])
def test_4_limits_hold_at_the_edge(
    name: str, operator: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    _edge(name, operator, good, bad, strict=True)


@pytest.mark.parametrize(("name", "operator", "good", "bad"), LOOSE, ids=lambda x: str(x)[:24])
def test_4_loose_limits_hold_at_the_edge(
    name: str, operator: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    _edge(name, operator, good, bad, strict=False)


def _edge(name: str, operator: str, good: Any, bad: Any, *, strict: bool) -> None:
    says = limits()[name].says
    at = violations(Facts(operator=operator, **good), strict=strict)
    assert not any(says in reason for reason in at)
    past = violations(Facts(operator=operator, **{**good, **bad}), strict=strict)
    found = [reason for reason in past if says in reason]
    assert found
    assert limits()[name].source in found[0]


def test_4_every_limit_and_operator_has_an_entry_here() -> None:
    tested = {name for name, *_ in BLOCKS + LOOSE} | WARNED | ELSEWHERE
    assert tested == set(limits())
    assert {operator for operator, _ in CHIPS} == set(load().operators)
    assert all(
        (entry.source and "(" in entry.source) or "section" in entry.source
        for entry in limits().values()
    )


def test_4_an_unknown_fact_is_not_judged() -> None:
    assert violations(Facts(operator=FIA)) == []
    assert doubts(Facts(operator=FIA, page_size=16))
    assert not doubts(Facts(operator=FIA, page_size=128))


# --- 9: reported bugs ---------------------------------------------------------------------------


def _mask_past_512() -> None:
    """1: a bool mask is ignored past 512 keys; ours are refused, lengths say it."""
    spec = replace(make_call("NHD", [600]).spec, attn_mask=True)
    assert "ignored past 512 keys" in ASCEND.refusals(spec)[0]
    assert complaints(make_call("NHD", [600, 513, 512])) == []


def _tnd_without_mask() -> None:
    """2: layout TND, sparse mode 0, no mask, float16 gave the plain average of the values."""
    spec = make_call("NHD", [600], queries=3, causal=False, dtype=torch.float16).spec
    assert ASCEND.choice(spec).route.name == "fia-rows"


def _page_16() -> None:
    """3: pages of 16 were accepted and wrong on a 910C: said with the reason."""
    with pytest.warns(UserWarning, match="a page of 16 was accepted and gave wrong results"):
        decode(make_call("NHD", [100], page=16))


def _page_1() -> None:
    """4: a page of 1 is refused by the operator with 561002; here before it, in words."""
    with pytest.raises(splitkv.UnsupportedError, match=r"page_size 1: .* multiple of 16"):
        decode(make_call("NHD", [100], page=1))


def _list_and_batch() -> None:
    """5, 6: 20 lengths for a batch of 21; 9 for 16: a list has one entry per row in every call."""
    for layout in ("NHD", "HND", "BSND", "packed"):
        for fields in ({}, {"sliding_window": 100}, {"queries": 3}):
            with standin.recording() as calls:
                decode(make_call(layout, [300, 0, 129, 2], **fields), num_splits=2)
            for one in calls:
                table, q = one.arguments.get("block_table"), one.arguments.get("query")
                lengths = one.arguments.get("actual_seq_lengths_kv") or []
                if table is not None and lengths:
                    assert len(lengths) == table.shape[0] == q.shape[0]
    with pytest.raises(ValueError, match="must be 4 lengths"):
        _graph(4).refresh([300] * 3)


def _last_query_length() -> None:
    """7: the last query length must be T."""
    with standin.recording() as calls:
        decode(make_call("NHD", [300, 0, 129], queries=3))
    ends = [
        (one.arguments["actual_seq_qlen"], one.arguments["query"])
        for one in calls
        if one.arguments.get("actual_seq_qlen")
    ]
    assert ends
    assert all(list(end)[-1] == q.shape[0] for end, q in ends)


def _head_dim_256_in_tnd() -> None:
    """8: head dim 256 in layout TND was refused: single rows serve it."""
    call = make_call("HND", [300, 17], D=256, queries=3)
    assert ASCEND.choice(call.spec).route.name == "fia-rows"
    assert complaints(call) == []


def _mla_heads() -> None:
    """10, 11: 12 heads of MLA were refused by the operator (561002); here in words."""
    fields = {"num_q_heads": 12, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    spec = replace(make_call("NHD", [30]).spec, **fields)
    reasons = AscendBackend(route="fia-mla", needs_lse=False).refusals(spec)
    assert "heads 12: MLA takes a power of two" in reasons[0]


def _empty_shard() -> None:
    """11: an empty shard, and rows that are empty in all of them."""
    for splits in (1, 3):
        out, lse = decode(make_call("NHD", [0, 300, 0]), num_splits=splits)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert (lse[[0, 2]] == -math.inf).all()


def _wait_in_capture() -> None:
    """11, 19: a host copy inside a capture; a prepared plan makes none, another says so."""
    call = make_call("NHD", [300, 129])
    here = replace(call, q=on_npu(call.q), cache=on_npu(call.cache))
    plan = ASCEND.plan_for(here)
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(RuntimeError, match="has not yet run"),
    ):
        ASCEND.partial(here, plan)
    ASCEND.partial(here, plan)
    with torch.npu.graph(torch.npu.NPUGraph()):
        ASCEND.partial(here, plan)


def _causal_mask_with_window() -> None:
    """12: sparse mode 3 with a window ignores the window."""
    for queries in (1, 3):
        call = make_call("NHD", [300, 129], queries=queries, sliding_window=50)
        assert complaints(call) == []


def _strided_cache() -> None:
    """14: strided keys are refused by new CANN; here before a launch."""
    call = make_call("BSND", [300])
    both = torch.stack([call.cache.k, call.cache.v], -1)
    cache = replace(call.cache, k=both[..., 0], v=both[..., 1])
    with pytest.raises(splitkv.UnsupportedError, match="k has strides"):
        decode(replace(call, cache=cache))


def _trailing_length() -> None:
    """15: npu_fusion_attention with lengths that end before T."""
    with standin.recording() as calls:
        decode(make_call("BSND", [300, 0, 129], D=64, dtype=torch.float32))
    (one,) = [one for one in calls if one.name.endswith("npu_fusion_attention")]
    assert one.arguments["actual_seq_kvlen"][-1] == one.arguments["key"].shape[0]
    assert one.arguments["actual_seq_qlen"][-1] == one.arguments["query"].shape[0]


def _stale_lengths() -> None:
    """17: replay computes the captured lengths: updates have the new ones."""
    graph = _graph(2)
    graph.refresh([300, 129], on_npu(torch.zeros(2, 5, dtype=torch.int32)))
    assert graph.updates() == [{"actual_seq_lengths_kv": [300, 129]}]
    graph.refresh([301, 0], on_npu(torch.zeros(2, 5, dtype=torch.int32)))
    assert graph.updates(2) == [{"actual_seq_lengths_kv": [301, 0]}] * 2


def _atb_shapes() -> None:
    """18: 'PagedAttentionOperation setup failed!': head dims and pages beyond it say so before."""
    backend = AscendBackend(route="paged-attention", needs_lse=False)
    spec = make_call("NHD", [30], D=512).spec
    assert backend.refusals(spec) == []
    reasons = backend.refusals(replace(spec, page_size=256))
    assert len(reasons) == 2  # for keys and for values
    assert all("with head dims above 256 a page has at most 128 tokens" in x for x in reasons)


def _decode_without_mask() -> None:
    """20: a mask in decode costs a tenth of it: single queries never get one."""
    with standin.recording() as calls:
        decode(make_call("NHD", [300, 129]))
    assert all(one.arguments.get("atten_mask") is None for one in calls)


def _quantised_cache() -> None:
    """21: fp8 and int8 caches crash: refused."""
    spec = make_call("NHD", [30]).spec
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert "quantised cache" in ASCEND.refusals(replace(spec, kv_dtype=dtype))[0]


def _mask_of_v2() -> None:
    """26: the second version was given another mask than the 2048 x 2048 one."""
    with standin.recording() as calls:
        decode(make_call("NHD", [300, 129], queries=3))
    (mask,) = [one.arguments["atten_mask"] for one in calls if one.arguments.get("sparse_mode")]
    assert torch.equal(mask.cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))


def _graph(batch: int) -> GraphDecode:
    spec = make_call("NHD", [300]).spec
    return GraphDecode(spec, batch=batch, max_len=600, device="npu")


BUGS: dict[str, Callable[[], None]] = {
    "1": _mask_past_512,
    "2": _tnd_without_mask,
    "3": _page_16,
    "4": _page_1,
    "5 6": _list_and_batch,
    "7": _last_query_length,
    "8": _head_dim_256_in_tnd,
    "10": _mla_heads,
    "11 empty": _empty_shard,
    "11 19": _wait_in_capture,
    "12": _causal_mask_with_window,
    "14": _strided_cache,
    "15": _trailing_length,
    "17": _stale_lengths,
    "18": _atb_shapes,
    "20": _decode_without_mask,
    "21": _quantised_cache,
    "26": _mask_of_v2,
}
"""By row of the sheet's list; 9 (old CANN), 13 (one ulp between routes), 16 (deadlocks), 22 to 25,
27 and 28 are no calls of ours.
"""


@pytest.mark.parametrize("row", BUGS)
def test_9_reported_bugs_do_not_reach_us(row: str) -> None:
    BUGS[row]()
