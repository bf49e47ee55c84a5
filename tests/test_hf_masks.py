"""Every way of hiding keys, on every path, against textbook attention in float64."""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from transformers import AttentionInterface

from hf_models import FINE, Layer, dense_in_float64
from splitkv.integrations import transformers as hf
from splitkv.integrations.masks import Hidden, all_visible, band, fit, read_mask, remember

B, H, K, D, T = 3, 6, 2, 16, 70


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register(num_splits=4, profile=FINE, max_queries=8)


def bottom_right(queries: int, window: int | None = None) -> Tensor:
    return band(queries, T, window, torch.device("cpu")).expand(B, 1, queries, T).clone()


def masks(queries: int) -> dict[str, Tensor]:
    """Boolean masks [B, 1, S, T] by what they hide."""
    generator = torch.Generator().manual_seed(queries)
    column = torch.arange(T)
    padded = bottom_right(queries) & (column >= torch.tensor([0, 9, 33])[:, None])[:, None, None]
    blind = padded.clone()
    blind[1, :, 0] = False
    holes = bottom_right(queries) & (torch.rand(B, 1, 1, T, generator=generator) > 0.3)
    tree = bottom_right(queries)
    tree[..., -queries:] &= torch.rand(B, 1, queries, queries, generator=generator) > 0.5
    chunk = bottom_right(queries) & (column >= 64)
    tail = bottom_right(queries)[..., 20:]
    return {
        "only the future": bottom_right(queries),
        "nothing": torch.ones(B, 1, queries, T, dtype=torch.bool),
        "left padding": padded,
        "a window": bottom_right(queries, 12),
        "a window and padding": bottom_right(queries, 12) & padded,
        "a chunk's past": chunk,
        "the tail of a static cache": torch.nn.functional.pad(tail, (0, 20)),
        "holes": holes,
        "branches of a tree": tree,
        "all keys of one row": blind,
        "everything": torch.zeros(B, 1, queries, T, dtype=torch.bool),
        "the same for all requests": holes[:1],
    }


def inputs(queries: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries)
    return tuple(
        torch.randn(B, length, heads, D, generator=generator, dtype=torch.float64).transpose(1, 2)
        for length, heads in ((queries, H), (T, K), (T, K))
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Tensor:
    layer = Layer("splitkv")
    return AttentionInterface()["splitkv"](layer, query, key, value, mask, scaling=0.3, **more)[0]


SEMANTICS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.linspace(-2, 2, H, dtype=torch.float64)},
}


@pytest.mark.parametrize("what", masks(1))
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_what_a_mask_hides_is_hidden(semantics: str, queries: int, what: str) -> None:
    query, key, value = inputs(queries)
    mask, more = masks(queries)[what], SEMANTICS[semantics]
    want, _ = dense_in_float64(None, query, key, value, mask, 0.3, **more)
    torch.testing.assert_close(attend(query, key, value, mask, **more), want)


@pytest.mark.parametrize("what", ["left padding", "the tail of a static cache", "holes"])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_slots_that_nobody_sees_may_hold_anything(queries: int, what: str) -> None:
    query, key, value = inputs(queries)
    mask = masks(queries)[what]
    never = ~mask.any(2)[..., None]
    spoilt = [tensor.masked_fill(never, torch.nan) for tensor in (key, value)]
    assert torch.equal(attend(query, *spoilt, mask), attend(query, key, value, mask))


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("window", [None, 5])
def test_without_a_mask_causality_and_window_hold(window: int | None, queries: int) -> None:
    query, key, value = inputs(queries)
    want, _ = dense_in_float64(None, query, key, value, bottom_right(queries, window), 0.3)
    got = attend(query, key, value, None, sliding_window=window)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_attention_that_is_not_causal_sees_everything(queries: int) -> None:
    query, key, value = inputs(queries)
    everything = torch.ones(B, 1, queries, T, dtype=torch.bool)
    want, _ = dense_in_float64(None, query, key, value, everything, 0.3)
    torch.testing.assert_close(attend(query, key, value, None, is_causal=False), want)


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("semantics", ["plain", "sinks"])
def test_additive_masks_and_biases_are_added(semantics: str, queries: int) -> None:
    query, key, value = inputs(queries)
    more = SEMANTICS[semantics]
    hidden = masks(queries)["left padding"]
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(hidden.shape).masked_fill(~hidden, lowest)
    bias = torch.linspace(-3, 3, H * T, dtype=torch.float64).reshape(1, H, 1, T)
    bias = bias.expand(1, H, queries, T)
    per_head = hidden.expand(B, H, queries, T)

    want, _ = dense_in_float64(None, query, key, value, hidden, 0.3, **more)
    seen = hidden.any(-1)[:, 0, :, None, None]  # an additive mask leaves blind rows an average
    for mask in (additive, per_head):
        got = attend(query, key, value, mask, **more)
        torch.testing.assert_close(got * seen, want * seen)

    with_bias = _biased(query, key, value, hidden, bias, **more)
    got = attend(query, key, value, hidden, position_bias=bias, **more)
    torch.testing.assert_close(got, with_bias)
    got = attend(query, key, value, additive, position_bias=bias, **more)
    torch.testing.assert_close(got * seen, with_bias * seen)


def _biased(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, s_aux: Any = None
) -> Tensor:
    scores = query @ key.repeat_interleave(H // K, 1).mT * 0.3 + bias
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        column = s_aux[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., :T]
    return (weights @ value.repeat_interleave(H // K, 1)).transpose(1, 2)


def test_mask_is_said_as_shortly_as_possible() -> None:
    said = {what: read_mask(mask, 0, 3) for what, mask in masks(3).items()}
    short = {what: (v.start, v.stop, v.mask is None, v.causal) for what, v in said.items()}
    assert short["only the future"] == (0, T, True, True)
    assert short["nothing"] == (0, T, True, False)
    assert short["the tail of a static cache"] == (0, T - 20, True, True)
    assert short["a chunk's past"] == (64, T, True, True)
    assert short["a window"] == (T - 14, T, False, False)
    assert short["left padding"] == (0, T, False, False)
    assert short["everything"] == (0, 0, True, False)
    one = masks(1)
    assert read_mask(one["a window"], 0, 1).mask is None
    assert read_mask(one["left padding"], 0, 1).mask is not None


def test_mask_is_read_once_and_again_after_it_changed() -> None:
    mask = masks(1)["left padding"]
    asked = []

    def ask() -> int:
        asked.append(1)
        return len(asked)

    assert [remember(mask, "q", ask), remember(mask, "q", ask), remember(mask, "r", ask)] == [
        1,
        1,
        2,
    ]
    mask[0, 0, 0, 3] = False
    assert remember(mask, "q", ask) == 3
    with torch.inference_mode():
        untracked = mask.clone()
        assert [remember(untracked, "q", ask), remember(untracked, "q", ask)] == [4, 5]


def test_rows_of_a_mask_are_read_apart() -> None:
    mask = bottom_right(20)
    assert read_mask(mask, 0, 8).stop == T - 12
    assert read_mask(mask, 8, 16).causal
    assert read_mask(mask, 19, 20) is read_mask(mask, 19, 20)


def test_mask_of_another_width_is_dropped_only_if_it_hides_nothing_but_the_future() -> None:
    future = Hidden(bottom_right(3), None, True, None)
    assert fit(future, T) is future
    assert fit(future, 5).mask is None
    visible = all_visible(fit(future, 5), 3, 5, torch.device("cpu"))
    assert (visible.start, visible.stop, visible.mask, visible.causal) == (0, 5, None, True)
    for what in ("left padding", "nothing", "a window"):
        with pytest.raises(ValueError, match=f"has {T} columns"):
            fit(Hidden(masks(3)[what], None, True, None), 5)
