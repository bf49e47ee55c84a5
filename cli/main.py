"""The command line: which commands there are, and what their answers mean to a shell.

A command is a module of this folder with ``HELP``, ``configure(parser)`` and ``run(args) -> int``.
It is imported when it is asked for, so that no command waits for another's libraries. Exit codes:
0 all held; 1 something did not, or the request is well formed and nobody here takes it (no such
device, no such library: ``UnsupportedError``); 2 a malformed request.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from splitkv import __version__
from splitkv.cli.output import print_json

COMMANDS = {
    "doctor": "what is installed here, which devices there are, and which backends can run",
    "explain": "which backend takes a request, and why the others do not",
    "plan": "how histories are cut into splits on a device",
    "parity": "run the cases on the backends in reach against the float64 reference",
    "fuzz": "random requests against the float64 reference, what fails made small",
    "bench": "time a decode step here, beside torch's own attention and beside reading",
    "tune": "measure a device and write its profile for the planner",
    "verify": "ask an NPU what the documents leave open, run the cases on it, time it",
    "matrix": "the support matrix: who takes what, and on what evidence",
    "demo": "a real small model decodes through splitkv",
    "generate": "continue a text with a model that decodes through splitkv",
}
NOT_HELD, MALFORMED = 1, 2
"""Exit codes of what is not so, or not to be had here, and of what cannot be meant."""
READER_GONE = 141
"""Exit code when whoever read stdout stopped (``| head``): 128 + SIGPIPE, as of other programs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` without the program's name (None: the process's own)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), "")
    parser, subparsers = _parser("--json" in arguments)
    module = import_module(f"splitkv.cli.{command}") if command in COMMANDS else None
    if module is not None:
        subparsers[command].description = module.HELP
        module.configure(subparsers[command])
    try:
        args = parser.parse_args(arguments)
    except SystemExit as stop:  # how argparse ends after --help, --version and usage errors
        return stop.code if isinstance(stop.code, int) else 2
    if module is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code = _run(module, args)
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered has nowhere to go, and Python would say so at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return code


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        return int(module.run(args))
    except (OverflowError, MemoryError) as error:
        return _refused(args, ValueError(f"a number is too large: {error}"), MALFORMED)
    except ValueError as error:
        return _refused(args, error, MALFORMED)
    except NotImplementedError as error:
        if type(error) is NotImplementedError:
            raise  # a gap in the code, where UnsupportedError is an answer
        return _refused(args, error, NOT_HELD)


class _Parser(argparse.ArgumentParser):
    """Says a usage error on stdout too where JSON is wanted there."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            print_json({"error": message, "kind": "usage"})
        super().error(message)


class _JsonParser(_Parser):
    as_json = True


def _parser(
    as_json: bool,
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = (_JsonParser if as_json else _Parser)(
        prog="splitkv",
        description="Split-KV decode attention: the same on CPU, NVIDIA GPUs and Ascend NPUs.",
        epilog="exit codes: 0 all held, 1 something did not hold or is not to be had here, "
        "2 malformed request",
    )
    parser.add_argument("--version", action="version", version=f"splitkv {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="command")
    subparsers: dict[str, argparse.ArgumentParser] = {}
    for name, what in COMMANDS.items():
        # "resolve": a command may describe its own --json
        subparsers[name] = choices.add_parser(name, help=what, conflict_handler="resolve")
        subparsers[name].add_argument(
            "--json",
            action="store_true",
            help="machine-readable output, and nothing else, on stdout",
        )
    return parser, subparsers


def _refused(args: argparse.Namespace, error: Exception, code: int) -> int:
    print(f"splitkv {args.command}: {error}", file=sys.stderr)
    if args.json:
        print_json({"error": str(error), "kind": type(error).__name__})
    return code
