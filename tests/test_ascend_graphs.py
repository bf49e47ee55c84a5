"""Captured calls on the stand-in: stale lengths, updates, workspaces, tables, refusals."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import splitkv
from ascend_calls import make_call, on_npu
from splitkv.backends.registry import backend_named
from splitkv.common.call import DecodeCall
from splitkv.kernels_ascend import fused_infer, graphs, standin
from splitkv.kernels_ascend.graphs import GraphDecode, graph_refusals
from splitkv.kernels_ascend.routes import Wants
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

ASCEND = backend_named("ascend")
LONGEST = 600


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


def shortened(call: DecodeCall, lengths: list[int]) -> DecodeCall:
    """The same memory with other lengths."""
    return replace(call, cache=replace(call.cache, seq_lens=torch.tensor(lengths)))


def placed(call: DecodeCall) -> DecodeCall:
    return replace(call, q=on_npu(call.q), cache=on_npu(call.cache))


def table_of(call: DecodeCall) -> Any:
    """The block table; entries past a request's pages are garbage on purpose."""
    table = getattr(call.cache, "block_table", None)
    return None if table is None else on_npu(table)


def wrong(state: splitkv.PartialState, call: DecodeCall) -> list[str]:
    out, lse = splitkv.finish(state, dtype=call.q.dtype)
    answer = reference(call)
    return errors(out.cpu(), lse.cpu(), answer).exceeds(bounds(call, None, answer, 1))


def decoder(call: DecodeCall, **fields: Any) -> GraphDecode:
    return GraphDecode(call.spec, batch=call.batch, max_len=LONGEST, device="npu", **fields)


CALLS = [
    ("NHD", {}),
    ("HND", {}),
    ("NHD", {"D": 64, "dtype": torch.float16}),
    ("BSND", {}),
    ("BNSD", {}),
    ("NHD", {"queries": 3}),
    ("HND", {"queries": 3, "causal": False}),
    ("NHD", {"sliding_window": 100}),
    ("HND", {"sliding_window": 200, "queries": 3}),
    ("NHD", {"sliding_window": 129}),
    ("NHD", {"sliding_window": 1}),
]
STEPS = [[300, 0, 129, 520], [301, 140, 0, 521], [600, 9, 128, 257], [128, 3, 256, 3]]


@pytest.mark.parametrize(("layout", "fields"), CALLS, ids=str)
def test_replays_follow_the_lengths(layout: str, fields: dict[str, Any]) -> None:
    call = make_call(layout, [LONGEST] * 4, **fields)
    here = placed(call)
    decode = decoder(call)
    decode.refresh(STEPS[0], table_of(call))
    decode.partial(here.q, here.cache)  # sizes the workspace
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        states = [decode.partial(here.q, here.cache) for _ in range(2)]
    for lengths in STEPS:
        decode.refresh(lengths, table_of(call))
        graph.update(cpu_update_input=decode.updates(layers=2))
        graph.replay()
        for state in states:
            assert wrong(state, shortened(call, lengths)) == [], lengths


@pytest.mark.parametrize(("layout", "fields"), CALLS, ids=str)
def test_no_request_is_no_operator_and_no_update(layout: str, fields: dict[str, Any]) -> None:
    call = make_call(layout, [], **fields)
    here, decode = placed(call), decoder(call)
    decode.refresh([], table_of(call))
    graph = torch.npu.NPUGraph()
    with standin.recording() as calls, torch.npu.graph(graph):
        state = decode.partial(here.q, here.cache)
    assert not [one.name for one in calls if one.name.startswith("npu::")]
    assert decode.updates(layers=2) == []
    assert state.out.shape == (0, call.spec.num_queries, 4, call.spec.head_dim)
    assert state.lse.shape == state.out.shape[:-1]


@pytest.mark.parametrize("layout", ["NHD", "BSND"])
def test_a_naive_replay_computes_the_captured_lengths(layout: str) -> None:
    """The backend's own call in a graph: right for the capture's lengths, wrong for any other."""
    call = make_call(layout, [300, 129])
    here = placed(shortened(call, [300, 129]))
    plan = ASCEND.plan_for(here)
    ASCEND.partial(here, plan)  # binds the plan: a capture must not copy
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        state = ASCEND.partial(here, plan)
    graph.replay()
    assert wrong(state, call) == []
    shorter = shortened(call, [200, 100])
    here.cache.seq_lens.copy_(torch.tensor([200, 100]))
    graph.replay()
    assert wrong(state, shorter)
    assert wrong(state, call) == []


def test_forgetting_the_update_or_the_table_is_seen() -> None:
    call = make_call("NHD", [LONGEST] * 2, sliding_window=100)
    here = placed(call)
    decode = decoder(call)
    decode.refresh([300, 140], table_of(call))
    decode.partial(here.q, here.cache)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        state = decode.partial(here.q, here.cache)
    later = [500, 290]
    decode.refresh(later, table_of(call))
    graph.replay()
    assert wrong(state, shortened(call, later))  # the table has moved, the lengths have not
    graph.update(cpu_update_input=decode.updates())
    graph.replay()
    assert wrong(state, shortened(call, later)) == []


def test_a_workspace_of_the_first_lengths_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 5000
    call = make_call("BSND", [longest] * 2, capacity=5120)
    here = placed(call)
    ours, naive = (GraphDecode(call.spec, batch=2, max_len=longest, device="npu") for _ in range(2))
    ours.refresh([9, 9])
    ours.partial(here.q, here.cache)
    ours.refresh([longest] * 2)
    assert wrong(ours.partial(here.q, here.cache), call) == []
    right = fused_infer.single_call
    naive.refresh([9, 9])
    with monkeypatch.context() as patch:
        patch.setattr(
            graphs, "single_call", lambda q, heads, _, **rest: right(q, heads, [9, 9], **rest)
        )
        naive.partial(here.q, here.cache)
    naive.refresh([longest] * 2)
    with pytest.raises(RuntimeError, match="bytes are needed"):
        naive.partial(here.q, here.cache)


def test_a_window_one_too_wide_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """pre_tokens = W keeps W + 1 keys."""
    call = make_call("NHD", [300, 129], sliding_window=3)
    here, decode = placed(call), decoder(call)
    decode.refresh([300, 129], table_of(call))
    assert wrong(decode.partial(here.q, here.cache), call) == []
    right = fused_infer.packed_call
    monkeypatch.setattr(
        graphs,
        "packed_call",
        lambda *args, window, **rest: right(*args, window=window + 1, **rest),
    )
    assert wrong(decode.partial(here.q, here.cache), call)


def test_keys_and_table_entries_outside_of_the_window_are_not_touched() -> None:
    """Pages in front of the window's first are gone; their table entries are out of bounds."""
    call = make_call("NHD", [600, 300], sliding_window=100)
    table = call.cache.block_table.clone()
    for request, length in enumerate((600, 300)):
        gone = (length - 100) // 128
        for block in range(gone):
            call.cache.k[table[request, block]] = math.nan
        table[request, :gone] = 10**6
    here, decode = placed(call), decoder(call)
    decode.refresh([600, 300], on_npu(table))
    assert wrong(decode.partial(here.q, here.cache), call) == []


REFUSED = [
    ("NHD", {"logits_soft_cap": 10.0}, "logit soft cap: no operator is told of it"),
    ("NHD", {"alibi": True}, "ALiBi"),
    ("NHD", {"attn_bias": True}, "additive bias"),
    ("NHD", {"attn_mask": True, "queries": 3}, "boolean mask"),
    ("NHD", {"sliding_window": 100, "anchor_tokens": 4}, "anchor_tokens 4 with a window: they are"),
    ("packed", {}, "packed queries or keys"),
    ("NHD", {"sliding_window": 100, "causal": False}, "causal=False with a window"),
    ("BSND", {"queries": 2}, "layout BSND: layout TND wants pages"),
    ("NHD", {"sliding_window": 100, "dtype": torch.float16}, "dtype float16: layout TND takes"),
    ("NHD", {"sliding_window": 100, "D": 64}, "head_dim 64: layout TND takes head dims 128"),
    ("NHD", {"D": 72}, "head_dim 72: the head dim of float16 and bfloat16"),
]


@pytest.mark.parametrize(("layout", "fields", "words"), REFUSED, ids=str)
def test_what_cannot_be_captured_is_refused_with_the_reason(
    layout: str, fields: dict[str, Any], words: str
) -> None:
    spec = make_call(layout, [300, 9], **fields).spec
    assert graph_refusals(spec, Wants())[0].startswith(words)
    with pytest.raises(splitkv.UnsupportedError, match=words.split(":")[0]):
        GraphDecode(spec, batch=2, max_len=300, device="npu")


def test_misuse_is_said() -> None:
    call = make_call("NHD", [300, 9], queries=3)
    here, decode = placed(call), decoder(call)
    for lengths, words in (
        ([300], "must be 2 lengths"),
        ([300, 601], "up to 600"),
        ([300, 2], "3 queries need as many keys"),
    ):
        with pytest.raises(ValueError, match=words):
            decode.refresh(lengths, table_of(call))
    with pytest.raises(ValueError, match="needs its block_table"):
        decode.refresh([300, 9])
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        with pytest.raises(RuntimeError, match="outside of the capture"):
            decode.refresh([300, 9], table_of(call))
        with pytest.raises(RuntimeError, match="make one before the capture"):
            decode.partial(here.q, here.cache)
