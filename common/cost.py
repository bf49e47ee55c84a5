"""What the planner expects splits of a given size to take, and the size it chooses by that.

The model is one line: predicted time = slowest worker's bytes / its share of the bandwidth + merge.
Lengths are counted in granules. The planners of host and device take these constants, in the same
operations of float64, so that they choose alike.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec
from splitkv.common.visibility import IntArray

QUARTER_WAVES = (1, 2, 3, 4, 8, 12, 16, 24, 32)
"""Sizes that are considered make so many quarters of a split per worker and kv head."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The constants of one spec on one device.

    cores: groups of workers that share one. granule_seconds: one worker reads one granule of one kv
    head with its share of the bandwidth; split_seconds: between one split and the next;
    launch_seconds: of the merge; state_seconds: one split's states [S, H] are merged. alone,
    together: the profile's, the latter per neighbour.
    """

    kv_heads: int
    workers: int
    cores: int
    granule_seconds: float
    split_seconds: float
    launch_seconds: float
    state_seconds: float
    alone: float
    together: float

    def merge_seconds(self, states: int) -> float:
        """Of the states of so many splits."""
        return self.launch_seconds + states * self.state_seconds

    def best_size(self, granules: IntArray) -> int:
        """Granules per split with the smallest predicted time for requests of ``granules`` [B], B
        at least 1; ties go to the fewest splits.

        Splits no longer than a worker's share in whole granules, handed out longest first, keep the
        slowest worker within twice that (Graham's bound for list scheduling); so do splits of twice
        that length where every one has a worker of its own.

        Workers share the bandwidth until the slowest, or the fullest core, is left alone: it has
        whole waves of equal splits, or half a split more than its share of ragged ones, unless each
        split has a worker of its own.
        """
        heads, workers = self.kv_heads, self.workers
        total, longest = int(np.add.reduce(granules)), int(np.maximum.reduce(granules))
        share = total * heads / workers
        uniform = total == longest * len(granules)
        if uniform:
            sizes = _even_sizes(longest, len(granules) * heads, workers)
            counts = [len(granules) * -(-longest // size) for size in sizes]
        else:
            sizes = _ragged_sizes(longest, int(share))
            counts = splits_of(granules, sizes)
        limit = max(-(-total * heads // workers), 1)
        best, least = sizes[0], float("inf")
        for size, states in zip(sizes, counts, strict=True):
            items = states * heads
            if size > limit and (items > workers or size > 2 * limit):
                continue
            waves = -(-items // workers)
            if uniform:
                fullest = self.together * (-(-items // self.cores) * size)
                busy = max(share, self.alone * (waves * size), fullest)
            else:
                busy = max(share, self.alone * (size if waves == 1 else share + size / 2))
            seconds = busy * self.granule_seconds + waves * self.split_seconds
            if size < longest:
                seconds += self.merge_seconds(states)
            if seconds < least:
                best, least = size, seconds
        return best


@lru_cache(maxsize=64)
def step_cost(spec: DecodeSpec, profile: DeviceProfile, granule: int) -> StepCost:
    """granule: tokens."""
    rows = spec.num_queries * spec.num_q_heads
    return StepCost(
        spec.num_kv_heads,
        profile.workers,
        profile.workers // profile.neighbours,
        granule * token_seconds(spec, profile),
        profile.split_seconds,
        profile.launch_seconds,
        rows * profile.merge_seconds / profile.workers,
        profile.alone,
        profile.together / profile.neighbours,
    )


def token_seconds(spec: DecodeSpec, profile: DeviceProfile) -> float:
    """One worker reading one token of one kv head with its share of the bandwidth."""
    per_head = spec.kv_bytes_per_token / spec.num_kv_heads
    return per_head * profile.workers / profile.read_bandwidth


def _even_sizes(longest: int, whole: int, workers: int) -> list[int]:
    """Of equal requests, ``whole`` items if uncut: uncut first, then smaller and smaller."""
    pieces = [1]
    for quarters in QUARTER_WAVES:
        more = workers * quarters // (4 * whole)
        if more > pieces[-1]:
            pieces.append(more)
    return [max(-(-longest // each), 1) for each in pieces]


def _ragged_sizes(longest: int, share: int) -> list[int]:
    """Of unequal requests: uncut first, then smaller and smaller."""
    sizes = [longest]
    for quarters in QUARTER_WAVES:
        size = share * 4 // quarters or 1
        if size < sizes[-1]:
            sizes.append(size)
    return sizes


def splits_of(granules: IntArray, sizes: list[int]) -> list[int]:
    """How many splits each size makes.

    In float64, whose division is the faster one and exact enough: a quotient of integers below
    2**31 that is not whole is not rounded to a whole one.
    """
    pieces = granules / np.array(sizes, np.float64)[:, None]
    np.ceil(pieces, out=pieces)
    return np.add.reduce(pieces, 1).astype(np.int64).tolist()  # type: ignore[no-any-return]
