"""``splitkv demo``: who is chosen, a real model decoding, parity, and the matrix in numbers."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING

from splitkv.backends.registry import BACKENDS, check_device, explain, select
from splitkv.cli.generate import (
    Settings,
    Written,
    as_json,
    as_question,
    load_model,
    spec_of,
    summary,
    write,
)
from splitkv.cli.output import print_json, print_table, track
from splitkv.common.spec import DecodeSpec, Feature
from splitkv.common.support import dtype_name
from splitkv.matrix.case import Case, Size
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import Word, cell, tables
from splitkv.matrix.pages import evidence_of_today
from splitkv.matrix.parity import Outcome, Result, run_case

if TYPE_CHECKING:
    from splitkv.integrations.smollm2 import SmolLM2

HELP = (
    "A real small model decodes through splitkv, in several splits over a paged cache, beside "
    "eager attention; then one parity case per feature on every backend, and the support matrix in "
    "numbers. Exits 1 if a token differs from eager attention's or a case fails."
)
QUESTIONS = (
    (0, "What is a lighthouse for?"),
    (1, "What are the three parts of the promise?"),
    (2, "Summarise this text in one sentence."),
)
"""How many paragraphs of the demo's text come before a question: histories of unlike lengths."""

Parity = dict[str, list[Result]]
"""Results of the demo's cases by backend."""
Words = dict[str, Counter[Word]]
"""How many feature rows of the matrix say each word, by backend."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=32, metavar="N", help="(default 32)")
    add("--num-splits", type=int, default=7, metavar="N", help="splits per request (default 7)")
    add("--page-size", type=int, default=16, metavar="P", help="tokens of a page (default 16)")
    add("--device", default="cpu", help="of the model, as torch names it (default cpu)")


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    check_device(args.device)
    settings = Settings(
        new_tokens=args.max_new_tokens,
        num_splits=args.num_splits,
        page_size=args.page_size,
        backend=None,
        device=args.device,
    )
    loaded = load_model(settings.device)
    spec = spec_of(loaded.model, settings)
    answers = explain(spec, settings.device)
    chosen = select(spec, settings.device).name
    if not args.json:
        print(f"SmolLM2-135M-Instruct, loaded in {time.perf_counter() - start:.1f} s")
        _print_choice(spec, chosen, answers)
    written = write(loaded, _prompts(loaded), settings, compare_eager=True)
    written = replace(written, prompts=[_shown(*question) for question in QUESTIONS])
    if not args.json:
        _print_written(written)
    parity = _parity(_one_case_per_feature(CASES))
    words = _matrix_words()
    seconds = time.perf_counter() - start
    held = _held(written, parity)
    if args.json:
        print_json(
            {
                "held": held,
                "seconds": round(seconds, 1),
                "chosen": chosen,
                "reasons": answers,
                "generated": as_json(written),
                "parity": {name: _outcomes(results) for name, results in parity.items()},
                "matrix": {
                    name: {word.value: counts[word] for word in Word}
                    for name, counts in words.items()
                },
            }
        )
    else:
        _print_parity(parity)
        _print_matrix(words)
        print(f"{'all held' if held else 'NOT ALL HELD'}; {seconds:.1f} s")
    return 0 if held else 1


def _prompts(loaded: "SmolLM2") -> list[str]:
    text = (files("splitkv.cli") / "demo.txt").read_text(encoding="utf-8")
    paragraphs = text.split("\n\n")[1:]
    return [
        as_question(loaded, "\n\n".join([*paragraphs[:count], question]))
        for count, question in QUESTIONS
    ]


def _shown(paragraphs: int, question: str) -> str:
    if not paragraphs:
        return question
    return f"({paragraphs} paragraph{'s' * (paragraphs > 1)} of cli/demo.txt) {question}"


def _one_case_per_feature(cases: Sequence[Case]) -> list[Case]:
    small = [case for case in cases if case.size is Size.SMALL]
    first = (next(case for case in small if feature in case.features) for feature in Feature)
    return list(dict.fromkeys(first))


def _parity(cases: Sequence[Case]) -> Parity:
    results: Parity = {backend.name: [] for backend in BACKENDS}
    for case in track(cases, "parity"):
        for backend in BACKENDS:
            results[backend.name].append(run_case(backend, case))
    return results


def _matrix_words() -> Words:
    evidence = evidence_of_today()
    rows = tables(CASES)["Feature"]
    return {
        backend.name: Counter(cell(row, backend, evidence, CASES).word for row in rows)
        for backend in BACKENDS
    }


def _held(written: Written, parity: Parity) -> bool:
    failed = any(_outcomes(results)[Outcome.FAILED.value] for results in parity.values())
    assert written.comparison is not None
    return written.comparison.same_tokens and not failed


def _outcomes(results: Sequence[Result]) -> dict[str, int]:
    counts = Counter(result.outcome for result in results)
    return {outcome.value: counts[outcome] for outcome in Outcome}


def _print_choice(spec: DecodeSpec, chosen: str, answers: dict[str, list[str]]) -> None:
    title = (
        f"Who computes its decode steps: {spec.num_q_heads} query heads on {spec.num_kv_heads} kv "
        f"heads of {spec.head_dim}, {dtype_name(spec.dtype)}, pages of {spec.page_size} tokens"
    )
    rows = (
        (name, "chosen" if name == chosen else "\n".join(reasons) or "would take them too")
        for name, reasons in answers.items()
    )
    print_table(("backend", "answer on this machine"), rows, title=title)


def _print_written(written: Written) -> None:
    rows = zip(written.prompts, written.plan.seq_lens, written.texts, strict=True)
    print_table(("question", "tokens", "answer"), rows, title="One left-padded batch")
    print(summary(written))


def _print_parity(parity: Parity) -> None:
    rows = []
    for name, results in parity.items():
        failed = [result for result in results if result.outcome is Outcome.FAILED]
        absent = [result for result in results if result.outcome is Outcome.MISSING]
        remarks = [f"{result.case}: {'; '.join(result.why)}" for result in failed]
        remarks += [sentence for result in absent[:1] for sentence in result.why]
        rows.append((name, *_outcomes(results).values(), "\n".join(remarks)))
    print_table(
        ("backend", *(outcome.value for outcome in Outcome), "remarks"),
        rows,
        title=f"Parity with the float64 reference, {max(map(len, parity.values()))} cases, "
        "one per feature "
        f"(splitkv parity runs all {len(CASES)})",
    )


def _print_matrix(words: Words) -> None:
    said = [word for word in Word if any(counts[word] for counts in words.values())]
    print_table(
        ("backend", *(word.value for word in said)),
        ((name, *(counts[word] for word in said)) for name, counts in words.items()),
        title=f"The support matrix: what it says of {len(Feature)} features (splitkv matrix)",
    )
