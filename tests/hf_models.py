"""Tiny random models of the families that differ in their attention, and what tests ask of them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from splitkv import PROFILES

FINE = replace(PROFILES["cpu"], tile_tokens=8)
"""A planner's view that cuts even the short histories of tiny models into splits."""
VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 3}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 3}),
    "qwen2-28-heads": (
        "Qwen2",
        {
            "num_hidden_layers": 2,
            "hidden_size": 28 * 8,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3": ("Qwen3", {"num_hidden_layers": 3, "head_dim": 32}),
    "qwen2-sliding": (
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
    ),
    "mistral": ("Mistral", {"num_hidden_layers": 3, "sliding_window": 16}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 16,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 256,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 256,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": _SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_chunk_size": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
        },
    ),
}
_CLASSES = {"Gemma3": "Gemma3ForCausalLM", "Llama4": "Llama4ForCausalLM"}
_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random model in eval mode whose attention is eager's."""
    name, different = FAMILIES[family]
    config_class = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))
    config = config_class(**(_COMMON | different))
    torch.manual_seed(seed)
    model = getattr(transformers, _CLASSES.get(name, f"{name}ForCausalLM"))._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():  # sharper than the initialisation: attention is to matter, sinks too
        for key, parameter in model.named_parameters():
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(8)
            elif key.endswith("sinks"):
                parameter.normal_(0, 1)
    return model.eval().to(dtype)


def left_padded(lengths: list[int], *, seed: int = 1) -> dict[str, Tensor]:
    """input_ids and attention_mask of random prompts of these lengths, padded on the left."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


@dataclass(frozen=True)
class Generated:
    tokens: Tensor
    """[B, new]"""
    scores: Tensor
    """[B, new, vocabulary]"""


@torch.no_grad()
def generate(
    model: Any, attention: str, prompts: dict[str, Tensor], new: int, **more: Any
) -> Generated:
    """Greedy decoding of exactly ``new`` tokens with this attention implementation."""
    model.set_attn_implementation(attention)
    result = model.generate(
        **prompts,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    scores = torch.stack(result.scores, dim=1)
    return Generated(result.sequences[:, prompts["input_ids"].shape[1] :], scores)


def dense_in_float64(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Textbook attention under a full boolean mask, in float64: what all others are measured by."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (tensor.double() for tensor in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    sinks = scores.new_full((query.shape[1],), -torch.inf) if s_aux is None else s_aux.double()
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].nan_to_num(0)
    return (weights @ v).transpose(1, 2).to(query.dtype), None


def full_mask(**kwargs: Any) -> Tensor:
    """transformers' boolean mask, never left out."""
    return sdpa_mask(**kwargs | {"allow_is_causal_skip": False})


def assert_as_good_as_eager(got: Generated, eager: Generated, exact: Generated) -> None:
    """The tokens are eager's, and the scores are off by at most twice what eager's are.

    Tokens alone would say little: a random model may repeat one whatever its attention computes.
    """
    assert torch.equal(got.tokens, eager.tokens)
    assert torch.equal(got.tokens, exact.tokens)
    assert torch.isfinite(got.scores).all()
    off, allowed = (float((run.scores - exact.scores).abs().max()) for run in (got, eager))
    assert off <= 2 * allowed, f"scores are off by {off:.1e}, eager's by {allowed:.1e}"


class Layer(torch.nn.Module):
    """What an attention function sees of the layer that calls it."""

    is_causal = True

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attention)


AttentionInterface.register("float64", dense_in_float64)
AttentionMaskInterface.register("float64", full_mask)
