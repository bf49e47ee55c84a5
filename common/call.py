"""One call's tensors in one place, in one shape: what a backend is handed."""

from dataclasses import dataclass

from torch import Tensor

from splitkv.common.cache import Cache
from splitkv.common.spec import DecodeSpec


@dataclass(frozen=True, slots=True, eq=False)
class DecodeCall:
    """Queries, cache and whatever masks and scales come with them; checked before a backend sees
    it.

    q: [B, S, H, D], or [sum of S, H, D] with cu_seqlens_q. alibi_slopes: float32 [H] or [B, H].
    attn_bias: [B or 1, H or 1, S, n], added to the scaled and capped scores of the last n
    positions. kv_start: int [B], 0 to seq_len: positions below it are seen by nobody, anchors
    included. attn_mask: bool [B, S, n], True may be seen, of the last n positions of each request
    (column c is position seq_len - n + c); earlier positions stay visible. k_scale, v_scale: as the
    spec's ``ScaleKind`` says; k_zero, v_zero: like the scale they go with.
    """

    q: Tensor
    cache: Cache
    spec: DecodeSpec
    cu_seqlens_q: Tensor | None = None
    alibi_slopes: Tensor | None = None
    attn_bias: Tensor | None = None
    attn_mask: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_zero: Tensor | None = None
    v_zero: Tensor | None = None
    kv_start: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.cache.batch

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading shape of a state: [B, S, H], or [sum of S, H] for packed queries."""
        return tuple(self.q.shape[:-1])
