"""Histories whose visible part begins later in each request: left padding, and what was cut off."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from backends_in_reach import IN_REACH, InReach, every_backend, spec_of
from cuda_calls import call_of, decode, host_plan
from histories import History, lengths32, random_history, random_queries
from splitkv.backends.ascend import AscendBackend
from splitkv.common.spec import Feature
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.graphs import graph_refusals

LENGTHS = [150, 40, 64, 1, 0, 130]
STARTS = [45, 0, 64, 1, 0, 129]
"""Inside a page, at the beginning, nothing left (of many and of one), nothing there, the last."""
SETTINGS = {
    "plain": {},
    "window": {"sliding_window": 100},
    "blocks": {"sliding_window": 96, "window_block": 32},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.2])},
    "not causal": {"causal": False},
}


def without(history: History, starts: list[int]) -> History:
    """The requests with what lies below their starts left out."""
    k, v = (
        [rows[start:] for rows, start in zip(part, starts, strict=True)]
        for part in (history.k, history.v)
    )
    return History(k, v)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "blocks"])
@every_backend
def test_it_is_the_answer_of_a_request_that_begins_there(
    on: InReach, name: str, steps: int
) -> None:
    """Windows and slopes go by distance, so that leaving tokens out in front changes neither."""
    starts = [min(start, max(n - steps, 0)) for start, n in zip(STARTS, LENGTHS, strict=True)]
    history, q = random_history(LENGTHS, 2, 64), random_queries(6, steps, 4, 64)
    settings: dict[str, Any] = SETTINGS[name]
    given = {**settings, "kv_start": lengths32(starts)}
    out, lse = on.decode(q, **history.paged(16), **given, num_splits=3)
    want, want_lse = on.decode(q, **without(history, starts).dense(), **settings)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse, want_lse, atol=1e-5)
    control, _ = on.decode(q, **history.paged(16), **settings)
    assert not torch.allclose(out, control, atol=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
@every_backend
def test_what_lies_below_is_never_read(on: InReach, name: str) -> None:
    settings: dict[str, Any] = SETTINGS[name]
    clean, spoilt = (random_history(LENGTHS, 2, 64) for _ in range(2))
    for k, v, start in zip(spoilt.k, spoilt.v, STARTS, strict=True):
        k[:start], v[:start] = math.nan, math.inf
    q, answers = random_queries(6, 2, 4, 64), []
    for history in (clean, spoilt):
        cache = history.paged(16)
        if history is spoilt:
            for row, start in enumerate(STARTS):
                cache["block_table"][row, : start // 16] = -1
        given = {"kv_start": lengths32(STARTS), "num_splits": 3, **settings}
        answers.append(on.decode(q, **cache, **given))
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


@every_backend
def test_it_wins_over_anchors(on: InReach) -> None:
    """Anchors 0 to 9, a window of 20, a start at 6: seen are 6 to 9 and the window."""
    history, q = random_history([100], 2, 64), random_queries(1, 1, 4, 64)
    given = {"sliding_window": 20, "anchor_tokens": 10, "kv_start": lengths32([6])}
    out, lse = on.decode(q, **history.paged(16), **given)
    kept = torch.cat([torch.arange(6, 10), torch.arange(80, 100)])
    seen = History([history.k[0][kept]], [history.v[0][kept]])
    want, want_lse = on.decode(q, **seen.dense())
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse, want_lse, atol=1e-5)


@every_backend
def test_a_row_that_sees_nothing_is_the_sink_s(on: InReach) -> None:
    history, q = random_history([20], 2, 64), random_queries(1, 1, 4, 64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = on.decode(q, **history.dense(), kv_start=lengths32([20]), sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse[0, 0], sinks)


def test_layers_of_one_plan_may_begin_elsewhere() -> None:
    """A plan reads the whole history; each call clips it, and remembers no other call's starts."""
    history, q = random_history([140, 90], 2, 64), random_queries(2, 1, 4, 64)
    for on in IN_REACH[:2]:
        cache = history.paged(16)
        spec = spec_of(q, **cache, kv_start=lengths32([0, 0]))
        plan = on.plan(spec, [140, 90], tile=64, num_splits=3)
        for starts in ([45, 0], [0, 70], [139, 90], [45, 0]):
            got = on.decode(q, **cache, kv_start=lengths32(starts), plan=plan)
            want = on.decode(q, **without(history, starts).dense())
            assert torch.allclose(got[0], want[0], atol=1e-5)
            assert torch.allclose(got[1], want[1], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 96, "window_block": 48}], ids=str)
def test_a_plan_for_longer_requests_is_clipped_like_its_own(settings: dict[str, int]) -> None:
    """The clipping kernel says again where a shorter request's window starts."""
    history, q = random_history([300, 90], 2, 64), random_queries(2, 2, 4, 64)
    call = call_of(q, history.paged(16), kv_start=lengths32([210, 3]), **settings)
    exact, longer = (host_plan(call, n, num_splits=3) for n in ([300, 90], [700, 460]))
    one, other = decode(call, exact), decode(call, longer)
    assert torch.allclose(one[0], other[0], atol=1e-5)
    assert torch.allclose(one[1], other[1], atol=1e-5)


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (torch.tensor([5, 41]), r"kv_start\[1\] is 41, the request has 40 tokens"),
        (torch.tensor([-1, 0]), r"kv_start\[0\] is -1"),
        (torch.tensor([0]), r"kv_start must be \[2\], got \[1\]"),
        (torch.tensor([0.0, 1.0]), "kv_start must be"),
        ([0, 0], "kv_start must be a torch tensor"),
    ],
)
def test_what_is_no_start_is_refused(starts: Any, words: str) -> None:
    history, q = random_history([90, 40], 2, 64), random_queries(2, 1, 4, 64)
    with pytest.raises(ValueError, match=words):
        splitkv.decode_attention(q, **history.paged(16), kv_start=starts, backend="cpu")


def test_a_spec_says_that_starts_come() -> None:
    history, q = random_history([40], 2, 64), random_queries(1, 1, 4, 64)
    cache: dict[str, Any] = history.paged(16)
    spec = spec_of(q, **cache, kv_start=lengths32([3]))
    assert Feature.KV_START in spec.features
    pages = splitkv.PagedCache(cache["k"], cache["v"], cache["block_table"], cache["seq_lens"])
    with pytest.raises(ValueError, match="the spec promises kv_start"):
        splitkv.decode(q, pages, spec, backend="cpu")
    with pytest.raises(ValueError, match="does not promise kv_start"):
        splitkv.decode(q, pages, spec_of(q, **cache), kv_start=lengths32([3]), backend="cpu")
    with pytest.raises(ValueError, match="kv_start: the queries of a cascade's group"):
        splitkv.plan_cascade(pages, spec)


def test_ascend_refuses_with_the_reason() -> None:
    history, q = random_history([40], 2, 64), random_queries(1, 1, 4, 64)
    plain = spec_of(q, **history.paged(16), kv_start=lengths32([3]))
    spec = replace(plain, dtype=torch.float16, kv_dtype=torch.float16)
    words = "a request begins at 0"
    for refusals in (
        AscendBackend().refusals(spec),
        own.refusals(spec),
        graph_refusals(spec, AscendBackend().wants),
    ):
        assert any(words in one or "requests begin at 0" in one for one in refusals)


def test_torch_s_operator_takes_it() -> None:
    from splitkv.backends import torch_ops

    history, q = random_history([300, 40], 2, 64), random_queries(2, 1, 4, 64)
    given: dict[str, Any] = {**history.paged(16), "kv_start": lengths32([45, 7])}
    out, lse = torch_ops.decode_attention(q, **given)
    want, want_lse = _answer(q, given)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def _answer(q: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    found = splitkv.decode_attention(q, **given, return_lse=True)
    assert isinstance(found, tuple)
    return found
