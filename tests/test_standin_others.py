"""Quirks of the incremental operator, the merge operator and the cache writes."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from splitkv.kernels_ascend.standin.schemas import SCHEMAS
from standin_calls import Dense, bsnd, heads_of, refused, request, right

pytestmark = pytest.mark.usefixtures("torch_npu")


def _incre(torch_npu: ModuleType, one: Dense, **options: object) -> Tensor:
    options = {"scale_value": one.sm_scale, "input_layout": "BSND", **heads_of(one), **options}
    batched = (tensor[None].npu() for tensor in one)
    return torch_npu.npu_incre_flash_attention(*batched, **options).cpu()[0]


def test_contract_incre_lengths_are_keys(torch_npu: ModuleType) -> None:
    one = request(40)
    out = _incre(torch_npu, one, actual_seq_lengths=[20])
    assert right(out, None, Dense(one.q, one.k[:20], one.v[:20]))


def test_naive_incre_lengths_are_keys(torch_npu: ModuleType) -> None:
    one = request(40)
    out = _incre(torch_npu, one, actual_seq_lengths=[1])  # taken for the query's length
    assert not right(out, None, one)


def test_contract_incre_no_lse(torch_npu: ModuleType) -> None:
    assert "inner_precise=1)" in SCHEMAS["npu_incre_flash_attention"]
    assert isinstance(_incre(torch_npu, request(40)), Tensor)
    with refused("one query per request, got 2"):
        _incre(torch_npu, request(40, queries=2))


def test_naive_incre_no_lse(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'softmax_lse_flag'"):
        _incre(torch_npu, request(40), softmax_lse_flag=True)


def _update(
    torch_npu: ModuleType, states: list[tuple[Tensor, Tensor]], update_type: int = 1
) -> tuple[Tensor, Tensor]:
    """States as out [S, H, D], lse [S, H]."""
    shape = states[0][0].shape
    out, lse = torch_npu.npu_attention_update(
        [lse.reshape(-1).npu() for _, lse in states],
        [out.reshape(-1, shape[-1]).npu() for out, _ in states],
        update_type,
    )
    return out.cpu().view(shape), lse.cpu()


def _halves(torch_npu: ModuleType, one: Dense) -> list[tuple[Tensor, Tensor]]:
    middle = len(one.k) // 2
    parts = (slice(0, middle), slice(middle, None))
    return [bsnd(torch_npu, Dense(one.q, one.k[part], one.v[part])) for part in parts]


def test_contract_update_flat(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    out, lse = _update(torch_npu, _halves(torch_npu, one))
    assert right(out, lse.view(3, 4), one, causal=False)
    (first, first_lse), *_ = _halves(torch_npu, one)
    with refused(r"lse must be float32 \[R\]"):
        torch_npu.npu_attention_update([first_lse.npu()], [first.flatten(0, 1).npu()], 1)


def test_naive_update_flat(torch_npu: ModuleType) -> None:
    """(B, N, S, 1) LSEs flattened beside (B, S, N, D) outputs."""
    one = request(40, queries=3)
    states = [(out, lse.T.contiguous()) for out, lse in _halves(torch_npu, one)]
    out, _ = _update(torch_npu, states)
    assert not right(out, None, one, causal=False)


def test_contract_update_plus_inf(torch_npu: ModuleType) -> None:
    one = request(40)
    empty = bsnd(torch_npu, request(0)._replace(q=one.q))
    assert torch.all(empty[1] == math.inf)
    out, lse = _update(torch_npu, [*_halves(torch_npu, one), empty])
    assert right(out, lse.view(1, 4), one)


def test_naive_update_plus_inf(torch_npu: ModuleType) -> None:
    """The finite sentinel is a number: two of them merge to a finite LSE, not to 'nothing'."""
    empty = bsnd(torch_npu, request(40), actual_seq_lengths_kv=[0])
    _, lse = _update(torch_npu, [empty, empty])
    assert not torch.isinf(lse).any()


def test_contract_update_all_invalid(torch_npu: ModuleType) -> None:
    empty = bsnd(torch_npu, request(0))
    out, lse = _update(torch_npu, [empty, empty])
    assert out.isnan().all()
    assert lse.isnan().all()


def test_naive_update_all_invalid(torch_npu: ModuleType) -> None:
    nothing = (torch.zeros(1, 4, 64), torch.full((1, 4), -math.inf))
    out, _ = _update(torch_npu, [nothing, nothing])
    assert not torch.equal(out, torch.zeros(1, 4, 64))


def test_contract_update_shards(torch_npu: ModuleType) -> None:
    one = request(64)
    quarter = [Dense(one.q, one.k[i : i + 4], one.v[i : i + 4]) for i in range(0, 64, 4)]
    out, lse = _update(torch_npu, [bsnd(torch_npu, part) for part in quarter])
    assert right(out, lse.view(1, 4), one)
    for D in (4, 12, 520):
        with refused(f"D {D} is not a multiple of 8 from 8 to 512"):
            _update(torch_npu, [(torch.zeros(1, 4, D), torch.zeros(1, 4))])
    with refused("update_type 7"):
        _update(torch_npu, _halves(torch_npu, one), 7)


def test_naive_update_shards(torch_npu: ModuleType) -> None:
    one = request(17)
    states = [bsnd(torch_npu, Dense(one.q, one.k[i : i + 1], one.v[i : i + 1])) for i in range(17)]
    with refused("17 shards, the limit is 16"):
        _update(torch_npu, states)


def test_contract_update_type_0(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = _update(torch_npu, _halves(torch_npu, one), 0)
    assert right(out, None, one)
    assert lse.numel() == 0


def test_naive_update_type_0(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = _update(torch_npu, _halves(torch_npu, one), 0)
    assert not right(out, lse, one)


def _write(torch_npu: ModuleType, slots: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Two tokens (all 1, all 2) written to a cache of zeros [3, 4, 2, 16]."""
    tokens = torch.stack([torch.full((2, 16), value) for value in (1.0, 2.0)]).half().npu()
    caches = [torch.zeros(3, 4, 2, 16).half().npu() for _ in "kv"]
    torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, slots.npu(), **options)
    return caches[0].cpu(), caches[1].cpu()


def test_contract_scatter_default_is_nz(torch_npu: ModuleType) -> None:
    assert "cache_mode='PA_NZ'" in SCHEMAS["npu_scatter_pa_kv_cache"]
    for dtype in (torch.int32, torch.int64):
        k, v = _write(torch_npu, torch.tensor([9, 2], dtype=dtype), cache_mode="Norm")
        assert torch.equal(k, v)
        assert torch.all(k[2, 1] == 1)
        assert torch.all(k[0, 2] == 2)
        assert k.sum() == 3 * 2 * 16


def test_naive_scatter_default_is_nz(torch_npu: ModuleType) -> None:
    tokens = torch.ones(1, 2, 64).half().npu()
    caches = [torch.zeros(3, 4, 2, 64).half().npu() for _ in "kv"]
    with refused("pass 'Norm'"):
        torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, torch.tensor([9]).npu())


def test_contract_scatter_negative_slot(torch_npu: ModuleType) -> None:
    k, _ = _write(torch_npu, torch.tensor([-1, 2]), cache_mode="Norm")
    assert k.sum() == 2 * 2 * 16


def test_naive_scatter_negative_slot(torch_npu: ModuleType) -> None:
    """-1 is not the last slot, as it is in torch; and nothing checks the other end."""
    k, _ = _write(torch_npu, torch.tensor([-1, 2]), cache_mode="Norm")
    assert not k[2, 3].any()
    with pytest.raises(IndexError):
        _write(torch_npu, torch.tensor([12, 2]), cache_mode="Norm")


def test_contract_scatter_duplicate_slot(torch_npu: ModuleType) -> None:
    k, _ = _write(torch_npu, torch.tensor([-1, -1]), cache_mode="Norm")
    assert not k.any()


def test_naive_scatter_duplicate_slot(torch_npu: ModuleType) -> None:
    with refused("slots repeat"):
        _write(torch_npu, torch.tensor([5, 5]), cache_mode="Norm")


def test_contract_scatter_one_dtype(torch_npu: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        tokens = torch.ones(1, 2, 16).to(dtype).npu()
        caches = [torch.zeros(3, 4, 2, 16).to(dtype).npu() for _ in "kv"]
        slot = torch.tensor([9]).npu()
        torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, slot, cache_mode=None)
        assert all(cache.cpu()[2, 1].all() for cache in caches)
    with refused("must share one of"):
        torch_npu._npu_reshape_and_cache(
            *[torch.ones(1, 2, 16).npu()] * 2, *[torch.zeros(3, 4, 2, 16).npu()] * 2, slot.int()
        )


def test_naive_scatter_one_dtype(torch_npu: ModuleType) -> None:
    """Rows as they come, in another dtype than the cache: torch would convert them."""
    tokens = torch.ones(1, 2, 16).npu()
    caches = [torch.zeros(3, 4, 2, 16).half().npu() for _ in "kv"]
    slot = torch.tensor([9]).npu()
    with refused("must share one of"):
        torch_npu.npu_scatter_pa_kv_cache(tokens, tokens, *caches, slot, cache_mode="Norm")
    with refused("keys torch.float32 and values torch.float16"):
        torch_npu.npu_scatter_pa_kv_cache(tokens, tokens.half(), *caches, slot, cache_mode="Norm")


def test_contract_scatter_value_dim(torch_npu: ModuleType) -> None:
    k, v = torch.zeros(3, 4, 2, 16).npu(), torch.zeros(3, 4, 2, 8).npu()
    tokens = (torch.ones(1, 2, 16).npu(), torch.ones(1, 2, 8).npu())
    slot = torch.tensor([9]).npu()
    torch_npu.npu_scatter_pa_kv_cache(*tokens, k, v, slot, cache_mode="Norm")
    assert (k.cpu().sum(), v.cpu().sum()) == (32, 16)


def test_naive_scatter_value_dim(torch_npu: ModuleType) -> None:
    """Keys and values of different heads, folded into the last dimension alike."""
    k, v = torch.zeros(3, 4, 1, 32).npu(), torch.zeros(3, 4, 2, 8).npu()
    tokens = (torch.ones(1, 1, 32).npu(), torch.ones(1, 2, 8).npu())
    with refused(r"keys \[1, 1, 32\] and values \[1, 2, 8\] differ"):
        torch_npu.npu_scatter_pa_kv_cache(*tokens, k, v, torch.tensor([9]).npu(), cache_mode="Norm")


def _reshape_and_cache(torch_npu: ModuleType, slots: Tensor) -> Tensor:
    tokens = torch.ones(1, 2, 16).half().npu()
    caches = [torch.zeros(3, 4, 2, 16).half().npu() for _ in "kv"]
    torch_npu._npu_reshape_and_cache(tokens, tokens, *caches, slots.npu())
    return caches[0].cpu()


def test_contract_reshape_slots_int32(torch_npu: ModuleType) -> None:
    cache = _reshape_and_cache(torch_npu, torch.tensor([7], dtype=torch.int32))
    assert torch.all(cache[1, 3] == 1)
    assert cache.sum() == 2 * 16


def test_naive_reshape_slots_int32(torch_npu: ModuleType) -> None:
    with refused("slots must be one of"):
        _reshape_and_cache(torch_npu, torch.tensor([7]))
