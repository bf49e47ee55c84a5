"""From times of plans to the constants of a profile: the planner's own model, solved for them.

The model is linear in launch cost, seconds per byte and merge cost; what each is multiplied by is
asked of the model itself, with the others at nothing. Relative errors are
made small, so that a call of 20 us weighs as much as one of 20 ms.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

from splitkv.common.plan import SplitPlan
from splitkv.common.profile import DeviceProfile

Array = npt.NDArray[np.float64]

TILE_RATE = 0.9
"""Of the rate of long splits that a split of one tile still reaches."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What was timed, the seconds it took, and what the model makes of it for a profile."""

    name: str
    seconds: float
    model: Callable[[DeviceProfile], float]

    def off(self, profile: DeviceProfile) -> float:
        """Predicted over measured, less 1."""
        return self.model(profile) / self.seconds - 1


def call_seconds(plan: SplitPlan, profile: DeviceProfile) -> float:
    """Predicted seconds of these very cuts on a device of ``profile``."""
    return replace(plan, profile=profile).predicted_seconds


def merge_seconds(rows: int, profile: DeviceProfile) -> float:
    """Predicted seconds of merging ``rows`` state rows [Dv] in a launch of their own."""
    return profile.launch_seconds + rows * profile.merge_seconds / profile.workers


def fit(timed: Sequence[Timed], known: DeviceProfile) -> DeviceProfile:
    """``known`` with launch, bandwidth and merge cost that explain ``timed`` best.

    Least squares over relative errors, none of the three below 0.

    Raises:
        ValueError: fewer than three times, or times that leave one of the three undetermined.
    """
    terms = np.array([_terms(one, known) for one in timed]).reshape(-1, 3)
    seconds = np.array([one.seconds for one in timed])
    rows = terms / seconds[:, None]
    size = np.linalg.norm(rows, axis=0)
    if len(rows) < 3 or not size.all() or np.linalg.matrix_rank(rows / size) < 3:
        raise ValueError(
            f"{len(rows)} times do not determine launch, bandwidth and merge cost: time plans of "
            "several lengths, and merges"
        )
    launch, per_byte, merge = _not_negative(rows / size) / size
    if per_byte <= 0:
        raise ValueError("the times do not grow with the bytes read: time larger caches")
    return replace(
        known,
        launch_seconds=float(launch),
        read_bandwidth=float(1 / per_byte),
        merge_seconds=float(merge),
    )


def shortest_tile(timed: Mapping[int, Timed], profile: DeviceProfile) -> int:
    """Tokens of the shortest splits that read at ``TILE_RATE`` of the rate of the longest ones.

    timed: tokens of a split -> one history cut into such splits; launches and merges, by
    ``profile``, are taken off the times.
    """
    free = replace(profile, read_bandwidth=math.inf)
    reading = {tokens: one.seconds - one.model(free) for tokens, one in timed.items()}
    longest, *shorter = sorted(reading, reverse=True)
    slow = (tokens for tokens in shorter if reading[tokens] > reading[longest] / TILE_RATE)
    first_slow = next(slow, 0)  # a shorter one that seems to read well is noise
    return min(tokens for tokens in reading if tokens > first_slow)


def typical_off(timed: Sequence[Timed], profile: DeviceProfile) -> float:
    """Median of |predicted / measured - 1|."""
    return median(abs(one.off(profile)) for one in timed)


def _terms(one: Timed, known: DeviceProfile) -> tuple[float, float, float]:
    """What launch cost, seconds per byte and merge cost are multiplied by."""
    none = replace(
        known,
        launch_seconds=0.0,
        read_bandwidth=math.inf,
        merge_seconds=0.0,
        split_seconds=0.0,
    )
    return (
        one.model(replace(none, launch_seconds=1.0)),
        one.model(replace(none, read_bandwidth=1.0)),
        one.model(replace(none, merge_seconds=1.0)),
    )


def _not_negative(rows: Array) -> Array:
    """x >= 0 with the smallest |rows x - 1|: the best of all ways to hold some of x at 0."""
    best, least = np.zeros(3), math.inf
    for count in (3, 2, 1):
        for free in combinations(range(3), count):
            part = np.linalg.lstsq(rows[:, free], np.ones(len(rows)), rcond=None)[0]
            left = float(np.linalg.norm(rows[:, free] @ part - 1))
            if (part >= 0).all() and left < least:
                least, best = left, np.zeros(3)
                best[list(free)] = part
    return best
