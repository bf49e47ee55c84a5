"""Queries, caches, tables and results in the forms that callers have them: page lists down to
single tokens, views of larger buffers, strides of any kind.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

import splitkv
from backends_in_reach import INTERPRETED, InReach, backends, every_backend
from histories import (
    Arguments,
    History,
    assert_near,
    assert_near_lse,
    attend,
    lengths32,
    offsets32,
    random_history,
    random_queries,
    same_bits,
)
from splitkv.common.cache import PagedCache

H, K, D, P = 4, 2, 128, 16
DTYPE = torch.bfloat16
LENGTHS = [40, 16, 3]
STRIDES = "strides"  # what a refusal of a torn cache speaks of


def example(steps: int = 1) -> tuple[Tensor, History]:
    shape = (len(LENGTHS), H, D) if steps == 1 else (len(LENGTHS), steps, H, D)
    return random_queries(*shape, dtype=DTYPE), random_history(LENGTHS, K, D, dtype=DTYPE)


def check(result: tuple[Tensor, Tensor], q: Tensor, history: History) -> None:
    rows = q[:, None] if q.ndim == 3 else q
    want, want_lse = attend(rows, history)
    assert_near(result[0].reshape(rows.shape), torch.stack(want))
    assert_near_lse(result[1].reshape(rows.shape[:-1]), torch.stack(want_lse))


def listed(paged: Arguments, page_size: int, dtype: torch.dtype = torch.int32) -> Arguments:
    """A paged cache found by page lists in the place of its table."""
    table = paged["block_table"]
    counts = [-(-length // page_size) for length in LENGTHS]
    pages = torch.cat([table[b, :count] for b, count in enumerate(counts)])
    rest = {name: paged[name] for name in ("k", "v", "seq_lens", "layout")}
    return {**rest, "kv_indptr": offsets32(counts).to(dtype), "kv_indices": pages.to(dtype)}


@pytest.mark.parametrize("page_size", [1, P])
@every_backend
def test_page_lists_down_to_single_tokens(on: InReach, page_size: int) -> None:
    q, history = example()
    paged = history.paged(page_size)
    lists = listed(paged, page_size)
    result = on.decode(q, **lists)
    check(result, q, history)
    assert same_bits(result, on.decode(q, **paged))
    assert same_bits(result, on.decode(q, **listed(paged, page_size, torch.int64)))
    turned = lists | {"kv_indices": lists["kv_indices"].roll(1), "validate": "shapes"}
    assert not same_bits(on.decode(q, **turned), result)


@every_backend
def test_requests_may_share_pages(on: InReach) -> None:
    """A prefix of two pages that three lists begin with."""
    whole = random_history([50], K, D, dtype=DTYPE)
    own = random_history([5, 17, 1], K, D, dtype=DTYPE, seed=4)
    joined = History(
        [torch.cat([whole.k[0][: 2 * P], k]) for k in own.k],
        [torch.cat([whole.v[0][: 2 * P], v]) for v in own.v],
    )
    pool = History([whole.k[0][: 2 * P], *own.k], [whole.v[0][: 2 * P], *own.v]).paged(P)
    table, tails = pool["block_table"], (1, 2, 1)
    lists = [torch.cat([table[0, :2], table[b + 1, :count]]) for b, count in enumerate(tails)]
    q = random_queries(3, H, D, dtype=DTYPE)
    result = on.decode(
        q, pool["k"], pool["v"], layout="NHD", seq_lens=lengths32(joined.lengths),
        kv_indptr=offsets32([len(pages) for pages in lists]), kv_indices=torch.cat(lists),
    )  # fmt: skip
    check(result, q, joined)
    check_fails = own.lengths  # without the prefix it is another question
    with pytest.raises(AssertionError):
        check(
            result, q, History([k[-n:] for k, n in zip(joined.k, check_fails, strict=True)], own.v)
        )


def test_lengths_by_last_pages_are_for_the_cache_and_not_for_one_call() -> None:
    q, history = example()
    lists = listed(history.paged(P), P)
    last = lengths32([(length - 1) % P + 1 for length in LENGTHS])
    cache = PagedCache.from_indptr(
        lists["k"], lists["v"], lists["kv_indptr"], lists["kv_indices"], last_page_len=last
    )
    assert cache.seq_lens.tolist() == LENGTHS
    del lists["seq_lens"]
    with pytest.raises(ValueError, match=r"a paged cache needs seq_lens \[B\]"):
        splitkv.decode_attention(q, **lists)


def dense_views(history: History, layout: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The same rows as views of what a model keeps: all layers at once, K beside V, more rows."""
    given = history.dense(48, layout=layout)
    k, v = given["k"], given["v"]
    layers = torch.full((3, *k.shape), math.nan, dtype=DTYPE).transpose(0, 1).contiguous()
    layers[:, 1], side = k, torch.cat([k, v], -1)
    values = torch.full((3, *v.shape), math.nan, dtype=DTYPE).transpose(0, 1).contiguous()
    values[:, 1] = v
    more = [torch.cat([torch.full_like(x, math.nan), x]) for x in (k, v)]
    return {
        "layers": (layers[:, 1], values[:, 1]),
        "side by side": (side[..., :D], side[..., D:]),
        "after other rows": (more[0][len(k) :], more[1][len(k) :]),
    }


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("kind", ["layers", "side by side", "after other rows"])
@every_backend
def test_dense_views_of_larger_buffers(on: InReach, kind: str, layout: str) -> None:
    q, history = example()
    k, v = dense_views(history, layout)[kind]
    assert (kind == "after other rows") == k.is_contiguous()
    with on.may_refuse(STRIDES):
        result = on.decode(q, k, v, seq_lens=lengths32(LENGTHS), layout=layout)
    check(result, q, history)
    assert same_bits(result, on.decode(q, **history.dense(48, layout=layout)))


@pytest.mark.parametrize("kind", ["rows", "side by side"])
@every_backend
def test_packed_views_of_larger_buffers(on: InReach, kind: str) -> None:
    q, history = example()
    packed = history.packed()
    k, v = packed["k"], packed["v"]
    if kind == "rows":  # every other row is somebody else's
        k, v = (torch.stack([x, torch.full_like(x, math.nan)], 1)[:, 0] for x in (k, v))
    else:
        both = torch.cat([k, v], -1)
        k, v = both[..., :D], both[..., D:]
    assert not k.is_contiguous()
    with on.may_refuse(STRIDES):
        result = on.decode(q, k, v, cu_seqlens_k=packed["cu_seqlens_k"])
    check(result, q, history)
    assert same_bits(result, on.decode(q, **packed))


def query_views(q: Tensor) -> dict[str, Tensor]:
    """q [B, S, H, D] as a part of a fused projection, with heads first, and reversed in memory."""
    fused = torch.full((*q.shape[:2], (H + 2 * K) * D), math.nan, dtype=DTYPE)
    fused[..., : H * D] = q.flatten(2)
    return {
        "fused projection": fused[..., : H * D].unflatten(2, (H, D)),
        "heads first": q.transpose(1, 2).contiguous().transpose(1, 2),
        "elements apart": torch.stack([q, torch.full_like(q, math.nan)], -1)[..., 0],
    }


@pytest.mark.parametrize("kind", ["fused projection", "heads first", "elements apart"])
@backends(slow=INTERPRETED)
def test_queries_of_any_strides(on: InReach, kind: str) -> None:
    q, history = example(steps=2)
    view = query_views(q)[kind]
    assert not view.is_contiguous()
    cache = history.paged(P)
    result = on.decode(view, **cache)
    check(result, q, history)
    assert same_bits(result, on.decode(q, **cache))


@every_backend
def test_one_query_for_all_requests_is_a_stride_of_0(on: InReach) -> None:
    q, history = example()
    one = q[:1].expand(3, H, D)
    result = on.decode(one, **history.paged(P))
    check(result, one, history)
    assert not same_bits(result, on.decode(q, **history.paged(P)))


@pytest.mark.parametrize("splits", [1, 2])
@every_backend
def test_results_go_into_views_and_nowhere_else(on: InReach, splits: int) -> None:
    q, history = example(steps=2)
    cache = history.paged(P)
    want = on.decode(q, **cache, tile=P, num_splits=splits)
    room = torch.full((3, 2, 3, H, D), -7.0, dtype=DTYPE)  # the middle of three is ours
    lse_room = torch.full((3, H, 2, 2), -7.0)
    placed, lse_placed = on.place(room), on.place(lse_room)
    out, lse = placed[:, :, 1], lse_placed[..., 0].transpose(1, 2)
    result = on.decode(q, **cache, tile=P, num_splits=splits, out=out, lse=lse)
    assert same_bits(result, want)
    room, lse_room = placed.cpu(), lse_placed.cpu()
    assert same_bits((room[:, :, 1], lse_room[..., 0].transpose(1, 2)), want)
    assert bool((room[:, :, ::2] == -7).all())
    assert bool((lse_room[..., 1] == -7).all())


@backends(slow=INTERPRETED)
def test_every_form_at_once(on: InReach) -> None:
    q, history = example(steps=2)
    paged = history.paged(P)
    views = [query_views(q)["fused projection"], query_views(q)["heads first"]]
    lists = [listed(paged, P, dtype) for dtype in (torch.int32, torch.int64)]
    want = on.decode(q, **paged)
    for view, found in itertools.product(views, lists):
        out = on.place(torch.full((3, H, 2, D), math.nan, dtype=DTYPE)).transpose(1, 2)
        assert same_bits(on.decode(view, **found, out=out), want)
