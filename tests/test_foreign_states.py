"""States of other libraries, both ways: what they report becomes the same state, and every bit
comes back.
"""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import splitkv
from histories import attend, random_history, random_queries, same_bits
from splitkv.common.state import PartialState
from splitkv.integrations import states as borders

B, S, H, K, D, T = 2, 3, 4, 2, 16, 24
EMPTY = (1, 1)  # the row of which a state below has seen nothing
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")
Theirs = tuple[Tensor, Tensor]
Border = Callable[[Tensor, Tensor], PartialState]


def a_state(*shape: int, seed: int = 0) -> PartialState:
    """Random, with a row of nothing; ``max`` is the lse, as everybody reports it."""
    random = torch.Generator().manual_seed(seed)
    lse = 20 * torch.randn(*shape, generator=random)
    out = torch.randn(*shape, D, generator=random)
    lse[EMPTY], out[EMPTY] = -math.inf, 0.0
    return PartialState(lse, lse.clone(), out)


def bits(state: PartialState) -> tuple[Tensor, ...]:
    return state.max, state.lse, state.out


def fia(layout: str) -> tuple[Callable[[PartialState], Theirs], Border]:
    def there(state: PartialState) -> Theirs:
        return borders.to_fused_infer(state, layout)

    return there, lambda out, lse: borders.from_fused_infer(out, lse, layout)


PACKED = {
    "flash-attention varlen": (
        borders.to_flash_attention_varlen,
        borders.from_flash_attention_varlen,
    ),
    "FIA TND": fia("TND"),
}
DENSE = {
    "flash-attention": (borders.to_flash_attention, borders.from_flash_attention),
    "torch": (borders.to_torch, borders.from_torch),
    **{f"FIA {layout}": fia(layout) for layout in LAYOUTS},
}
SHAPES = {
    "flash-attention varlen": ((5, H, D), (H, 5)),
    "FIA TND": ((5, H, D), (5, H, 1)),
    "flash-attention": ((B, S, H, D), (B, H, S)),
    "torch": ((B, H, S, D), (B, H, S)),
    "FIA BSH": ((B, S, H * D), (B, H, S, 1)),
    "FIA BSND": ((B, S, H, D), (B, H, S, 1)),
    "FIA BNSD": ((B, H, S, D), (B, H, S, 1)),
    "FIA BNSD_BSND": ((B, S, H, D), (B, H, S, 1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back_is_exact(name: str) -> None:
    there, back = (PACKED | DENSE)[name]
    state = a_state(5, H) if name in PACKED else a_state(B, S, H)
    out, lse = there(state)
    assert (tuple(out.shape), tuple(lse.shape)) == SHAPES[name]
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert same_bits(bits(back(out, lse)), bits(state))
    again = there(back(out, lse))
    assert same_bits(again, (out, lse)), "their own sentinel comes back too"
    with pytest.raises(ValueError, match="goes with"):
        back(out, lse[:, :-1])
    with pytest.raises(ValueError, match="the state must be"):
        there(a_state(2, 2, S, H))


def test_flashinfer_there_and_back_rounds_once_each_way() -> None:
    state = a_state(5, H)
    out, lse2 = borders.to_flashinfer(state)
    back = borders.from_flashinfer(out, lse2)
    assert torch.equal(back.out, state.out)
    seen = state.lse > -math.inf
    assert torch.equal(lse2[~seen], state.lse[~seen])
    assert torch.equal(back.lse[~seen], state.lse[~seen])
    eps = torch.finfo(torch.float32).eps
    off = (back.lse - state.lse).abs()[seen]
    assert bool((off <= eps * state.lse[seen].abs()).all())
    exact = state.lse.double()[seen] / math.log(2)
    assert torch.allclose(lse2[seen].double(), exact, rtol=eps)
    forgotten = PartialState.from_lse(out, lse2)  # base 2 taken for natural
    assert float((forgotten.lse - state.lse)[seen].abs().max()) > 5


def merge_base_2(left: Theirs, right: Theirs) -> Theirs:
    """FlashInfer's merge_state (state.cuh), in float64."""
    (va, sa), (vb, sb) = [(v.double(), s.double()) for v, s in (left, right)]
    top = torch.maximum(sa, sb)
    a, b = torch.exp2(sa - top), torch.exp2(sb - top)
    return (va * a[..., None] + vb * b[..., None]) / (a + b)[..., None], top + torch.log2(a + b)


def merge_natural(left: Theirs, right: Theirs) -> Theirs:
    """vLLM's merge_attn_states: lse [H, T], in float64."""
    (va, sa), (vb, sb) = [(v.double(), s.double()) for v, s in (left, right)]
    total = torch.logaddexp(sa, sb)
    a, b = (sa - total).exp().T[..., None], (sb - total).exp().T[..., None]
    return va * a + vb * b, total


def test_merging_there_is_merging_here() -> None:
    left, right = a_state(5, H), a_state(5, H, seed=1)
    right.lse[EMPTY], right.max[EMPTY] = 0.5, 0.5  # seen by one of them
    want = splitkv.merge_states([left, right])
    v, s = merge_base_2(borders.to_flashinfer(left), borders.to_flashinfer(right))
    got = borders.from_flashinfer(v.float(), s.float())
    assert torch.allclose(got.out, want.out, atol=2e-5)
    assert torch.allclose(got.lse, want.lse, atol=2e-5)
    there = [borders.to_flash_attention_varlen(part, empty=-math.inf) for part in (left, right)]
    v, s = merge_natural(*there)
    got = borders.from_flash_attention_varlen(v.float(), s.float())
    assert torch.allclose(got.out, want.out, atol=2e-5)
    assert torch.allclose(got.lse, want.lse, atol=2e-5)
    average = (left.out + right.out) / 2
    assert not torch.allclose(average, want.out, atol=1e-2)


@pytest.mark.parametrize(
    ("sentinel", "garbage"), [(math.inf, 0.0), (-3.4e38, 0.0), (-3.4e38, 7.0), (-math.inf, 7.0)]
)
def test_every_way_of_fia_to_say_nothing(sentinel: float, garbage: float) -> None:
    state = a_state(B, S, H)
    out, lse = borders.to_fused_infer(state, "BSND")
    nothing = lse[..., 0].transpose(1, 2) == math.inf
    assert bool(nothing.any())
    lse = torch.where(lse == math.inf, sentinel, lse)
    out = torch.where(nothing[..., None], garbage, out)
    assert same_bits(bits(borders.from_fused_infer(out, lse, "BSND")), bits(state))


def test_rows_that_an_explicit_mask_hid_need_a_word() -> None:
    state = a_state(B, S, H)
    out, lse = borders.to_fused_infer(state, "BNSD")
    mean = torch.where((lse == math.inf), 3.0, out)  # the mean of the hidden values
    lse = torch.where(lse == math.inf, -1e12 + math.log(T), lse)
    told = borders.from_fused_infer(mean, lse, "BNSD", hidden_rows=True)
    assert same_bits(bits(told), bits(state))
    untold = borders.from_fused_infer(mean, lse, "BNSD")
    assert bool((untold.out[EMPTY] == 3.0).all())


def test_an_overflow_of_fia_stays_to_be_seen() -> None:
    out, lse = torch.ones(2, H, D), torch.zeros(2, H, 1)
    lse[0, 0] = math.nan
    assert bool(borders.from_fused_infer(out, lse, "TND").lse[0, 0].isnan())


@pytest.mark.parametrize("sentinel", [math.inf, -math.inf])
def test_both_versions_of_flash_attention_say_nothing(sentinel: float) -> None:
    state = a_state(B, S, H)
    out, lse = borders.to_flash_attention(state, empty=sentinel)
    assert bool((lse == sentinel).any())
    out = out.clone()
    out[EMPTY] = math.nan  # version 2 may leave anything there
    assert same_bits(bits(borders.from_flash_attention(out, lse)), bits(state))
    with pytest.raises(ValueError, match="empty must be"):
        borders.to_flash_attention(state, empty=0.0)


# --- what torch really returns ---


def hidden() -> Tensor:
    """bool [S, T], True is visible; row 1 sees nothing."""
    visible = torch.arange(T) <= torch.arange(S)[:, None] + T - S
    visible[1] = False
    return visible


def case() -> tuple[Tensor, Tensor, Tensor, PartialState]:
    """q, k, v [B, heads, S or T, D] and the state that they leave, in float64."""
    history = random_history([T, T], K, D)
    q = random_queries(B, S, H, D)
    out, lse = attend(q, history, causal=False, mask=hidden().expand(B, S, T))
    want = PartialState(torch.stack(lse), torch.stack(lse), torch.stack(out))
    k, v = (torch.stack(part).transpose(1, 2) for part in (history.k, history.v))
    return q.transpose(1, 2), k, v, want


def near(got: PartialState, want: PartialState) -> bool:
    empty = torch.equal(got.lse == -math.inf, want.lse == -math.inf)
    seen = want.lse > -math.inf
    close = torch.allclose(got.lse[seen].double(), want.lse[seen], atol=1e-5)
    return empty and close and torch.allclose(got.out.double(), want.out, atol=1e-5)


def test_flex_attention_reports_a_natural_lse_and_minus_infinity() -> None:
    q, k, v, want = case()
    visible = hidden()
    mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, S, T, device="cpu", BLOCK_SIZE=16
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager: not compiled
        out, aux = flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    got = borders.from_torch(out, aux.lse)
    assert near(got, want)
    assert not near(PartialState(got.max, got.lse / math.log(2), got.out), want)
    there = borders.to_torch(got)
    assert same_bits(there, (out, aux.lse))


def test_sdpa_on_a_cpu_reports_0_for_a_row_that_saw_nothing() -> None:
    q, k, v, want = case()
    bias = hidden().float().log()
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias[None, None]
    )
    assert bool((lse[:, :, 1] == 0).all()), "torch has changed: mend from_torch"
    assert near(borders.from_torch(out, lse, hidden_rows=True), want)
    assert not near(borders.from_torch(out, lse), want)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_history_that_several_libraries_share_is_one(parts: int) -> None:
    """Pieces of a history come back from four libraries' forms and merge to the whole."""
    history = random_history([T, T], K, D)
    q = random_queries(B, S, H, D)
    k, v = torch.stack(history.k), torch.stack(history.v)

    def piece(low: int, high: int) -> PartialState:
        return splitkv.partial_attention(
            q, k[:, low:high], v[:, low:high], layout="BSND", causal=False, backend="cpu"
        )

    ways = [
        lambda state: borders.from_flash_attention(*borders.to_flash_attention(state)),
        lambda state: borders.from_torch(*borders.to_torch(state)),
        lambda state: borders.from_fused_infer(*borders.to_fused_infer(state, "BSH"), "BSH"),
    ]
    step = T // parts
    pieces = [way(piece(step * n, step * n + step)) for n, way in enumerate(ways[:parts])]
    got = splitkv.merge_states(pieces)
    out, lse = attend(q, history, causal=False)
    want = PartialState(torch.stack(lse), torch.stack(lse), torch.stack(out))
    assert near(got, want)
    if parts > 1:
        assert not near(splitkv.merge_states(pieces[1:]), want)


def test_sixteen_bits_of_out_are_taken_and_of_lse_refused() -> None:
    state = a_state(5, H)
    out, lse = borders.to_flash_attention_varlen(state, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert borders.from_flash_attention_varlen(out, lse).out.dtype == torch.float32
    with pytest.raises(ValueError, match="lse must be float32"):
        borders.from_flash_attention_varlen(out, lse.half())
