"""What the CPU backend promises beyond closeness: bits, poison, strides, memory."""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import splitkv
from dense_attention import LAYOUTS, PAGE, Problem, check, dense, problem, run, stored, where
from splitkv.backends import cpu_sums, cpu_work
from splitkv.backends.cpu_tiles import SCRATCH, Tiles

CUTS: tuple[dict[str, int], ...] = ({"num_splits": 3}, {"split_size": 256}, {"num_splits": 1})
MIB = 1 << 20


def _same_bits(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _only(given: Problem, b: int) -> Problem:
    one = slice(b, b + 1)
    return dataclasses.replace(
        given, q=given.q[one], k=given.k[one], v=given.v[one], lengths=given.lengths[one]
    )


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("queries", "heads"), [(1, (5, 5)), (1, (8, 2)), (3, (10, 2))])
def test_bits_do_not_depend_on_batch_mates_or_place(
    cut: dict[str, int], layout: str, queries: int, heads: tuple[int, int]
) -> None:
    lengths = (1300, 130, 130, 1300, 64, 1, 699)
    given = problem(lengths=lengths, queries=queries, heads=heads, sliding_window=1200)
    out, lse = run(given, layout, **cut)
    for size in (1, 2, 4):
        some = dataclasses.replace(
            given,
            q=given.q[-size:],
            k=given.k[-size:],
            v=given.v[-size:],
            lengths=lengths[-size:],
        )
        assert _same_bits(run(some, layout, **cut), (out[-size:], lse[-size:]))
    for b in range(len(lengths)):
        alone = run(_only(given, b), layout, **cut)
        assert _same_bits(alone, (out[b : b + 1], lse[b : b + 1]))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("heads", [5, 7, 10])
def test_a_lone_kv_head_has_the_bits_of_a_batched_one(heads: int) -> None:
    # without padded rows MKL spreads one product over the threads, and its bits differ
    given = problem(lengths=(700, 700), heads=(heads, 1))
    out, _ = run(given)
    for b in range(2):
        assert torch.equal(run(_only(given, b))[0], out[b : b + 1])


def test_bits_are_the_same_for_16_equal_requests() -> None:
    given = problem(lengths=(333,) * 16)
    out, _ = run(given, "BSND", num_splits=2)
    for b in (0, 7, 15):
        assert torch.equal(run(_only(given, b), "BSND", num_splits=2)[0], out[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_bits_do_not_depend_on_layout_or_pages(cut: dict[str, int], dtype: torch.dtype) -> None:
    given = problem(lengths=(1700, 300, 64, 0), queries=2, dims=(64, 64)).to(dtype)
    first = run(given, "BSND", **cut)
    for layout in LAYOUTS[1:]:
        assert _same_bits(run(given, layout, **cut), first)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_bits_do_not_depend_on_which_pages(layout: str) -> None:
    given = problem()
    k, v = stored(given, layout)
    options = where(given, layout)
    first = splitkv.decode_attention(given.q, k, v, **options, num_splits=2)
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(5))
    moved = options | {"block_table": torch.argsort(order)[options["block_table"].long()]}
    assert torch.equal(
        splitkv.decode_attention(given.q, k[order], v[order], **moved, num_splits=2), first
    )


def test_the_same_call_gives_the_same_bits_on_every_thread() -> None:
    given = problem(queries=3, sliding_window=100)
    first = run(given)
    with ThreadPoolExecutor(3) as pool:
        for other in pool.map(lambda _: run(given), range(9)):
            assert _same_bits(other, first)


def test_scratch_made_in_inference_mode_serves_outside_of_it() -> None:
    given = problem()
    with ThreadPoolExecutor(1) as pool:  # a thread without scratch of its own yet

        def inside() -> tuple[torch.Tensor, ...]:
            with torch.inference_mode():
                return run(given)

        inferred = pool.submit(inside).result()
        assert _same_bits(pool.submit(run, given).result(), inferred)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 90}, {"logits_soft_cap": 4.0}], ids=str)
def test_small_tiles_give_the_same_answer(
    monkeypatch: pytest.MonkeyPatch, layout: str, options: dict[str, Any]
) -> None:
    given = problem(lengths=(700, 5, 320), queries=3, dims=(32, 40), **options)
    whole = run(given, layout)
    monkeypatch.setattr(cpu_work, "OPERAND_BYTES", 1)
    monkeypatch.setattr(cpu_sums, "PILE_ELEMENTS", 1)
    monkeypatch.setattr(cpu_work, "QUERY_ROWS", 12)
    tiled = run(given, layout)
    check(tiled, given)
    assert not _same_bits(tiled, whole)  # the tiles really were others


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["k", "v"])
def test_nan_that_is_seen_comes_out(layout: str, operand: str) -> None:
    given = problem(lengths=(300, 300), heads=(4, 2))
    getattr(given, operand)[0, 40, 1] = math.nan
    out, lse = run(given, layout, num_splits=2)
    assert torch.isnan(out[0, :, 2:]).all()
    assert torch.isfinite(out[0, :, :2]).all()
    assert torch.isfinite(out[1]).all()
    assert bool(torch.isnan(lse[0, :, 2:]).all()) == (operand == "k")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_value_reaches_only_the_queries_that_see_it(layout: str, poison: float) -> None:
    mask = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    mask[0, 3, 1] = False
    given = problem(lengths=(200,), queries=4, attn_mask=mask)
    clean, _ = run(given, layout)
    given.v[0, 197, 0, 5] = poison  # the second query's own position
    out, _ = run(given, layout)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[0, 1:3, :3, 5] = True  # the fourth query is masked, the first comes before it
    expected = torch.isnan if math.isnan(poison) else torch.isinf
    assert expected(out[hit]).all()
    torch.testing.assert_close(out[~hit], clean[~hit])


def test_a_bias_of_minus_infinity_hides_what_it_hides() -> None:
    bias = torch.zeros(1, 1, 1, 8)
    bias[..., 3] = -math.inf
    given = problem(lengths=(100, 8), attn_bias=bias)
    clean = run(given)
    check(clean, given)
    given.k[0, 95], given.v[0, 95] = math.nan, math.nan
    assert _same_bits(run(given), clean)


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "NHD", "HND"])
def test_any_strides_and_offsets(layout: str) -> None:
    given = problem(dims=(32, 48))
    want = run(given, layout)
    k, v = stored(given, layout)
    options = where(given, layout)
    for pick in (
        lambda x: torch.stack([x, x], -1)[..., 0],  # last stride 2
        lambda x: torch.cat([x, x], -1)[..., 3 : 3 + x.shape[-1]].copy_(x),  # odd offset
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],  # room for more
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat([x, x], 2)[:, :, x.shape[2] :],
    ):
        got = splitkv.decode_attention(given.q, pick(k), pick(v), **options, return_lse=True)
        assert _same_bits(got, want)


def test_a_window_over_equal_and_unequal_requests() -> None:
    lengths = (900, 700, 700, 700, 300, 500, 128)
    given = problem(lengths=lengths, dims=(64, 64), sliding_window=128)
    k, v = (x.contiguous() for x in (given.k, given.v))
    got = splitkv.decode_attention(
        given.q,
        k,
        v,
        layout="BSND",
        seq_lens=torch.tensor(lengths),
        sliding_window=128,
        return_lse=True,
    )
    assert isinstance(got, tuple)
    check(got, given)


def test_autocast_changes_nothing() -> None:
    given = problem(logits_soft_cap=3.0)
    plain = run(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _same_bits(run(given), plain)


def test_one_cache_shared_by_all_requests() -> None:
    given = problem(lengths=(300,))
    q = given.q.expand(4, -1, -1, -1)
    k, v = (x.expand(4, -1, -1, -1) for x in (given.k, given.v))
    out = splitkv.decode_attention(q, k, v, layout="BSND")
    assert isinstance(out, torch.Tensor)
    assert all(torch.equal(out[b], run(given)[0][0]) for b in range(4))


@pytest.mark.parametrize("page", [1, 3, 256, 1000])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_odd_page_sizes(page: int, layout: str) -> None:
    given = problem(lengths=(700, 3), sliding_window=500)
    blocks = -(-700 // page)
    table = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(2)).view(2, blocks)
    pools = []
    for x in (given.k, given.v):
        pool = torch.full((2 * blocks, page, *x.shape[2:]), math.nan)
        padded = torch.full((2, blocks * page, *x.shape[2:]), math.nan)
        padded[:, :700] = x
        pool[table.flatten()] = padded.unflatten(1, (blocks, page)).flatten(0, 1)
        pools.append(pool.transpose(1, 2).contiguous() if layout == "HND" else pool)
    got = splitkv.decode_attention(
        given.q,
        *pools,
        layout=layout,
        seq_lens=torch.tensor(given.lengths),
        block_table=table,
        sliding_window=500,
        return_lse=True,
        num_splits=2,
    )
    assert isinstance(got, tuple)
    check(got, given)


def test_entries_that_are_not_used_are_never_followed() -> None:
    mask = torch.ones(2, 1, 2 * PAGE, dtype=torch.bool)
    mask[:, :, :PAGE] = False
    given = problem(lengths=(3 * PAGE, 2 * PAGE), attn_mask=mask)
    k, v = stored(given, "NHD")
    options = where(given, "NHD")
    options["block_table"][0, 1] = 10**9
    options["block_table"][1, 0] = -1
    got = splitkv.decode_attention(given.q, k, v, **options, attn_mask=mask, return_lse=True)
    assert isinstance(got, tuple)
    check(got, given)


def test_a_step_shares_the_work_and_follows_the_lengths() -> None:
    given = problem(lengths=(300, 200))
    cache = splitkv.DenseCache(given.k, given.v, torch.tensor([300, 200]))
    spec = splitkv.DecodeSpec(
        num_q_heads=6, num_kv_heads=2, head_dim=32, layout=cache.layout, dtype=torch.float32
    )
    plan = splitkv.select(spec, name="cpu").plan(spec, [300, 200])
    check(splitkv.decode(given.q, cache, spec, plan=plan), given)
    shorter = dataclasses.replace(given, lengths=(120, 200))
    cache = splitkv.DenseCache(given.k, given.v, torch.tensor([120, 200]))
    check(splitkv.decode(given.q, cache, spec, plan=plan), shorter)


MEMORY = """
import resource, torch, splitkv
k = torch.zeros(1, 2**19, 1, 128, dtype=torch.bfloat16)
v, q = k.clone(), torch.zeros(1, 8, 128, dtype=torch.bfloat16)
options = {options}
splitkv.decode_attention(q, k[:, :64], v[:, :64], layout="BSND")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if "block_table" in options:
    k, v = (x.view(-1, 16, 1, 128) for x in (k, v))
splitkv.decode_attention(q, k, v, **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    "options",
    [
        '{"layout": "BSND"}',
        '{"layout": "NHD", "seq_lens": [2**19], "block_table": torch.arange(2**15)[None]}',
        '{"layout": "BSND", "num_splits": 7, "logits_soft_cap": 2.0}',
    ],
)
def test_a_long_history_takes_no_more_scratch(options: str) -> None:
    code = MEMORY.replace("{options}", options)
    run_ = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run_.stdout) * 1024 < 64 * MIB  # a float32 copy of this cache takes 512 MiB


@pytest.mark.parametrize("heads", [(32, 8), (128, 128), (64, 1)])
@pytest.mark.parametrize("queries", [1, 40])
def test_scratch_is_what_the_backend_says(heads: tuple[int, int], queries: int) -> None:
    given = problem(lengths=(1500,), queries=queries, heads=heads, dims=(64, 64))
    given = given.to(torch.bfloat16)
    cache = splitkv.DenseCache(given.k, given.v, torch.tensor([1500]))
    spec = splitkv.DecodeSpec(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=64,
        layout=cache.layout,
        dtype=torch.bfloat16,
        num_queries=queries,
    )
    backend = splitkv.select(spec, name="cpu")
    plan = backend.plan(spec, [1500])

    def held() -> int:
        splitkv.decode(given.q, cache, spec, plan=plan)
        return SCRATCH.nbytes

    with ThreadPoolExecutor(1) as pool:  # a fresh thread's scratch
        nbytes = pool.submit(held).result()
    assert 0 < nbytes <= backend.workspace_bytes(plan) <= 64 * MIB


def test_rows_that_see_nothing() -> None:
    given = problem(lengths=(2, 0), queries=4)  # the first two queries stand before position 0
    out, lse = run(given)
    assert (out[0, :2] == 0).all()
    assert (lse[0, :2] == -math.inf).all()
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    check((out, lse), given)
    assert torch.isfinite(dense(given)[1][0, 2:]).all()


@pytest.mark.parametrize("room", [1, 2], ids=["contiguous", "every other page"])
@pytest.mark.parametrize("window", [None, 301])
def test_blocks_of_tokens_have_the_bits_of_tokens(
    window: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(3)
    pool = torch.randn(90 * room, 16, 2, 32, generator=random).bfloat16()[::room]
    table = torch.randperm(90, generator=random)[:88].view(2, 44).int()
    request = {
        "seq_lens": torch.tensor([700, 93], dtype=torch.int32),
        "block_table": table,
        "layout": "NHD",
        "sliding_window": window,
        "return_lse": True,
    }
    q = torch.randn(2, 4, 32, generator=random).bfloat16()
    read: list[int] = []
    honest = Tiles._read_blocks
    monkeypatch.setattr(
        Tiles,
        "_read_blocks",
        lambda *given: (read.append(given[-1].step), honest(*given))[1],
    )
    by_block = splitkv.decode_attention(q, pool, pool.flip(-1), **request)
    assert max(read) > 1
    read.clear()
    monkeypatch.setattr(Tiles, "_step", lambda *_: 1)
    by_token = splitkv.decode_attention(q, pool, pool.flip(-1), **request)
    assert not read
    assert all(torch.equal(*pair) for pair in zip(by_block, by_token, strict=True))
