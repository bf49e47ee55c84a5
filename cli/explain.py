"""``splitkv explain``: which backend takes a request, and why the others do not. Runs nothing."""

import argparse

from splitkv.backends.registry import BACKENDS, backend_named, explain
from splitkv.cli.output import print_json, print_table
from splitkv.cli.spec_arguments import add_spec_arguments, spec_from, spec_json

HELP = (
    "Which backend takes a request, and why the others do not; nothing runs. "
    "Exits 1 if none takes it, or not the one that --backend names."
)


def configure(parser: argparse.ArgumentParser) -> None:
    devices = [backend.device_type for backend in BACKENDS]
    parser.add_argument("--device", choices=devices, help="of the tensors (default: any)")
    parser.add_argument("--backend", help="ask for this one, as a call with backend=... does")
    add_spec_arguments(parser)


def run(args: argparse.Namespace) -> int:
    spec = spec_from(args)
    if args.backend is not None:
        backend_named(args.backend)
    answers = explain(spec, args.device)
    asked = answers if args.backend is None else {args.backend: answers[args.backend]}
    chosen = next((name for name, reasons in asked.items() if not reasons), None)
    if args.json:
        print_json({"chosen": chosen, "spec": spec_json(spec), "reasons": answers})
    else:
        print(f"{spec}\nchosen: {chosen or 'none'}")
        print_table(
            ("backend", "reasons against it"),
            ((name, "\n".join(reasons) or "none") for name, reasons in answers.items()),
        )
    return 0 if chosen is not None else 1
