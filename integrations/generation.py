"""Greedy generation with one attention or another, and how far two runs are apart."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a model wrote after its prompts.

    tokens: int64 [B, new]; logits: [B, new, vocabulary], unprocessed; alive: bool [B, new], False
    after a request's end.
    """

    tokens: Tensor
    logits: Tensor
    alive: Tensor
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against another of the same prompts, over the steps whose histories agree.

    margin: the smallest distance of the best logit from the second best, in the other run. As long
    as the largest difference is below half of it, no token can have been in doubt.
    """

    same_tokens: bool
    largest_difference: float
    margin: float


@torch.no_grad()
def greedy(
    model: Any,
    prompts: dict[str, Tensor],
    new_tokens: int,
    *,
    attention: str,
    **more: Any,
) -> Generation:
    """The model's likeliest continuation of at most ``new_tokens`` tokens.

    prompts: input_ids and attention_mask, int64 [B, T], padded on the left. attention: a registered
    attention implementation. more: further arguments of ``model.generate``, such as a cache.
    """
    model.set_attn_implementation(attention)
    start = time.perf_counter()
    result = model.generate(
        **prompts,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )
    seconds = time.perf_counter() - start
    tokens = result.sequences[:, prompts["input_ids"].shape[1] :]
    ends = torch.isin(tokens, _end_tokens(model).to(tokens.device))
    ended = ends.cumsum(1) - ends.long()
    return Generation(tokens, torch.stack(result.logits, dim=1), ended == 0, seconds)


def compare(run: Generation, other: Generation) -> Comparison:
    """How far ``run`` is from ``other``, step by step up to the first token that differs."""
    steps = min(run.tokens.shape[1], other.tokens.shape[1])
    tokens, others = run.tokens[:, :steps], other.tokens[:, :steps]
    agree = (tokens == others) | ~other.alive[:, :steps]
    before = torch.nn.functional.pad(agree[:, :-1], (1, 0), value=True).long().cumprod(1).bool()
    counted = before & other.alive[:, :steps]
    mine, theirs = run.logits[:, :steps][counted], other.logits[:, :steps][counted]
    best = theirs.topk(2, dim=-1).values
    return Comparison(
        run.tokens.shape == other.tokens.shape and bool(agree.all()),
        float((mine - theirs).abs().max()),
        float((best[:, 0] - best[:, 1]).min()),
    )


def _end_tokens(model: Any) -> Tensor:
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = []
    return torch.tensor([ends] if isinstance(ends, int) else ends, dtype=torch.int64)
