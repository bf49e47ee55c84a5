"""The CPU backend against dense float64 attention: every feature, pair, layout and dtype."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import splitkv
from dense_attention import LAYOUTS, LENGTHS, Problem, check, dense, problem, run, stored, where

HALVES = (torch.float16, torch.bfloat16)
QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _features(queries: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    batch = len(LENGTHS)
    return {
        "window": {"sliding_window": 40},
        "anchors": {"sliding_window": 40, "anchor_tokens": 5},
        "blocks": {"sliding_window": 40, "window_block": 20},
        "cap": {"logits_soft_cap": 3.0},
        "alibi": {"alibi_slopes": torch.rand(6, generator=generator)},
        "alibi-per-request": {"alibi_slopes": torch.rand(batch, 6, generator=generator)},
        "bias": {"attn_bias": torch.randn(batch, 6, queries, 20, generator=generator)},
        "bias-shared": {"attn_bias": torch.randn(1, 1, queries, 20, generator=generator)},
        "mask": {"attn_mask": torch.rand(batch, queries, 9, generator=generator) > 0.4},
        "scale": {"sm_scale": 0.3},
        "not-causal": {"causal": False},
    }


SPLITS: tuple[dict[str, int], ...] = ({}, {"num_splits": 7}, {"split_size": 256}, {"num_splits": 1})


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_feature_alone(layout: str, split: dict[str, int], queries: int) -> None:
    for options in ({}, *_features(queries).values()):
        given = problem(queries=queries, **options)
        check(run(given, layout, **split), given)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("pair", [*itertools.combinations(_features(1), 2)], ids="+".join)
def test_every_pair_of_features(pair: tuple[str, str], queries: int) -> None:
    features = _features(queries)
    given = problem(queries=queries, **(features[pair[0]] | features[pair[1]]))
    check(run(given, "NHD", num_splits=3), given)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bit_is_no_worse_than_twice_eager(dtype: torch.dtype, layout: str) -> None:
    given = problem(queries=2, dims=(64, 48)).to(dtype)
    check(run(given, layout, num_splits=2), given)


def test_float64_is_exact_to_rounding() -> None:
    given = problem(queries=2, sliding_window=70, logits_soft_cap=5.0).to(torch.float64)
    (out, lse), (want, want_lse) = run(given, "HND", num_splits=4), dense(given)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [*itertools.permutations((torch.float32, *HALVES), 2), (torch.float32, torch.float64)],
)
def test_mixed_dtypes_compute_in_the_wider(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    given = problem(dims=(64, 64))
    given = dataclasses.replace(
        given, q=given.q.to(q_dtype), k=given.k.to(kv_dtype), v=given.v.to(kv_dtype)
    )
    out, lse = run(given, "BSND")
    assert (out.dtype, lse.dtype) == (q_dtype, torch.float32)
    check((out, lse), given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("shape", [(1,), (2,), (5, 2)], ids=str)
def test_scaled_codes_score_like_their_values(
    layout: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(3)
    k_scale, v_scale = (torch.rand(shape, generator=generator) * 0.1 for _ in range(2))
    given = problem(queries=2)
    codes = dataclasses.replace(given, k=(given.k * 20).to(dtype), v=(given.v * 20).to(dtype))

    def values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        by_head = scale.view(-1, 1, scale.shape[-1], 1)
        return x.float() * by_head

    exact = dataclasses.replace(given, k=values(codes.k, k_scale), v=values(codes.v, v_scale))
    k, v = (x.view(torch.uint8) for x in (codes.k, codes.v))
    raw = dataclasses.replace(codes, k=k, v=v)
    stored_k, stored_v = (x.view(dtype) for x in stored(raw, layout, poison=(0, 0)))
    got = splitkv.decode_attention(
        given.q,
        stored_k,
        stored_v,
        **where(raw, layout),
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=2,
        return_lse=True,
    )
    assert isinstance(got, tuple)
    check(got, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("splits", [1, 3])
def test_packed_queries(layout: str, window: int | None, splits: int) -> None:
    counts = (2, 1, 5, 3, 0)
    options: dict[str, Any] = {"sliding_window": window, "anchor_tokens": 2}
    given = problem(queries=5, **options)
    rows = torch.cat([given.q[b, 5 - count :] for b, count in enumerate(counts)])
    cu_seqlens_q = torch.tensor([0, *itertools.accumulate(counts)])
    packed = dataclasses.replace(given, q=rows)
    out, lse = run(packed, layout, cu_seqlens_q=cu_seqlens_q, num_splits=splits)
    # bottom-right alignment: the last queries of a longer run sit at the same positions
    for b, count in enumerate(counts):
        if count == 0:
            continue
        one = Problem(
            given.q[b : b + 1, 5 - count :],
            given.k[b : b + 1],
            given.v[b : b + 1],
            given.lengths[b : b + 1],
            options,
        )
        own = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        check((out[own][None], lse[own][None]), one)


def test_a_plan_for_longer_histories_serves_shorter_ones() -> None:
    window = {"sliding_window": 50, "anchor_tokens": 20}
    for queries, options in itertools.product((1, 3), ({}, window)):
        given = problem(queries=queries, **options)
        longer = [700, 90, 64, 200, 30]
        k, v = stored(given, "BSND")
        cache = splitkv.DenseCache(k, v, torch.tensor(given.lengths))
        spec = splitkv.DecodeSpec(
            num_q_heads=6,
            num_kv_heads=2,
            head_dim=32,
            layout=cache.layout,
            dtype=torch.float32,
            num_queries=queries,
            **options,
        )
        for splits in (1, 3):
            plan = splitkv.select(spec, name="cpu").plan(spec, longer, num_splits=splits)
            check(splitkv.decode(given.q, cache, spec, plan=plan), given)
