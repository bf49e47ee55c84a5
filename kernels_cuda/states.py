"""Where the kernels leave results: the call's own tensors, or partial states in a workspace."""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.common.spec import DecodeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """out: [B, S, H, Dv] or [tokens, H, Dv], any dtype and strides. lse, and top or None: no Dv."""

    out: Tensor
    lse: Tensor
    top: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Partial states, float32: out [slots, S * H, Dv], lse and top [slots, S * H]."""

    out: Tensor
    lse: Tensor
    top: Tensor

    @classmethod
    def empty(cls, spec: DecodeSpec, slots: int, device: torch.device) -> "Workspace":
        """Uninitialised, in one allocation of exactly ``slots * S * H * (Dv + 2)`` floats."""
        rows = spec.num_queries * spec.num_q_heads
        sizes = (slots * rows * spec.head_dim_v, slots * rows, slots * rows)
        out, lse, top = torch.empty(sum(sizes), device=device).split(sizes)
        shape = (slots, rows)
        return cls(out.view(*shape, spec.head_dim_v), lse.view(shape), top.view(shape))
