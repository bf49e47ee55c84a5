"""What ``splitkv explain --emit torch_npu`` prints runs on the stand-in and gives the reference's
answer.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import splitkv
from ascend_calls import make_call, on_npu
from splitkv.cli.main import main
from splitkv.common.call import DecodeCall
from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.emit import emit
from splitkv.kernels_ascend.routes import OWN, ROUTES, Wants, choose
from splitkv.kernels_ascend.soc import Soc
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

LENGTHS = [300, 0, 129, 520]
SINKS = torch.tensor([0.5, -3.0, 2.0, 4.0])


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


def latent(layout: str, **fields: Any) -> DecodeCall:
    call = make_call(layout, LENGTHS, heads=(4, 1), D=576, **fields)
    cache = replace(call.cache, v=call.cache.k[..., :512])
    return replace(call, cache=cache, spec=replace(call.spec, head_dim_v=512))


def complaints(call: DecodeCall, text: str, sinks: torch.Tensor | None = None) -> list[str]:
    """Run what is printed and compare."""
    space: dict[str, Any] = {}
    exec(compile(text, "emitted", "exec"), space)  # noqa: S102 (running it is the point)
    keys = [call.cache.k, call.cache.v]
    if "latent, rope" in text:
        keys = [part.contiguous() for part in call.cache.k.split([512, 64], -1)]
    placed = [on_npu(part) for part in (call.q, *keys)]
    if call.spec.layout.paged:
        # whatever stands behind the used entries
        placed.append(on_npu(call.cache.block_table))
    more = [] if sinks is None else [on_npu(sinks)]
    out, lse = space["decode"](*placed, call.cache.seq_lens.tolist(), *more)
    answer = reference(call, sinks)
    lse = answer.lse.float() if lse is None else lse.cpu()
    return errors(out.cpu(), lse, answer).exceeds(bounds(call, sinks, answer, 3))


OUTPUT = {"needs_lse": False}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("NHD", {}, {}, "fia-rows"),
    ("HND", {}, {}, "fia-rows"),
    ("BSND", {}, {}, "fia-rows"),
    ("BNSD", {}, {}, "fia-rows"),
    ("NHD", {"queries": 3, "dtype": torch.float16}, {}, "fia-rows"),
    ("BSND", {"queries": 3, "dtype": torch.float16}, {}, "fia-rows"),
    ("HND", {"queries": 3, "D": 64, "causal": False}, {}, "fia-rows"),
    ("NHD", {"sliding_window": 100}, {}, "fia-rows"),
    ("HND", {"sliding_window": 200, "anchor_tokens": 7}, {}, "fia-rows"),
    ("NHD", {"sliding_window": 3, "anchor_tokens": 150}, {}, "fia-rows"),
    ("NHD", {"sliding_window": 1000}, {}, "fia-rows"),
    ("HND", {"sliding_window": 100, "queries": 3, "D": 64}, {}, "fia-rows"),
    ("NHD", {"sliding_window": 100, "queries": 3}, {}, "fia-tnd"),
    ("NHD", {"queries": 3}, {}, "fia-tnd"),
    ("HND", {"queries": 3, "causal": False}, {}, "fia-tnd"),
    ("packed", {}, {}, "fia-tnd"),
    ("packed", {"queries": 3}, {}, "fia-tnd"),
    ("packed", {"D": 64, "queries": 3}, {}, "fusion"),
    ("BSND", {"dtype": torch.float32, "queries": 3}, {}, "fusion"),
    ("BNSD", {"dtype": torch.float32}, {}, "fusion"),
    ("NHD", {}, {"route": "incre", **OUTPUT}, "incre"),
    ("HND", {}, {"route": "incre", **OUTPUT}, "incre"),
    ("BSND", {}, {"route": "incre", **OUTPUT}, "incre"),
    ("BNSD", {}, {"route": "incre", **OUTPUT}, "incre"),
    ("NHD", {}, {"route": "paged-attention", **OUTPUT}, "paged-attention"),
    ("BSND", {"queries": 3}, {"route": "prompt", **OUTPUT}, "prompt"),
    ("BNSD", {"queries": 3, "causal": False}, {"route": "prompt", **OUTPUT}, "prompt"),
]


@pytest.mark.parametrize(("layout", "fields", "wants", "route"), CASES, ids=str)
def test_what_is_printed_is_right(
    layout: str, fields: dict[str, Any], wants: dict[str, Any], route: str
) -> None:
    call = make_call(layout, LENGTHS, **fields)
    asked = Wants(**wants)
    chosen = choose(call.spec, asked).route
    assert chosen is not None
    assert chosen.name == route
    text = emit(call.spec, asked)
    assert complaints(call, text) == []
    if chosen.state:
        sunk = replace(call, spec=replace(call.spec, sinks=True))
        assert complaints(sunk, emit(sunk.spec, asked), SINKS) == []


@pytest.mark.parametrize("layout", ["NHD", "HND", "BSND", "BNSD"])
@pytest.mark.parametrize("queries", [1, 3])
def test_absorbed_mla(layout: str, queries: int) -> None:
    call = latent(layout, queries=queries)
    assert complaints(call, emit(call.spec, Wants(strict=False))) == []


@pytest.mark.parametrize("queries", [1, 3])
def test_sinks_that_the_operator_adds(queries: int) -> None:
    call = make_call("NHD", LENGTHS, queries=queries, sinks=True)
    sinks = SINKS.bfloat16().float()
    assert complaints(call, emit(call.spec, Wants(route="fia-sinks")), sinks) == []


def test_every_route_is_printed() -> None:
    printed = {route for *_, route in CASES} | {"fia-mla", "fia-sinks"}
    assert printed == {route.name for route in ROUTES}


def test_a_310p_whose_operator_takes_no_lists_is_not_printed_for() -> None:
    fields = {"queries": 3, "causal": False, "heads": (4, 4), "dtype": torch.float16}
    spec = make_call("BSND", [9], **fields).spec
    wants = Wants(soc=Soc.ATLAS_310P, **OUTPUT)
    assert getattr(choose(spec, wants).route, "name", None) == "prompt"
    with pytest.raises(splitkv.UnsupportedError, match="route prompt on 310P"):
        emit(spec, wants)


MISTAKES = [
    ("NHD", {}, "scale=SCALE", "scale=1.0"),
    ("NHD", {}, "(lse <= -1e30)", "(lse != lse)"),
    ("NHD", {"queries": 3}, "sparse_mode=3", "sparse_mode=2"),
    ("NHD", {"queries": 3, "dtype": torch.float16}, "n - S + 1 + t", "n - S + 2 + t"),
    ("NHD", {"sliding_window": 100}, "own - W", "own - W - 1"),
    ("NHD", {"sliding_window": 100}, "min(first + step", "min(step"),
    ("HND", {"sliding_window": 100}, "torch.exp(lse - top)", "torch.ones_like(lse)"),
    ("packed", {"D": 64}, "total[..., 0].log()", "total.sum(-1).log()"),
]


@pytest.mark.parametrize(("layout", "fields", "right", "mistake"), MISTAKES, ids=str)
def test_a_mistake_in_what_is_printed_is_found(
    layout: str, fields: dict[str, Any], right: str, mistake: str
) -> None:
    call = make_call(layout, LENGTHS, **fields)
    text = emit(call.spec, Wants())
    assert right in text
    try:
        found = complaints(call, text.replace(right, mistake))
    except (IndexError, RuntimeError) as fault:
        found = [str(fault)]
    assert found


def test_it_imports_nothing_of_ours() -> None:
    for layout, fields, wants, _ in CASES:
        text = emit(make_call(layout, LENGTHS, **fields).spec, Wants(**wants))
        tree = ast.walk(ast.parse(text))
        names = {
            alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names
        }
        assert names == {"math", "torch", "torch_npu"}
        assert "no NPU has\nrun it" in text
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("layout", "fields", "words"),
    [
        ("NHD", {"dtype": torch.float32}, "dtype float32: unquantised query"),
        ("BSND", {"sliding_window": 9}, "windows are printed for pages only"),
        ("NHD", {"sliding_window": 9, "window_block": 3}, "windows are printed for window_block 1"),
        ("NHD", {"counts": [1, 2]}, "ragged queries"),
        ("NHD", {"sliding_window": 9, "anchor_tokens": 1, "queries": 2}, "anchors with several"),
    ],
)
def test_what_is_not_printed_says_why(layout: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(splitkv.UnsupportedError, match=words):
        emit(make_call(layout, [30, 9], **fields).spec, Wants())


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--heads", "4:2", "--page-size", "128"]
    assert main([*arguments, "--emit", "torch_npu"]) == 0
    text = capsys.readouterr().out
    call = make_call("NHD", LENGTHS)
    assert text == emit(call.spec, Wants())
    assert complaints(call, text) == []
    assert main([*arguments, "--emit", "torch_npu", "--head-dim", "72"]) == 1
    assert "head_dim 72" in capsys.readouterr().out


def test_the_command_shows_each_route(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--page-size", "128", "--backend", "ascend"]
    main(arguments)
    shown = capsys.readouterr().out
    assert "FIA v1, BSND, 3-D cache" in shown
    for route in (*ROUTES, OWN):
        assert route.name in shown
    main([*arguments, "--soc", "310P", "--dtype", "float16", "--json"])
    answer = json.loads(capsys.readouterr().out)["ascend"]
    assert answer["soc"] == "310P"
    assert answer["route"] is None
    assert answer["against"]["fia-rows"][0].startswith("Ascend 310P has no npu_fused_infer")
    main([*arguments, "--soc", "310P", "--dtype", "float16", "--json", "--no-lse"])
    assert json.loads(capsys.readouterr().out)["ascend"]["route"] == "incre"
    assert main([*arguments, "--soc", "310Q"]) != 0
