"""SmolLM2-135M, a real model: 48 tokens after three left-padded prompts, as eager writes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AttentionInterface

from splitkv import PROFILES
from splitkv.integrations import smollm2
from splitkv.integrations import transformers as hf
from splitkv.integrations.generation import Generation, compare, greedy
from splitkv.integrations.paged_cache import PagedLayer, SplitKVCache
from splitkv.kernels_ascend import standin

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


def in_float16(attention: Callable[..., Any]) -> Callable[..., Any]:
    """``attention`` for a float32 model: what the NPU's operators take is rounded at the border."""

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any):
        out, weights = attention(module, query.half(), key.half(), value.half(), *more, **named)
        return out.float(), weights

    return rounded


@pytest.fixture
def _on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loaded()  # on the host, before anything is an NPU's
    set_up = PagedLayer.lazy_initialization
    monkeypatch.setattr(
        PagedLayer, "lazy_initialization", lambda self, k, v: set_up(self, k.half(), v.half())
    )
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    standin.install()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    standin.uninstall()


@pytest.mark.usefixtures("_on_the_stand_in")
@pytest.mark.parametrize(("page_size", "splits"), [(16, 7)])  # minutes: the stand-in is no device
def test_the_ascend_backend_on_the_stand_in_writes_the_same(page_size: int, splits: int) -> None:
    model, inputs, eager = loaded()
    profile = replace(PROFILES["Ascend910B3"], tile_tokens=page_size)
    hf.register(num_splits=splits, profile=profile, backend="ascend")
    served = AttentionInterface._global_mapping["splitkv"]
    AttentionInterface.register("splitkv", in_float16(served))
    on_device = {name: tensor.to("npu") for name, tensor in inputs.items()}
    cache = SplitKVCache(model.config, page_size=page_size)
    with standin.recording() as calls:
        run = greedy(model.to("npu"), on_device, NEW, attention="splitkv", cache=cache)
    model.to("cpu")
    operators = [call.name for call in calls if "fused_infer" in call.name]
    assert len(operators) >= (NEW - 1) * model.config.num_hidden_layers
    run = replace(run, tokens=run.tokens.cpu(), logits=run.logits.cpu(), alive=run.alive.cpu())
    found = compare(run, eager)
    assert found.same_tokens, f"largest logit difference {found.largest_difference:.1e}"
