"""Quirks of masks, windows and sinks."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.standin.schemas import SCHEMAS
from standin_calls import (
    Dense,
    P,
    Paged,
    all_right,
    bsnd,
    compressed_mask,
    finite,
    naive_merge,
    paged,
    paged_bnsd,
    paged_tnd,
    refused,
    request,
    right,
    tnd,
)

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_contract_softmax_mask_true_hides(torch_npu: ModuleType) -> None:
    one = request(40, queries=2)
    hidden = torch.zeros(1, 2, 40, dtype=torch.bool)
    hidden[..., 25:] = True
    out, lse = bsnd(torch_npu, one, atten_mask=hidden)
    assert right(out, lse, Dense(one.q, one.k[:25], one.v[:25]), causal=False)


def test_naive_softmax_mask_true_hides(torch_npu: ModuleType) -> None:
    one = request(40, queries=2)
    may_be_seen = torch.zeros(1, 2, 40, dtype=torch.bool)
    may_be_seen[..., :25] = True
    out, lse = bsnd(torch_npu, one, atten_mask=may_be_seen)
    assert not right(out, lse, Dense(one.q, one.k[:25], one.v[:25]), causal=False)


def test_contract_legacy_drops_window(torch_npu: ModuleType) -> None:
    one = request(40)
    band = {
        "sparse_mode": 4,
        "pre_tokens": 7,
        "next_tokens": 0,
        "atten_mask": compressed_mask(),
    }
    assert right(*bsnd(torch_npu, one, **band), one)
    assert right(*tnd(torch_npu, one, **band), one, window=8)


def test_naive_legacy_drops_window(torch_npu: ModuleType) -> None:
    one = request(40)
    out, lse = bsnd(
        torch_npu, one, sparse_mode=4, pre_tokens=7, next_tokens=0, atten_mask=compressed_mask()
    )
    assert not right(out, lse, one, window=8)


def test_contract_legacy_drops_query_lengths(torch_npu: ModuleType) -> None:
    one = request(40)
    assert right(*bsnd(torch_npu, one, actual_seq_lengths=[0]), one)


def test_naive_legacy_drops_query_lengths(torch_npu: ModuleType) -> None:
    """Query length 0 does not blank a padded row."""
    one = request(40)
    out, _ = bsnd(torch_npu, one, actual_seq_lengths=[0])
    assert out.any()


def _band(window: int) -> dict[str, object]:
    return {
        "sparse_mode": 4,
        "pre_tokens": window,
        "next_tokens": 0,
        "atten_mask": compressed_mask(),
    }


@pytest.mark.parametrize("queries", [1, 3])
def test_contract_band_inclusive(torch_npu: ModuleType, queries: int) -> None:
    one = request(40, queries=queries)
    assert right(*tnd(torch_npu, one, **_band(7)), one, window=8)
    batch = paged([200, 40, 129])
    assert all_right(*paged_tnd(torch_npu, batch, **_band(7)), batch, window=8)


def test_naive_band_inclusive(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    out, lse = tnd(torch_npu, one, **_band(8))
    assert not right(out, lse, one, window=8)
    assert right(out, lse, one, window=9)


def test_contract_compressed_mask(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    for shape in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)):
        mask = compressed_mask().view(shape)
        assert right(*tnd(torch_npu, one, sparse_mode=3, atten_mask=mask), one)
    out, lse = tnd(torch_npu, one, sparse_mode=2, atten_mask=compressed_mask())
    first = Dense(one.q[:1], one.k[:1], one.v[:1])  # mode 2 is left-aligned
    assert right(out[:1], lse[:1], first)


def test_naive_compressed_mask(torch_npu: ModuleType) -> None:
    one = request(40, queries=3)
    with refused("needs a 2048 x 2048 mask, got None"):
        tnd(torch_npu, one, sparse_mode=3)
    with refused(r"needs a 2048 x 2048 mask, got \[3, 40\]"):
        tnd(torch_npu, one, sparse_mode=3, atten_mask=torch.ones(3, 40).bool().triu(38))
    with pytest.raises(standin.StandinGapError, match="not strictly upper triangular"):
        tnd(torch_npu, one, sparse_mode=3, atten_mask=compressed_mask().logical_not())


def _masked_by_length(batch: Paged) -> dict[str, object]:
    """Length given by a mask over the whole table, instead of by the length list."""
    room = batch.table.shape[1] * P
    mask = (torch.arange(room) >= batch.lengths[0]).view(1, 1, 1, room)
    return {"atten_mask": mask, "actual_seq_lengths_kv": [room]}


def test_contract_mask_under_ranked(torch_npu: ModuleType) -> None:
    short, long = finite(paged([300])), finite(paged([600]))
    # room for 384 positions: all of the mask is read
    assert all_right(*paged_bnsd(torch_npu, short, **_masked_by_length(short)), short)
    whole = long._replace(requests=[_whole_table(long)])
    assert all_right(*paged_bnsd(torch_npu, long, **_masked_by_length(long)), whole)


def _whole_table(batch: Paged) -> Dense:
    pages = batch.table[0].long()
    return Dense(batch.q, batch.k[pages].flatten(0, 1), batch.v[pages].flatten(0, 1))


def test_naive_mask_under_ranked(torch_npu: ModuleType) -> None:
    batch = finite(paged([600]))
    assert not all_right(*paged_bnsd(torch_npu, batch, **_masked_by_length(batch)), batch)
    assert all_right(*paged_bnsd(torch_npu, batch), batch)


def test_contract_hidden_nan_leaks(torch_npu: ModuleType) -> None:
    one = request(40)
    one.v[0] = math.nan
    out, _ = tnd(torch_npu, one, **_band(7))
    assert out.isnan().all()
    # past the length nothing is read: the pool's unused slots hold NaN
    batch = paged([200, 3])
    assert all_right(*paged_tnd(torch_npu, batch), batch)


def test_naive_hidden_nan_leaks(torch_npu: ModuleType) -> None:
    one = request(40)
    clean = Dense(*(tensor.clone() for tensor in one))
    one.v[0] = math.nan
    assert not right(*tnd(torch_npu, one, **_band(7)), clean, window=8)


def _with_sink(torch_npu: ModuleType, one: Dense, sink: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *(tensor.npu() for tensor in one),
        input_layout="TND",
        learnable_sink=sink.npu(),
        softmax_scale=one.sm_scale,
        num_query_heads=one.q.shape[1],
        num_key_value_heads=one.k.shape[1],
        actual_seq_qlen=[len(one.q)],
        actual_seq_kvlen=[len(one.k)],
        return_softmax_lse=True,
    )
    return out.cpu(), lse.cpu()[..., 0]


def test_contract_sink_v2_only(torch_npu: ModuleType) -> None:
    assert "learnable_sink" not in SCHEMAS["npu_fused_infer_attention_score"]
    one = request(40)
    with refused("learnable_sink needs layout TND"):
        torch_npu.npu_fused_infer_attention_score_v2(
            *(tensor[None].npu() for tensor in one),
            input_layout="BSND",
            learnable_sink=torch.zeros(4).half().npu(),
            num_query_heads=4,
            num_key_value_heads=2,
        )
    with refused(r"must be \[4\] torch.float16"):
        _with_sink(torch_npu, one, torch.zeros(4))


def test_naive_sink_v2_only(torch_npu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'learnable_sink'"):
        tnd(torch_npu, request(40), learnable_sink=torch.zeros(4).half())


SINK = torch.tensor([0.5, 1.0, 2.0, 4.0]).half()


def test_contract_sink_in_lse(torch_npu: ModuleType) -> None:
    one = request(40)
    assert right(*_with_sink(torch_npu, one, SINK), one, sink=SINK)


def test_naive_sink_in_lse(torch_npu: ModuleType) -> None:
    one = request(40)
    parts = [Dense(one.q, one.k[part], one.v[part]) for part in (slice(0, 20), slice(20, 40))]
    to_every_split = [_with_sink(torch_npu, part, SINK) for part in parts]
    assert not right(naive_merge(to_every_split), None, one, sink=SINK)
    to_one_split = [_with_sink(torch_npu, parts[0], SINK), tnd(torch_npu, parts[1])]
    assert right(naive_merge(to_one_split), None, one, sink=SINK)
