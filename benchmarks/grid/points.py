"""The points of the grid: which heads, which lengths, under which name.

An id is ``heads:kv_headsxhead_dim/case``, as in ``32:8x128/64x8192``; a case is requests x tokens,
or a ragged mix. Ids are stable: recorded figures are found again by them.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from splitkv.cli.bench_shapes import Shape

MOST_BYTES = 40e9
"""K and V of a point: it must fit twice, and leave room."""
PAGE_SIZES = (None, 16, 128)
"""Layouts of every point; None is contiguous."""

_HEADS = (
    (32, 8, 128),
    (28, 4, 128),
    (8, 1, 128),
    (64, 8, 128),
    (32, 32, 128),
    (16, 2, 128),
    (8, 4, 256),
    (16, 8, 256),
    (9, 3, 64),
)
_ANCHOR_HEADS = ((32, 8, 128), (28, 4, 128), (8, 1, 128), (32, 32, 128))
_BATCHES = (1, 4, 16, 64, 256)
_LENGTHS = (1024, 8192, 32768, 131072)
# int(4096 * exp(z - 1/2)), z of NumPy's default_rng(0): mean 4096, sigma 1
_LOG_NORMAL = (
    *(2817, 2176, 4713, 2759, 1454, 3566, 9152, 6405, 1229, 700, 1332, 2589, 242, 1996, 714, 1194),
    *(1441, 1810, 3749, 7046, 2184, 9742, 1277, 3530, 6131, 2729, 1181, 988, 1571, 3096, 905, 2015),
    *(2118, 4266, 3079, 3544, 1291, 2182, 5441, 11061, 705, 11290, 9543, 5426, 3236, 1815, 10676),
    *(17641, 15054, 9254, 3551, 742, 2473, 4789, 684, 3688, 3818, 4983, 760, 1281, 1605, 771),
    *(14145, 1513),
)
RAGGED = {
    "rag-a": (131072, *[1024] * 63),
    "rag-b": _LOG_NORMAL,
    "rag-c": (131072, *[4096] * 31),
    "half-empty": (8192, 0) * 32,
}
_ANCHOR_CASES = (
    *("1x1024", "1x8192", "1x131072", "8x8192", "64x2048", "64x8192", "256x2048"),
    *("rag-a", "rag-b", "rag-c"),
)
_GRID_CASES = (
    *(f"{batch}x{length}" for batch in _BATCHES for length in _LENGTHS),
    *("rag-a", "rag-b", "half-empty"),
)
_CHOICE_POINTS = 40
_CHOICE_BYTES = 4.4e9


@dataclass(frozen=True, slots=True)
class Point:
    """One shape of the grid under its id."""

    id: str
    shape: Shape

    @property
    def heads(self) -> str:
        """``32:8x128``."""
        return self.id.partition("/")[0]

    @property
    def case(self) -> str:
        """``64x8192``."""
        return self.id.partition("/")[2]


def point(heads: int, kv_heads: int, dim: int, case: str) -> Point:
    """The point of these heads and this case, a ragged mix or ``requests x tokens``."""
    if case in RAGGED:
        lengths = RAGGED[case]
    else:
        batch, _, length = case.partition("x")
        lengths = (int(length),) * int(batch)
    return Point(f"{heads}:{kv_heads}x{dim}/{case}", Shape(heads, kv_heads, dim, lengths))


def _points(heads: tuple[tuple[int, int, int], ...], cases: tuple[str, ...]) -> list[Point]:
    every = [point(*one, case) for one in heads for case in cases]
    return [one for one in every if one.shape.kv_bytes <= MOST_BYTES]


ANCHORS = _points(_ANCHOR_HEADS, _ANCHOR_CASES)
GRID = _points(_HEADS, _GRID_CASES)
TINY = _points(((4, 2, 64),), ("2x96", "3x40"))
"""For trying the benchmark itself, on a CPU in seconds."""


def _every() -> dict[str, Point]:
    return {one.id: one for one in (*ANCHORS, *GRID)}


def _spread(candidates: list[Point], count: int) -> list[Point]:
    return [candidates[index * len(candidates) // count] for index in range(count)]


def _most_telling_first(points: list[Point]) -> list[Point]:
    """Each case for all heads before the next case, so that a run cut short has seen every head;
    small and ragged ones first, where libraries differ most.
    """
    cases = [point.case for point in points]
    first = ("1x1024", "rag-b", "1x8192", "rag-a", "64x8192", "8x8192", "1x131072")
    order = dict.fromkeys((*first, *cases))
    place = {case: index for index, case in enumerate(order)}
    return sorted(points, key=lambda point: place[point.case])


SUBSETS: dict[str, list[Point]] = {
    "anchors": _most_telling_first(ANCHORS),
    "claims": _most_telling_first(ANCHORS),
    "grid": _most_telling_first(GRID),
    "all": list(_every().values()),
    "choice": _spread([p for p in GRID if p.shape.kv_bytes <= _CHOICE_BYTES], _CHOICE_POINTS),
    "tiny": TINY,
}
"""Named subsets. anchors: the points at which other libraries were measured before, and of which
all claims speak, hence its second name. choice: spread over the grid, for an exhaustive search of
the number of splits.
"""


def chosen(patterns: str) -> list[Point]:
    """Points of the subsets and shell patterns between commas, each once, in that order.

    Raises:
        ValueError: a word that is neither a subset nor the pattern of any id.
    """
    known = _every() | {one.id: one for one in TINY}
    found: dict[str, Point] = {}
    for word in patterns.split(","):
        points = SUBSETS.get(word) or [
            one for one in known.values() if fnmatchcase(one.id, word.strip())
        ]
        if not points:
            raise ValueError(f"{word!r} is no id, pattern of ids, or one of {list(SUBSETS)}")
        found |= {one.id: one for one in points}
    return list(found.values())
