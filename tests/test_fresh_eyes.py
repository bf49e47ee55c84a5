"""What somebody with fresh eyes broke, each with the right answer."""

import pickle
from dataclasses import replace

import pytest
import torch

from splitkv import (
    DecodeSpec,
    DenseCache,
    Layout,
    PagedCache,
    PartialState,
    RingCache,
    decode,
    decode_attention,
    explain,
    finish,
    select,
)

SPEC = DecodeSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, layout="BSND", dtype=torch.float32)


def history() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8), torch.randn(2, 10, 2, 8)


@pytest.mark.parametrize("name", ["alibi_slopes", "attn_bias", "sinks"])
def test_a_trainable_extra_is_refused_and_poisons_no_later_call(name: str) -> None:
    q, k = history()
    before = decode_attention(q, k, k, layout="BSND")
    shape = (1, 4, 1, 10) if name == "attn_bias" else (4,)
    extra = {name: torch.nn.Parameter(torch.ones(shape))}
    with pytest.raises(ValueError, match=f"{name} requires grad"):
        decode_attention(q, k, k, layout="BSND", **extra)
    assert torch.equal(decode_attention(q, k, k, layout="BSND"), before)


def test_an_unchecked_trainable_extra_leaves_no_autograd_on_the_scratch() -> None:
    q, k = history()
    slopes = torch.ones(4)
    wanted = decode_attention(q, k, k, layout="BSND", alibi_slopes=slopes)
    trained = torch.nn.Parameter(slopes.clone())
    got = decode_attention(q, k, k, layout="BSND", alibi_slopes=trained, validate="none")
    assert not got.requires_grad
    assert torch.equal(got, wanted)
    assert torch.equal(decode_attention(q, k, k, layout="BSND", alibi_slopes=slopes), wanted)


@pytest.mark.parametrize("lengths", [[10, 7], [10, 10], [0, 3]])
def test_head_major_layout_over_token_major_memory(lengths: list[int]) -> None:
    q, k = history()
    rows = k.transpose(1, 2)
    wanted = decode_attention(q, k, k, layout="BSND", seq_lens=lengths)
    assert torch.equal(
        decode_attention(q, rows, rows, layout="BNSD", seq_lens=lengths), wanted
    ) or torch.allclose(decode_attention(q, rows, rows, layout="BNSD", seq_lens=lengths), wanted)


def test_head_major_pages_over_token_major_memory() -> None:
    pool = torch.randn(6, 32, 2, 8)
    table, lengths = torch.arange(6).view(2, 3), torch.tensor([40, 7])
    q = torch.randn(2, 4, 8)
    wanted = decode_attention(q, pool, pool, layout="NHD", block_table=table, seq_lens=lengths)
    turned = pool.transpose(1, 2)
    got = decode_attention(q, turned, turned, layout="HND", block_table=table, seq_lens=lengths)
    assert torch.equal(got, wanted)


def test_packed_queries_with_reversed_strides() -> None:
    q = torch.randn(3, 3, 10).permute(2, 1, 0)
    k = torch.randn(2, 3, 10, 3)
    offsets = torch.tensor([0, 5, 10])
    got = decode_attention(q, k, k, layout="BNSD", cu_seqlens_q=offsets)
    wanted = decode_attention(q.contiguous(), k, k, layout="BNSD", cu_seqlens_q=offsets)
    assert torch.equal(got, wanted)


def test_what_an_earlier_call_left_behind_changes_no_bit() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 14, 64), torch.randn(1, 130, 2, 64), torch.randn(1, 130, 2, 1)
    zeros = torch.zeros(1, 300, 2, 64)
    results = []
    for earlier in (zeros, zeros * float("nan")):
        decode_attention(q, earlier, earlier[..., :1], layout="BSND")
        results.append(decode_attention(q, k, v, layout="BSND"))
    assert torch.equal(*results)


def test_a_ring_counts_each_requests_own_queries() -> None:
    pool = torch.randn(6, 4, 2, 8)
    table = torch.arange(6).view(2, 3)
    ring = RingCache(pool, pool, table, torch.tensor([8, 30]))
    spec = replace(
        SPEC, layout="NHD", page_size=4, num_queries=8, packed_queries=True, sliding_window=5
    )
    out, _ = decode(torch.randn(9, 4, 8), ring, spec, cu_seqlens_q=torch.tensor([0, 8, 9]))
    assert torch.isfinite(out).all()


def test_an_unchecked_call_vouches_for_no_later_one() -> None:
    q, k = history()
    cache = DenseCache(k, k, torch.tensor([10, 7]))
    plan = select(SPEC, "cpu").plan(SPEC, [10, 7])
    scale = torch.ones(1)
    decode(q, cache, SPEC, plan=plan, k_scale=scale, validate="none")
    with pytest.raises(ValueError, match="does not promise k_scale"):
        decode(q, cache, SPEC, plan=plan, k_scale=scale, validate="shapes")


@pytest.mark.parametrize("level", ["none", "shapes"])
def test_a_call_vouches_for_none_that_asks_for_more(level: str) -> None:
    q, pages = torch.randn(1, 4, 8), torch.randn(3, 4, 2, 8)
    lengths = torch.tensor([6], dtype=torch.int32)
    cache = PagedCache(pages, pages, torch.tensor([[0, 7]]), lengths, Layout.NHD)
    spec = replace(SPEC, layout=Layout.NHD, page_size=4)
    plan = select(spec).plan(spec, [6])
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 7"):
        decode(q, cache, spec, plan=plan)
    decode(q, cache, spec, plan=plan, validate=level)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 7"):
        decode(q, cache, spec, plan=plan)


def test_a_spec_is_made_anew_when_it_is_unpickled() -> None:
    again = pickle.loads(pickle.dumps(SPEC))
    assert again == SPEC
    assert hash(again) == hash(SPEC)
    assert again.plan_key == SPEC.plan_key


@pytest.mark.parametrize(
    "change",
    [
        {"logits_soft_cap": 1e39},
        {"logits_soft_cap": 1e-60},
        {"sm_scale": 1e300},
        {"anchor_tokens": 1.5},
        {"anchor_tokens": 2**70},
        {"anchor_tokens": None},
        {"sliding_window": 2**63},
        {"causal": "no"},
        {"alibi": "no"},
        {"k_scale": "head"},
        {"logits_soft_cap": "4"},
    ],
    ids=str,
)
def test_a_spec_refuses_what_no_kernel_could_use(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(SPEC, **change)


@pytest.mark.parametrize(
    "name", ["q", "k", "cu_seqlens_q", "alibi_slopes", "attn_bias", "attn_mask", "sinks", "out"]
)
def test_what_is_no_tensor_is_refused_by_name(name: str) -> None:
    q, k = history()
    given = {"q": q, "k": k, "v": k} | {name: "x"}
    with pytest.raises(ValueError, match=rf"{name}.* must be a"):
        decode_attention(**given, layout="BSND")


def test_an_output_without_memory_of_its_own_is_refused() -> None:
    q, k = history()
    with pytest.raises(ValueError, match="out must not"):
        decode_attention(q, k, k, layout="BSND", out=torch.zeros(1, 4, 8).expand(2, 4, 8))


def test_an_output_whose_elements_share_memory_is_refused() -> None:
    q, k = history()
    meeting = torch.zeros(99).as_strided(q.shape, (1, 1, 1))
    with pytest.raises(ValueError, match=r"each element needs memory of its own"):
        decode_attention(q, k, k, layout="BSND", out=meeting)
    apart = torch.zeros(2, 8, 4, 3)[..., 1].transpose(1, 2)
    wanted = decode_attention(q, k, k, layout="BSND")
    assert torch.equal(decode_attention(q, k, k, layout="BSND", out=apart), wanted)


def test_more_splits_than_any_integer_holds() -> None:
    q, k = history()
    wanted = decode_attention(q, k, k, layout="BSND", num_splits=10)
    assert torch.equal(decode_attention(q, k, k, layout="BSND", num_splits=2**70), wanted)


def test_an_unknown_device_is_a_malformed_question() -> None:
    with pytest.raises(ValueError, match="unknown device 'bogus'"):
        explain(SPEC, "bogus")


def test_states_refuse_what_has_lost_its_weights() -> None:
    out = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="lse must be float32"):
        PartialState.from_lse2(out, torch.zeros(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="floating"):
        finish(PartialState.empty((3,), 4), dtype=torch.int32)
