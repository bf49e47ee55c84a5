"""Model families that differ in their attention, with every cache: scores are eager's."""

from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from hf_models import (
    FAMILIES,
    FINE,
    Generated,
    assert_as_good_as_eager,
    full_mask,
    generate,
    left_padded,
    tiny,
)
from splitkv.integrations import transformers as hf
from splitkv.integrations.paged_cache import SplitKVCache

PROMPTS = left_padded([41, 32])
NEW = 30
CACHES = ("dynamic", "static", "pages of 8", "pages of 16")


@lru_cache(maxsize=1)
def measured(family: str) -> tuple[Any, Generated, Generated]:
    """The model, and what it generates with eager attention and with the float64 reference."""
    model = tiny(family)
    exact = generate(model, "float64", PROMPTS, NEW)
    return model, generate(model, "eager", PROMPTS, NEW), exact


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register(num_splits=3, profile=FINE)


def cache_arguments(model: Any, cache: str) -> dict[str, Any]:
    if cache == "dynamic":
        return {}
    if cache == "static":
        return {"cache_implementation": "static"}
    return {"cache": SplitKVCache(model.config, page_size=int(cache.split()[-1]))}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batch_scores_as_eager_does(family: str, cache: str) -> None:
    model, eager, exact = measured(family)
    got = generate(model, "splitkv", PROMPTS, NEW, **cache_arguments(model, cache))
    assert_as_good_as_eager(got, eager, exact)


def test_decode_steps_are_cut_into_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    planned = hf._plan

    def recording(*args: Any) -> Any:
        plans.append(planned(*args))
        return plans[-1]

    monkeypatch.setattr(hf, "_plan", recording)
    generate(tiny("llama"), "splitkv", PROMPTS, 3)
    assert [plan.max_splits for plan in plans] == [3] * 6  # two steps of three layers
    assert len(set(map(id, plans))) == 2  # one plan for all layers of a step


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "llama4"])
def test_padding_that_is_attended_would_be_noticed(family: str) -> None:
    """The comparison above can fail: the same prompts without their mask score otherwise."""
    model, eager, exact = measured(family)
    AttentionInterface.register("unmasked", hf.attention_function("unmasked", _splitting()))
    AttentionMaskInterface.register(
        "unmasked", lambda **kwargs: full_mask(**kwargs | {"attention_mask": None})
    )
    wrong = generate(model, "unmasked", PROMPTS, NEW)
    worst = (wrong.scores - exact.scores).abs().max()
    assert worst > 1000 * (eager.scores - exact.scores).abs().max()


def _splitting() -> hf.Splitting:
    return hf.Splitting(
        num_splits=None, split_size=None, backend=None, profile=None, max_queries=16
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["dynamic", "pages of 16"])
def test_half_precision_is_no_further_off_than_eager(cache: str, dtype: torch.dtype) -> None:
    """One step on the same tokens: tokens of two half-precision runs may part for good reasons."""
    model = tiny("qwen3")
    ids = PROMPTS["input_ids"]

    def last_scores(attention: str, **more: Any) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            past = model(ids[:, :-1], attention_mask=PROMPTS["attention_mask"][:, :-1], **more)
            step = {"attention_mask": PROMPTS["attention_mask"], "cache": past.cache}
            return model(ids[:, -1:], **step).logits.double()

    exact = last_scores("eager")
    model = model.to(dtype)
    eager = last_scores("eager")
    more = {} if cache == "dynamic" else {"cache": SplitKVCache(model.config, page_size=16)}
    got = last_scores("splitkv", **more)
    assert torch.isfinite(got).all()
    assert (got - exact).norm() <= 2 * (eager - exact).norm()
