"""Which worker reads which KV range of which request, and what is merged into what: integers in,
integers out.

The cost model is one line: predicted time = slowest worker's bytes / its share of the bandwidth +
merge. Lengths are counted in granules (the tile, rounded up to whole pages), and where a
request is cut depends on its own length and the granules per split alone (and, in automatic mode,
on whether all requests are of one length).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec
from splitkv.common.visibility import IntArray, as_lengths, visible_bounds

Int32Array = npt.NDArray[np.int32]


class SplitMode(Enum):
    """Who decides how far a request is cut."""

    AUTO = "automatic"
    """the cost model"""
    NUM_SPLITS = "num_splits"
    """at most that many splits per request"""
    SPLIT_SIZE = "split_size"
    """every split that many tokens: batch invariant"""
    WHOLE = "whole"
    """num_splits=1: no request is cut"""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SplitPlan:
    """Splits of every request of one step, sorted by request, then by position; arrays are updated
    in place by ``refresh``.

    request, start, end: int32 [capacity]; split n reads positions [start, end) of its request. Only
        the first ``num_splits`` entries count.
    indptr: int32 [B + 1]; the splits of request b are indptr[b] to indptr[b + 1].
    window_first: bool [capacity]; this split opens its request's window: when the plan serves a
        shorter request than it was made for, the split starts where that request's window starts.
    seq_lens: int32 [B], the lengths planned for. The plan stays right for any shorter request, if
        the one who executes it clips ``end`` to the actual length L and moves the ``start`` of an
        opening split to min(start, max(w, anchor_tokens)), where w is the ``window_start`` of the
        first query, at L - S. The anchors stop it: where a shorter window reaches them, their own
        split reads them already.
    An anchor range apart from the window is a split of its own, in every mode.
    """

    spec: DecodeSpec
    profile: DeviceProfile
    mode: SplitMode
    requested: int | None
    granule: int
    request: Int32Array
    start: Int32Array
    end: Int32Array
    window_first: npt.NDArray[np.bool_]
    indptr: Int32Array
    seq_lens: Int32Array
    bound: dict[object, object] = field(default_factory=dict, repr=False)
    """What backends tie to this plan (device copies, checked shapes); emptied by ``refresh``."""

    @property
    def batch(self) -> int:
        return len(self.seq_lens)

    @property
    def num_splits(self) -> int:
        """N, the splits of all requests together."""
        return int(self.indptr[-1])

    @property
    def max_splits(self) -> int:
        """The most splits that one request has."""
        return int(np.diff(self.indptr).max(initial=0))

    @property
    def lengths(self) -> IntArray:
        """Tokens of each split, int64 [N]."""
        count = self.num_splits
        return self.end[:count].astype(np.int64) - self.start[:count]

    @property
    def launch_order(self) -> IntArray:
        """Splits, longest first: the order that keeps the last worker from starting late. int64
        [N].
        """
        return np.argsort(-self.lengths, kind="stable")

    def worker_tokens(self) -> IntArray:
        """Tokens that each worker reads when splits are handed out in launch order, int64
        [workers].
        """
        loads = [(0, worker) for worker in range(self.profile.workers)]
        for tokens in self.lengths[self.launch_order].tolist():
            for _ in range(self.spec.num_kv_heads):
                load, worker = loads[0]
                heapq.heapreplace(loads, (load + tokens, worker))
        return np.array(sorted(load for load, _ in loads), dtype=np.int64)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the splits read."""
        return int(self.lengths.sum()) * self.spec.kv_bytes_per_token

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial states of requests with more than one split (float32 max, lse and
        out).
        """
        counts = np.diff(self.indptr)
        rows = int(counts[counts > 1].sum()) * self.spec.num_queries * self.spec.num_q_heads
        return rows * (self.spec.head_dim_v + 2) * 4

    @property
    def waves(self) -> float:
        """Work items (split, kv head) per worker."""
        return self.num_splits * self.spec.num_kv_heads / self.profile.workers

    @property
    def balance(self) -> float:
        """Mean load over the slowest worker's load: 1 is even, 0.5 means half the device waits."""
        loads = self.worker_tokens()
        return float(loads.mean() / loads.max()) if loads.max(initial=0) else 1.0

    @property
    def predicted_seconds(self) -> float:
        """Launch, the workers' reads and merge, by the profile's numbers."""
        profile, loads = self.profile, self.worker_tokens()
        shared = loads[::-1].reshape(profile.neighbours, -1)
        shared[1::2] = shared[1::2, ::-1]  # the busiest beside the idlest
        fullest = float(shared.mean(0).max())
        busy = max(fullest * profile.together, int(loads[-1]) * profile.alone, float(loads.mean()))
        waves = -(-self.num_splits * self.spec.num_kv_heads // profile.workers)
        merge = self.partial_bytes and float(_merge_seconds(self.spec, profile, self.num_splits))
        read = busy * token_seconds(self.spec, profile) + waves * profile.split_seconds
        return profile.launch_seconds + read + merge

    def refresh(self, seq_lens: "Sequence[int] | IntArray") -> None:
        """Plan again for other lengths, in place, within the capacity.

        Raises:
            ValueError: another number of requests, or more splits than the capacity holds; the plan
            is then unchanged.
        """
        lengths = as_lengths("seq_lens", seq_lens)
        if len(lengths) != self.batch:
            raise ValueError(f"the plan holds {self.batch} requests, got {len(lengths)} lengths")
        cuts = _cut(self.spec, self.profile, self.mode, self.requested, self.granule, lengths)
        if len(cuts.request) > len(self.request):
            raise ValueError(
                f"the lengths need {len(cuts.request)} splits, the plan's capacity is "
                f"{len(self.request)}; "
                "plan again, or plan with a larger capacity"
            )
        _fill(self, cuts, lengths)
        self.bound.clear()

    def summary(self) -> dict[str, object]:
        """The reported figures, ready for JSON."""
        return {
            "mode": self.mode.value,
            "profile": self.profile.name,
            "requests": self.batch,
            "splits": self.num_splits,
            "max_splits": self.max_splits,
            "granule_tokens": self.granule,
            "predicted_us": round(self.predicted_seconds * 1e6, 2),
            "kv_bytes": self.kv_bytes,
            "partial_bytes": self.partial_bytes,
            "waves": round(self.waves, 3),
            "balance": round(self.balance, 3),
        }


def plan_splits(
    spec: DecodeSpec,
    seq_lens: "Sequence[int] | IntArray",
    *,
    profile: DeviceProfile,
    num_splits: int | None = None,
    split_size: int | None = None,
    capacity: int | None = None,
) -> SplitPlan:
    """Cut the visible history of every request into splits.

    seq_lens: [B] tokens on the host, the new ones included. num_splits: at most so many splits per
    request, 1 for none; split_size: tokens per split, rounded up to granules (both None: the cost
    model decides). capacity: splits that ``refresh`` may use (None: as many as these lengths need).

    No split is empty, splits of a request neither overlap nor leave out a visible position, and a
    request shorter than a granule is one split. In automatic mode the slowest worker reads at most
    twice max(all granules / workers, 1 granule), and one anchor range apart from its window on top
    of
    that: anchors are never cut.

    Raises:
        ValueError: both split arguments, a value below 1, lengths out of range, or a capacity that
        is too small.
    """
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"give num_splits or split_size, not both: got {num_splits} and {split_size}"
        )
    for name, value in (("num_splits", num_splits), ("split_size", split_size)):
        integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (integer and value >= 1):
            raise ValueError(
                f"{name} must be an integer of 1 or more (None: automatic), got {value!r}"
            )
    mode = SplitMode.AUTO
    if num_splits is not None:
        mode = SplitMode.WHOLE if num_splits == 1 else SplitMode.NUM_SPLITS
    elif split_size is not None:
        mode = SplitMode.SPLIT_SIZE
    requested = num_splits if num_splits is not None else split_size
    if requested is not None:
        requested = min(int(requested), 2**31 - 1)  # more than any history has
    lengths = as_lengths("seq_lens", seq_lens)
    granule = granule_tokens(profile.tile_tokens, spec.page_size)
    cuts = _cut(spec, profile, mode, requested, granule, lengths)
    size = len(cuts.request) if capacity is None else capacity
    if size < len(cuts.request):
        raise ValueError(
            f"capacity {capacity} is below the {len(cuts.request)} splits that these lengths need"
        )
    plan = SplitPlan(
        spec,
        profile,
        mode,
        requested,
        granule,
        request=np.zeros(size, np.int32),
        start=np.zeros(size, np.int32),
        end=np.zeros(size, np.int32),
        window_first=np.zeros(size, np.bool_),
        indptr=np.zeros(len(lengths) + 1, np.int32),
        seq_lens=np.zeros(len(lengths), np.int32),
    )
    _fill(plan, cuts, lengths)
    return plan


def granule_tokens(tile_tokens: int, page_size: int | None) -> int:
    """Where cuts may fall: the tile, rounded up to whole pages."""
    return tile_tokens if page_size is None else math.ceil(tile_tokens / page_size) * page_size


@dataclass(frozen=True, slots=True)
class _Cuts:
    request: IntArray
    start: IntArray
    end: IntArray
    window_first: npt.NDArray[np.bool_]
    indptr: IntArray


def _fill(plan: SplitPlan, cuts: _Cuts, lengths: IntArray) -> None:
    count = len(cuts.request)
    plan.request[:count] = cuts.request
    plan.start[:count] = cuts.start
    plan.end[:count] = cuts.end
    plan.window_first[:count] = cuts.window_first
    plan.indptr[:] = cuts.indptr
    plan.seq_lens[:] = lengths


def _cut(
    spec: DecodeSpec,
    profile: DeviceProfile,
    mode: SplitMode,
    requested: int | None,
    granule: int,
    lengths: IntArray,
) -> _Cuts:
    anchor_end, start = visible_bounds(lengths, spec.num_queries, spec)
    first = start // granule  # the granule grid is absolute, so a window may begin inside a granule
    granules = np.maximum(-(-lengths // granule) - first, 0)
    granules = np.where(lengths > start, granules, 0)
    per_split = _granules_per_split(spec, profile, mode, requested, granule, granules)
    even = mode is not SplitMode.SPLIT_SIZE and (mode is not SplitMode.AUTO or _uniform(granules))
    size, count = _cuts_of(granules, per_split, even=even)
    has_anchor = (anchor_end > 0).astype(np.int64)
    indptr = np.concatenate(([0], np.cumsum(count + has_anchor)))
    request = np.repeat(np.arange(len(lengths)), count + has_anchor)
    index = np.arange(len(request)) - indptr[:-1][request] - has_anchor[request]
    begin = (first[request] + index * size[request]) * granule
    end = np.minimum(begin + size[request] * granule, lengths[request])
    begin = np.maximum(begin, start[request])
    anchor = index < 0
    return _Cuts(
        request,
        np.where(anchor, 0, begin),
        np.where(anchor, anchor_end[request], end),
        index == 0,
        indptr,
    )


def _uniform(granules: IntArray) -> bool:
    return bool(granules.size == 0 or (granules == granules.flat[0]).all())


def _cuts_of(granules: IntArray, per_split: IntArray, *, even: bool) -> tuple[IntArray, IntArray]:
    """Granules of each split but the last, and number of splits per request; even: the last one's
    too. Ragged requests leave rests of all sizes, which fill up the workers' last gaps.
    """
    size = np.minimum(per_split, np.maximum(granules, 1))
    if even:
        pieces = np.maximum(-(-granules // size), 1)
        size = np.maximum(-(-granules // pieces), 1)
    return size, -(-granules // size)


def _granules_per_split(
    spec: DecodeSpec,
    profile: DeviceProfile,
    mode: SplitMode,
    requested: int | None,
    granule: int,
    granules: IntArray,
) -> IntArray:
    if mode is SplitMode.WHOLE or granules.size == 0:
        return np.maximum(granules, 1)
    if mode is SplitMode.NUM_SPLITS:
        assert requested is not None
        return np.maximum(-(-granules // requested), 1)
    if mode is SplitMode.SPLIT_SIZE:
        assert requested is not None
        return np.full_like(granules, max(-(-requested // granule), 1))
    return np.full_like(granules, _automatic(spec, profile, granule, granules))


_QUARTER_WAVES = np.array([1, 2, 3, 4, 8, 12, 16, 24, 32])
"""Sizes that are considered make so many quarters of a split per worker and kv head."""


def _automatic(spec: DecodeSpec, profile: DeviceProfile, granule: int, granules: IntArray) -> int:
    """Granules per split with the smallest predicted time; ties go to the fewest splits.

    Splits no longer than max(1, all granules / workers), handed out longest first, keep the slowest
    worker within twice that (Graham's bound for list scheduling); so do splits of twice that length
    where every one has a worker of its own.
    """
    heads, workers = spec.num_kv_heads, profile.workers
    share = int(granules.sum()) * heads / workers
    longest, busy = int(granules.max()), int((granules > 0).sum())
    if _uniform(granules):
        pieces = np.maximum(workers * _QUARTER_WAVES // max(4 * busy * heads, 1), 1)
        sizes = -(-longest // pieces)
    else:
        sizes = int(share) * 4 // np.maximum(_QUARTER_WAVES, 4)
    sizes = np.maximum(np.concatenate(([longest], sizes)), 1)
    seconds, items, largest = _predict(spec, profile, granule, granules, sizes)
    limit = max(share, 1.0)
    allowed = (largest <= limit) | ((items <= workers) & (largest <= 2 * limit))
    return int(sizes[np.argmin(np.where(allowed, seconds, np.inf))])


def _predict(
    spec: DecodeSpec, profile: DeviceProfile, granule: int, granules: IntArray, sizes: IntArray
) -> tuple[npt.NDArray[np.float64], IntArray, IntArray]:
    """Seconds with at most ``sizes`` [C] granules a split, work items, and granules of the largest.

    Workers share the bandwidth until the slowest, or the fullest core, is left alone: it has whole
    waves of equal splits, or half a split more than its share of ragged ones, unless each split has
    a worker of its own.
    """
    uniform = _uniform(granules)
    size, count = _cuts_of(granules[None], sizes[:, None], even=uniform)
    states, most = count.sum(1), count.max(1)
    items, largest = states * spec.num_kv_heads, size.max(1)
    waves = -(-items // profile.workers)
    share = int(granules.sum()) * spec.num_kv_heads / profile.workers
    ragged = np.where(waves == 1, largest, share + largest / 2)
    slowest = waves * largest if uniform else ragged
    fullest = -(-items // (profile.workers // profile.neighbours)) * largest / profile.neighbours
    core = fullest if uniform else 0.0
    busy = np.maximum(share, np.maximum(profile.alone * slowest, profile.together * core))
    seconds = busy * granule * token_seconds(spec, profile) + waves * profile.split_seconds
    merge = _merge_seconds(spec, profile, states)
    return np.where(most > 1, seconds + merge, seconds), items, largest


def token_seconds(spec: DecodeSpec, profile: DeviceProfile) -> float:
    """One worker reading one token of one kv head with its share of the bandwidth."""
    per_head = spec.kv_bytes_per_token / spec.num_kv_heads
    return per_head * profile.workers / profile.read_bandwidth


def _merge_seconds(
    spec: DecodeSpec, profile: DeviceProfile, states: "int | IntArray"
) -> "float | npt.NDArray[np.float64]":
    rows = states * spec.num_queries * spec.num_q_heads
    return profile.launch_seconds + rows * profile.merge_seconds / profile.workers
