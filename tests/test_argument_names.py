"""A call of another library, converted, computes what that library says it computes."""

import importlib
import inspect
import math
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foreign_meanings as theirs
import splitkv
from histories import History, offsets32, random_history, random_queries
from splitkv.integrations.argument_names import PAGE, How, calls, page, screened
from splitkv.integrations.flash_attention_names import (
    from_flash_attn_varlen,
    from_flash_attn_with_kvcache,
    from_torch_varlen,
)
from splitkv.integrations.flashinfer_names import (
    alibi_slopes_of,
    from_flashinfer,
    from_flashinfer_single,
)
from splitkv.integrations.torch_npu_names import from_fused_infer, from_fused_infer_v2
from splitkv.integrations.vllm_names import from_paged_attention_v2, from_unified_attention
from splitkv.kernels_ascend.standin.schemas import SCHEMAS

LENGTHS = [21, 5, 40]
P, K, H, D, DV = 8, 2, 4, 16, 16
HISTORY = random_history(LENGTHS, K, D, dtype=torch.float64)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
Result = tuple[Tensor, Tensor]


def ours(keywords: dict[str, Any]) -> Result:
    """out and lse of the converted call, on the CPU."""
    keywords = {name: value for name, value in keywords.items() if name != "return_lse"}
    out, lse = splitkv.decode_attention(**keywords, return_lse=True, backend="cpu")
    return out, lse


def agree(got: Result, want: Result, *, lse: bool = True) -> bool:
    near = torch.allclose(got[0].reshape_as(want[0]), want[0], rtol=0, atol=1e-10)
    return near and (not lse or torch.allclose(got[1].reshape_as(want[1]), want[1], atol=1e-10))


def queries(steps: int = 1) -> Tensor:
    return random_queries(len(LENGTHS), steps, H, D, dtype=torch.float64)


def meant(meaning: Callable[..., Result], q: Tensor, **options: Any) -> Result:
    """A meaning over every request of ``HISTORY``, q [B, S, H, D]."""
    return theirs.stacked(
        [meaning(*row, **options) for row in zip(q, HISTORY.k, HISTORY.v, strict=True)]
    )


# --- FlashInfer ---


def page_lists(paged: dict[str, Any]) -> dict[str, Any]:
    counts = [-(-length // P) for length in LENGTHS]
    table = paged["block_table"]
    last = [length - (count - 1) * P for length, count in zip(LENGTHS, counts, strict=True)]
    return {
        "paged_kv_indptr": offsets32(counts),
        "paged_kv_indices": torch.cat([table[b, :count] for b, count in enumerate(counts)]),
        "paged_kv_last_page_len": torch.tensor(last, dtype=torch.int32),
    }


FLASHINFER = {
    "plain": {},
    "window": {"window_left": 6},
    "a window of the query alone": {"window_left": 0},
    "cap": {"logits_soft_cap": 3.0},
    "scale": {"sm_scale": 0.7},
    "sinks": {"sinks": SINKS},
}


@pytest.mark.parametrize("options", FLASHINFER.values(), ids=FLASHINFER)
@pytest.mark.parametrize(("layout", "steps"), [("NHD", 1), ("HND", 1), ("NHD", 3)])
def test_flashinfer_batch(options: dict[str, Any], layout: str, steps: int) -> None:
    paged = HISTORY.paged(P, layout=layout)
    q = queries(steps)
    one = torch.stack([paged["k"], paged["v"]], 1)  # one tensor, an axis of 2
    for cache in ((paged["k"], paged["v"]), one):
        keywords = from_flashinfer(
            q=q.flatten(0, 1), paged_kv_cache=cache, kv_layout=layout, q_len_per_req=steps,
            page_size=P, num_qo_heads=H, num_kv_heads=K, head_dim=D, q_data_type="float64",
            **page_lists(paged), **options,
        )  # fmt: skip
        assert agree(ours(keywords), meant(theirs.flashinfer, q, **options))
    assert keywords["k"].data_ptr() == one.data_ptr(), "a view, no copy"


def test_flashinfer_other_forms_of_the_same() -> None:
    paged = HISTORY.paged(P)
    q = queries()
    given = {"q": q[:, 0], "paged_kv_cache": (paged["k"], paged["v"])}
    lists = page_lists(paged)
    want = meant(theirs.flashinfer, q)
    by_table = {"block_tables": paged["block_table"], "seq_lens": paged["seq_lens"]}
    assert agree(ours(from_flashinfer(**given, **by_table)), want)
    plan_names = {name.removeprefix("paged_kv_"): value for name, value in lists.items()}
    roomy = torch.cat([plan_names["indices"], torch.full((9,), 10**6, dtype=torch.int32)])
    assert agree(ours(from_flashinfer(**given, **(plan_names | {"indices": roomy}))), want)
    scaled = from_flashinfer(**given, **lists, q_scale=2.0, k_scale=1.5, logits_soft_cap=0.0)
    assert agree(ours(scaled), meant(theirs.flashinfer, q, sm_scale=3.0 * D**-0.5))
    alibi = from_flashinfer(**given, **lists, pos_encoding_mode="ALIBI")
    assert agree(ours(alibi), meant(theirs.flashinfer, q, alibi=True), lse=False)
    assert from_flashinfer(**given, **lists, fixed_split_size=2)["split_size"] == 2 * P
    assert from_flashinfer(**given, **lists, disable_split_kv=True)["num_splits"] == 1


def test_flashinfer_off_by_one_would_be_seen() -> None:
    paged = HISTORY.paged(P)
    q = queries()
    given = {"q": q[:, 0], "paged_kv_cache": (paged["k"], paged["v"]), **page_lists(paged)}
    want = meant(theirs.flashinfer, q, window_left=6)
    for wrong in (5, 7):
        assert not agree(ours(from_flashinfer(**given, window_left=wrong)), want)
    shorter = given | {"paged_kv_last_page_len": given["paged_kv_last_page_len"] - 1}
    shorter["paged_kv_last_page_len"].clamp_(min=1)
    assert not agree(ours(from_flashinfer(**shorter)), meant(theirs.flashinfer, q))


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes_of(8).tolist() == [2.0**-h for h in range(1, 9)]
    left_over = [2.0**-x for x in (0.5, 1.5, 2.5, 3.5)]
    assert torch.equal(alibi_slopes_of(12)[8:], torch.tensor(left_over))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfer_single(layout: str) -> None:
    q, k, v = queries()[0, 0], HISTORY.k[0], HISTORY.v[0]
    placed = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    options = {"window_left": 4, "logits_soft_cap": 5.0, "sm_scale": 0.3}
    keywords = from_flashinfer_single(
        q=q, k=placed[0], v=placed[1], kv_layout=layout, use_tensor_cores=True, **options
    )
    assert agree(ours(keywords), theirs.flashinfer(q[None], k, v, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "rotate q and k before"),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, "theirs caps after the bias"),
        ({"pos_encoding_mode": "ALIBI", "return_lse": True}, "counts from position 0"),
        ({"lse": torch.zeros(3, H)}, "their buffer takes base 2"),
        ({"v_scale": 2.0}, "multiply out by it"),
        ({"o_data_type": "float16"}, "out has q's dtype here"),
        ({"window_right": -1}, "no later key"),
    ],
)
def test_flashinfer_refusals(options: dict[str, Any], words: str) -> None:
    paged = HISTORY.paged(P)
    given = {"q": queries()[:, 0], "paged_kv_cache": (paged["k"], paged["v"]), **page_lists(paged)}
    with pytest.raises(splitkv.UnsupportedError, match=words):
        from_flashinfer(**given, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_layout": "NDH"}, "kv_layout must be 'NHD' or 'HND'"),
        ({"page_size": 16}, "page_size is 16, the tensors have 8"),
        ({"num_qo_heads": 8}, "num_qo_heads is 8, the tensors have 4"),
        ({"q_data_type": torch.float16}, "q_data_type is torch.float16"),
        ({"window_lefft": 3}, "has no argument 'window_lefft'"),
        ({"indptr": torch.zeros(4)}, "are one argument"),
        ({"logits_soft_cap": -1.0}, "must be 0"),
        ({"q_len_per_req": 2}, "q must be"),
        ({"disable_split_kv": True, "fixed_split_size": 2}, "contradicts"),
        ({"pos_encoding_mode": "SINE"}, "must be NONE, ALIBI or ROPE_LLAMA"),
    ],
)
def test_flashinfer_malformed(options: dict[str, Any], words: str) -> None:
    paged = HISTORY.paged(P)
    given = {"q": queries()[:, 0], "paged_kv_cache": (paged["k"], paged["v"]), **page_lists(paged)}
    with pytest.raises(ValueError, match=words):
        from_flashinfer(**given, **options)


# --- flash-attention and torch's varlen ---

FLASH = {
    "their defaults, not causal": {},
    "causal": {"causal": True},
    "a window to the left": {"window_size": (6, -1)},
    "right 0 is causal": {"window_size": (6, 0)},
    "right is 0 where causal": {"causal": True, "window_size": (3, 5)},
    "cap": {"causal": True, "softcap": 2.0},
    "slopes": {"causal": True, "alibi_slopes": SLOPES},
    "scale": {"softmax_scale": 0.4},
}


@pytest.mark.parametrize("options", FLASH.values(), ids=FLASH)
@pytest.mark.parametrize("steps", [1, 4])
def test_flash_attn_with_kvcache(options: dict[str, Any], steps: int) -> None:
    q = queries(steps)
    want = meant(theirs.flash_attention, q, **options)
    dense, paged = HISTORY.dense(48), HISTORY.paged(P)
    forms = [
        {"k_cache": dense["k"], "v_cache": dense["v"], "cache_seqlens": dense["seq_lens"]},
        {
            "k_cache": paged["k"],
            "v_cache": paged["v"],
            "cache_seqlens": paged["seq_lens"],
            "page_table": paged["block_table"],
        },
        {  # rows in another order, found by their index
            "k_cache": dense["k"].flip(0),
            "v_cache": dense["v"].flip(0),
            "cache_seqlens": dense["seq_lens"],
            "cache_batch_idx": torch.tensor([2, 1, 0], dtype=torch.int32),
        },
    ]
    for form in forms:
        assert agree(ours(from_flash_attn_with_kvcache(q=q, **form, **options)), want)


def test_flash_attn_lengths_and_splits() -> None:
    q, k, v = queries()[:1], HISTORY.k[0][None], HISTORY.v[0][None]
    whole = theirs.flash_attention(q[0], k[0], v[0])
    cut = theirs.flash_attention(q[0], k[0, :9], v[0, :9])
    given = {"q": q, "k_cache": k, "v_cache": v}
    assert agree(ours(from_flash_attn_with_kvcache(**given)), whole)
    assert agree(ours(from_flash_attn_with_kvcache(**given, cache_seqlens=9)), cut)
    assert not agree(ours(from_flash_attn_with_kvcache(**given, cache_seqlens=10)), cut)
    splits = [from_flash_attn_with_kvcache(**given, num_splits=n)["num_splits"] for n in (0, 1, 3)]
    assert splits == [None, 1, 3]


VARLEN_COUNTS = [2, 1, 3]


@pytest.mark.parametrize("options", FLASH.values(), ids=FLASH)
def test_varlen_of_both(options: dict[str, Any]) -> None:
    q = random_queries(sum(VARLEN_COUNTS), H, D, dtype=torch.float64)
    rows = zip(q.split(VARLEN_COUNTS), HISTORY.k, HISTORY.v, strict=True)
    want = theirs.stacked([theirs.flash_attention(*row, **options) for row in rows], packed=True)
    packed, paged = HISTORY.packed(), HISTORY.paged(P)
    offsets, pool = packed["cu_seqlens_k"], {"block_table": paged["block_table"]}
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 40}
    q_given = {"q": q, "cu_seqlens_q": offsets32(VARLEN_COUNTS), **bounds, **options}
    for form in (
        {"k": packed["k"], "v": packed["v"], "cu_seqlens_k": offsets},
        {"k": paged["k"], "v": paged["v"], "cu_seqlens_k": offsets, **pool},
        {"k": paged["k"], "v": paged["v"], "seqused_k": paged["seq_lens"], **pool},
    ):
        assert agree(ours(from_flash_attn_varlen(**q_given, **form)), want)
    if set(options) <= {"window_size", "softmax_scale"}:
        renamed = {"scale" if name == "softmax_scale" else name: x for name, x in options.items()}
        keywords = from_torch_varlen(
            query=q, key=packed["k"], value=packed["v"], cu_seq_q=offsets32(VARLEN_COUNTS),
            cu_seq_k=offsets, max_q=3, max_k=40, enable_gqa=True, **renamed,
        )  # fmt: skip
        assert agree(ours(keywords), want)


def test_flash_attention_off_by_one_would_be_seen() -> None:
    q, dense = queries(4), HISTORY.dense()
    given = {"q": q, "k_cache": dense["k"], "v_cache": dense["v"]}
    given["cache_seqlens"] = dense["seq_lens"]
    want = meant(theirs.flash_attention, q, window_size=(6, 0))
    assert not agree(ours(from_flash_attn_with_kvcache(**given, window_size=(7, 0))), want)
    assert not agree(ours(from_flash_attn_with_kvcache(**given, window_size=(6, -1))), want)
    assert not agree(ours(from_flash_attn_with_kvcache(**given)), ours({
        **from_flash_attn_with_kvcache(**given), "causal": True,
    }))  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window_size": (4, 2)}, "window_size right 2"),
        ({"alibi_slopes": SLOPES}, "falls off to both sides"),
        ({"alibi_slopes": SLOPES, "causal": True, "return_softmax_lse": True}, "their lse is not"),
        ({"k": torch.zeros(1)}, "append_kv"),
        ({"cache_leftpad": torch.zeros(3)}, "kv_start hides"),
        ({"rotary_cos": torch.zeros(3)}, "rotate q and k before"),
        ({"attention_chunk": 128}, "chunked attention"),
    ],
)
def test_flash_attention_refusals(options: dict[str, Any], words: str) -> None:
    dense = HISTORY.dense()
    with pytest.raises(splitkv.UnsupportedError, match=words):
        from_flash_attn_with_kvcache(
            q=queries(4), k_cache=dense["k"], v_cache=dense["v"], **options
        )


def test_packed_rows_that_nobody_uses_and_heads_without_leave_are_refused() -> None:
    packed = HISTORY.packed()
    q, offsets = random_queries(3, H, D), torch.arange(4)
    keys = {"k": packed["k"], "v": packed["v"], "cu_seqlens_k": packed["cu_seqlens_k"]}
    with pytest.raises(splitkv.UnsupportedError, match="pack the used rows"):
        from_flash_attn_varlen(q=q, cu_seqlens_q=offsets, **keys, seqused_k=torch.ones(3))
    with pytest.raises(ValueError, match="need enable_gqa=True"):
        from_torch_varlen(query=q, key=keys["k"], value=keys["v"], cu_seq_q=offsets)
    with pytest.raises(splitkv.UnsupportedError, match=r"dropout_p 0\.1: dropout"):
        from_flash_attn_varlen(q=q, cu_seqlens_q=offsets, **keys, dropout_p=0.1)


# --- vLLM ---

UNIFIED = {
    "plain": {},
    "window": {"window_size": (6, 0)},
    "cap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "bias over the new tokens": {"qq_bias": torch.randn(3, 3, generator=torch.Generator())},
}


@pytest.mark.parametrize("options", UNIFIED.values(), ids=UNIFIED)
def test_unified_attention(options: dict[str, Any]) -> None:
    q, paged = queries(3), HISTORY.paged(P)
    keywords = from_unified_attention(
        q=q.flatten(0, 1), k=paged["k"], v=paged["v"], cu_seqlens_q=offsets32([3, 3, 3]),
        max_seqlen_q=3, seqused_k=paged["seq_lens"], max_seqlen_k=40, softmax_scale=0.5,
        causal=True, block_table=paged["block_table"], q_descale=None,
        k_descale=torch.ones(3, K), v_descale=torch.ones(3, K), **options,
    )  # fmt: skip
    want = meant(theirs.unified_attention, q, softmax_scale=0.5, **options)
    assert agree(ours(keywords), want, lse=False)  # it returns none
    wrong = keywords | {"window_left": 5}
    assert not agree(ours(wrong), want, lse=False)


def test_metadata_names_and_refusals_of_unified_attention() -> None:
    q, paged = queries(2), HISTORY.paged(P)
    metadata = {
        "query_start_loc": offsets32([2, 2, 2]),
        "seq_lens": paged["seq_lens"],
        "block_table": paged["block_table"],
    }
    given = {"q": q.flatten(0, 1), "k": paged["k"], "v": paged["v"], "softmax_scale": 1.0}
    want = meant(theirs.unified_attention, q, softmax_scale=1.0)
    assert agree(ours(from_unified_attention(**given, **metadata)), want)
    for options, words in (
        ({"causal": torch.ones(3)}, "causal per request"),
        ({"qq_bias": torch.zeros(3, 3)}, "first new token"),
        ({"chunk_lookback": 1}, "chunked attention"),
        ({"use_alibi_sqrt": True}, "square roots"),
    ):
        with pytest.raises(splitkv.UnsupportedError, match=words):
            from_unified_attention(**given, **metadata, **options)
    with pytest.raises(ValueError, match=r"window_size must be \(W - 1, 0\)"):
        from_unified_attention(**given, **metadata, window_size=(3, 1))


def test_paged_attention_v2_whose_keys_lie_in_groups() -> None:
    q, paged = queries(), HISTORY.paged(P, layout="HND")
    x = 4
    grouped = paged["k"].unflatten(3, (D // x, x)).permute(0, 1, 3, 2, 4).contiguous()
    given = {
        "query": q[:, 0], "key_cache": grouped, "block_tables": paged["block_table"],
        "value_cache": paged["v"].transpose(2, 3).contiguous(), "seq_lens": paged["seq_lens"],
        "num_kv_heads": K, "block_size": P, "scale": 0.25, "kv_cache_dtype": "auto",
        "k_scale": 1.0, "v_scale": 1.0, "alibi_slopes": None,
    }  # fmt: skip
    want = meant(theirs.unified_attention, q, softmax_scale=0.25)
    assert agree(ours(from_paged_attention_v2(**given)), want)
    plain = given | {"key_cache": grouped.transpose(2, 4).contiguous()}
    assert not agree(ours(from_paged_attention_v2(**plain | {"block_size": None})), want)
    with pytest.raises(splitkv.UnsupportedError, match="view the cache as the fp8 dtype"):
        from_paged_attention_v2(**given | {"kv_cache_dtype": "fp8"})


# --- torch_npu ---


def fia_dense(layout: str, q: Tensor) -> dict[str, Any]:
    dense = HISTORY.dense(48, fill=9.0, layout="BNSD" if layout.startswith("BNSD") else "BSND")
    form: Callable[[Tensor], Tensor] = {
        "BSH": lambda x: x.flatten(2),
        "BSND": lambda x: x,
    }.get(layout, lambda x: x.transpose(1, 2))
    keys = (dense["k"], dense["v"])
    if layout == "BSH":
        keys = (keys[0].flatten(2), keys[1].flatten(2))
    return {
        "query": form(q), "key": keys[0], "value": keys[1], "input_layout": layout,
        "num_heads": H, "num_key_value_heads": K, "actual_seq_lengths_kv": LENGTHS,
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.2, "sparse_mode": 3}], ids=["0", "3"])
def test_fused_infer_over_dense_keys(layout: str, options: dict[str, Any]) -> None:
    q = queries(3)
    want = meant(theirs.fused_infer, q, **options)
    assert agree(ours(from_fused_infer(**fia_dense(layout, q), **options)), want)
    assert not agree(ours(from_fused_infer(**fia_dense(layout, q), scale=D**-0.5)), want)


@pytest.mark.parametrize("one_query", [True, False])
def test_fused_infer_masks_hide_and_count_from_the_first_position(one_query: bool) -> None:
    q = queries(1 if one_query else 3)
    hide = torch.rand(3, 1, q.shape[1], 48, generator=torch.Generator().manual_seed(3)) < 0.4
    given = fia_dense("BSND", q)
    rows = zip(q, HISTORY.k, HISTORY.v, hide[:, 0], strict=True)
    want = theirs.stacked([theirs.fused_infer(a, k, v, atten_mask=m) for a, k, v, m in rows])
    for mask in (hide, hide.to(torch.int8), hide[:, 0]):
        assert agree(ours(from_fused_infer(**given, atten_mask=mask)), want)
    if one_query:
        assert agree(ours(from_fused_infer(**given, atten_mask=hide[:, 0, 0])), want)
    assert not agree(ours(from_fused_infer(**given, atten_mask=~hide)), want)


FIA_COUNTS = [2, 1, 3]
FIA_MODES = {
    "none": {},
    "causal": {"sparse_mode": 3},
    "band": {"sparse_mode": 4, "pre_tokens": 6, "next_tokens": 0},
}


@pytest.mark.parametrize("options", FIA_MODES.values(), ids=FIA_MODES)
@pytest.mark.parametrize("cache", ["packed", "blocks of rows", "blocks of heads"])
def test_fused_infer_packed(options: dict[str, Any], cache: str) -> None:
    q = random_queries(sum(FIA_COUNTS), H, D, dtype=torch.float64)
    rows = zip(q.split(FIA_COUNTS), HISTORY.k, HISTORY.v, strict=True)
    want = theirs.stacked(
        [theirs.fused_infer(*row, scale=0.3, **options, sink=SINKS) for row in rows], packed=True
    )
    given: dict[str, Any] = {
        "query": q, "input_layout": "TND", "num_query_heads": H, "num_key_value_heads": K,
        "actual_seq_qlen": list(accumulate(FIA_COUNTS)), "softmax_scale": 0.3,
        "learnable_sink": SINKS, "atten_mask": torch.ones(2048, 2048).triu(1).bool(), **options,
    }  # fmt: skip
    if options == {}:
        given["atten_mask"] = None
    sums = list(accumulate(LENGTHS))
    if cache == "packed":
        packed = HISTORY.packed()
        given |= {"key": packed["k"], "value": packed["v"], "actual_seq_kvlen": sums}
        wrong = LENGTHS
    else:
        paged = HISTORY.paged(P, fill=9.0, layout="NHD" if cache == "blocks of rows" else "HND")
        pools = [paged["k"], paged["v"]]
        pools = [pool.flatten(2) for pool in pools] if cache == "blocks of rows" else pools
        given |= {"key": pools[0], "value": pools[1], "block_table": paged["block_table"]}
        given |= {"block_size": P, "actual_seq_kvlen": LENGTHS}
        wrong = sums
    assert agree(ours(from_fused_infer_v2(**given)), want)
    with pytest.raises(ValueError, match=r"running sums|seq_lens\["):  # cumulative or not
        ours(from_fused_infer_v2(**given | {"actual_seq_kvlen": wrong}))
    if "pre_tokens" in options:
        off = given | {"pre_tokens": options["pre_tokens"] + 1}
        assert not agree(ours(from_fused_infer_v2(**off)), want)
        with pytest.raises(splitkv.UnsupportedError, match="next_tokens 1"):
            from_fused_infer_v2(**given | {"next_tokens": 1})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparse_mode": 4, "next_tokens": 0}, "ignores the window"),
        ({"sparse_mode": 2}, "aligned to the top left"),
        ({"sparse_mode": 9}, "sparse_mode 9"),
        ({"input_layout": "NTD"}, "input_layout 'NTD'"),
        ({"pse_shift": torch.zeros(1)}, "last n positions"),
        ({"key_antiquant_scale": torch.ones(1)}, "give k_scale"),
    ],
)
def test_fused_infer_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(splitkv.UnsupportedError, match=words):
        from_fused_infer(**fia_dense("BSND", queries()) | options)


def test_fused_infer_top_left_mask_is_ours_where_queries_are_the_whole_history() -> None:
    square = History([k[:5] for k in HISTORY.k], [v[:5] for v in HISTORY.v])
    q = queries(5)
    dense = square.dense()
    given = {"query": q, "key": dense["k"], "value": dense["v"], "input_layout": "BSND"}
    given |= {"num_heads": H, "num_key_value_heads": K}
    rows = zip(q, square.k, square.v, strict=True)
    want = theirs.stacked([theirs.fused_infer(*row, sparse_mode=3) for row in rows])
    assert agree(ours(from_fused_infer(**given, sparse_mode=2)), want)


# --- the table ---


def signature_names(call: str) -> set[str]:
    if call.startswith("torch_npu."):
        text = SCHEMAS[call.removeprefix("torch_npu.")]
        inside = text[text.index("(") + 1 : text.index(") ->")]
        return {re.split(r"[ =]", part.strip())[1] for part in inside.split(", ") if part != "*"}
    module, _, name = call.rpartition(".")
    return set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


@pytest.mark.parametrize(
    "call", [name for name in calls() if name.startswith(("torch_npu.", "torch."))]
)
def test_the_table_lists_the_signature_that_is_at_hand(call: str) -> None:
    assert {argument.name for argument in calls()[call].arguments} == signature_names(call)


@pytest.mark.parametrize("name", calls())
def test_no_argument_is_dropped_in_silence(name: str) -> None:
    call = calls()[name]
    module, _, function = call.function.rpartition(".")
    text = inspect.getsource(importlib.import_module(module))
    assert f"def {function}(" in text
    accepted = inspect.signature(splitkv.decode_attention).parameters
    required = {argument.name: None for argument in call.arguments if argument.required}
    for argument in call.arguments:
        match argument.how:
            case How.CONVERTED:
                assert f'"{argument.name}"' in text, f"nothing reads {argument.name}"
            case How.SAME:
                assert (argument.ours or argument.name) in accepted
            case How.REFUSED:
                refusal = re.escape(argument.says)
                with pytest.raises(splitkv.UnsupportedError, match=refusal):
                    screened(name, required | {argument.name: object()})
                for harmless in (None, *argument.unless):
                    screened(name, required | {argument.name: harmless})
    with pytest.raises(ValueError, match="has no argument 'dropout'"):
        screened(name, required | {"dropout": 0.0})
    if required:
        with pytest.raises(ValueError, match=f"needs {next(iter(required))}"):
            screened(name, {})


def test_the_page_is_the_tables() -> None:
    written = (Path(__file__).parents[1] / PAGE).read_text("utf-8")
    assert written == page(), "write it anew: python -m splitkv.integrations.argument_names"
    for call in calls().values():
        assert call.name in written
        assert math.prod(f"`{argument.name}`" in written for argument in call.arguments)
