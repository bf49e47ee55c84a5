"""What the Ascend backend refuses, in which words, and that its limits are those of the operators
it stands on.
"""

import importlib.util
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import splitkv
from ascend_calls import LAYOUTS, decode, make_call, on_npu
from splitkv.backends.ascend import AscendBackend
from splitkv.backends.registry import backend_named, explain, reasons
from splitkv.common.spec import DecodeSpec, Feature, Layout, ScaleKind
from splitkv.kernels_ascend import attention, checks, prepare, runtime, standin, whole
from splitkv.kernels_ascend.limits import Limit, limit, limits
from splitkv.kernels_ascend.routes import FIA_ROWS, Choice, page_warning

ASCEND = backend_named("ascend")


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


def make_spec(layout: str = "NHD", **fields: Any) -> DecodeSpec:
    paged = layout in ("NHD", "HND")
    fields = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 128,
        "page_size": 128 if paged else None,
        **fields,
    }
    return DecodeSpec(layout=Layout(layout), **fields)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_spec_is_taken(layout: str) -> None:
    assert ASCEND.refusals(make_spec(layout)) == []


REFUSED = {
    "soft cap": (
        {"logits_soft_cap": 30.0},
        "logit soft cap: the fused-infer operators have no argument for it that comes with an LSE "
        "(no tanh on the scores) (needs a vendor change)",
    ),
    "alibi": ({"alibi": True}, "ALiBi slopes: the operators take no slopes"),
    "bias": ({"attn_bias": True}, "additive bias: the operators' bias tensor (pse_shift)"),
    "mask": ({"attn_mask": True}, "boolean mask (trees): an explicit mask enters as a score"),
    "Dv": (
        {"head_dim_v": 64},
        "head_dim_v 64: key and value have one head dim outside of the 192/128 prefill",
    ),
    "float32": (
        {"dtype": torch.float32},
        "dtype float32: unquantised query, key and value are float16 or bfloat16 (torch "
        "documentation of FIA (4.1)); convert or choose another backend",
    ),
    "mixed dtypes": (
        {"dtype": torch.float16, "kv_dtype": torch.bfloat16},
        "cache dtype other than the query's: query, key and value have one dtype",
    ),
    "int8": (
        {"kv_dtype": torch.int8, "k_scale": ScaleKind.HEAD, "v_scale": ScaleKind.HEAD},
        "quantised cache with scales: the operators' int8 caches with antiquant scales have no",
    ),
    "D of 72": (
        {"head_dim": 72},
        "head_dim 72: the head dim of float16 and bfloat16 inputs is a multiple of 16 "
        "(torch documentation of FIA (4.1)); pad the heads",
    ),
    "D of 528": ({"head_dim": 528}, "head_dim 528: the head dim is at most 512"),
    "65 heads on one": (
        {"num_q_heads": 65, "num_kv_heads": 1},
        "query heads per kv head 65: at most 64 query heads per kv head",
    ),
    "258 heads": (
        {"num_q_heads": 258, "num_kv_heads": 258},
        "num_q_heads 258: at most 256 query heads",
    ),
    "page of 24": (
        {"page_size": 24},
        "page_size 24: with one query per row a page is a multiple of 16 tokens "
        "(torch documentation of FIA (4.1, 4.4; sglang 25169)); use pages of 128 tokens",
    ),
    "page of 1": (
        {"page_size": 1},
        "page_size 1: with one query per row a page is a multiple of 16",
    ),
    "page of 1024": ({"page_size": 1024}, "page_size 1024: a page has at most 512 tokens"),
    "wide cache rows": (
        {"num_q_heads": 256, "num_kv_heads": 256, "head_dim": 256},
        "kv heads x head_dim 65536: one token of a 3-D cache has at most 65535 elements",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_specs_say_why(name: str) -> None:
    fields, words = REFUSED[name]
    spec = make_spec(**fields)
    found = ASCEND.refusals(spec)
    assert found[0].startswith(words)
    assert len(found) == 1, found
    assert explain(spec, "npu")["ascend"] == found
    with pytest.raises(splitkv.UnsupportedError) as refusal:
        splitkv.select(spec, "npu", "ascend")
    assert found[0] in str(refusal.value)


def test_every_reason_is_given_at_once() -> None:
    spec = make_spec(head_dim=520, page_size=24, logits_soft_cap=1.0, dtype=torch.float32)
    words = (
        "logit soft cap",
        "dtype float32",
        "head_dim 520: the head dim of",
        "head_dim 520: the",
    )
    found = ASCEND.refusals(spec)
    assert len(found) == 5
    for start in (*words, "page_size 24"):
        assert any(reason.startswith(start) for reason in found)


def test_a_packed_cache_is_taken_as_far_as_tnd_is_documented() -> None:
    for D in (128, 192):
        assert ASCEND.choice(make_spec("packed", head_dim=D)).route.name == "fia-tnd"
    spec = make_spec("packed", head_dim=64, dtype=torch.float16)
    assert ASCEND.choice(spec).route.name == "fusion"
    assert AscendBackend(route="fia-tnd").refusals(spec) == [
        "dtype float16: layout TND takes bfloat16; sources take float16 too (torch documentation "
        "of FIA v2, TND section; vllm-ascend converts for it (4.2, 7.1))",
        "head_dim 64: layout TND takes head dims 128 and 192; sources and newer CANN take more "
        "(64, and up to 256 without a 4-D cache) (torch documentation of FIA v2, TND section "
        "(4.1, 4.2))",
    ]
    assert AscendBackend(route="fia-tnd", strict=False).refusals(spec) == []


def test_wide_rows_are_fine_by_head() -> None:
    wide = {"num_q_heads": 256, "num_kv_heads": 256, "head_dim": 256}
    assert ASCEND.refusals(make_spec("HND", **wide)) == []


# --- limits ------------------------------------------------------------------------------------


def test_declared_ranges_are_the_documented_limits() -> None:
    """``Support`` states numbers that the matrix reads; they must be those of limits.yaml."""
    support = ASCEND.support
    for D in range(1, 800):
        assert (D in support.head_dim) == (not ASCEND.refusals(make_spec("BSND", head_dim=D)))
        v = make_spec("BSND", head_dim=768, head_dim_v=D)
        assert (D in support.head_dim_v) == (not ASCEND.refusals(v))
    for page in range(1, 1100):
        assert (page in support.page_size) == (not ASCEND.refusals(make_spec(page_size=page)))
    for group in range(1, 300):
        spec = make_spec("BSND", num_q_heads=group, num_kv_heads=1)
        assert (group in support.group) == (not ASCEND.refusals(spec))


@contextmanager
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend without its own refusals: whatever comes goes to the operator."""
    with monkeypatch.context() as patch:
        patch.setattr(type(ASCEND), "refusals", lambda self, spec: [])
        for module in (attention, checks, prepare, whole):
            chosen = Choice(FIA_ROWS, {}, [])
            patch.setattr(module, "choose", lambda spec, wants, chosen=chosen: chosen)
        patch.setattr(checks, "violations", lambda facts, strict: [])
        yield


@pytest.mark.parametrize(
    "fields",
    [
        {"D": 72},
        {"D": 528},
        {"heads": (65, 1)},
        {"page": 24},
        {"page": 1},
        {"page": 1024},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_what_is_refused_here_the_operator_refuses_too(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call("NHD", [100, 30], **fields)
    assert ASCEND.refusals(call.spec)
    with (
        unchecked(monkeypatch),
        warnings.catch_warnings(action="ignore"),
        pytest.raises(RuntimeError, match="561002"),
    ):
        decode(call)


@pytest.mark.parametrize(
    ("D", "Dv", "route"),
    [
        (128, 128, "fia-tnd"),
        (192, 128, "fusion"),
        (192, 192, "fia-tnd"),
        (96, 96, "fusion"),
        (96, 128, None),
    ],
)
def test_head_dim_pairs_of_a_packed_cache(D: int, Dv: int, route: str | None) -> None:
    spec = make_spec("packed", num_q_heads=16, num_kv_heads=4, head_dim=D, head_dim_v=Dv)
    chosen = ASCEND.choice(spec).route
    assert (None if chosen is None else chosen.name) == route
    assert bool(ASCEND.refusals(spec)) == (route is None)


@pytest.mark.parametrize("page", [1, 8, 16, 32, 64, 128, 256])
def test_each_page_size_is_right_or_refused(page: int) -> None:
    for queries in (1, 32):
        call = make_call("NHD", [100, 300], heads=(16, 8), page=page, queries=queries)
        with warnings.catch_warnings(action="ignore"):
            if page % 16:
                with pytest.raises(splitkv.UnsupportedError, match=f"page_size {page}: "):
                    decode(call)
            else:
                assert decode(call)[0].isfinite().all()


def test_other_pages_than_128_warn_with_the_reason() -> None:
    call = make_call("NHD", [100], page=16)
    with pytest.warns(UserWarning, match=r"page size 16: 128 is the only page size that .* 910C"):
        decode(call)
    with pytest.warns(UserWarning, match="page size 16: "):
        ASCEND.plan(call.spec, [100])
    assert page_warning(128) is None
    with warnings.catch_warnings(action="error"):
        decode(make_call("NHD", [100]))


def test_limits_are_typed_and_have_sources() -> None:
    for name, entry in limits().items():
        assert isinstance(entry, Limit)
        assert entry.name == name
        assert entry.source
        assert entry.says


GOOD = {"operators": ["npu_attention_update"], "of": "shards", "says": "b", "source": "c"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"max": 1}, "must have"),
        ({**GOOD, "max": 1, "colour": 2}, "of the rest only"),
        (GOOD, "must have exactly one rule"),
        ({**GOOD, "max": 1, "min": 1}, "must have exactly one rule"),
        ({**GOOD, "max": True}, "of another kind"),
        ({**GOOD, "max": [1]}, "of another kind"),
        ({**GOOD, "one_of": 1}, "of another kind"),
        ({**GOOD, "same_as": "nothing"}, "of another kind"),
        ({**GOOD, "max": 1, "of": "nothing"}, "must be a field of Facts"),
        ({**GOOD, "max": 1, "says": ""}, "needs texts"),
        ({**GOOD, "max": 1, "when": {"nothing": {"max": 1}}}, "unknown facts"),
        ({**GOOD, "max": 1, "socs": ["910A"]}, "not a valid Soc"),
    ],
)
def test_malformed_limits_are_refused(entry: dict[str, object], words: str) -> None:
    from splitkv.kernels_ascend.limits import _limit

    with pytest.raises(ValueError, match=words):
        _limit("broken", entry)


# --- refusals that only the tensors show -------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_caches_are_refused_before_a_launch(layout: str) -> None:
    call = make_call(layout, [100, 30])
    both = torch.stack([call.cache.k, call.cache.v], -2)
    cache = replace(call.cache, k=both[..., 0, :], v=both[..., 1, :])
    with (
        standin.recording() as calls,
        pytest.raises(splitkv.UnsupportedError, match=r"k has strides .* keep K and V") as refusal,
    ):
        decode(replace(call, cache=cache))
    assert "v has strides" in str(refusal.value)
    assert not [one for one in calls if one.name.startswith("npu::")]


def test_strides_are_refused_before_there_is_a_key() -> None:
    call = make_call("BSND", [0, 0], capacity=128)
    k, v = (x.repeat_interleave(2, -1)[..., ::2] for x in (call.cache.k, call.cache.v))
    assert decode(call)[0].eq(0).all()
    with pytest.raises(splitkv.UnsupportedError, match=r"k has strides"):
        decode(replace(call, cache=replace(call.cache, k=k, v=v)))


def test_pages_of_k_and_v_at_different_steps_are_refused() -> None:
    call = make_call("NHD", [100, 30])
    twice = torch.stack([call.cache.k, call.cache.k], 1)
    cache = replace(call.cache, k=twice[:, 0])
    with pytest.raises(splitkv.UnsupportedError, match="pages of k lie 2 apart, pages of v 1"):
        decode(replace(call, cache=cache))


def test_tensor_refusals_can_be_asked_for() -> None:
    call = make_call("BSND", [300], capacity=521)
    (reason,) = ASCEND.tensor_refusals(call, ASCEND.plan(call.spec, [300], num_splits=2))
    assert reason.startswith("T 521 of the dense cache")
    assert ASCEND.tensor_refusals(call, ASCEND.plan(call.spec, [300])) == []


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize(
    ("semantics", "arguments"),
    [({"queries": 2}, {}), ({"sliding_window": 9}, {}), ({}, {"num_splits": 2})],
    ids=["queries", "window", "splits"],
)
def test_odd_dense_capacities_are_refused_where_pages_are_needed(
    layout: str, semantics: dict[str, Any], arguments: dict[str, Any]
) -> None:
    call = make_call(layout, [300, 200], capacity=521, **semantics)
    with pytest.raises(
        splitkv.UnsupportedError, match=r"T 521 .* not a multiple of 16.*multiples of 128"
    ):
        decode(call, **arguments)


@contextmanager
def limited(monkeypatch: pytest.MonkeyPatch, **values: int) -> Iterator[None]:
    """Smaller limits, so that small calls reach them."""
    changed = {name: replace(limit(name), value=value) for name, value in values.items()}
    with monkeypatch.context() as patch:
        known = {**limits(), **changed}
        patch.setattr("splitkv.kernels_ascend.limits.limits", lambda: known)
        yield


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    single, several = make_call("NHD", [600, 600]), make_call("NHD", [600, 600], queries=2)
    with limited(monkeypatch, rows_max=4, rows_tnd_max=8, tnd_tokens_max=10):
        decode(single, num_splits=2)
        with pytest.raises(splitkv.UnsupportedError, match=r"rows 6: .* use fewer splits"):
            decode(single, num_splits=3)
        decode(several)
        with pytest.raises(splitkv.UnsupportedError) as refusal:
            decode(several, num_splits=3)
    # each request: two shared splits of two queries, and the last split once per query
    assert "tokens 12: layout TND takes at most" in str(refusal.value)
    assert "rows " not in str(refusal.value).replace("1 rows", "")


@pytest.mark.parametrize(
    ("layout", "words"),
    [("NHD", "keys 300"), ("BSND", "T 640"), ("packed", "keys 300")],
)
def test_too_long_rows_are_refused_unless_cut(
    layout: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(layout, [300])
    with limited(monkeypatch, keys_per_row_max=256):
        with pytest.raises(
            splitkv.UnsupportedError, match=rf"{words}: with one query per row .* num_splits"
        ):
            decode(call, num_splits=1)
        decode(call, num_splits=2)


def test_too_large_pools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        limited(monkeypatch, kv_elements_max=1000),
        pytest.raises(
            splitkv.UnsupportedError, match=r"k spans .* elements: .* fewer than 2\*\*31"
        ),
    ):
        decode(make_call("NHD", [300]))


def test_lengths_for_another_batch_are_malformed() -> None:
    """Nine lengths for sixteen rows never reach the operator."""
    call = make_call("NHD", [100] * 16, heads=(8, 2), D=128)
    with pytest.raises(ValueError, match="seq_lens has 9 requests, block_table has 16"):
        replace(call.cache, seq_lens=call.cache.seq_lens[:9])
    with pytest.raises(ValueError, match="plan is for 9 requests, the cache has 16"):
        decode(call, plan=ASCEND.plan(call.spec, [100] * 9))
    cache = on_npu(call.cache)
    for lengths in ([100] * 16, torch.tensor([100] * 16).numpy()):
        out = splitkv.decode_attention(
            on_npu(call.q),
            cache.k,
            cache.v,
            seq_lens=lengths,
            block_table=cache.block_table,
            layout="NHD",
        )
        assert torch.equal(out.cpu(), decode(call)[0])


# --- absence -----------------------------------------------------------------------------------


def test_without_torch_npu_the_backend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    standin.uninstall()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ASCEND.missing() == (
        "torch_npu is not installed; install CANN and the torch-npu release for torch "
        f"{torch.__version__}"
    )
    assert ASCEND.evidence == "device"
    assert ASCEND.missing() in reasons(ASCEND, make_spec(), "npu")
    assert ASCEND.plan(make_spec(), [300]).profile.name == "Ascend910B3"


def test_installed_but_not_loaded_names_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    standin.uninstall()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in (ASCEND.missing() or "")


def test_no_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    assert "sees no NPU" in (ASCEND.missing() or "")


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("Ascend910B1", "Ascend910B1"),
        ("Ascend910B4", "Ascend910B4"),
        ("Ascend910B2C", "Ascend910B3"),
        ("Ascend910_9382", "Ascend910_93"),
    ],
)
def test_profiles_go_by_device_name(
    device: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.npu, "get_device_name", lambda: device)
    assert ASCEND.missing() is None
    assert ASCEND.profile().name == profile


def test_a_310p_has_no_operator_with_an_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "get_device_name", lambda: "Ascend310P3")
    assert ASCEND.missing() is None
    (reason,) = ASCEND.refusals(make_spec("BSND", dtype=torch.float16))
    assert reason.startswith("Ascend 310P has no npu_fused_infer_attention_score, only 910B")
    taker = AscendBackend(needs_lse=False)
    assert taker.choice(make_spec("BSND", dtype=torch.float16)).route.name == "incre"
    (reason,) = taker.refusals(make_spec("BSND"))
    assert reason.startswith("dtype bfloat16: on 310P float16 only")


def test_an_unknown_generation_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "get_device_name", lambda: "Ascend1000X")
    assert "Ascend1000X is of no generation whose limits are known" in (ASCEND.missing() or "")


def test_torch_npu_is_loaded_by_nobody_but_the_kernels() -> None:
    assert sys.modules["torch_npu"].SPLITKV_STANDIN
    assert runtime.is_standin()
    assert math.isfinite(limit("head_dim_max").number)


def test_every_feature_is_stated() -> None:
    assert set(ASCEND.support.features) == set(Feature)
