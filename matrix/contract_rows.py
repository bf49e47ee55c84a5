"""Contract: LSEs, rows without keys, merging, sinks, cache writes, repetition."""

import math

import torch
from torch import Tensor

from splitkv.kernels_ascend.runtime import operators
from splitkv.matrix.contract import Agrees, Found, as_documented, check
from splitkv.matrix.contract_calls import (
    BF16,
    attend,
    call,
    causal,
    error,
    near,
    request,
    rows,
    tnd,
)

_HELD = "FIA, docs and kernels (2.1)"


def _value(lse: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in sorted(set(lse.flatten().tolist()))[:3])


@check("What is the LSE of a dense call?", f"natural logarithm, (B, N, S, 1) float32; {_HELD}")
def lse_of_rows(device: torch.device) -> Found:
    one = request(300)
    out, lse = rows(one, device)
    wanted = attend(one)
    right = near(out, wanted[0]) and near(lse, wanted[1]) and lse.shape == (1, 8, 1, 1)
    return as_documented(
        right, f"{list(lse.shape)} {lse.dtype}, off by {error(lse, wanted[1]):.1e}"
    )


@check("What is the LSE of a packed, paged call?", f"natural logarithm, (T, N, 1); {_HELD}")
def lse_of_packed(device: torch.device) -> Found:
    one = request(300, queries=3)
    out, lse = tnd([one], device, **causal(device))
    wanted = attend(one, causal=True)
    right = near(out, wanted[0]) and near(lse, wanted[1]) and lse.shape == (3, 8, 1)
    return as_documented(
        right, f"{list(lse.shape)} {lse.dtype}, off by {error(lse, wanted[1]):.1e}"
    )


@check("What comes back with the LSE flag off?", "[0] (code), one zero (docs); (2.1; 10, row 2)")
def lse_switched_off(device: torch.device) -> Found:
    _, lse = rows(request(64), device, softmax_lse_flag=False)
    return Found(f"shape {list(lse.shape)}", Agrees.OPEN)


@check("A dense row of length 0?", "out 0, LSE -3.4e38 on the legacy path; kernels (2.2)")
def empty_row_dense(device: torch.device) -> Found:
    out, lse = rows(request(128), device, actual_seq_lengths_kv=[0])
    right = not out.any() and bool((lse < -1e38).all()) and bool(lse.isfinite().all())
    return as_documented(right, f"out {_value(out)}, LSE {_value(lse)}")


@check("A packed, paged row of length 0?", "out 0, LSE +inf; kernels (2.2)")
def empty_row_packed(device: torch.device) -> Found:
    pair = [request(200), request(128)]
    out, lse = tnd(pair, device, actual_seq_kvlen=[200, 0])
    right = (
        not out[1].any() and bool((lse[1] == math.inf).all()) and near(out[:1], attend(pair[0])[0])
    )
    return as_documented(right, f"out {_value(out[1])}, LSE {_value(lse[1])}")


@check("A key tensor without elements?", "out 0, LSE +inf; aclnn text of the fourth version (2.2)")
def empty_keys(device: torch.device) -> Found:
    out, lse = rows(request(0), device)
    right = not out.any() and bool((lse == math.inf).all())
    return as_documented(right, f"out {_value(out)}, LSE {_value(lse)}")


@check("Does the update skip an LSE of +inf?", "yes, read as -inf; kernel (2.4)")
def update_of_valid_and_empty(device: torch.device) -> Found:
    out, lse = torch.linspace(-2, 2, 256).view(4, 64), torch.linspace(-1, 1, 4)
    nothing = torch.full((4,), math.inf)
    lses, outs = [lse, nothing], [out, torch.zeros(4, 64)]
    merged, total = call("npu_attention_update", device, lses, outs, 1)
    right = error(merged, out.double()) < 1e-4 and error(total, lse.double()) < 1e-4
    return as_documented(right, f"off by {error(merged, out.double()):.1e}, LSE {_value(total)}")


@check("A row that no state of the update has seen?", "NaN, no guard; kernel (2.4)")
def update_of_empty_and_empty(device: torch.device) -> Found:
    lses, outs = [torch.full((4,), math.inf)] * 2, [torch.zeros(4, 64)] * 2
    merged, total = call("npu_attention_update", device, lses, outs, 1)
    right = bool(merged.isnan().all())
    return as_documented(right, f"out {_value(merged)}, LSE {_value(total)}")


@check("How many states does the update take?", "16 (torch docs), 128 (aclnn) (4.7; 10, row 3)")
def update_shards(device: torch.device) -> Found:
    taken = []
    for count in (2, 16, 17, 64, 128):
        lses, outs = [torch.zeros(4)] * count, [torch.ones(4, 64)] * count
        try:
            merged, _ = call("npu_attention_update", device, lses, outs, 1)
        except RuntimeError:
            break
        if error(merged, torch.ones(4, 64).double()) > 1e-3:
            break
        taken.append(count)
    return Found(f"right for {taken} states of 2, 16, 17, 64, 128", Agrees.OPEN)


@check("Is a learnable sink part of the LSE?", "yes, by the sources; undocumented (4.2; 10, row 8)")
def sink_in_lse(device: torch.device) -> Found:
    one, sinks = request(300), torch.linspace(0, 4, 8).to(BF16)
    _, lse = tnd([one], device, learnable_sink=sinks)
    without = attend(one)[1]
    within = torch.logaddexp(without, sinks.double())
    if near(lse, within):
        return Found("the LSE contains the sink", Agrees.YES)
    return Found(
        f"{error(lse, within):.1e} from with, {error(lse, without):.1e} from without", Agrees.NO
    )


@check("Does a cache write skip a negative slot?", "kernel: yes; undocumented (4.15)")
def negative_slot(device: torch.device) -> Found:
    new, pool = torch.ones(2, 2, 64, dtype=BF16), torch.zeros(2, 128, 2, 64, dtype=BF16)
    k, v = pool.to(device), pool.to(device)
    slots = torch.tensor([5, -1], dtype=torch.int32)
    rows_ = (new.to(device), new.to(device), k, v, slots.to(device))
    operators().npu_scatter_pa_kv_cache(*rows_, cache_mode="Norm")
    written = k.cpu().flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
    return as_documented(written == [5], f"slots written: {written}")


@check("Does paged attention (ATB) write a row of length 0?", "no, it stays as it was; ATB (2.3)")
def paged_attention_empty_row(device: torch.device) -> Found:
    out = _paged_attention(device, torch.tensor([0, 128], dtype=torch.int32))
    return as_documented(bool((out[0] == 7).all()), f"row of length 0 holds {_value(out[0])}")


@check(
    "Does paged attention (ATB) refuse lengths on the device?", "yes, hostData is null; ATB (4.12)"
)
def paged_attention_device_lengths(device: torch.device) -> Found:
    lengths = torch.tensor([128, 128], dtype=torch.int32).to(device)
    try:
        _paged_attention(device, lengths)
    except RuntimeError as refusal:
        return Found(f"refused: {str(refusal).splitlines()[0][:120]}", Agrees.YES)
    return Found("taken", Agrees.NO)


@check("The same call twice: the same bits?", "deterministic by default; aclnn text (4.1)")
def same_bits(device: torch.device) -> Found:
    batch = [request(keys) for keys in (4000, 129, 7)]
    runs = [tnd(batch, device) for _ in range(5)]
    equal = all(torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1]) for out, lse in runs)
    return as_documented(equal, "5 runs, the same bits" if equal else "bits differ between 5 runs")


def _paged_attention(device: torch.device, lengths: Tensor) -> Tensor:
    one = request(256, queries=2)
    pool, q = one.k.view(2, 128, 2, 128).to(device), one.q.to(device)
    table = torch.tensor([[0], [1]], dtype=torch.int32).to(device)
    out = torch.full((2, 8, 128), 7.0, dtype=BF16).to(device)
    operators()._npu_paged_attention(q, pool, pool, 2, 8, 128**-0.5, table, lengths, out)
    return out.cpu()
