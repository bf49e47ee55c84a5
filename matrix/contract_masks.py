"""Contract: windows, masks, lengths and padding."""

from typing import Any

import torch

from splitkv.kernels_ascend.fused_infer import compressed_mask
from splitkv.kernels_ascend.runtime import operators
from splitkv.matrix.contract import Agrees, Found, as_documented, check
from splitkv.matrix.contract_calls import (
    Request,
    attend,
    call,
    causal,
    error,
    near,
    paged,
    request,
    rows,
    tnd,
)

_WINDOW = 100


@check(
    "How many keys does pre_tokens = W - 1 show?",
    "W, both ends are inclusive; vendor test and kernel, while vllm-ascend passes W (4.1; 7.3)",
)
def window_packed(device: torch.device) -> Found:
    one = request(300)
    band: dict[str, Any] = {"sparse_mode": 4, "pre_tokens": _WINDOW - 1, "next_tokens": 0}
    out, _ = tnd([one], device, atten_mask=compressed_mask(device), **band)
    shown = [w for w in (_WINDOW - 1, _WINDOW, _WINDOW + 1) if _closest(out, one, w)]
    return as_documented(shown == [_WINDOW], f"matches windows of {shown} keys, W is {_WINDOW}")


def _closest(out: torch.Tensor, one: Request, window: int) -> bool:
    errors = {w: error(out, attend(one, causal=True, window=w)[0]) for w in range(98, 103)}
    return window == min(errors, key=errors.__getitem__) and errors[window] < 0.03


@check("Is a window of a dense single query honoured?", "no, dropped silently; tiling (2.2)")
def window_dense(device: torch.device) -> Found:
    one = request(300)
    band: dict[str, Any] = {"sparse_mode": 4, "pre_tokens": _WINDOW - 1, "next_tokens": 0}
    out, _ = rows(one, device, atten_mask=compressed_mask(device), **band)
    dropped = near(out, attend(one)[0])
    kept = near(out, attend(one, causal=True, window=_WINDOW)[0])
    return as_documented(dropped and not kept, f"dropped: {dropped}, honoured: {kept}")


@check(
    "Is a mask [1, 1, 1, S] of a paged single query honoured past 512 keys?",
    "it should be; vllm-ascend 15503 reports that it is ignored (9, row 1)",
)
def mask_past_512(device: torch.device) -> Found:
    one = request(1024)
    hidden = torch.zeros(1, 1024, dtype=torch.bool)
    hidden[:, 600:900] = True
    k, v, table = paged([one], 128, by_head=True)
    out, _ = call(
        "npu_fused_infer_attention_score",
        device,
        one.q[None].transpose(1, 2),
        k,
        v,
        input_layout="BNSD",
        scale=one.scale,
        softmax_lse_flag=True,
        atten_mask=hidden[None, None],
        actual_seq_lengths_kv=[1024],
        block_table=table,
        block_size=128,
        **one.heads,
    )
    kept, ignored = near(out, attend(one, hidden=hidden)[0]), near(out, attend(one)[0])
    return Found(f"honoured: {kept}, ignored: {ignored}", Agrees.YES if kept else Agrees.OPEN)


@check(
    "A row whose keys are all masked?",
    "the plain average of the masked values, LSE about -1e12; kernels (2.2)",
)
def row_masked_entirely(device: torch.device) -> Found:
    one = request(64)
    mask = torch.ones(1, 1, 1, 64, dtype=torch.bool)
    out, lse = rows(one, device, atten_mask=mask)
    mean = one.v.double().mean(0).repeat_interleave(4, 0)[None]
    right = near(out, mean) and bool((lse < -1e11).all()) and bool((lse > -1e13).all())
    return as_documented(
        right, f"{error(out, mean):.1e} from the average, LSE {float(lse.min()):.3g}"
    )


@check(
    "Does TND without a mask compute softmax in float16?",
    "yes; vllm-ascend 13699 reports the plain average of the values (9, row 2)",
)
def packed_float16(device: torch.device) -> Found:
    one = request(300, dtype=torch.float16)
    out, _ = tnd([one], device)
    average = one.v.double().mean(0).repeat_interleave(4, 0)[None]
    right = near(out, attend(one)[0])
    return as_documented(right, f"right: {right}, the average: {near(out, average)}")


@check("May T be longer than the last query length?", "no, they must be equal (4.1; 9, row 7)")
def padded_tokens(device: torch.device) -> Found:
    one = request(300, queries=4)
    try:
        tnd([one], device, actual_seq_qlen=[3], **causal(device))
    except RuntimeError as refusal:
        return Found(f"refused: {str(refusal).splitlines()[0][:120]}", Agrees.YES)
    return Found("taken", Agrees.NO)


@check(
    "May lengths be a tensor on the device?", "host integers; a call would wait (4.1; 10, row 10)"
)
def lengths_on_the_device(device: torch.device) -> Found:
    lengths = torch.tensor([200], dtype=torch.int64).to(device)
    try:
        rows(request(300), device, actual_seq_lengths_kv=lengths)
    except (RuntimeError, TypeError) as refusal:
        return Found(f"refused: {str(refusal).splitlines()[0][:120]}", Agrees.YES)
    return Found("taken; whether it waits for the device is not seen", Agrees.OPEN)


@check(
    "Does a NaN behind a row's length reach its output?",
    "no, nothing past the length is read (inferred)",
)
def nan_past_the_length(device: torch.device) -> Found:
    one = request(300)
    one.k[200:], one.v[200:] = float("nan"), float("nan")
    out, _ = rows(one, device, actual_seq_lengths_kv=[200])
    return as_documented(bool(out.isfinite().all()), f"finite: {bool(out.isfinite().all())}")


@check(
    "A replayed graph with other lengths?", "computes those of the capture (5, row 1; 9, row 17)"
)
def replay_keeps_lengths(device: torch.device) -> Found:
    npu = vars(torch)["npu"]
    one = request(300)
    q, k, v = (tensor[None].to(device) for tensor in (one.q, one.k, one.v))
    lengths = [200]
    given = {"input_layout": "BSND", "scale": one.scale, **one.heads}
    fused = operators().npu_fused_infer_attention_score
    fused(q, k, v, actual_seq_lengths_kv=lengths, **given)
    graph = npu.NPUGraph()
    with npu.graph(graph):
        out, _ = fused(q, k, v, actual_seq_lengths_kv=lengths, **given)
    lengths[0] = 300
    graph.replay()
    npu.synchronize()
    short = Request(one.q, one.k[:200], one.v[:200])
    stale, fresh = near(out.cpu()[0], attend(short)[0]), near(out.cpu()[0], attend(one)[0])
    return as_documented(
        stale and not fresh, f"those of the capture: {stale}, the new ones: {fresh}"
    )
