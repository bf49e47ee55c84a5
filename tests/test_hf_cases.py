"""Faults that others had in this place, by their ids in the case table."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from hf_models import (
    FINE,
    Layer,
    assert_as_good_as_eager,
    dense_in_float64,
    generate,
    left_padded,
    tiny,
)
from splitkv.integrations import transformers as hf
from splitkv.integrations.blocks import PAGES
from splitkv.integrations.paged_cache import PagedLayer, PageTable, SplitKVCache

NAME = "splitkv"


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register(NAME, num_splits=3, profile=FINE)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any
) -> Tensor:
    """The registered function on [B, H, S, D] tensors; returns [B, S, H, Dv]."""
    out, _ = AttentionInterface()[NAME](Layer(NAME), query, key, value, mask, **more)
    return out


def probe(keys: int, *, batch: int = 1, queries: int = 1, heads: int = 1) -> tuple[Tensor, ...]:
    """Queries of 0 and V[j] = j: the output is the mean of the visible positions."""
    position = torch.arange(keys, dtype=torch.float32)
    value = position[None, None, :, None].expand(batch, 1, keys, 16)
    return torch.zeros(batch, heads, queries, 16), torch.ones(batch, 1, keys, 16), value


def paged(key: Tensor, value: Tensor, page_size: int = 4) -> dict[str, Any]:
    """Keywords of a layer whose pages hold all but the last key already."""
    layer = PagedLayer(PageTable(page_size))
    for columns in (slice(0, -1), slice(-1, None)):
        keywords: dict[str, Any] = {}
        layer.update(key[:, :, columns], value[:, :, columns], 0, kwargs=keywords)
        if columns.start == 0:
            layer.append(key[:, :, columns], value[:, :, columns], None)
    return keywords


@pytest.mark.parametrize("cache", ["dynamic", "static", "pages"])
def test_o01_left_padded_prompts_score_as_each_alone(cache: str) -> None:
    model = tiny("llama")
    batch = left_padded([2, 5, 9])

    def more() -> dict[str, Any]:
        if cache == "pages":
            return {"cache": SplitKVCache(model.config, page_size=4)}
        return {"cache_implementation": "static"} if cache == "static" else {}

    together = {}
    for scale in (1.0, 1e4):  # what a pad token's embedding holds
        with torch.no_grad():
            model.model.embed_tokens.weight[0] = scale * torch.linspace(-3, 3, 64)
        together[scale] = generate(model, NAME, batch, 12, **more())
    assert torch.equal(together[1.0].scores, together[1e4].scores)

    for row, length in enumerate([2, 5, 9]):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in batch.items()}
        exact, eager = (generate(model, attention, alone, 12) for attention in ("float64", "eager"))
        mine = together[1.0]
        of_row = type(mine)(mine.tokens[row : row + 1], mine.scores[row : row + 1])
        assert_as_good_as_eager(of_row, eager, exact)


def test_o02_positions_from_five_are_one_sequence() -> None:
    model = tiny("llama")
    ids = left_padded([11])["input_ids"]
    positions = torch.arange(11)[None]
    with torch.no_grad():
        alone = {}
        continued = {}
        for attention in ("eager", NAME):
            model.set_attn_implementation(attention)
            alone[attention] = model(ids[:, 5:], position_ids=positions[:, 5:]).logits
            past = model(ids[:, :5], position_ids=positions[:, :5]).cache
            more = {"position_ids": positions[:, 5:], "cache": past}
            continued[attention] = model(ids[:, 5:], **more).logits
    torch.testing.assert_close(alone[NAME], alone["eager"])
    torch.testing.assert_close(continued[NAME], continued["eager"])
    assert not torch.allclose(alone[NAME], continued[NAME])


def test_o02_packed_positions_are_two_sequences() -> None:
    model = tiny("llama")
    ids = left_padded([6])["input_ids"]
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        packed = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
        apart = [model(part, use_cache=False).logits for part in ids.split(3, dim=1)]
    torch.testing.assert_close(packed.logits, torch.cat(apart, dim=1))


@pytest.mark.parametrize("resident", [(10, 7, 4), (4, 10, 7)])
def test_o03_layers_keep_different_numbers_of_keys(resident: tuple[int, ...]) -> None:
    model = tiny("llama")
    ids = left_padded([11])["input_ids"]
    step = {}
    for attention in ("sdpa", NAME):
        model.set_attn_implementation(attention)
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :10], cache=cache)
            for layer, keys in zip(cache.layers, resident, strict=True):
                layer.keys, layer.values = layer.keys[:, :, -keys:], layer.values[:, :, -keys:]
            step[attention] = model(
                ids[:, 10:], cache=cache, position_ids=torch.tensor([[10]])
            ).logits
    torch.testing.assert_close(step[NAME], step["sdpa"])


def test_o03_mask_with_padding_of_another_width_is_an_error() -> None:
    query, key, value = probe(7)
    padded = torch.tensor([[[[False, *[True] * 9]]]])
    with pytest.raises(ValueError, match=r"mask has 10 columns .* holds 7 keys"):
        attend(query, key, value, padded)
    torch.testing.assert_close(attend(query, key, value, padded | True), attend(query, key, value))


@pytest.mark.parametrize(
    ("window", "mean"), [(4, 7.5), (None, 4.5), (1, 9.0), (10, 4.5), (11, 4.5)]
)
def test_i01_window_counts_the_current_token(window: int | None, mean: float) -> None:
    query, key, value = probe(10, heads=2)
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    where = {"batch_size": 1, "q_length": 1, "kv_length": 10, "q_offset": 9}
    mask = hf.mask_function(**where, mask_function=rule, local_size=window)
    more = {"sliding_window": window}
    outs = [
        attend(query, key, value, mask, **more),
        attend(query, key, value, None, **more),
        attend(query, key[:, :, -1:], value[:, :, -1:], mask, **more, **paged(key, value)),
        attend(query, key[:, :, -1:], value[:, :, -1:], None, **more, **paged(key, value)),
    ]
    torch.testing.assert_close(torch.stack(outs), torch.full((4, 1, 1, 2, 16), mean))


@pytest.mark.parametrize("kind", ["dynamic", "static", "pages"])
def test_i09_window_of_eight_drops_its_first_key_at_length_nine(kind: str) -> None:
    keys = torch.arange(10.0, 11.1, 0.1)[None, None, :, None].expand(1, 1, 11, 4)
    layer = {
        "dynamic": lambda: DynamicSlidingWindowLayer(sliding_window=8),
        "static": lambda: StaticSlidingWindowLayer(max_cache_len=16, sliding_window=8),
        "pages": lambda: PagedLayer(PageTable(4)),
    }[kind]()
    rule = sliding_window_causal_mask_function(8)
    for start, stop in [(0, 6), *((length - 1, length) for length in range(7, 12))]:
        new = keys[:, :, start:stop]
        kv_length, kv_offset = layer.get_mask_sizes(stop - start)
        mask = hf.mask_function(
            batch_size=1,
            q_length=stop - start,
            kv_length=kv_length,
            q_offset=start,
            kv_offset=kv_offset,
            mask_function=rule,
            local_size=8,
            attention_mask=torch.ones(1, stop, dtype=torch.bool),
        )
        keywords: dict[str, Any] = {}
        k, v = layer.update(new, new, 0, kwargs=keywords)
        out = attend(torch.zeros(1, 1, stop - start, 4), k, v, mask, sliding_window=8, **keywords)
        seen = keys[0, 0, max(stop - 8, 0) : stop, 0]
        torch.testing.assert_close(out[0, -1, 0], seen.mean().expand(4))
    assert float(keys[0, 0, :8, 0].mean()) == pytest.approx(10.35)


def test_j06_sinks_arrive_through_a_wrapper_and_count_once() -> None:
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs)

    query, key, _ = probe(4, heads=2)
    value = torch.ones(1, 1, 4, 16)
    out = wrapper(query, key, value, None, s_aux=torch.zeros(2))
    torch.testing.assert_close(out, torch.full((1, 1, 2, 16), 0.8))


@pytest.mark.parametrize(
    "keyword", ["output_attentions", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k"]
)
def test_j06_keyword_that_is_not_read_is_an_error(keyword: str) -> None:
    query, key, value = probe(4)
    with pytest.raises(ValueError, match=f"{keyword} is given"):
        attend(query, key, value, None, **{keyword: True})


def test_j07_sink_is_an_extra_column_and_a_factor() -> None:
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(1, 2, 4, 16, generator=generator) for _ in range(3))
    sinks = torch.tensor([0.7, -1.3])
    got = attend(query, key, value, None, scaling=0.25, s_aux=sinks)
    causal = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    column, _ = dense_in_float64(None, query, key, value, causal, 0.25, s_aux=sinks)
    scores = (query @ key.mT * 0.25).masked_fill(~causal, -torch.inf)
    factor = torch.sigmoid(scores.logsumexp(-1) - sinks[:, None]).transpose(1, 2)[..., None]
    without = attend(query, key, value, None, scaling=0.25)
    torch.testing.assert_close(got, column)
    torch.testing.assert_close(got, without * factor)


@pytest.mark.parametrize("scaling", [1.0, 128**-0.5, 1 / 128, 0.5, None])
@pytest.mark.parametrize("queries", [1, 8, 50])
@pytest.mark.parametrize("way", ["dense", "pages", "soft cap"])
def test_j10_scale_is_honoured_on_every_path(way: str, queries: int, scaling: float | None) -> None:
    generator = torch.Generator().manual_seed(10)
    shapes = ((1, 8, queries, 128), (1, 2, 50, 128), (1, 2, 50, 128))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    mask = torch.ones(1, 1, queries, 50, dtype=torch.bool).tril(50 - queries)
    cap = 3.0 if way == "soft cap" else None
    want, _ = dense_in_float64(
        None, query, key, value, mask, 128**-0.5 if scaling is None else scaling, softcap=cap
    )
    if way != "pages":
        got = attend(query, key, value, mask, scaling=scaling, softcap=cap)
    else:
        layer = PagedLayer(PageTable(16))
        for columns in (slice(0, 50 - queries), slice(50 - queries, 50)):
            keywords: dict[str, Any] = {}
            if columns.stop > columns.start:
                new = layer.update(key[:, :, columns], value[:, :, columns], 0, kwargs=keywords)
                if columns.stop < 50:
                    layer.append(*new, None)
        got = attend(query, *new, mask, scaling=scaling, **keywords)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("masked", [False, True])
def test_m01_queries_sit_at_the_end_of_the_history(masked: bool) -> None:
    query, key, value = probe(5, queries=2)
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool).tril(3) if masked else None
    out = attend(query, key, value, mask)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([1.5, 2.0]))


@pytest.mark.parametrize("capacity", [8, 16384])
def test_m04_capacity_of_a_static_cache_does_not_matter(capacity: int) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(2, 2, 2, 16, generator=generator)
    key, value = (torch.full((2, 2, capacity, 16), torch.nan) for _ in range(2))
    mask = torch.zeros(2, 1, 2, capacity, dtype=torch.bool)
    alone = []
    for row, length in enumerate([5, 7]):
        k, v = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(2))
        key[row, :, :length], value[row, :, :length] = k[0], v[0]
        mask[row, 0, :, :length] = torch.ones(2, length, dtype=torch.bool).tril(length - 2)
        alone.append(attend(query[row : row + 1], k, v))
    torch.testing.assert_close(attend(query, key, value, mask), torch.cat(alone))


def test_m04_prompt_in_an_empty_static_cache_sees_no_tail() -> None:
    model = tiny("llama")
    ids = left_padded([9])["input_ids"]
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        cache = StaticCache(model.config, max_cache_len=64)
        static = [model(part, cache=cache).logits for part in ids.split([6, 2, 1], dim=1)]
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(static, dim=1), whole)


def test_c03_padding_with_nan_is_never_stored() -> None:
    lengths = [9, 17, 30]
    generator = torch.Generator().manual_seed(3)
    tokens = [
        [torch.randn(1, heads, length + 2, 64, generator=generator) for heads in (4, 2, 2)]
        for length in lengths
    ]
    seen = torch.arange(30) >= 30 - torch.tensor(lengths)[:, None]
    causal = torch.ones(30, 30, dtype=torch.bool).tril()

    def batched(index: int, columns: slice) -> Tensor:
        rows = [
            torch.nn.functional.pad(row[index], (0, 0, 30 - length, 0), value=torch.nan)
            for row, length in zip(tokens, lengths, strict=True)
        ]
        return torch.cat(rows)[:, :, columns]

    def run(layer: PagedLayer, take: Callable[[int, slice], Tensor], mask: Tensor) -> list[Tensor]:
        outs, start = [], 0
        for stop in (mask.shape[-1], mask.shape[-1] + 1, mask.shape[-1] + 2):
            query, key, value = (take(index, slice(start, stop)) for index in range(3))
            keywords: dict[str, Any] = {}
            key, value = layer.update(key, value, 0, kwargs=keywords)
            prompt = start == 0
            outs.append(attend(query, key, value, mask if prompt else None, **keywords)[:, -1])
            start = stop
        return outs

    together = run(PagedLayer(PageTable(4)), batched, (seen[:, None] & causal)[:, None])
    for row, length in enumerate(lengths):
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        alone = run(PagedLayer(PageTable(4)), lambda i, c, row=row: tokens[row][i][:, :, c], mask)
        for mine, his in zip(together, alone, strict=True):
            torch.testing.assert_close(mine[row], his[0])


@pytest.mark.parametrize("stored", ["dense", "pages"])
def test_n06_window_is_not_dropped_over_a_long_history(stored: str) -> None:
    query, key, value = probe(64, heads=2)
    more = {} if stored == "dense" else paged(key, value)
    k, v = (key, value) if stored == "dense" else (key[:, :, -1:], value[:, :, -1:])
    out = attend(query, k, v, None, sliding_window=16, **more)
    torch.testing.assert_close(out, torch.full((1, 1, 2, 16), 55.5))
    assert PAGES in paged(key, value)
