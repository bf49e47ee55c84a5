"""Which worker reads which KV range of which request, and what is merged into what: integers in,
integers out.

Lengths are counted in granules (the tile, rounded up to whole pages), and where a request is cut
depends on its own length and the granules per split alone, which ``splitkv.common.cost`` chooses in
automatic mode.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from splitkv.common.cost import step_cost, token_seconds
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
        return int(np.maximum.reduce(self.indptr[1:] - self.indptr[:-1], initial=0))

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
        return (-self.lengths).argsort(kind="stable")

    def worker_tokens(self) -> IntArray:
        """Tokens that each worker reads, splits handed out in launch order, int64 [workers]."""
        loads = [(0, worker) for worker in range(self.profile.workers)]
        for tokens in np.sort(self.lengths)[::-1].tolist():
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
        cost = step_cost(self.spec, profile, self.granule)
        merge = cost.merge_seconds(self.num_splits) if self.partial_bytes else 0.0
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
        request, start, end, window_first, indptr = _cut(
            self.spec, self.profile, self.mode, self.requested, self.granule, lengths
        )
        count = len(request)
        if count > len(self.request):
            raise ValueError(
                f"the lengths need {count} splits, the plan's capacity is {len(self.request)}; "
                "plan again, or plan with a larger capacity"
            )
        self.request[:count] = request
        self.start[:count] = start
        self.end[:count] = end
        self.window_first[:count] = window_first
        self.indptr[:] = indptr
        self.seq_lens[:] = lengths
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
    of that: anchors are never cut.

    Raises:
        ValueError: both split arguments, a value below 1, lengths out of range, or a capacity that
        is too small.
    """
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"give num_splits or split_size, not both: got {num_splits} and {split_size}"
        )
    for name, value in (("num_splits", num_splits), ("split_size", split_size)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
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
    request, start, end, window_first, indptr = _cut(
        spec, profile, mode, requested, granule, lengths
    )
    count = len(request)
    if capacity is not None and capacity != count:
        if capacity < count:
            raise ValueError(
                f"capacity {capacity} is below the {count} splits that these lengths need"
            )
        spare = (0, capacity - count)
        request, start, end = (np.pad(each, spare) for each in (request, start, end))
        window_first = np.pad(window_first, spare)
    return SplitPlan(
        spec,
        profile,
        mode,
        requested,
        granule,
        request,
        start,
        end,
        window_first,
        indptr,
        lengths.astype(np.int32),
    )


def granule_tokens(tile_tokens: int, page_size: int | None) -> int:
    """Where cuts may fall: the tile, rounded up to whole pages."""
    return tile_tokens if page_size is None else -(-tile_tokens // page_size) * page_size


_Cuts = tuple[Int32Array, Int32Array, Int32Array, npt.NDArray[np.bool_], Int32Array]
"""request, start, end, window_first, indptr of a ``SplitPlan``, without its spare capacity"""


def _cut(
    spec: DecodeSpec,
    profile: DeviceProfile,
    mode: SplitMode,
    requested: int | None,
    granule: int,
    lengths: IntArray,
) -> _Cuts:
    granules = -(-lengths // granule)
    windowed = spec.sliding_window is not None
    anchor_end = has_anchor = start = first = lengths  # of no use without a window
    if windowed:
        anchor_end, start = visible_bounds(lengths, spec.num_queries, spec)
        has_anchor = (anchor_end > 0).astype(np.int64)
        first = start // granule  # the grid is absolute, so a window may begin inside a granule
        granules = np.where(lengths > start, granules - first, 0)
    size = _granules_per_split(spec, profile, mode, requested, granule, granules)
    count = -(-granules // size)
    if windowed:
        count += has_anchor
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(count, out=indptr[1:])
    request = np.arange(len(lengths)).repeat(count)
    index = np.arange(len(request)) - indptr[request]
    if windowed:
        index -= has_anchor[request]
    step = (size if isinstance(size, int) else size[request]) * granule
    begin = index * step
    if windowed:
        begin += first[request] * granule
    end = np.minimum(begin + step, lengths[request])
    if windowed:
        anchor = index < 0
        begin = np.where(anchor, 0, np.maximum(begin, start[request]))
        end = np.where(anchor, anchor_end[request], end)
    return (
        request.astype(np.int32),
        begin.astype(np.int32),
        end.astype(np.int32),
        index == 0,
        indptr.astype(np.int32),
    )


def _granules_per_split(
    spec: DecodeSpec,
    profile: DeviceProfile,
    mode: SplitMode,
    requested: int | None,
    granule: int,
    granules: IntArray,
) -> int | IntArray:
    """Granules of each split but a request's last, of all requests or of each."""
    if mode is SplitMode.WHOLE or granules.size == 0:
        return max(int(granules.max(initial=0)), 1)
    if mode is SplitMode.AUTO:
        return step_cost(spec, profile, granule).best_size(granules)
    assert requested is not None
    if mode is SplitMode.SPLIT_SIZE:
        return -(-requested // granule)
    return np.maximum(-(-granules // requested), 1)
