"""What a split leaves behind, and how such states are merged: the one statement of the mathematics.

For queries q over a set J of positions with scaled scores s_j, a split leaves

    max = max_j s_j        lse = log sum_j exp(s_j)        out = sum_j exp(s_j - lse) v_j

in natural logarithms. States of the same queries over disjoint sets merge into the state of the
union:

    m = max_i lse_i        w_i = exp(lse_i - m)        W = sum_i w_i
    lse = m + log W        out = (sum_i w_i out_i) / W        max = max_i max_i

Nothing seen is (-inf, -inf, 0) and is the identity. A learned sink is the state (s_h, s_h, 0) and
enters once, in ``finish``. Worked example: scores [0, ln 2, ln 3, ln 4], values [1, 2, 4, 8], two
splits: max = ln 2 and ln 4, l = exp(lse - max) = 1.5 and 1.75, u = out * l = 2.5 and 11; merged l =
2.5, u = 12.25, out = 4.9 (the plain average of the two outs, 3.976..., is wrong).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STATE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class PartialState:
    """The state of queries over a part of their keys.

    max: float32 [..., H], the largest scaled score. An operator that reports only an LSE gives
        ``max = lse``, so ``max`` is not compared across backends; the merge never reads it.
    lse: float32 [..., H], natural log of the sum of exponentials; -inf where nothing was seen.
    out: float32 [..., H, Dv], normalised; 0 where nothing was seen.
    The oracle's states are float64 throughout.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together (16-bit lse included: its spacing
        at 1000 is 0.5 or worse).
    """

    max: Tensor
    lse: Tensor
    out: Tensor

    def __post_init__(self) -> None:
        if self.max.shape != self.lse.shape or self.out.shape[:-1] != self.lse.shape:
            raise ValueError(
                "a state is max [..., H], lse [..., H], out [..., H, Dv]; got "
                f"max {list(self.max.shape)}, lse {list(self.lse.shape)}, out "
                f"{list(self.out.shape)}"
            )
        dtypes = {self.max.dtype, self.lse.dtype, self.out.dtype}
        if len(dtypes) > 1 or self.lse.dtype not in _STATE_DTYPES:
            raise ValueError(
                "max, lse and out of a state must share float32 (or float64, for the oracle), got "
                f"{self.max.dtype}, {self.lse.dtype}, {self.out.dtype}; PartialState.from_lse "
                "converts a 16-bit out"
            )
        if not self.max.device == self.lse.device == self.out.device:
            raise ValueError(
                f"a state lives on one device, got max on {self.max.device}, lse on "
                f"{self.lse.device}, "
                f"out on {self.out.device}"
            )

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        head_dim_v: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "PartialState":
        """The merge's identity; ``shape`` is [..., H]."""
        nothing = torch.full(tuple(shape), -math.inf, device=device, dtype=dtype)
        out = torch.zeros((*shape, head_dim_v), device=device, dtype=dtype)
        return cls(nothing, nothing.clone(), out)

    @classmethod
    def from_lse(cls, out: Tensor, lse: Tensor) -> "PartialState":
        """From a normalised ``out`` [..., H, Dv] and a natural-log ``lse`` [..., H], as
        flash-attention reports them.

        An lse of -inf or +inf (flash-attention 2 and FlashMLA report +inf for a row without keys)
        means nothing was seen; ``out`` is then 0 whatever it held.

        Raises:
            ValueError: ``lse`` is not the shape of ``out`` without Dv, or is neither float32 nor
                float64: 16 bits have lost the merge weights already.
        """
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                "out is [..., H, Dv] and lse [..., H]; "
                f"got out {list(out.shape)} and lse {list(lse.shape)}"
            )
        if lse.dtype not in _STATE_DTYPES:
            raise ValueError(f"lse must be float32 (float64 for the oracle), got {lse.dtype}")
        dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
        lse = lse.to(dtype)
        seen = ~torch.isinf(lse)
        lse = torch.where(seen, lse, -math.inf)
        return cls(lse, lse.clone(), torch.where(seen[..., None], out.to(dtype), 0.0))

    @classmethod
    def from_lse2(cls, out: Tensor, lse2: Tensor) -> "PartialState":
        """From a base-2 lse, as FlashInfer reports it: ``lse = lse2 * ln 2``."""
        return cls.from_lse(out, lse2 * math.log(2.0))

    @classmethod
    def from_sums(cls, m: Tensor, l: Tensor, u: Tensor) -> "PartialState":  # noqa: E741
        """From flash-decoding's running max ``m``, sum ``l`` [..., H] and unnormalised ``u`` [...,
        H, Dv].
        """
        seen = l > 0
        safe = torch.where(seen, l, 1.0)
        lse = torch.where(seen, m + torch.log(safe), torch.where(torch.isnan(l), l, -math.inf))
        unseen = torch.where(torch.isnan(l), l, 0.0)[..., None]  # u may be garbage where l is 0
        out = torch.where(seen[..., None], u / safe[..., None], unseen)
        return cls(torch.where(seen, m, lse), lse, out)

    def to_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(m, l, u)`` with ``l = exp(lse - max)`` and ``u = out * l``; (-inf, 0, 0) where
        nothing was seen.
        """
        nothing = self.lse == -math.inf
        sums = torch.where(nothing, 0.0, torch.exp(self.lse - self.max))
        return self.max, sums, self.out * sums[..., None]

    def __getitem__(self, index: int | slice) -> "PartialState":
        """The states ``index`` along the first axis."""
        return PartialState(self.max[index], self.lse[index], self.out[index])


def stack_states(states: Sequence[PartialState]) -> PartialState:
    """States of equal shape on a new first axis."""
    return PartialState(
        torch.stack([state.max for state in states]),
        torch.stack([state.lse for state in states]),
        torch.stack([state.out for state in states]),
    )


def _check_mergeable(states: Sequence[PartialState]) -> None:
    if not states:
        raise ValueError(
            "merge_states needs at least one state; PartialState.empty is the state of nothing"
        )
    first = states[0]
    for index, state in enumerate(states[1:], 1):
        if state.out.shape != first.out.shape or state.out.dtype != first.out.dtype:
            raise ValueError(
                f"states to merge must agree: state {index} is {list(state.out.shape)} "
                f"{state.out.dtype}, "
                f"state 0 is {list(first.out.shape)} {first.out.dtype}"
            )
        if state.out.device != first.out.device:
            raise ValueError(
                f"states to merge must be on one device: state {index} is on {state.out.device}, "
                f"state 0 on {first.out.device}"
            )


def as_list(states: Sequence[PartialState] | PartialState) -> list[PartialState]:
    """The states of a list, or of one whose first axis stacks them (none: the empty state),
    checked to be mergeable.
    """
    if isinstance(states, PartialState):
        count, *shape = states.lse.shape
        if count == 0:
            out = states.out
            return [PartialState.empty(shape, out.shape[-1], device=out.device, dtype=out.dtype)]
        states = [states[index] for index in range(count)]
    _check_mergeable(states)
    return list(states)


def merge_states_torch(states: Sequence[PartialState] | PartialState) -> PartialState:
    """Merge states of the same queries over disjoint keys; the formulas stand at the top of this
    file.

    Adds in the order given, so the same states give the same bits. One state comes back bit for
    bit, and so does one state among empty ones.

    Raises:
        ValueError: no state, or states that differ in shape, dtype or device.
    """
    parts = as_list(states)
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    top = lse.amax(0)
    nothing = top == -math.inf
    safe_top = torch.where(nothing, 0.0, top)  # exp(-inf - 0) = 0, where exp(-inf + inf) is NaN
    weights = torch.exp(lse - safe_top)
    total = torch.zeros_like(top)
    out = torch.zeros_like(parts[0].out).neg_()  # -0.0 is the identity of addition, +0.0 is not
    for weight, part in zip(weights, parts, strict=True):
        total = total + weight  # sum() would add in an order that depends on the shape
        unseen = (part.lse == -math.inf)[..., None]
        out = out + torch.where(unseen, -0.0, part.out * weight[..., None])
    out = out / torch.where(nothing, 1.0, total)[..., None]
    merged_lse = torch.where(total == 1.0, top, safe_top + torch.log(total))
    return PartialState(
        torch.stack([part.max for part in parts]).amax(0),
        merged_lse,
        torch.where(nothing[..., None], 0.0, out),
    )


def finish(
    state: PartialState, *, sinks: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Turn a state into ``(out, lse)``: the only place where a sink enters.

    sinks: [H], one learned logit per query head, unscaled; takes softmax mass and adds no value.
        -inf is no sink.
    dtype: of ``out`` (None: the state's); ``lse`` keeps the state's dtype and is the one ``out`` is
        normalised by.

    Raises:
        ValueError: ``sinks`` is not [H] or lives on another device, or ``dtype`` is not floating.
    """
    out, lse = state.out, state.lse
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype, got {dtype}")
    if sinks is not None:
        if sinks.shape != lse.shape[-1:] or sinks.device != lse.device:
            raise ValueError(
                f"sinks must be [{lse.shape[-1]}] (one per query head) on {lse.device}, "
                f"got {list(sinks.shape)} on {sinks.device}"
            )
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
        nothing = with_sink == -math.inf
        share = torch.exp(lse - torch.where(nothing, 0.0, with_sink))
        out, lse = out * share[..., None], with_sink
    return out if dtype is None else out.to(dtype), lse
