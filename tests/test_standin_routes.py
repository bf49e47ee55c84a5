"""Quirks of the operators that the other routes call: rope and MLA, prompt, paged attention, and
the training operator.
"""

import math
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from torch import Tensor

from splitkv.kernels_ascend.lse import normalise
from splitkv.kernels_ascend.standin.schemas import SCHEMAS
from standin_calls import (
    Dense,
    Paged,
    all_right,
    compressed_mask,
    fused,
    naive_merge,
    paged,
    refused,
    request,
    right,
    to_npu,
)


def latent(torch_npu: ModuleType, lengths: list[int], *, heads: int = 4) -> tuple[Tensor, Tensor]:
    """Absorbed MLA in BNSD over one dense row of 40 tokens per length."""
    generator = torch.Generator().manual_seed(1)
    rows = len(lengths)
    q = torch.randn(rows, heads, 1, 576, generator=generator).half()
    k = torch.randn(rows, 1, 40, 576, generator=generator).half()
    nope, rope = k[..., :512].contiguous(), k[..., 512:].contiguous()
    placed = to_npu(nope)
    out, lse = torch_npu.npu_fused_infer_attention_score(
        to_npu(q[..., :512].contiguous()),
        placed,
        placed,
        query_rope=to_npu(q[..., 512:].contiguous()),
        key_rope=to_npu(rope),
        input_layout="BNSD",
        num_heads=heads,
        num_key_value_heads=1,
        scale=576**-0.5,
        softmax_lse_flag=True,
        actual_seq_lengths_kv=lengths,
    )
    for row, length in enumerate(lengths):
        one = Dense(q[row].transpose(0, 1), k[row].transpose(0, 1)[:length], None)  # type: ignore[arg-type]
        one = one._replace(v=one.k[..., :512])
        if length:
            assert right(out.cpu()[row].transpose(0, 1), lse.cpu()[row, :, :, 0].T, one)
    return out.cpu(), lse.cpu()


def test_contract_rope_not_legacy(torch_npu: ModuleType) -> None:
    _, lse = latent(torch_npu, [40, 0])
    assert (lse[1] == math.inf).all()


def test_naive_rope_not_legacy(torch_npu: ModuleType) -> None:
    """Who looks for the single-query sentinel of -3.4e38 alone merges an infinity."""
    out, lse = latent(torch_npu, [40, 0])
    out, lse = out[:, :, 0], lse[:, :, 0, 0]
    naive = torch.where(lse < -1e30, -math.inf, lse)
    assert naive_merge([(out[0], naive[0]), (out[1], naive[1])]).isnan().any()
    state_out, state_lse = normalise(out, lse)
    merged = naive_merge([(state_out[0], state_lse[0]), (state_out[1], state_lse[1])])
    assert torch.allclose(merged, out[0].float())


def test_contract_mla_heads(torch_npu: ModuleType) -> None:
    for heads in (1, 16, 128):
        latent(torch_npu, [40], heads=heads)


def test_naive_mla_heads(torch_npu: ModuleType) -> None:
    with refused("num_heads 12 is no power of two"):
        latent(torch_npu, [40], heads=12)


def prompt(torch_npu: ModuleType, one: Dense, **options: object) -> Tensor:
    options = {
        "num_heads": one.q.shape[1],
        "num_key_value_heads": one.k.shape[1],
        "scale_value": one.sm_scale,
        "input_layout": "BSND",
        **options,
    }
    tensors = (to_npu(tensor[None]) for tensor in one)
    return torch_npu.npu_prompt_flash_attention(
        *tensors, **{name: to_npu(option) for name, option in options.items()}
    ).cpu()[0]


def test_contract_prompt_no_lse(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    out = prompt(torch_npu, one, sparse_mode=3, atten_mask=compressed_mask())
    assert right(out, None, one)
    assert SCHEMAS["npu_prompt_flash_attention"].endswith("-> Tensor")


def test_naive_prompt_no_lse(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="softmax_lse_flag"):
        prompt(torch_npu, request(40, queries=3), softmax_lse_flag=True)


def test_contract_prompt_next_default(torch_npu: ModuleType) -> None:
    """A band without next_tokens ends at each query."""
    one = request(40, queries=3)
    band = {"sparse_mode": 4, "atten_mask": compressed_mask(), "pre_tokens": 9}
    assert right(prompt(torch_npu, one, **band), None, one, window=10)


def test_naive_prompt_next_default(torch_npu: ModuleType) -> None:
    """Who takes FIA's default to hold thinks that nothing after the query is hidden."""
    one = request(40, queries=3)
    band = {"sparse_mode": 4, "atten_mask": compressed_mask()}
    assert not right(prompt(torch_npu, one, **band), None, one, causal=False)
    assert right(prompt(torch_npu, one, **band, next_tokens=2147483647), None, one, causal=False)


def atb(torch_npu: ModuleType, batch: Paged, *, out: Tensor, lengths: object = None) -> Tensor:
    one = batch.requests[0]
    placed = out.npu()
    torch_npu._npu_paged_attention(
        batch.q.npu(),
        batch.k.npu(),
        batch.v.npu(),
        one.k.shape[1],
        one.q.shape[1],
        one.sm_scale,
        batch.table.npu(),
        torch.tensor(batch.lengths, dtype=torch.int32) if lengths is None else lengths,
        placed,
    )
    return placed.cpu()


def test_contract_atb_unwritten_row(torch_npu: ModuleType) -> None:
    batch = paged([300, 0, 129])
    out = atb(torch_npu, batch, out=torch.full_like(batch.q, 7.0))
    assert (out[1] == 7.0).all()
    kept = [0, 2]
    assert all_right(out[kept], None, batch._replace(requests=[batch.requests[i] for i in kept]))


def test_naive_atb_unwritten_row(torch_npu: ModuleType) -> None:
    batch = paged([300, 0])
    out = atb(torch_npu, batch, out=torch.full_like(batch.q, math.nan))  # as torch.empty may
    assert out[1].isnan().all()


def test_contract_atb_lengths_on_host(torch_npu: ModuleType) -> None:
    batch = paged([300, 5])
    assert all_right(atb(torch_npu, batch, out=torch.zeros_like(batch.q)), None, batch)


def test_naive_atb_lengths_on_host(torch_npu: ModuleType) -> None:
    batch = paged([300, 5])
    lengths = torch.tensor(batch.lengths, dtype=torch.int32).npu()
    with refused("tensor.hostData is null"):
        atb(torch_npu, batch, out=torch.zeros_like(batch.q), lengths=lengths)
    with refused("must be int32"):
        atb(torch_npu, batch, out=torch.zeros_like(batch.q), lengths=torch.tensor(batch.lengths))


def training(
    torch_npu: ModuleType, requests: list[Dense], **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, max and sum of requests one after the other."""
    q, k, v = (torch.cat(parts) for parts in zip(*requests, strict=True))
    ends = [list(accumulate(len(one[part]) for one in requests)) for part in (0, 1)]
    options = {
        "scale": requests[0].sm_scale,
        "actual_seq_qlen": ends[0],
        "actual_seq_kvlen": ends[1],
        "sparse_mode": 3,
        "atten_mask": compressed_mask(),
        "softmax_layout": "TND",
        **options,
    }
    options = {name: to_npu(option) for name, option in options.items()}
    found = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), q.shape[1], "TND", **options)
    return tuple(tensor.cpu() for tensor in found[:3])


TWO = [request(40, queries=3), request(17, queries=2, seed=1)]


def judged(out: Tensor, lse: Tensor) -> bool:
    parts = zip(out.split([3, 2]), lse.split([3, 2]), TWO, strict=True)
    return all(right(part, part_lse, one) for part, part_lse, one in parts)


def test_contract_fusion_eightfold(torch_npu: ModuleType) -> None:
    out, top, total = training(torch_npu, TWO)
    assert top.shape == total.shape == (5, 4, 8)
    assert (total == total[..., :1]).all()
    assert judged(out, top[..., 0] + total[..., 0].log())


def test_naive_fusion_eightfold(torch_npu: ModuleType) -> None:
    out, top, total = training(torch_npu, TWO)
    assert not judged(out, top[..., 0] + total.sum(-1).log())


def test_contract_fusion_by_head(torch_npu: ModuleType) -> None:
    out, top, total = training(torch_npu, TWO, softmax_layout="")
    lse = (top[..., 0] + total[..., 0].log()).flatten()
    parts = [part.view(4, -1).T for part in lse.split([12, 8])]
    assert judged(out, torch.cat(parts))


def test_naive_fusion_by_head(torch_npu: ModuleType) -> None:
    out, top, total = training(torch_npu, TWO, softmax_layout="")
    assert not judged(out, top[..., 0] + total[..., 0].log())


def test_contract_fusion_lengths_end_at_t(torch_npu: ModuleType) -> None:
    out, top, total = training(torch_npu, TWO)
    assert out.shape[0] == top.shape[0] == total.shape[0] == 5


def test_naive_fusion_lengths_end_at_t(torch_npu: ModuleType) -> None:
    with refused("actual_seq_kvlen ends at 56, key has 57 rows"):
        training(torch_npu, TWO, actual_seq_kvlen=[40, 56])


def test_mla_without_its_rope_part_is_another_answer(torch_npu: ModuleType) -> None:
    one = Dense(
        torch.ones(1, 2, 64).half(), torch.ones(3, 1, 64).half(), torch.ones(3, 1, 64).half()
    )
    with refused("query_rope and key_rope go together"):
        fused(
            torch_npu,
            one.q[None],
            one.k[None],
            one.v[None],
            query_rope=one.q[None],
            input_layout="BSND",
            num_heads=2,
            num_key_value_heads=1,
        )
