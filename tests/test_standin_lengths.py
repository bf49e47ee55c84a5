"""Quirks of lengths, pages, dtypes, strides and devices."""

from types import ModuleType

import pytest
import torch

from standin_calls import (
    Dense,
    P,
    all_right,
    bsnd,
    compressed_mask,
    finite,
    fused,
    heads_of,
    paged,
    paged_bnsd,
    paged_tnd,
    refused,
    request,
    right,
    tnd,
)

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_contract_host_lengths(torch_npu: ModuleType) -> None:
    one = request(40)
    for lengths in ([20], (20,), torch.tensor([20])):
        out, lse = bsnd(torch_npu, one, actual_seq_lengths_kv=[20])
        again = torch_npu.npu_fused_infer_attention_score(
            *(tensor[None].npu() for tensor in one),
            input_layout="BSND",
            scale=one.sm_scale,
            actual_seq_lengths_kv=lengths,
            **heads_of(one),
        )[0].cpu()
        assert torch.equal(again[0], out)
        assert right(out, lse, Dense(one.q, one.k[:20], one.v[:20]))


def test_naive_host_lengths(torch_npu: ModuleType) -> None:
    one = request(40)
    for lengths in (torch.tensor([20]).npu(), [torch.tensor(20).npu()]):
        with refused("must be host integers"):
            bsnd(torch_npu, one, actual_seq_lengths_kv=lengths)


def _two_packed() -> tuple[Dense, list[Dense]]:
    requests = [request(20, queries=2), request(33, queries=2, seed=1)]
    return Dense(*(torch.cat(parts) for parts in zip(*requests, strict=True))), requests


def test_contract_query_lengths_cumulative(torch_npu: ModuleType) -> None:
    packed, requests = _two_packed()
    lengths = {"actual_seq_lengths": [2, 4], "actual_seq_lengths_kv": [20, 53]}
    out, lse = tnd(torch_npu, packed, **lengths)
    for index, one in enumerate(requests):
        rows = slice(2 * index, 2 * index + 2)
        assert right(out[rows], lse[rows], one, causal=False)


def test_naive_query_lengths_cumulative(torch_npu: ModuleType) -> None:
    packed, _ = _two_packed()
    with refused("T 4 differs from the last query length 2"):
        tnd(torch_npu, packed, actual_seq_lengths=[2, 2], actual_seq_lengths_kv=[20, 53])
    with refused("2 key lengths"):  # a leading zero, as in cu_seqlens
        tnd(torch_npu, packed, actual_seq_lengths=[0, 2, 4], actual_seq_lengths_kv=[20, 53])


def test_contract_query_lengths_end_at_t(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    assert right(*tnd(torch_npu, one, actual_seq_lengths=[3]), one, causal=False)


def test_naive_query_lengths_end_at_t(torch_npu: ModuleType) -> None:
    one = request(40, queries=4)  # the last row is padding
    with refused("T 4 differs from the last query length 3"):
        tnd(torch_npu, one, actual_seq_lengths=[3])


def test_contract_kv_lengths_per_request_when_paged(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    assert all_right(*paged_tnd(torch_npu, batch, actual_seq_lengths_kv=[200, 130]), batch)


def test_naive_kv_lengths_per_request_when_paged(torch_npu: ModuleType) -> None:
    batch = finite(paged([100, 130]))
    out, lse = paged_tnd(torch_npu, batch, actual_seq_lengths_kv=[100, 230])
    assert not all_right(out, lse, batch)
    packed, requests = _two_packed()
    with refused("key lengths of layout TND are running sums"):
        swapped = {"actual_seq_lengths": [2, 4], "actual_seq_lengths_kv": [33, 20]}
        tnd(torch_npu, packed, **swapped)
    out, lse = tnd(torch_npu, packed, actual_seq_lengths=[2, 4], actual_seq_lengths_kv=[20, 33])
    assert not right(out[2:], lse[2:], requests[1], causal=False)


def test_contract_length_list_size(torch_npu: ModuleType) -> None:
    one = request(40)
    both = Dense(*(torch.stack([tensor, tensor]) for tensor in one))
    options = {"scale": one.sm_scale, "input_layout": "BSND", **heads_of(one)}
    for lengths in ([20], [20, 20], [20, 20, 7]):
        out, _ = fused(torch_npu, *both, actual_seq_lengths_kv=lengths, **options)
        for row in out:
            assert right(row, None, Dense(one.q, one.k[:20], one.v[:20]))


def test_naive_length_list_size(torch_npu: ModuleType) -> None:
    one = request(40)
    three = Dense(*(torch.stack([tensor] * 3) for tensor in one))
    with refused("2 key lengths for a batch of 3"):
        fused(
            torch_npu, *three, input_layout="BSND", actual_seq_lengths_kv=[20, 7], **heads_of(one)
        )


def test_contract_paged_needs_lengths(torch_npu: ModuleType) -> None:
    batch = paged([200])
    with refused("block_table is given without key lengths"):
        paged_bnsd(torch_npu, batch, actual_seq_lengths_kv=None)


test_naive_paged_needs_lengths = test_contract_paged_needs_lengths


def test_contract_block_table_unchecked(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    swapped = batch._replace(table=batch.table.flip(0))
    out, lse = paged_tnd(torch_npu, swapped, actual_seq_lengths_kv=[130, 200])
    assert right(out[1][None], lse[1][None], Dense(batch.requests[1].q, *batch.requests[0][1:]))


def test_naive_block_table_unchecked(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    batch.table[0, 1] = 10**6
    with pytest.raises(IndexError):
        paged_tnd(torch_npu, batch)
    batch.table[0, 1] = batch.table[1, 0]  # somebody else's page: no error, another answer
    assert not all_right(*paged_tnd(torch_npu, batch), batch)


def test_contract_cache_forms(torch_npu: ModuleType) -> None:
    batch = paged([200, 130])
    assert all_right(*paged_tnd(torch_npu, batch), batch)
    assert all_right(*paged_bnsd(torch_npu, batch), batch)
    one = batch.requests[0]
    by_head = [pool.transpose(1, 2).contiguous() for pool in (batch.k, batch.v)]
    options = {
        "scale": one.sm_scale,
        "block_table": batch.table,
        "block_size": P,
        "actual_seq_lengths_kv": batch.lengths,
        **heads_of(one),
    }
    out, _ = fused(
        torch_npu,
        batch.q,
        *by_head,
        input_layout="TND",
        actual_seq_lengths=[1, 2],
        **options,
    )
    assert all_right(out, None, batch)
    with refused("4-D .* does not go with layout BSND"):
        fused(torch_npu, batch.q[:, None], *by_head, input_layout="BSND", **options)


def test_naive_cache_forms(torch_npu: ModuleType) -> None:
    """NHD pages handed over as they are: read the wrong way round when P = K, refused otherwise."""
    batch = paged([40], page=16, heads=16, kv_heads=16)
    one = batch.requests[0]
    options = {
        "scale": one.sm_scale,
        "block_table": batch.table,
        "actual_seq_lengths_kv": batch.lengths,
        **heads_of(one),
    }
    whole = finite(batch)
    out, _ = fused(
        torch_npu,
        batch.q[:, :, None],
        whole.k,
        whole.v,
        input_layout="BNSD",
        block_size=16,
        **options,
    )
    assert not right(out[:, :, 0], None, one)
    batch = paged([200])
    options |= {"block_table": batch.table, "actual_seq_lengths_kv": [200], "block_size": P}
    options |= heads_of(batch.requests[0])
    with refused("cache has 128 heads"):
        fused(torch_npu, batch.q[:, :, None], batch.k, batch.v, input_layout="BNSD", **options)


def test_contract_head_dim(torch_npu: ModuleType) -> None:
    for D in (16, 80, 512):
        one = request(20, D=D)
        assert right(*bsnd(torch_npu, one), one)
    with refused("must be multiples of 16 up to 512"):
        bsnd(torch_npu, request(20, D=528))


def test_naive_head_dim(torch_npu: ModuleType) -> None:
    with refused("head dims 72, 72 must be multiples of 16"):
        bsnd(torch_npu, request(20, D=72))


def test_contract_head_dim_by_cache_form(torch_npu: ModuleType) -> None:
    for D in (80, 96, 256):
        batch = paged([200, 130], D=D)
        assert all_right(*paged_tnd(torch_npu, batch), batch)
        one = request(40, D=D)
        assert right(*tnd(torch_npu, one), one)
    with refused("is not 64, 128 or 192"):
        paged_tnd(torch_npu, paged([200], D=272))


def test_naive_head_dim_by_cache_form(torch_npu: ModuleType) -> None:
    batch = paged([200], D=96)
    one = batch.requests[0]
    by_head = [pool.transpose(1, 2).contiguous() for pool in (batch.k, batch.v)]
    with refused("head dim 96, 96 is not 64, 128 or 192"):
        fused(
            torch_npu,
            batch.q,
            *by_head,
            input_layout="TND",
            block_table=batch.table,
            block_size=P,
            actual_seq_lengths=[1],
            actual_seq_lengths_kv=[200],
            **heads_of(one),
        )


def test_contract_group_64(torch_npu: ModuleType) -> None:
    one = request(20, heads=64, kv_heads=1)
    assert right(*bsnd(torch_npu, one), one)


def test_naive_group_64(torch_npu: ModuleType) -> None:
    with refused("num_heads / num_key_value_heads is 65, the limit is 64"):
        bsnd(torch_npu, request(20, heads=65, kv_heads=1))


def test_contract_page_size(torch_npu: ModuleType) -> None:
    for page in (16, 48, 512):
        batch = paged([70, 30], page=page)
        assert all_right(*paged_tnd(torch_npu, batch), batch)


def test_naive_page_size(torch_npu: ModuleType) -> None:
    for page in (1, 8, 24, 528):
        with refused(f"block_size {page} with 1 queries is not a multiple of 16 up to 512"):
            paged_tnd(torch_npu, paged([70], page=page))
    batch = paged([70], page=16)
    batch = batch._replace(requests=[request(70, queries=2)])
    with refused("block_size 16 with 2 queries is not a multiple of 128"):
        paged_tnd(torch_npu, batch, actual_seq_lengths=[2])


def test_contract_sixteen_bit_only(torch_npu: ModuleType) -> None:
    one = request(20)
    mixed = Dense(one.q, one.k.bfloat16(), one.v.bfloat16())
    with refused("differs from the query's"):
        bsnd(torch_npu, mixed)
    out, _ = bsnd(torch_npu, Dense(*(tensor.bfloat16() for tensor in one)))
    assert out.dtype == torch.bfloat16


def test_naive_sixteen_bit_only(torch_npu: ModuleType) -> None:
    with refused("query dtype torch.float32 is not float16 or bfloat16"):
        bsnd(torch_npu, Dense(*(tensor.float() for tensor in request(20))))


def test_contract_contiguous(torch_npu: ModuleType) -> None:
    one = request(20)
    narrowed = torch.cat([one.k, one.k], -1).npu()[..., :64]
    with refused("key is not contiguous"):
        bsnd(torch_npu, one._replace(k=narrowed))


def test_naive_contiguous(torch_npu: ModuleType) -> None:
    batch = paged([200])
    viewed = [pool.npu().transpose(1, 2) for pool in (batch.k, batch.v)]
    with refused("key is not contiguous"):
        torch_npu.npu_fused_infer_attention_score(
            batch.q[:, :, None].npu(),
            *viewed,
            input_layout="BNSD",
            block_table=batch.table.npu(),
            block_size=P,
            actual_seq_lengths_kv=[200],
            **heads_of(batch.requests[0]),
        )


def test_contract_one_device(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"npu:0 and cpu"):
        torch.ones(2).npu() + torch.ones(2)
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        torch.ones(2).npu().numpy()
    with pytest.raises(RuntimeError, match="no float64"):
        torch.ones(2, 2).npu().double() @ torch.ones(2, 2).npu().double()


def test_naive_one_device(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    with pytest.raises(RuntimeError, match=r"npu:0 and cpu"):
        torch_npu.npu_fused_infer_attention_score(
            *(tensor.npu() for tensor in one),
            input_layout="TND",
            sparse_mode=3,
            atten_mask=compressed_mask(),
            actual_seq_lengths=[3],
            actual_seq_lengths_kv=[40],
            **heads_of(one),
        )
