"""Quirks of what comes back: defaults, LSE shapes, and the ways of saying that nothing was
attended.
"""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from standin_calls import (
    Dense,
    attend,
    bsnd,
    compressed_mask,
    fused,
    heads_of,
    naive_merge,
    paged,
    paged_tnd,
    refused,
    request,
    right,
    tnd,
)

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_contract_scale_default(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = bsnd(torch_npu, one, scale=1.0)
    named = bsnd(torch_npu, one)
    batched = [tensor[None] for tensor in one]
    unnamed, _ = fused(torch_npu, *batched, input_layout="BSND", **heads_of(one))
    assert torch.equal(unnamed[0], out)
    assert right(out, lse, one, sm_scale=1.0)
    assert right(*named, one)


def test_naive_scale_default(torch_npu: ModuleType) -> None:
    one = request(40)
    batched = [tensor[None] for tensor in one]
    out, _ = fused(torch_npu, *batched, input_layout="BSND", **heads_of(one))
    assert not right(out[0], None, one)


def test_contract_num_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, kv_heads=4)
    flat = [tensor.flatten(1)[None] for tensor in one]
    out, lse = fused(torch_npu, *flat, scale=1.0, softmax_lse_flag=True)
    wide = Dense(*(tensor.flatten(1)[:, None] for tensor in one))
    assert lse.shape == (1, 1, 1, 1)
    assert right(out[0][:, None], lse[0, :, :, 0].T, wide, sm_scale=1.0)


def test_naive_num_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, kv_heads=4)
    flat = [tensor.flatten(1)[None] for tensor in one]
    out, _ = fused(torch_npu, *flat, scale=one.sm_scale)
    assert not right(out[0].view(1, 4, 64), None, one)


def test_contract_num_kv_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, heads=4, kv_heads=4)
    assert right(*bsnd(torch_npu, one, num_key_value_heads=0), one)


def test_naive_num_kv_heads_default(torch_npu: ModuleType) -> None:
    one = request(40, heads=4, kv_heads=2)
    with refused("key has 2 heads, num_key_value_heads is 4"):
        bsnd(torch_npu, one, num_key_value_heads=0)


def test_contract_lse_shape(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    batched = [tensor[None] for tensor in one]
    options = {"softmax_lse_flag": True, "scale": one.sm_scale, **heads_of(one)}
    for layout, tensors in (
        ("BSH", [tensor.flatten(2) for tensor in batched]),
        ("BSND", batched),
        ("BNSD", [tensor.transpose(1, 2).contiguous() for tensor in batched]),
        ("BNSD_BSND", [tensor.transpose(1, 2).contiguous() for tensor in batched]),
    ):
        _, lse = fused(torch_npu, *tensors, input_layout=layout, **options)
        assert lse.shape == (1, 4, 3, 1)
        assert lse.dtype == torch.float32
        assert right(
            attend(one, torch.float64, causal=False)[0], lse[0, :, :, 0].T, one, causal=False
        )
    lengths = {"actual_seq_lengths": [3], "actual_seq_lengths_kv": [40]}
    _, lse = fused(torch_npu, *one, input_layout="TND", **lengths, **options)
    assert lse.shape == (3, 4, 1)
    by_head = [tensor.transpose(0, 1).contiguous() for tensor in one]
    for layout, out_shape in (("NTD", (4, 3, 64)), ("NTD_TND", (3, 4, 64))):
        out, lse = fused(torch_npu, *by_head, input_layout=layout, **lengths, **options)
        assert out.shape == out_shape
        assert lse.shape == (3, 4, 1)


def test_naive_lse_shape(torch_npu: ModuleType) -> None:
    one = request(40, queries=4)
    batched = (tensor[None] for tensor in one)
    options = {"scale": one.sm_scale, "softmax_lse_flag": True, **heads_of(one)}
    out, lse = fused(torch_npu, *batched, input_layout="BSND", **options)
    by_layout_of_the_query = lse.reshape(1, 4, 4)[0]
    assert not right(out[0], by_layout_of_the_query, one, causal=False)
    assert right(out[0], by_layout_of_the_query.T, one, causal=False)


def test_contract_lse_flag_off(torch_npu: ModuleType) -> None:
    one = request(8)
    batched = (tensor[None] for tensor in one)
    _, lse = fused(torch_npu, *batched, input_layout="BSND", **heads_of(one))
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32


def test_naive_lse_flag_off(torch_npu: ModuleType) -> None:
    one = request(8)
    with pytest.raises(IndexError):
        bsnd(torch_npu, one, softmax_lse_flag=False)


def test_contract_output_is_rounded(torch_npu: ModuleType) -> None:
    one = request(300)
    out, lse = bsnd(torch_npu, one)
    assert out.dtype == torch.float16
    assert lse.dtype == torch.float32
    exact, exact_lse = attend(one, torch.float64)
    # float32 arithmetic, then half a unit in the last place of float16
    assert 2.0**-16 < ((out.double() - exact) / exact).abs().max() < 2.0**-10
    assert (lse.double() - exact_lse).abs().max() < 2.0**-20 * exact_lse.abs().max()


def test_naive_output_is_rounded(torch_npu: ModuleType) -> None:
    one = request(300)
    parts = [Dense(one.q, one.k[part], one.v[part]) for part in (slice(0, 150), slice(150, 300))]
    states = [bsnd(torch_npu, part) for part in parts]
    exact = [attend(part, torch.float64) for part in parts]
    merged = _merge(states)
    better = _merge(exact)
    reference = attend(one, torch.float64)[0]
    # taken for exact, the partials are wrong by a 16-bit rounding: an error bound must carry it
    assert (merged - reference).abs().max() > 1000 * (better - reference).abs().max()


def _merge(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    lse = torch.stack([lse.double() for _, lse in states])
    weights = torch.exp(lse - lse.logsumexp(0))
    return (torch.stack([out.double() for out, _ in states]) * weights[..., None]).sum(0)


def test_contract_empty_kv(torch_npu: ModuleType) -> None:
    one = request(0)
    for out, lse in (
        bsnd(torch_npu, one, actual_seq_lengths_kv=[0]),
        tnd(torch_npu, one, actual_seq_lengths_kv=[0]),
    ):
        assert not out.any()
        assert torch.all(lse == math.inf)


def test_naive_empty_kv(torch_npu: ModuleType) -> None:
    one, empty = request(40), request(0)
    states = [
        bsnd(torch_npu, one),
        bsnd(torch_npu, empty._replace(q=one.q), actual_seq_lengths_kv=[0]),
    ]
    assert not right(naive_merge(states), None, one)


def test_contract_empty_row(torch_npu: ModuleType) -> None:
    batch = paged([200, 0])
    out, lse = paged_tnd(torch_npu, batch)
    assert right(out[0][None], lse[0][None], batch.requests[0])
    assert not out[1].any()
    assert torch.all(lse[1] == math.inf)


def test_naive_empty_row(torch_npu: ModuleType) -> None:
    batch = paged([200, 0])
    out, lse = paged_tnd(torch_npu, batch)
    one = batch.requests[0]
    merged = naive_merge([(out[0][None], lse[0][None]), (out[1][None], lse[1][None])])
    assert not right(merged, None, one)  # +inf - +inf is NaN


def test_contract_empty_row_legacy(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = bsnd(torch_npu, one, actual_seq_lengths_kv=[0])
    assert not out.any()
    assert lse.isfinite().all()
    assert torch.all(lse == torch.tensor(-3.4e38))
    tensors = [tensor[None].transpose(1, 2).contiguous() for tensor in one]
    options = {"softmax_lse_flag": True, **heads_of(one), "actual_seq_lengths_kv": [0]}
    _, lse = fused(torch_npu, *tensors, input_layout="BNSD_BSND", **options)
    assert torch.all(lse == math.inf)  # the same data, not on the legacy path


def test_naive_empty_row_legacy(torch_npu: ModuleType) -> None:
    """A guard for infinities alone takes the finite sentinel for a state."""
    one = request(40)
    _, lse = bsnd(torch_npu, one, actual_seq_lengths_kv=[0])
    guarded = torch.where(torch.isinf(lse), -math.inf, lse)
    assert not torch.equal(guarded, torch.full_like(lse, -math.inf))


def test_contract_invalid_row(torch_npu: ModuleType) -> None:
    one = request(2, queries=4)
    out, lse = tnd(torch_npu, one, sparse_mode=3, atten_mask=compressed_mask())
    assert not out[:2].any()
    assert torch.all(lse[:2] == math.inf)
    seen = Dense(one.q[2:], one.k, one.v)
    assert right(out[2:], lse[2:], seen)


def test_naive_invalid_row(torch_npu: ModuleType) -> None:
    one, other = request(2, queries=3), request(30, queries=3, seed=1)
    causal = {"sparse_mode": 3, "atten_mask": compressed_mask()}
    both = Dense(one.q, torch.cat([other.k, one.k]), torch.cat([other.v, one.v]))
    first = tnd(torch_npu, Dense(one.q, other.k, other.v))
    last = tnd(torch_npu, one, **causal)
    assert not right(naive_merge([first, last]), None, both)
    mended = (last[0], torch.where(last[1] == math.inf, -math.inf, last[1]))
    assert right(naive_merge([first, mended]), None, both)


def test_contract_full_mask_row(torch_npu: ModuleType) -> None:
    one = request(40, queries=2)
    mask = torch.zeros(1, 2, 40, dtype=torch.bool)
    mask[:, 0] = True
    out, lse = bsnd(torch_npu, one, atten_mask=mask)
    average = one.v.double().mean(0).repeat_interleave(2, 0)
    assert (out[0].double() - average).abs().max() <= 2.0**-10 * average.abs().max()
    assert torch.all(lse[0] == torch.tensor(-1e12) + math.log(40))
    out, lse = bsnd(torch_npu, one, atten_mask=mask, inner_precise=2)
    assert not out[0].any()
    assert torch.all(lse[0] == math.inf)


def test_naive_full_mask_row(torch_npu: ModuleType) -> None:
    """A mask that hides everything is not 'nothing seen': out holds an average, lse is finite."""
    one = request(40, queries=2)
    out, lse = bsnd(torch_npu, one, atten_mask=torch.ones(1, 2, 40, dtype=torch.bool))
    nothing_seen = torch.isinf(lse).all() and not out.any()
    assert not nothing_seen
