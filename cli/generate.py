"""``splitkv generate``: continue texts with a real model that decodes through splitkv."""

import argparse
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

from splitkv.backends.registry import backend_named, check_device, select
from splitkv.cli.output import print_json, print_table
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.support import UnsupportedError

if TYPE_CHECKING:  # transformers is imported when it is needed, and only then
    from splitkv.integrations.generation import Comparison, Generation
    from splitkv.integrations.smollm2 import SmolLM2

HELP = (
    "Continue texts with SmolLM2-135M, whose decode steps run through splitkv over a paged cache. "
    "With --compare-eager it exits 1 unless eager attention writes the same tokens."
)
PROMPTS = ("The three parts of a lighthouse's promise are", "A ship that loses its way at night")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model decodes: the command's flags."""

    new_tokens: int
    num_splits: int | None
    page_size: int
    backend: str | None
    device: str


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What splitkv's run wrote, eager's if asked for, and the plan of the last step."""

    prompts: list[str]
    texts: list[str]
    run: "Generation"
    plan: SplitPlan
    backend: str
    comparison: "Comparison | None"
    eager_seconds: float | None


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    add("--chat", action="store_true", help="each prompt is a question to the assistant")
    add("--max-new-tokens", type=int, default=48, metavar="N", help="(default 48)")
    add(
        "--num-splits",
        type=int,
        metavar="N",
        help="at most N splits per request (default: the planner's)",
    )
    add("--page-size", type=int, default=16, metavar="P", help="tokens of a page (default 16)")
    add("--backend", help="use this one or fail (default: the first that takes the request)")
    add("--device", default="cpu", help="of the model, as torch names it (default cpu)")
    add("--compare-eager", action="store_true", help="run eager attention too, and compare")


def run(args: argparse.Namespace) -> int:
    if args.backend is not None:
        backend_named(args.backend)
    check_device(args.device)
    settings = Settings(
        new_tokens=args.max_new_tokens,
        num_splits=args.num_splits,
        page_size=args.page_size,
        backend=args.backend,
        device=args.device,
    )
    prompts: list[str] = list(args.prompt or PROMPTS)
    if "" in prompts:
        raise ValueError(f"prompt {prompts.index('') + 1} of {len(prompts)} is empty")
    loaded = load_model(settings.device)
    asked = [as_question(loaded, prompt) for prompt in prompts] if args.chat else prompts
    written = write(loaded, asked, settings, compare_eager=args.compare_eager)
    if args.json:
        print_json(as_json(replace(written, prompts=prompts)))
    else:
        print_table(("prompt", "continuation"), zip(prompts, written.texts, strict=True))
        print(summary(written))
    return 0 if written.comparison is None or written.comparison.same_tokens else 1


def load_model(device: str) -> "SmolLM2":
    """The real model, with transformers' own messages turned down to errors.

    Raises:
        UnsupportedError: a package is missing; the text says how to install it.
    """
    if find_spec("transformers") is None:
        raise UnsupportedError("transformers is not installed: pip install 'splitkv[demo]'")
    from transformers.utils import logging

    from splitkv.integrations import smollm2

    logging.set_verbosity_error()
    return smollm2.load(device=device)


def as_question(loaded: "SmolLM2", prompt: str) -> str:
    """``prompt`` as the model's chat template asks it."""
    message = [{"role": "user", "content": prompt}]
    template = loaded.tokenizer.apply_chat_template
    return str(template(message, tokenize=False, add_generation_prompt=True))


def write(
    loaded: "SmolLM2", prompts: list[str], settings: Settings, *, compare_eager: bool
) -> Written:
    """Continue ``prompts`` through splitkv over a paged cache.

    Splits that are asked for are cut at pages, so that short histories are split as well.

    Raises:
        ValueError: more new tokens than the model has positions left, or none.
    """
    from splitkv.integrations import transformers as hf
    from splitkv.integrations.generation import compare, greedy
    from splitkv.integrations.paged_cache import SplitKVCache

    model, tokenizer = loaded.model, loaded.tokenizer
    inputs: dict[str, Tensor] = dict(tokenizer(prompts, return_tensors="pt", padding=True))
    positions, longest = model.config.max_position_embeddings, inputs["input_ids"].shape[1]
    if not 1 <= settings.new_tokens <= positions - longest:
        raise ValueError(
            f"--max-new-tokens must be 1 to {positions - longest} (the model has {positions} "
            f"positions, the longest prompt {longest} tokens), got {settings.new_tokens}"
        )
    inputs = {name: tensor.to(settings.device) for name, tensor in inputs.items()}
    spec = spec_of(model, settings)
    backend = select(spec, settings.device, settings.backend)
    profile = backend.profile_for(spec)
    if settings.num_splits is not None:
        profile = replace(profile, tile_tokens=settings.page_size)
    hf.register(num_splits=settings.num_splits, backend=settings.backend, profile=profile)
    cache = SplitKVCache(model.config, page_size=settings.page_size)
    run = greedy(model, inputs, settings.new_tokens, attention="splitkv", cache=cache)
    plan = plan_splits(spec, cache.lengths, profile=profile, num_splits=settings.num_splits)
    comparison = eager_seconds = None
    if compare_eager:
        eager = greedy(model, inputs, settings.new_tokens, attention="eager")
        comparison, eager_seconds = compare(run, eager), eager.seconds
    kept = [row[alive].tolist() for row, alive in zip(run.tokens, run.alive, strict=True)]
    texts = [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]
    return Written(prompts, texts, run, plan, backend.name, comparison, eager_seconds)


def spec_of(model: Any, settings: Settings) -> DecodeSpec:
    """What a decode step of one layer asks of a backend."""
    config = model.config
    return DecodeSpec(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layout=Layout.NHD,
        page_size=settings.page_size,
        dtype=model.dtype,
        sm_scale=config.head_dim**-0.5,
    )


def summary(written: Written) -> str:
    """A few lines: who computed what, and how far it is from eager attention."""
    plan, steps = written.plan, written.run.tokens.shape[1]
    lines = [
        f"{steps} steps in {written.run.seconds:.1f} s, attention by {written.backend}; "
        f"histories of {', '.join(map(str, plan.seq_lens))} tokens at the end, "
        f"cut into {', '.join(map(str, splits_of(plan)))} splits"
    ]
    found = written.comparison
    if found is not None:
        lines.append(
            f"tokens {'equal to' if found.same_tokens else 'DIFFER from'} eager attention's "
            f"({written.eager_seconds:.1f} s); largest logit difference "
            f"{found.largest_difference:.1e}, smallest distance of the best token from the "
            f"second best {found.margin:.1e}"
        )
    return "\n".join(lines)


def splits_of(plan: SplitPlan) -> list[int]:
    """Splits of each request."""
    return [int(count) for count in plan.indptr[1:] - plan.indptr[:-1]]


def as_json(written: Written) -> dict[str, object]:
    """The same as numbers."""
    found = written.comparison
    return {
        "backend": written.backend,
        "steps": written.run.tokens.shape[1],
        "seconds": round(written.run.seconds, 3),
        "requests": [
            {"prompt": prompt, "text": text, "tokens": int(length), "splits": splits}
            for prompt, text, length, splits in zip(
                written.prompts,
                written.texts,
                written.plan.seq_lens,
                splits_of(written.plan),
                strict=True,
            )
        ],
        "eager": None
        if found is None
        else {
            "same_tokens": found.same_tokens,
            "largest_difference": found.largest_difference,
            "margin": found.margin,
            "seconds": round(written.eager_seconds or 0.0, 3),
        },
    }
