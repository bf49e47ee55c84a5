"""How large tiles may be, by what they take of a vector core's unified buffer, and how many cores
there are. Integers in, integers out.
"""

from dataclasses import dataclass

from splitkv.common.profile import ASCEND_910B3, PROFILES
from splitkv.common.spec import DecodeSpec

UB_BYTES = 192 * 1024
"""One vector core's unified buffer on every A2 and A3 target: bishengir-compile 1.2.0 says that
1572864 bits are available where a kernel wants more."""
MERGE_MOST_DIM = 512
"""Dv of the largest row that a merge tile holds eight of."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of one device: a kernel with a matrix product runs on cube cores, each with two vector
    cores beside it; a kernel without one runs on the vector cores.
    """

    cube: int

    @property
    def vector(self) -> int:
        return 2 * self.cube


def cores_of(device_name: str | None) -> Cores:
    """By the name that the runtime reports; of an unknown or absent device the fewest that any has,
    as too small a grid is slow where too large a one waits for a second wave.

    Source: the target table of bishengir-compile 1.2.0, through ``splitkv.common.profile``.
    """
    known = (profile for name, profile in PROFILES.items() if name.startswith("Ascend"))
    name = device_name or ""
    found = next((profile for profile in known if name.startswith(profile.name)), ASCEND_910B3)
    return Cores(found.workers)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def merge_ub_bytes(rows: int, head_dim_v: int) -> int:
    """An upper bound of what a merge tile [rows, head_dim_v] takes of the unified buffer.

    Nine tiles of float32 (values, products and their selection, the sum, the result; loads and
    results twice, so that transfers overlap with arithmetic), 64 vectors of one number per row, and
    a kibibyte of alignment. Every variant is compiled, and its memory plan compared with this
    (``tests_ascend_kernels``).
    """
    return 36 * rows * power_of_two(head_dim_v) + 256 * rows + 1024


def merge_rows(rows: int, head_dim_v: int, programs: int) -> int:
    """Rows of a merge tile, a power of two: small enough to give every program one, and to fit into
    the unified buffer; 8 or more, as a transfer has 32 bytes. A row's bits do not depend on it.

    rows: of all requests together.

    Raises:
        ValueError: Dv above 512.
    """
    if head_dim_v > MERGE_MOST_DIM:
        raise ValueError(
            f"head_dim_v {head_dim_v} is above {MERGE_MOST_DIM}, the most that the merge kernel "
            "takes; merge with torch operators (splitkv.common.state.merge_states_torch)"
        )
    most = 64
    while merge_ub_bytes(most, head_dim_v) > UB_BYTES:
        most //= 2
    return min(most, max(8, power_of_two(-(-rows // programs))))


@dataclass(frozen=True, slots=True)
class SplitTile:
    """rows: of S * G query rows; tokens: keys of one step."""

    rows: int
    tokens: int


_MOST_SCORES = 2048
"""Of a split tile, rows x tokens; and of rows x tokens x head dim, 2**18. With every mask on, twice
as large overflows the unified buffer for some head dim (``tests_ascend_kernels`` compiles both)."""


def split_tile(spec: DecodeSpec) -> SplitTile:
    """The split kernel's tile, a function of the spec alone, so that bits do not depend on batches.

    A tile never leaves its page: its tokens divide the page where 16 or more of them do, and a page
    of another size is cut into tiles of which the last is not full.
    """
    rows = 16 if spec.num_queries * spec.group <= 16 else 32
    widest = max(spec.head_dim, spec.head_dim_v)
    tokens = min(_MOST_SCORES // rows, 2**18 // (rows * widest))
    if spec.page_size is not None:
        tokens = min(tokens, max(spec.page_size & -spec.page_size, 16))
    return SplitTile(rows, tokens)
