"""From vLLM's attention calls to ours; every argument with its source is in
argument_names.yaml.
"""

from typing import Any

from torch import Tensor

from splitkv.common.support import UnsupportedError
from splitkv.integrations.argument_names import cache_scales, must_be, screened, soft_cap

UNIFIED = "vllm.unified_attention"
PAGED = "vllm.paged_attention_v2"


def from_unified_attention(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for vLLM's Triton ``unified_attention``.

    q: [T, H, D]; k, v: [pages, P, K, D]; block_table int [B, max_blocks].

    Raises:
        ValueError: malformed, as an argument that it does not have.
        UnsupportedError: an argument without a counterpart here, with the reason.
    """
    ours, theirs = screened(UNIFIED, given)
    causal = theirs.get("causal", True)
    if isinstance(causal, Tensor):
        raise UnsupportedError("causal per request: one answer for all requests here")
    left, right = theirs.get("window_size") or (-1, -1)
    if left < -1 or right not in (0, -1):
        raise ValueError(f"window_size must be (W - 1, 0) or (-1, -1), got {(left, right)}")
    found = ours | cache_scales(ours["k"], theirs.get("k_descale"), theirs.get("v_descale"))
    if (bias := theirs.get("qq_bias")) is not None:
        found["attn_bias"] = _bias_of(bias, ours["cu_seqlens_q"])
    return found | {
        "layout": "NHD",
        "causal": bool(causal),
        "window_left": left,
        "logits_soft_cap": soft_cap("softcap", theirs.get("softcap")),
    }


def from_paged_attention_v2(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for vLLM's ``paged_attention_v2`` (and v1).

    query: [B, H, D]; key_cache: [pages, K, D / x, P, x]; value_cache: [pages, K, D, P]. Copies the
    whole key pool, because its D is cut into groups of x by the token axis.

    Raises:
        ValueError, UnsupportedError: as ``from_unified_attention``.
    """
    ours, theirs = screened(PAGED, given)
    key, value = theirs["key_cache"], theirs["value_cache"]
    if key.ndim != 5 or value.ndim != 4:
        raise ValueError(
            "key_cache must be [pages, K, D / x, P, x] and value_cache [pages, K, D, P], got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    must_be("num_kv_heads", theirs.get("num_kv_heads"), key.shape[1])
    must_be("block_size", theirs.get("block_size"), key.shape[3])
    k = key.permute(0, 1, 3, 2, 4).flatten(3)
    found = ours | cache_scales(k, theirs.get("k_scale"), theirs.get("v_scale"))
    return found | {"k": k, "v": value.transpose(2, 3), "layout": "HND"}


def _bias_of(bias: Tensor, offsets: Tensor) -> Tensor:
    steps = bias.shape[0]
    if bias.ndim != 2 or bias.shape[1] != steps:
        raise ValueError(f"qq_bias must be [S, S], got {list(bias.shape)}")
    counts = set(offsets.diff().tolist())
    if counts - {steps}:
        raise UnsupportedError(
            f"qq_bias [{steps}, {steps}] with requests of {sorted(counts)} queries: columns count "
            "from a request's first new token there, from its last here"
        )
    return bias[None, None]
