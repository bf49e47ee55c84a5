"""Rung 2: our limits and our validator against the wheel's own documents: examples and numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from documented_numbers import FIA, FIA_V2, NOT_READ, STATED, Stated, disagreements, unread
from documents import Call, Example, examples, run, texts
from splitkv.backends.ascend import AscendBackend
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.support import dtype_name
from splitkv.kernels_ascend.limits import Facts, Limit, limits, load, violations

TEXTS = texts()
FAMILY = {
    "npu_fused_infer_attention_score.out": FIA,
    "npu_fused_infer_attention_score_v2.out": FIA_V2,
    "npu_fusion_attention_v2": "npu_fusion_attention",
    "npu_fusion_attention_v3": "npu_fusion_attention",
}
"""Documents of variants, read with the limits of the operator that they vary."""
OURS = {
    name: FAMILY.get(name, name) for name in TEXTS if FAMILY.get(name, name) in load().operators
}
EXAMPLES = [example for name in OURS for example in examples(name, TEXTS[name])]
NO_CALL = {
    ("npu_fusion_attention", 0): "wants a test library",
    ("npu_fusion_attention_v3", 0): "wants a test library",
    ("npu_scatter_pa_kv_cache", 0): "a space within a name: it is no Python from there on",
    ("npu_scatter_pa_kv_cache", 1): "asks for a name that it does not have",
}
"""Examples that end before they call the operator."""
NO_SPEC = {
    "pse": "additive scores of a training operator",
    "pse_shift": "additive scores",
    "atten_mask": "a full mask over one query, whose right reading is disputed (issue 15503)",
    "sink": "a sink for an operator whose state we take without it",
    "query_rope": "rope apart from the query; a training layout",
}
"""Arguments that keep an example from being one of our specs."""


def program_id(example: Example) -> str:
    return f"{example.operator}-{example.number}"


def calls_of(example: Example, folder: Path) -> list[Call]:
    found, _ = run(example, folder)
    return [call for call in found if call[0] in (example.operator.partition(".")[0],)]


def sizes(given: dict[str, Any]) -> dict[str, int]:
    """B, S, T, H, K, D of a call's tensors, whatever the layout."""
    layout = given["input_layout"].split("_")[0]
    heads = next(given[n] for n in ("num_heads", "num_query_heads", "head_num") if n in given)
    query, key = list(given["query"].shape), list(given["key"].shape)
    if layout in ("BSH", "SBH"):
        D = query[2] // heads
        query, key = ([*shape[:2], shape[2] // D, D] for shape in (query, key))
        layout = layout.replace("H", "ND")
    named = (dict(zip(layout, shape, strict=True)) for shape in (query, key))
    q, k = named
    rows = {"S": q.get("T", q.get("S")), "T": k.get("T", k.get("S"))}
    return {"B": q.get("B", 1), "H": heads, "K": k["N"], "D": q["D"], **rows}


def facts_of(call: Call) -> Facts:
    """The call as our validator sees calls."""
    name, given = call
    operator = FAMILY.get(name, name)
    if operator == "npu_attention_update":
        return Facts(
            operator=operator, shards=len(given["lse"]), head_dim=given["local_out"][0].shape[-1]
        )
    n, mask, mode = sizes(given), given["atten_mask"], given.get("sparse_mode", 0)
    compressed = mask is not None and mode in (2, 3, 4) and list(mask.shape[-2:]) == [2048, 2048]
    return Facts(
        operator=operator,
        layout=given["input_layout"],
        dtype=dtype_name(given["query"].dtype),
        kv_dtype=dtype_name(given["key"].dtype),
        head_dim=n["D"],
        head_dim_v=n["D"],
        rope_dim=0,
        heads=n["H"],
        kv_heads=n["K"],
        group=n["H"] // n["K"],
        cache_form=0,
        kv_elements=given["key"].numel(),
        rows=n["B"],
        queries=n["S"],
        keys=n["T"],
        sparse_mode=mode,
        mask="none" if mask is None else "compressed" if compressed else "full",
        inner_precise=given.get("inner_precise"),
    )


def spec_of(call: Call) -> DecodeSpec | str:
    """The call as a request of ours, or the argument that keeps it from being one."""
    _, given = call
    if "input_layout" not in given:
        return "a merge, no request"
    for name, reason in NO_SPEC.items():
        if isinstance(given.get(name), Tensor):
            return f"{name}: {reason}"
    n = sizes(given)
    layout = {"BNSD": Layout.BNSD, "TND": Layout.PACKED}.get(given["input_layout"], Layout.BSND)
    return DecodeSpec(
        num_q_heads=n["H"],
        num_kv_heads=n["K"],
        head_dim=n["D"],
        layout=layout,
        dtype=given["query"].dtype,
        num_queries=n["S"],
        packed_queries=layout is Layout.PACKED,
        causal=given.get("sparse_mode") == 3 and given["atten_mask"] is not None,
    )


def test_every_document_of_attention_is_read_or_listed() -> None:
    other = sorted(n for n in TEXTS if "atten" in n or "flash" in n if n not in OURS)
    print("documents of operators that no route uses:", other)
    assert set(load().operators) - set(OURS) == {
        "_npu_paged_attention"
    }  # ATB has its own, no example
    assert len(EXAMPLES) >= 14


@pytest.mark.parametrize("example", EXAMPLES, ids=program_id)
def test_an_example_is_within_our_limits(example: Example, tmp_path: Path) -> None:
    calls = calls_of(example, tmp_path)
    if (example.operator, example.number) in NO_CALL:
        assert not calls, "it can be read now"
        return
    assert calls
    for call in calls:
        assert not violations(facts_of(call), strict=False)
        strictly = violations(facts_of(call))
        print(program_id(example), "strictly:", strictly or "within")
        assert not strictly or "layout TND" in strictly[0] or "full mask" in strictly[0]


@pytest.mark.parametrize("example", EXAMPLES, ids=program_id)
def test_a_backend_takes_an_example(example: Example, tmp_path: Path) -> None:
    routes = {FIA: ("fia-tnd", "fia-rows"), FIA_V2: ("fia-tnd", "fia-rows")}
    routes |= {"npu_incre_flash_attention": ("incre",), "npu_prompt_flash_attention": ("prompt",)}
    routes |= {"npu_fusion_attention": ("fusion",)}
    for call in calls_of(example, tmp_path):
        spec = spec_of(call)
        if isinstance(spec, str):
            print(program_id(example), "is no spec of ours:", spec)
            continue
        backends = [
            AscendBackend(strict=False, needs_lse=False, route=name)
            for name in routes[OURS[example.operator]]
        ]
        reasons = [backend.refusals(spec) for backend in backends]
        assert [] in reasons, reasons


def test_an_example_beyond_a_limit_would_be_refused(tmp_path: Path) -> None:
    example = next(e for e in EXAMPLES if e.operator == FIA)
    facts = facts_of(calls_of(example, tmp_path)[0])
    assert not violations(facts)
    for change in ({"head_dim": 528}, {"heads": 257}, {"layout": "BDNS"}, {"dtype": "float32"}):
        assert violations(replace(facts, **change)), change  # type: ignore[arg-type]


# Numbers


@pytest.mark.parametrize(
    "stated", STATED, ids=lambda stated: f"{stated.limit}-{stated.documents[0]}"
)
def test_a_documented_number_is_the_limit(stated: Stated) -> None:
    assert not disagreements(stated, TEXTS, limits())


def numbered(entry: Limit) -> bool:
    values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
    return all(isinstance(value, int) for value in values)


def test_every_number_is_read_or_listed() -> None:
    read = {stated.limit for stated in STATED}
    ours = {name for name, entry in limits().items() if numbered(entry)}
    assert read | set(NOT_READ) == ours, "say where the documents state it, or why they do not"
    assert not read & set(NOT_READ)


def _more(entry: Limit) -> Limit:
    if isinstance(entry.value, tuple):
        return replace(entry, value=tuple(int(value) + 1 for value in entry.value))
    return replace(entry, value=entry.number + 1)


def _fewer(entry: Limit) -> Limit:
    if isinstance(entry.value, tuple):
        return replace(entry, value=tuple(int(value) - 1 for value in entry.value))
    return replace(entry, value=entry.number - 1)


@pytest.mark.parametrize("change", [_more, _fewer])
def test_a_perturbed_limit_is_reported(change: Callable[[Limit], Limit]) -> None:
    perturbed = {
        name: change(entry) if numbered(entry) else entry for name, entry in limits().items()
    }
    unseen = [stated.limit for stated in STATED if not disagreements(stated, TEXTS, perturbed)]
    assert not unseen


def test_a_document_that_no_longer_states_it_is_reported() -> None:
    silent = dict.fromkeys(TEXTS, "")
    assert all(disagreements(stated, silent, limits()) for stated in STATED)


def test_sentences_that_no_pattern_reads_are_listed() -> None:
    for name in OURS:
        for sentence in unread(name, TEXTS[name]):
            print(f"{name}: not read: {sentence}")


def test_dtypes_of_the_first_line_are_ours() -> None:
    line = next(line for line in TEXTS[FIA].splitlines() if line.startswith("query: Tensor"))
    for dtype in (torch.float16, torch.bfloat16):
        assert dtype_name(dtype) in line
        assert dtype_name(dtype) in limits()["fia_dtype"].choices
    assert "float32" not in line
