"""SmolLM2-135M, a real model: 48 tokens after three left-padded prompts, as eager writes them."""

from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

pytest.importorskip("transformers")

from splitkv import PROFILES
from splitkv.integrations import smollm2
from splitkv.integrations import transformers as hf
from splitkv.integrations.generation import Generation, compare, greedy
from splitkv.integrations.paged_cache import SplitKVCache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing())),
]
NEW = 48


@cache
def loaded() -> tuple[Any, dict[str, Any], Generation]:
    """Model, prompts of about 10, 130 and 500 tokens, and what eager attention writes."""
    model = smollm2.load()
    text = (files("splitkv.cli") / "demo.txt").read_text(encoding="utf-8")
    prompts = ["The three parts of the promise of a lighthouse are", text[:600], text[:2300]]
    inputs = dict(model.tokenizer(prompts, return_tensors="pt", padding=True))
    return model.model, inputs, greedy(model.model, inputs, NEW, attention="eager")


@pytest.mark.parametrize("splits", [1, 2, 7, 16])
@pytest.mark.parametrize("page_size", [None, 16, 128])
def test_tokens_are_eagers_and_no_token_was_in_doubt(page_size: int | None, splits: int) -> None:
    model, inputs, eager = loaded()
    tile = page_size or 16
    hf.register(num_splits=splits, profile=replace(PROFILES["cpu"], tile_tokens=tile))
    more = {} if page_size is None else {"cache": SplitKVCache(model.config, page_size=page_size)}
    run = greedy(model, inputs, NEW, attention="splitkv", **more)
    found = compare(run, eager)
    assert found.same_tokens
    assert found.largest_difference <= 1e-3
    assert found.largest_difference < found.margin / 2
