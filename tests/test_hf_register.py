"""Registering with transformers, and everything that must be loud instead of quietly different."""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.masking_utils import causal_mask_function

from hf_models import FINE, Layer, generate, left_padded, tiny
from splitkv import UnsupportedError
from splitkv.integrations import transformers as hf

PROMPTS = left_padded([9, 4])


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register(profile=FINE)


def attend(name: str, query: torch.Tensor, **more: Any) -> torch.Tensor:
    key = torch.ones(query.shape[0], 2, 10, 16, requires_grad=query.requires_grad)
    mask = more.pop("attention_mask", None)
    return AttentionInterface()[name](Layer(name), query, key, key, mask, **more)[0]


def test_pitfall_1_attention_without_its_mask_function_is_an_error() -> None:
    """transformers passes None for every mask then, and padding would be attended in silence."""
    AttentionInterface.register("half", AttentionInterface()["splitkv"])
    model = tiny("llama")
    for more in ({}, {"cache_implementation": "static"}):
        with pytest.raises(ValueError, match=r"'half' has no mask function.*register\('half'\)"):
            generate(model, "half", PROMPTS, 2, **more)


def test_pitfall_1_another_mask_function_is_an_error_where_it_leaves_the_mask_out() -> None:
    AttentionInterface.register("other", AttentionInterface()["splitkv"])
    AttentionMaskInterface.register("other", AttentionMaskInterface()["sdpa"])
    model = tiny("llama")
    model.set_attn_implementation("other")
    with (
        pytest.raises(ValueError, match="'other' has no mask function of splitkv"),
        torch.no_grad(),
    ):
        model(PROMPTS["input_ids"])


def test_pitfall_2_mask_is_left_out_only_where_none_has_one_meaning() -> None:
    def mask(queries: int, keys: int) -> torch.Tensor | None:
        where = {"q_length": queries, "kv_length": keys, "q_offset": 0}
        return hf.mask_function(batch_size=1, mask_function=causal_mask_function, **where)

    assert mask(1, 8) is None
    assert mask(8, 8) is None
    prompt_in_static_cache = mask(4, 8)
    assert prompt_in_static_cache is not None
    assert torch.equal(prompt_in_static_cache[0, 0], torch.ones(4, 8, dtype=torch.bool).tril())


def test_pitfall_4_mask_does_not_follow_the_offset_of_a_static_cache() -> None:
    offset = torch.tensor(4)
    where = {"q_length": 1, "kv_length": 8, "q_offset": offset}
    mask = hf.mask_function(
        batch_size=1, mask_function=causal_mask_function, allow_is_causal_skip=False, **where
    )
    offset.add_(1)  # what the cache's update does before attention runs
    assert mask is not None
    assert mask.flatten().tolist() == [True] * 5 + [False] * 3


def test_pitfall_4_static_cache_sees_exactly_the_written_keys() -> None:
    """A key too many changes the scores by less than it takes to change a token."""
    model = tiny("llama")
    model.set_attn_implementation("splitkv")
    ids = left_padded([12])["input_ids"]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0, 8:]
        cache = StaticCache(model.config, max_cache_len=32)
        model(ids[:, :8], cache=cache)
        steps = [model(ids[:, i : i + 1], cache=cache).logits[0, 0] for i in range(8, 12)]
    torch.testing.assert_close(torch.stack(steps), whole)


@pytest.mark.parametrize("name", ["my-flash", "me/mine", "paged|x", "eager", "sdpa"])
def test_pitfall_6_names_that_transformers_reads_its_own_way_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        hf.register(name)


def test_pitfall_7_continuous_batching_refuses_the_name_itself() -> None:
    model = tiny("llama")
    model.set_attn_implementation("splitkv")
    with pytest.raises(ValueError, match="splitkv"):
        model.generate_batch([[5, 6, 7]], progress_bar=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_splits": 0}, "num_splits must be 1 or more, got 0"),
        ({"split_size": -1}, "split_size must be 1 or more, got -1"),
        ({"max_queries": 0}, "max_queries must be 1 or more, got 0"),
        ({"num_splits": 2, "split_size": 64}, "not both: got 2 and 64"),
        ({"profile": "cpu"}, "profile must be a DeviceProfile or None, got 'cpu'"),
    ],
)
def test_malformed_registrations_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hf.register("other", **arguments)


def test_named_backend_is_used_or_refuses() -> None:
    hf.register("on-ascend", backend="ascend")
    with pytest.raises(UnsupportedError, match="backend 'ascend' does not take"):
        attend("on-ascend", torch.zeros(1, 4, 1, 16))
    hf.register("on-cpu", backend="cpu")
    assert attend("on-cpu", torch.zeros(1, 4, 1, 16)).shape == (1, 1, 4, 16)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dropout": 0.1}, "dropout must be 0, got 0.1"),
        ({"attention_mask": torch.ones(1, 10)}, r"must be \[B, 1, S, T\], got \[1, 10\]"),
        ({"attention_mask": torch.zeros(1, 1, 1, 9)}, "must have 10 columns, got 9"),
        ({"position_bias": torch.zeros(1, 4, 1, 9)}, "must have 10 columns, got 9"),
        ({"sliding_window": 4, "is_causal": False}, "not causal needs a mask"),
    ],
)
def test_what_would_be_ignored_is_an_error(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attend("splitkv", torch.zeros(1, 4, 1, 16), **more)


@pytest.mark.parametrize("queries", [1, 10])
def test_gradients_are_refused_for_prompts_too(queries: int) -> None:
    query = torch.zeros(1, 4, queries, 16, requires_grad=True)
    with pytest.raises(ValueError, match="requires grad"):
        attend("splitkv", query)
    with torch.no_grad():
        attend("splitkv", query)


@pytest.mark.slow
def test_graph_break_leaves_a_compiled_model_right() -> None:
    model = tiny("llama")
    model.set_attn_implementation("splitkv")
    with torch.no_grad():
        want = model(**PROMPTS).logits
        got = torch.compile(model, backend="eager")(**PROMPTS).logits
    torch.testing.assert_close(got, want)
