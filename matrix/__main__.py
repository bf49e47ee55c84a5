"""``python -m splitkv.matrix [--check]``: write SUPPORT.md and support.yaml, or what differs.

``--extend`` adds the pairwise cases that are missing since an axis, a value or a limit has changed.
"""

import argparse
import sys
from collections.abc import Sequence

from splitkv.matrix.cases_pairwise import extend
from splitkv.matrix.pages import check, write


def main(argv: Sequence[str] | None = None) -> int:
    """0: written, or checked and equal; 1: ``--check`` found a difference or a broken cell."""
    parser = argparse.ArgumentParser(prog="python -m splitkv.matrix", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 on a difference"
    )
    parser.add_argument(
        "--extend", action="store_true", help="write the rows that pairwise_rows.py lacks"
    )
    asked = parser.parse_args(argv)
    if asked.extend:
        print(extend())
        return 0
    if not asked.check:
        for path in write():
            print(path)
        return 0
    found = check()
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
