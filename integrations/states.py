"""Partial states of other libraries, both ways: base, shape and what stands for "nothing seen".

Ours is natural logarithms, lse [..., H] beside out [..., H, Dv], and (0, -inf) for nothing seen.

| library | out | lse | base | nothing seen |
| --- | --- | --- | --- | --- |
| FlashInfer | [T, H, Dv] | [T, H] | 2 | -inf |
| flash-attention | [B, S, H, Dv] | [B, H, S] | e | +inf (2), -inf (3) |
| flash-attention and torch varlen, vLLM's merge | [T, H, Dv] | [H, T] | e | the same |
| torch SDPA (flash, CPU and CUDA), FlexAttention | [B, H, S, Dv] | [B, H, S] | e | below |
| torch_npu FIA | by layout | [B, H, S, 1], TND [T, H, 1] | e | +inf, -3.4e38, about -1e12 |

A way there and back keeps every bit of ``out`` and ``lse`` in float32, but for FlashInfer's base,
where each way rounds once. ``max`` is not carried by any of them: it comes back as ``lse``. ``out``
is shared, not copied, where its form does not change.
Sources: docs/names.md names the files; the rows of torch are what 2.13 returned on a CPU.
"""

import math

import torch
from torch import Tensor

from splitkv.common.state import PartialState
from splitkv.kernels_ascend.lse import normalise

FIA_EXPLICIT_MASK = -1e12
"""FIA adds this to a score that ``atten_mask`` hides (sparse modes 0 and 1)."""


def from_flashinfer(out: Tensor, lse2: Tensor) -> PartialState:
    """From ``run(..., return_lse=True)`` or ``merge_state``: out [T, H, Dv], lse2 float32 [T, H]
    in base 2.
    """
    return PartialState.from_lse2(out, lse2)


def to_flashinfer(
    state: PartialState, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``(v, s)`` for ``merge_state``: out [..., H, Dv] in ``dtype``, lse [..., H] in base 2."""
    return _out(state, dtype), state.lse / math.log(2.0)


def from_flash_attention(out: Tensor, lse: Tensor) -> PartialState:
    """From ``return_softmax_lse=True``: out [B, S, H, Dv], lse float32 [B, H, S].

    Returns:
        A state [B, S, H].
    """
    _check("lse", lse, (out.shape[0], out.shape[2], out.shape[1]) if out.ndim == 4 else None, out)
    return PartialState.from_lse(out, lse.transpose(1, 2).contiguous())


def to_flash_attention(
    state: PartialState, *, dtype: torch.dtype | None = None, empty: float = math.inf
) -> tuple[Tensor, Tensor]:
    """``(out [B, S, H, Dv], lse [B, H, S])`` of a state [B, S, H].

    empty: lse of nothing seen: +inf as version 2 reports it, or -inf as version 3 does.
    """
    _check_axes(state, 3, "[B, S, H]")
    return _out(state, dtype), _emptied(state.lse, empty).transpose(1, 2).contiguous()


def from_flash_attention_varlen(out: Tensor, lse: Tensor) -> PartialState:
    """From ``flash_attn_varlen_func``, torch's ``varlen_attn`` or vLLM's ``merge_attn_states``: out
    [T, H, Dv], lse float32 [H, T].

    torch 2.13 documents [T, H] for ``varlen_attn``; its operator makes [H, T].
    """
    _check("lse", lse, (out.shape[1], out.shape[0]) if out.ndim == 3 else None, out)
    return PartialState.from_lse(out, lse.T.contiguous())


def to_flash_attention_varlen(
    state: PartialState, *, dtype: torch.dtype | None = None, empty: float = math.inf
) -> tuple[Tensor, Tensor]:
    """``(out [T, H, Dv], lse [H, T])`` of a state [T, H]; ``empty`` as for
    ``to_flash_attention`` (-inf for ``merge_attn_states``, which takes both).
    """
    _check_axes(state, 2, "[T, H]")
    return _out(state, dtype), _emptied(state.lse, empty).T.contiguous()


def from_torch(out: Tensor, lse: Tensor, *, hidden_rows: bool = False) -> PartialState:
    """From FlexAttention's ``AuxOutput.lse`` or SDPA's flash operators: out [B, H, S, Dv], lse
    float32 [B, H, S].

    hidden_rows: an ``attn_mask`` of SDPA on a CPU may hide whole rows: such a row comes back as
        (0, lse 0), which only the caller can tell from one visible score of 0 with a value of 0.
        FlexAttention reports (0, -inf) and SDPA's CUDA operator +inf, which need no word.

    Returns:
        A state [B, S, H].
    """
    _check("lse", lse, tuple(out.shape[:3]) if out.ndim == 4 else None, out)
    if hidden_rows:
        nothing = (lse == 0) & (out == 0).all(-1)
        lse = torch.where(nothing, -math.inf, lse)
    return PartialState.from_lse(out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous())


def to_torch(state: PartialState, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """``(out [B, H, S, Dv], lse [B, H, S])`` as FlexAttention gives them; a state [B, S, H]."""
    _check_axes(state, 3, "[B, S, H]")
    out = _out(state, dtype).transpose(1, 2).contiguous()
    return out, state.lse.transpose(1, 2).contiguous()


def from_fused_infer(
    out: Tensor, lse: Tensor, input_layout: str, *, hidden_rows: bool = False
) -> PartialState:
    """From ``npu_fused_infer_attention_score`` (both versions) with its LSE.

    out: [B, S, H, Dv] (BSND, BNSD_BSND), [B, S, H * Dv] (BSH), [B, H, S, Dv] (BNSD) or [T, H, Dv]
    (TND). lse: float32 [T, H, 1] (TND), else [B, H, S, 1]. A row that saw nothing is +inf, or
    -3.4e38 from the path for one query per request.
    hidden_rows: an ``atten_mask`` in sparse mode 0 or 1 may hide whole rows: without the correction
        of such rows (bit 1 of ``inner_precise``) they come back as the mean of the hidden values
        with an lse of -1e12 + log n, which scores of float16 inputs cannot reach.

    Returns:
        A state [B, S, H], or [T, H] for TND.
    """
    tall, flat = _ours_from_fia(out, lse, input_layout)
    tall, flat = normalise(tall, flat)
    if hidden_rows:
        flat = torch.where(flat <= FIA_EXPLICIT_MASK / 2, -math.inf, flat)
    return PartialState.from_lse(tall, flat)


def to_fused_infer(
    state: PartialState, input_layout: str, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` in the operator's shapes; nothing seen is lse +inf, as most of its paths
    write it.
    """
    tnd = input_layout == "TND"
    _check_axes(state, 2 if tnd else 3, "[T, H]" if tnd else "[B, S, H]")
    out, lse = _out(state, dtype), _emptied(state.lse, math.inf)
    if tnd:
        return out, lse[..., None].contiguous()
    lse = lse.transpose(1, 2)[..., None].contiguous()
    match input_layout:
        case "BSND" | "BNSD_BSND":
            return out, lse
        case "BSH":
            return out.flatten(2), lse
        case "BNSD":
            return out.transpose(1, 2).contiguous(), lse
    raise ValueError(f"input_layout must be {_FIA_LAYOUTS}, got {input_layout!r}")


_FIA_LAYOUTS = "BSH, BSND, BNSD, BNSD_BSND or TND"


def _ours_from_fia(out: Tensor, lse: Tensor, input_layout: str) -> tuple[Tensor, Tensor]:
    if input_layout == "TND":
        _check("lse", lse, (*out.shape[:2], 1) if out.ndim == 3 else None, out)
        return out, lse[..., 0]
    if input_layout == "BSH":
        if out.ndim != 3 or lse.ndim != 4 or out.shape[2] % max(lse.shape[1], 1):
            _check("lse", lse, None, out)
        out = out.unflatten(2, (lse.shape[1], -1))
    elif input_layout == "BNSD":
        out = out.transpose(1, 2).contiguous()
    elif input_layout not in ("BSND", "BNSD_BSND"):
        raise ValueError(f"input_layout must be {_FIA_LAYOUTS}, got {input_layout!r}")
    want = (out.shape[0], out.shape[2], out.shape[1], 1) if out.ndim == 4 else None
    _check("lse", lse, want, out)
    return out, lse[..., 0].transpose(1, 2).contiguous()


def _out(state: PartialState, dtype: torch.dtype | None) -> Tensor:
    return state.out if dtype is None else state.out.to(dtype)


def _emptied(lse: Tensor, empty: float) -> Tensor:
    if empty not in (math.inf, -math.inf):
        raise ValueError(f"empty must be inf or -inf, got {empty}")
    return torch.where(lse == -math.inf, empty, lse)


def _check(name: str, tensor: Tensor, want: tuple[int, ...] | None, out: Tensor) -> None:
    if want is None or tuple(tensor.shape) != want:
        shape = "another out" if want is None else list(want)
        raise ValueError(f"{name} is {list(tensor.shape)}, out {list(out.shape)} goes with {shape}")


def _check_axes(state: PartialState, axes: int, shape: str) -> None:
    if state.lse.ndim != axes:
        raise ValueError(f"the state must be {shape}, got {list(state.lse.shape)}")
