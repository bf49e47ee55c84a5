"""The CUDA kernels where they go wrong first; test_parity runs the case table through them."""

import math

import pytest
import torch

from cuda_calls import DEVICE, assert_answers, call_of, decode, host_plan, partial, taken
from histories import History, offsets32, random_history, random_queries, same_bits
from splitkv.kernels_cuda.states import Workspace

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_lengths_around_a_tile(dtype: torch.dtype) -> None:
    history = random_history([0, 1, 15, 16, 63, 64, 65, 129], 1, 16, dtype=dtype)
    call = call_of(random_queries(8, 1, 2, 16, dtype=dtype), history.dense(), causal=True)
    out, lse = decode(call)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(lse[0], torch.full_like(lse[0], -math.inf))
    assert_answers(call, out, lse)


@pytest.mark.parametrize("first_seen", [1, 64, 130, 199])
def test_the_first_tiles_are_fully_masked(first_seen: int) -> None:
    history = random_history([200], 1, 32)
    mask = torch.zeros(1, 2, 200, dtype=torch.bool)
    mask[:, :, first_seen:] = True
    mask[:, 0, first_seen] = False
    call = call_of(random_queries(1, 2, 2, 32), history.dense(), attn_mask=mask, causal=False)
    assert_answers(call, *decode(call, num_splits=2))


def test_a_row_whose_every_token_is_masked() -> None:
    history = random_history([150, 9], 1, 16, dtype=BF16)
    mask = torch.ones(2, 2, 150, dtype=torch.bool)
    mask[0, 1] = False
    mask[1] = False
    call = call_of(random_queries(2, 2, 3, 16, dtype=BF16), history.dense(), attn_mask=mask)
    for splits in (1, 2):
        out, lse = decode(call, num_splits=splits)
        assert torch.equal(lse == -math.inf, ~mask.any(-1)[:, :, None].expand(-1, -1, 3))
        assert_answers(call, out, lse)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_layout_and_page_size_gives_the_same_bits(dtype: torch.dtype) -> None:
    history = random_history([130, 7], 2, 16, dtype=dtype)
    q = random_queries(2, 1, 4, 16, dtype=dtype)
    caches = [history.dense(), history.dense(150, layout="BNSD"), history.packed()]
    caches += [history.paged(page) for page in (1, 3, 16, 480)]
    caches += [history.paged(16, layout="HND", unused=2**31 - 1, seed=3)]
    answers = [decode(call_of(q, cache), num_splits=1) for cache in caches]
    assert_answers(call_of(q, caches[0]), *answers[0])
    assert all(same_bits(answers[0], answer) for answer in answers)


@pytest.mark.parametrize(
    "settings", [{}, {"sliding_window": 40}, {"sliding_window": 40, "anchor_tokens": 5}]
)
def test_what_no_query_sees_changes_no_bit(settings: dict[str, int]) -> None:
    lengths = [170, 33, 1, 0]
    clean, spoilt = (random_history(lengths, 1, 16, dtype=BF16) for _ in range(2))
    queries, window = 2, settings.get("sliding_window")
    for k, v in zip(spoilt.k, spoilt.v, strict=True):
        first = 0 if window is None else max(len(k) - queries - window + 1, 0)
        k[settings.get("anchor_tokens", 0) : first] = math.nan
        v[settings.get("anchor_tokens", 0) : first] = math.inf
    tables = clean.paged(16, fill=0.0, unused=0), spoilt.paged(16, fill=math.nan, unused=-1)
    if window is not None and not settings.get("anchor_tokens"):
        tables[1]["block_table"][0, : (170 - queries - window + 1) // 16] = -(2**31)
    q = random_queries(4, queries, 2, 16, dtype=BF16)
    one, other = (decode(call_of(q, table, **settings), num_splits=2) for table in tables)
    assert same_bits(one, other)
    assert_answers(call_of(q, tables[0], **settings), *one)


def test_a_gap_between_anchors_and_the_window_of_fewer_queries_is_not_read() -> None:
    """The plan joins anchors and window, as four queries would; the first request asks one."""
    history = random_history([17, 30], 1, 16)
    q, counts = random_queries(5, 2, 16), offsets32([1, 4])
    settings = {"sliding_window": 10, "anchor_tokens": 5, "cu_seqlens_q": counts}
    clean = call_of(q, history.paged(1, fill=0.0, unused=0), **settings)
    answer = decode(clean, num_splits=1)
    assert_answers(clean, *answer)
    spoilt = history.paged(1)
    unseen = spoilt["block_table"][0, 5:7].tolist()
    spoilt["k"][unseen], spoilt["v"][unseen] = math.nan, math.nan
    assert same_bits(answer, decode(call_of(q, spoilt, **settings), num_splits=1))
    spoilt["block_table"][0, 5:7] = -1
    assert same_bits(answer, decode(call_of(q, spoilt, **settings), num_splits=1))


@pytest.mark.parametrize("hide", ["attn_mask", "attn_bias"])
def test_a_hidden_value_of_nan_stays_hidden(hide: str) -> None:
    history = random_history([90], 1, 16)
    seen = torch.rand(1, 2, 90, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[:, :, [3, 70]] = False
    bias = torch.where(seen, 0.5, -math.inf)[:, None]
    settings = {"attn_mask": seen} if hide == "attn_mask" else {"attn_bias": bias}
    q = random_queries(1, 2, 2, 16)
    clean = call_of(q, history.dense(), **settings)
    answer = decode(clean, num_splits=1)
    assert_answers(clean, *answer)
    history.k[0][[3, 70]] = math.nan
    history.v[0][[3, 70]] = math.nan
    assert same_bits(answer, decode(call_of(q, history.dense(), **settings), num_splits=1))


def test_every_row_is_written_and_no_scratch_is_read_unwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoilt(*arguments: object) -> Workspace:
        workspace = empty(*arguments)
        for tensor in (workspace.out, workspace.lse, workspace.top):
            tensor.fill_(math.nan)
        return workspace

    empty = Workspace.empty
    monkeypatch.setattr(Workspace, "empty", spoilt)
    history = random_history([140, 0, 300, 2], 1, 40, dtype=FP16)
    counts = [2, 3, 0, 3]
    q = random_queries(sum(counts), 2, 40, dtype=FP16)
    call = call_of(q, history.paged(16), cu_seqlens_q=offsets32(counts))
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:-1], math.nan)
    from cuda_calls import BACKEND

    for splits in (1, 3):
        plan = BACKEND.plan_for(call, num_splits=splits)
        out, lse = (torch.full_like(tensor, math.nan).to(DEVICE) for tensor in (out, lse))
        BACKEND.decode(call, plan, out=out, lse=lse)
        assert_answers(call, out.cpu(), lse.cpu())


@pytest.mark.parametrize("splits", [1, 2, 64])
def test_a_sink_enters_once_and_alone_where_nothing_is_seen(splits: int) -> None:
    history = random_history([300, 0, 20], 2, 16, dtype=BF16)
    sinks = torch.tensor([0.5, -math.inf, math.inf, -20.0])
    call = call_of(random_queries(3, 1, 4, 16, dtype=BF16), history.dense(), sinks=True)
    out, lse = decode(call, sinks=sinks, num_splits=splits)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1, 0], sinks)
    assert_answers(call, out, lse, sinks)


@pytest.mark.parametrize("splits", [1, 2])
def test_scores_of_exactly_minus_61250(splits: int) -> None:
    """Below every finite stand-in for -inf that 16 bits can hold, and many of float32 kernels."""
    tokens, dim = 200, 16
    k = torch.zeros(tokens, 1, dim, dtype=BF16)
    k[:, 0, 0] = -980.0
    v = random_history([tokens], 1, dim, dtype=BF16).v[0]
    q = torch.zeros(1, 1, 2, dim, dtype=BF16)
    q[0, 0, 0, 0], q[0, 0, 1, 1] = 250.0, 1.0
    call = call_of(q, History([k], [v]).paged(16), sm_scale=0.25)
    out, lse = decode(call, num_splits=splits)
    mean = v[:, 0].double().mean(0)
    spacing = 2.0**-8  # of float32 at 61250
    assert (lse.double()[0, 0, 0] - (math.log(tokens) - 61250)).abs() <= spacing
    assert (out[0, 0].double() - mean).abs().max() <= 2 * torch.finfo(
        BF16
    ).eps * v.double().abs().max()


@pytest.mark.parametrize("group", [1, 7, 24, 40, 64])
def test_groups_of_any_size(group: int) -> None:
    history = random_history([70, 9], 1, 16, dtype=BF16)
    call = call_of(random_queries(2, 3, group, 16, dtype=BF16), history.dense())
    assert_answers(call, *decode(call))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dim", [1, 40, 80, 96, 112, 192, 256])
def test_head_dims_that_are_no_power_of_two(dim: int, dtype: torch.dtype) -> None:
    history = random_history([21], 2, dim, head_dim_v=max(dim - 8, 5), dtype=dtype)
    call = call_of(random_queries(1, 1, 6, dim, dtype=dtype), history.paged(4, spare_pages=0))
    assert_answers(call, *decode(call))


@pytest.mark.parametrize("splits", [{"num_splits": 3}, {"split_size": 128}])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(splits: dict[str, int]) -> None:
    history = random_history([150, 300, 3], 2, 16, dtype=BF16)
    q = random_queries(3, 1, 4, 16, dtype=BF16)
    together = decode(call_of(q, history.paged(16)), **splits)
    again = decode(call_of(q, history.paged(16)), **splits)
    assert same_bits(together, again)
    alone = decode(call_of(q[1:2], taken(history, 1).paged(16, seed=5)), **splits)
    assert same_bits(alone, tuple(tensor[1:2] for tensor in together))
    turned = decode(call_of(q.flip(0), taken(history, 2, 1, 0).paged(16, seed=9)), **splits)
    assert same_bits(together, tuple(tensor.flip(0) for tensor in turned))


@pytest.mark.parametrize("splits", [{"num_splits": 3}, {"split_size": 128}, {}])
def test_plans_of_host_and_device_give_the_same_bits(splits: dict[str, int]) -> None:
    lengths = [300, 0, 129, 1]
    history = random_history(lengths, 1, 16, dtype=FP16)
    call = call_of(random_queries(4, 2, 2, 16, dtype=FP16), history.paged(3), sliding_window=200)
    on_device = decode(call, **splits)
    assert same_bits(on_device, decode(call, host_plan(call, lengths, **splits)))
    assert_answers(call, *on_device)


@pytest.mark.parametrize("lengths", [[300, 290], [170, 105], [104, 44], [40, 41], [3, 0]])
def test_a_plan_for_longer_requests_serves_shorter_ones(lengths: list[int]) -> None:
    """Down to where the window meets the anchors, which remain a split of their own."""
    history = random_history(lengths, 1, 16)
    q = random_queries(2, 2, 2, 16)
    call = call_of(q, history.dense(300), sliding_window=64, anchor_tokens=40)
    for splits in ({"num_splits": 2}, {"num_splits": 1}, {"split_size": 128}):
        assert_answers(call, *decode(call, host_plan(call, [300, 300], **splits)))


def test_a_soft_cap_of_large_and_of_small_scores() -> None:
    history = random_history([70], 1, 16)
    for gain in (1e-3, 1.0, 1e4):
        call = call_of(random_queries(1, 1, 2, 16) * gain, history.dense(), logits_soft_cap=30.0)
        assert_answers(call, *decode(call))


@pytest.mark.parametrize("sm_scale", [0.0, -0.25, 1e-30])
def test_scales_of_any_sign(sm_scale: float) -> None:
    history = random_history([70], 1, 16)
    call = call_of(random_queries(1, 1, 2, 16), history.dense(), sm_scale=sm_scale)
    assert_answers(call, *decode(call))


def test_any_strides_and_index_types() -> None:
    history = random_history([70, 20], 2, 16, dtype=BF16)
    q = random_queries(2, 2, 4, 32, dtype=BF16)[..., ::2]
    arguments = history.paged(8, fill=0.0)
    wide = torch.full((4, 2 * arguments["block_table"].shape[1]), -1)
    wide[::2, ::2] = arguments["block_table"]
    lengths = torch.stack([arguments["seq_lens"].long(), torch.zeros(2, dtype=torch.int64)], 1)
    both = torch.stack([arguments["k"], arguments["v"]], -1)
    strided = {
        "k": both[..., 0],
        "v": both[..., 1],
        "block_table": wide[::2, ::2],
        "seq_lens": lengths[:, 0],
        "layout": "NHD",
    }
    bias = torch.rand(2, 1, 2, 100, generator=torch.Generator().manual_seed(0))[..., ::2]
    call, plain = call_of(q, strided, attn_bias=bias), call_of(q, arguments, attn_bias=bias)
    answer = decode(call, num_splits=1)
    assert_answers(call, *answer)
    assert same_bits(answer, decode(plain, num_splits=1))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64])
def test_slopes_biases_and_sinks_of_other_dtypes(dtype: torch.dtype) -> None:
    history = random_history([70, 9], 1, 16)
    q = random_queries(2, 2, 2, 16)
    bias = random_queries(2, 2, 2, 70, seed=5)
    bias[0, :, :, ::7] = -math.inf
    extras = {"attn_bias": bias.to(dtype), "alibi_slopes": torch.tensor([0.25, 0.1]).to(dtype)}
    sinks = torch.tensor([0.5, -3.3]).to(dtype)
    call = call_of(q, history.dense(), sinks=True, **extras)
    assert_answers(call, *decode(call, sinks=sinks), sinks)
    rounded = {name: value.float() for name, value in extras.items()}
    same = decode(call_of(q, history.dense(), sinks=True, **rounded), sinks=sinks.float())
    assert same_bits(same, decode(call, sinks=sinks))


def test_out_and_lse_are_written_in_place_whatever_their_strides() -> None:
    from cuda_calls import BACKEND

    history = random_history([140], 1, 16, dtype=BF16)
    call = call_of(random_queries(1, 2, 2, 16, dtype=BF16), history.dense())
    for splits in (1, 2):
        plan = BACKEND.plan_for(call, num_splits=splits)
        wanted = decode(call, plan)
        out = torch.empty(1, 2, 16, 2, 2, dtype=BF16, device=DEVICE)[..., 0].transpose(2, 3)
        lse = torch.empty(1, 2, 2, device=DEVICE).transpose(1, 2)
        BACKEND.decode(call, plan, out=out, lse=lse)
        assert same_bits(wanted, (out.cpu(), lse.cpu()))


def test_the_state_is_the_answer_before_its_rounding() -> None:
    history = random_history([200, 0, 66], 1, 24, dtype=BF16)
    call = call_of(random_queries(3, 1, 2, 24, dtype=BF16), history.packed())
    for splits in (1, 2):
        out, lse = decode(call, num_splits=splits)
        state = partial(call, num_splits=splits)
        assert state.out.dtype == FP32
        assert same_bits((out, lse), (state.out.to(BF16), state.lse))
        assert torch.equal(state.max == -math.inf, lse == -math.inf)
        assert bool(((state.max <= lse) & (lse <= state.max + math.log(200))).all())


def test_a_nan_in_a_visible_slot_comes_out() -> None:
    for name in ("k", "v"):
        history = random_history([100, 50], 1, 16)
        getattr(history, name)[0][7] = math.nan
        out, lse = decode(call_of(random_queries(2, 1, 2, 16), history.dense()), num_splits=2)
        assert torch.isnan(out[0]).all()
        assert torch.isnan(lse[0]).all() == (name == "k")
        assert torch.isfinite(out[1]).all()
        assert torch.isfinite(lse[1]).all()


def test_no_request_at_all() -> None:
    history = random_history([], 1, 16)
    empty = torch.empty(0, 4, 1, 16)
    call = call_of(
        random_queries(0, 1, 2, 16),
        {
            "k": empty,
            "v": empty,
            "seq_lens": torch.tensor(history.lengths, dtype=torch.int32),
            "layout": "BSND",
        },
    )
    out, lse = decode(call)
    assert out.shape == (0, 1, 2, 16)
    assert lse.shape == (0, 1, 2)
