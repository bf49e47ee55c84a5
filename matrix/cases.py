"""The case table: named requests that stand for the rows of the support matrix.

Ids are stable. What a line leaves out is as ``case.make`` has it: H 8, K 2, D 64, bfloat16, NHD
pages of 128. One feature at a time here, every two of them together in ``cases_pairwise``.
"""

from fnmatch import fnmatchcase

from splitkv.matrix import cases_semantics as semantics
from splitkv.matrix import cases_shapes as shapes
from splitkv.matrix.case import Case
from splitkv.matrix.cases_pairwise import PAIRWISE

CASES: tuple[Case, ...] = (
    *shapes.LENGTHS,
    *shapes.LAYOUTS,
    *shapes.HEADS,
    *shapes.LATENT,
    *shapes.PAGES,
    *shapes.DTYPES,
    *semantics.QUERIES,
    *semantics.WINDOWS,
    *semantics.STARTS,
    *semantics.SCORES,
    *semantics.SPLITS,
    *semantics.MODELS,
    *semantics.REAL,
    *PAIRWISE,
)


def cases_named(pattern: str | None) -> tuple[Case, ...]:
    """The cases whose id matches a shell pattern such as ``window*`` (None: all).

    Raises:
        ValueError: no id does.
    """
    found = tuple(case for case in CASES if pattern is None or fnmatchcase(case.id, pattern))
    if not found:
        raise ValueError(
            f"no case matches {pattern!r}; ids are like {CASES[0].id!r}, patterns like 'window*'"
        )
    return found
