"""A cache of transformers in pages: what is stored, what is read, and what it refuses."""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma3nTextConfig,
    LlamaConfig,
    MambaConfig,
)

from hf_models import FINE, Layer, assert_as_good_as_eager, generate, left_padded, tiny
from splitkv import UnsupportedError
from splitkv.integrations import transformers as hf
from splitkv.integrations.masks import Hidden, band
from splitkv.integrations.paged_cache import PagedLayer, PageTable, SplitKVCache, left_padding

CPU = torch.device("cpu")
LENGTHS = [41, 32, 7]
PROMPTS = left_padded(LENGTHS)


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register(num_splits=3, profile=FINE)


def test_pages_hold_the_tokens_without_their_padding() -> None:
    model = tiny("llama")
    model.set_attn_implementation("splitkv")
    paged, dense = SplitKVCache(model.config, page_size=8), DynamicCache()
    with torch.no_grad():
        for cache in (paged, dense):
            model(**PROMPTS, cache=cache)
            model(
                torch.tensor([[5], [6], [7]]),
                attention_mask=torch.nn.functional.pad(PROMPTS["attention_mask"], (0, 1), value=1),
                cache=cache,
            )
    table = paged.table.tensor(CPU)
    assert table.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 11, -1],  # page 10 went to request 2, which needed it before request 1 did
        [10, -1, -1, -1, -1, -1],
    ]
    for index, (pages, kept) in enumerate(zip(paged.layers, dense.layers, strict=True)):
        assert pages.lengths == (42, 33, 8)
        assert pages.get_seq_length() == 42
        for pool, rows in ((pages.keys, kept.keys), (pages.values, kept.values)):
            for row, length in enumerate(pages.lengths):
                stored = pool[table[row, : -(-length // 8)]].flatten(0, 1)[:length]
                exactly = {"rtol": 0, "atol": 0} if index == 0 else {}  # no attention before it
                torch.testing.assert_close(
                    stored.transpose(0, 1), rows[row, :, -length:], **exactly
                )


def test_decode_reads_pages_in_place_and_needs_no_mask_for_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("mistral")
    cache = SplitKVCache(model.config, page_size=8)
    calls = []
    decode = hf.decode

    def recording(q: Tensor, view: Any, spec: Any, **more: Any) -> Any:
        calls.append((view, spec))
        return decode(q, view, spec, **more)

    monkeypatch.setattr(hf, "decode", recording)
    generate(model, "splitkv", PROMPTS, 3, cache=cache)
    assert len(calls) == 2 * len(cache.layers)
    for (view, spec), layer in zip(calls[-3:], cache.layers, strict=True):
        assert view.k.data_ptr() == layer.keys.data_ptr()
        assert (spec.attn_mask, spec.sliding_window, spec.page_size) == (False, 16, 8)


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma2", "llama4"])
def test_prompt_may_come_in_chunks(family: str) -> None:
    """A short prompt's first chunks are padding only; a chunk may be longer than max_queries."""
    model = tiny(family)
    logits = {}
    for attention in ("eager", "splitkv"):
        model.set_attn_implementation(attention)
        cache = DynamicCache(config=model.config)
        if attention == "splitkv":
            cache = SplitKVCache(model.config, page_size=8)
        start, parts = 0, []
        with torch.no_grad():
            for stop in (5, 27, 40, 41):
                step = PROMPTS["input_ids"][:, start:stop]
                seen = PROMPTS["attention_mask"][:, :stop]
                parts.append(model(step, attention_mask=seen, cache=cache).logits)
                start = stop
        logits[attention] = torch.cat(parts, dim=1)
    real = PROMPTS["attention_mask"].bool()
    torch.testing.assert_close(logits["splitkv"][real], logits["eager"][real])


def test_cache_goes_on_after_a_crop() -> None:
    model = tiny("llama")
    model.set_attn_implementation("splitkv")
    ids = left_padded([30])["input_ids"]
    cache = SplitKVCache(model.config, page_size=8)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.crop(-9)
        assert cache.get_seq_length() == 21
        again = model(ids[:, 21:], cache=cache).logits
        whole = model(ids, use_cache=False).logits[:, 21:]
    torch.testing.assert_close(again, whole)


def test_cache_is_new_after_a_reset() -> None:
    model = tiny("llama")
    cache = SplitKVCache(model.config, page_size=8)
    first = generate(model, "splitkv", PROMPTS, 5, cache=cache)
    cache.reset()
    other = {name: tensor[:2] for name, tensor in PROMPTS.items()}
    again = generate(model, "splitkv", other, 5, cache=cache)
    fresh = generate(model, "splitkv", other, 5, cache=SplitKVCache(model.config, page_size=8))
    assert torch.equal(again.scores, fresh.scores)
    assert torch.equal(again.tokens, first.tokens[:2])


def test_beams_are_copies_of_pages() -> None:
    model = tiny("qwen2")
    outs = []
    for attention in ("eager", "splitkv"):
        model.set_attn_implementation(attention)
        more = {"cache": SplitKVCache(model.config, page_size=4)} if attention == "splitkv" else {}
        more |= {"num_beams": 4, "max_new_tokens": 12, "do_sample": False}
        with torch.no_grad():
            outs.append(
                model.generate(**PROMPTS, **more, output_scores=True, return_dict_in_generate=True)
            )
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    torch.testing.assert_close(outs[0].sequences_scores, outs[1].sequences_scores)


def test_second_turn_continues_the_pages() -> None:
    model = tiny("llama")
    turns = left_padded([20])["input_ids"]
    both: dict[str, Any] = {}
    for attention in ("eager", "splitkv"):
        model.set_attn_implementation(attention)
        cache = DynamicCache()
        if attention == "splitkv":
            cache = SplitKVCache(model.config, page_size=8)
        ids = turns
        for _ in range(2):
            with torch.no_grad():
                ids = model.generate(ids, max_new_tokens=6, do_sample=False, cache=cache)
            ids = torch.cat([ids, turns[:, :7]], dim=1)
        both[attention] = ids
    assert torch.equal(both["splitkv"], both["eager"])


def test_padding_after_a_token_is_an_error() -> None:
    model = tiny("llama")
    model.set_attn_implementation("splitkv")
    right = {name: tensor.flip(1) for name, tensor in PROMPTS.items()}
    words = "padding after a token.*padding_side = 'left'"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        model(**right, cache=SplitKVCache(model.config))
    cache = SplitKVCache(model.config)
    with torch.no_grad():
        model(**PROMPTS, cache=cache)
        masked = torch.nn.functional.pad(PROMPTS["attention_mask"], (0, 1), value=0)
        with pytest.raises(ValueError, match="request 0 has padding after its 41 tokens"):
            model(torch.tensor([[5], [6], [7]]), attention_mask=masked, cache=cache)


def test_mask_that_hides_more_than_padding_is_kept() -> None:
    layer = PagedLayer(PageTable(4))
    layer.seen, layer.pads, layer.keys = 10, (0, 3), torch.zeros(0, 4, 1, 8)
    layer.values = layer.keys
    layer.table.reserve(layer.lengths)
    expected = band(1, 10, None, CPU).expand(2, 1, 1, 10).clone()
    expected[1, ..., :3] = False
    plain = next(layer.blocks(Hidden(expected, None, True, None), 1, 8))
    assert (plain.mask, plain.causal, plain.lengths) == (None, True, (10, 7))
    expected[0, ..., 5] = False
    kept = next(layer.blocks(Hidden(expected, None, True, None), 1, 8))
    assert kept.mask is not None
    assert not kept.causal


def test_other_attention_over_pages_is_an_error() -> None:
    """Eager attention would see the new tokens only: right for the prompt, wrong ever after."""
    model = tiny("llama")
    with pytest.raises(UnsupportedError, match="its attention was not splitkv's"):
        generate(model, "eager", PROMPTS, 3, cache=SplitKVCache(model.config))


def test_model_that_keeps_its_keywords_is_an_error() -> None:
    layer = PagedLayer(PageTable(4))
    with pytest.raises(UnsupportedError, match=r"does not call cache.update\(..., kwargs=kwargs\)"):
        layer.update(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), 0)


def test_another_batch_is_an_error() -> None:
    layer = PagedLayer(PageTable(4))
    layer.update(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8), kwargs={})
    assert layer.append(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8), None)
    with pytest.raises(ValueError, match="holds 2 requests, got 3"):
        layer.append(torch.zeros(3, 1, 1, 8), torch.zeros(3, 1, 1, 8), None)


@pytest.mark.parametrize("page_size", [0, -1, 1.5, True])
def test_page_size_is_a_positive_integer(page_size: Any) -> None:
    with pytest.raises(ValueError, match="page_size must be a positive integer"):
        SplitKVCache(LlamaConfig(num_hidden_layers=1), page_size=page_size)


@pytest.mark.parametrize("config", [Gemma3nTextConfig(), MambaConfig()])
def test_layers_that_have_no_pages_are_refused(config: Any) -> None:
    with pytest.raises(UnsupportedError, match="this model has"):
        SplitKVCache(config)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("batch_repeat_interleave", (2,)),
        ("batch_select_indices", (torch.tensor([0]),)),
        ("offload", (0,)),
    ],
)
def test_what_pages_cannot_do_is_refused(what: str, arguments: tuple[Any, ...]) -> None:
    cache = SplitKVCache(LlamaConfig(num_hidden_layers=2))
    with pytest.raises(UnsupportedError, match="SplitKVCache"):
        getattr(cache, what)(*arguments)


def test_crop_is_checked() -> None:
    layer = PagedLayer(PageTable(4))
    for tokens in (1, -1):
        with pytest.raises(ValueError, match="tokens_to_remove must be 0 to 0"):
            layer.crop(tokens)


def test_left_padding_is_read_off_the_diagonal() -> None:
    mask = band(4, 6, None, CPU).expand(3, 1, 4, 6).clone()
    mask[1, ..., :4] = False
    mask[2, ..., :6] = False
    assert left_padding(mask, 2) == (0, 2, 4)
    with pytest.raises(ValueError, match="must have 5 columns, got 6"):
        left_padding(mask, 1)


def test_pages_and_dense_say_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, 60, 16, generator=generator) for h in (4, 2, 2))
    layer = PagedLayer(PageTable(4))
    layer.update(key[:, :, :-1], value[:, :, :-1], kwargs={})
    layer.append(key[:, :, :-1], value[:, :, :-1], None)
    keywords: dict[str, Any] = {}
    new = layer.update(key[:, :, -1:], value[:, :, -1:], kwargs=keywords)
    attention = AttentionInterface()["splitkv"]
    paged, _ = attention(Layer("splitkv"), query[:, :, -1:], *new, None, **keywords)
    dense, _ = attention(Layer("splitkv"), query[:, :, -1:], key, value, None)
    torch.testing.assert_close(paged, dense)


def test_prompts_of_one_token_and_of_none_but_padding() -> None:
    model = tiny("llama")
    prompts = left_padded([1, 6])
    exact, eager = (generate(model, attention, prompts, 8) for attention in ("float64", "eager"))
    got = generate(model, "splitkv", prompts, 8, cache=SplitKVCache(model.config, page_size=4))
    assert_as_good_as_eager(got, eager, exact)
