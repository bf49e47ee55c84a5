"""``splitkv matrix``: the support matrix, as recorded."""

import argparse

from splitkv.backends.registry import BACKENDS
from splitkv.cli.output import print_json, print_table
from splitkv.common.spec import Feature
from splitkv.matrix.cases import CASES
from splitkv.matrix.cells import cell, tables
from splitkv.matrix.pages import FOLDER, check, data, evidence_of_today

HELP = "The support matrix: who takes what, and on what evidence."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 if SUPPORT.md or support.yaml is not what the code and the recorded runs say",
    )


def run(args: argparse.Namespace) -> int:
    if args.check:
        found = check()
        if args.json:
            print_json({"held": not found, "differences": found})
        else:
            print("\n".join(found) if found else "the support matrix is up to date")
        return 1 if found else 0
    if args.json:
        print_json(data())
        return 0
    evidence = evidence_of_today()
    rows = tables(CASES)["Feature"]
    columns = ["feature", *(backend.name for backend in BACKENDS)]
    lines = [
        [row.title, *(cell(row, backend, evidence, CASES).word.value for backend in BACKENDS)]
        for row in rows
    ]
    print_table(columns, lines, title=f"{len(CASES)} cases, {len(Feature)} features")
    print(f"\nreasons, axes, devices and versions: {FOLDER / 'SUPPORT.md'}")
    return 0
