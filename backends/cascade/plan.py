"""Shared prefixes: which pages are read once for several requests.

The requests of a group see all of its pages with all of their queries. So these queries are read as
those of one request that sees everything (no causal mask), what is left of each history is decoded
as ever, and the states merge: both parts are exact. What pays is ``worth``'s affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from splitkv.backends.cascade.prefixes import Trie, find_prefixes
from splitkv.backends.cascade.worth import Choice, choose_prefixes, reads_of
from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec, ScaleKind
from splitkv.common.visibility import IntArray, as_lengths, visible_bounds


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Pages that are read once for several requests.

    first: column of the block table where they begin; pages: int64 [n], their ids. members: int64
    [m], the requests, rising. level: how many groups its members' histories pass before.
    """

    first: int
    pages: IntArray
    members: IntArray
    level: int


@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """Groups of one step; everything else of each history, the suffix, is decoded request by
    request.

    groups: outer prefixes before those nested in them. shared: int64 [B], the tokens of each
        request that groups read, from position 0. counts: int64 [B], queries of each request.
    seq_lens: int64 [B], the lengths planned for; read-only, ``refresh`` puts another array in its
        place. capacity: tokens that a row of the block table holds. mask_tokens: the positions at
        each history's end that a mask or bias may cover. queries_per_read: queries that one pass
        over K and V serves (None: any number). saved_seconds: predicted, by ``profile``.
    why: sentences: what kept requests or prefixes from being shared.
    """

    spec: DecodeSpec
    profile: DeviceProfile
    groups: tuple[Group, ...]
    shared: IntArray
    counts: IntArray
    seq_lens: IntArray
    capacity: int
    mask_tokens: int | None
    queries_per_read: int | None
    saved_seconds: float
    why: tuple[str, ...]
    bound: dict[tuple[object, ...], object] = field(init=False, default_factory=dict, repr=False)
    """What executing ties to this plan, and to no copy of it. What depends on lengths is kept with
    the array of lengths it was made for, and made again for another."""

    def __post_init__(self) -> None:
        self._set_lengths(self.seq_lens)

    def __reduce__(self) -> tuple[object, ...]:
        # copies are made anew, as by replace: with lengths and bound of their own
        return CascadePlan, tuple(getattr(self, entry.name) for entry in fields(self) if entry.init)

    @property
    def batch(self) -> int:
        return len(self.seq_lens)

    @property
    def levels(self) -> int:
        """The most groups that one history passes."""
        return max((group.level + 1 for group in self.groups), default=0)

    @property
    def group_tokens(self) -> IntArray:
        """Tokens of each group, int64."""
        pages = [len(group.pages) for group in self.groups]
        return np.array(pages, np.int64) * page_size_of(self.spec)

    @property
    def group_queries(self) -> IntArray:
        """Queries that read each group, int64."""
        counts = [self.counts[group.members].sum() for group in self.groups]
        return np.array(counts, np.int64)

    @property
    def group_reads(self) -> IntArray:
        """Passes over the K and V of each group, int64."""
        return reads_of(self.group_queries, self.queries_per_read)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step reads: each group's once per pass, and the suffixes."""
        suffixes = _own_bytes(self, self.seq_lens - self.shared)
        tokens = int((self.group_tokens * self.group_reads).sum())
        return tokens * self.spec.kv_bytes_per_token + suffixes

    @property
    def flat_kv_bytes(self) -> int:
        """Bytes that it would read without groups."""
        return _own_bytes(self, self.seq_lens)

    @property
    def state_bytes(self) -> int:
        """Bytes of the groups' partial states (float32 max, lse and out)."""
        rows = int(self.group_queries.sum()) * self.spec.num_q_heads
        return rows * (self.spec.head_dim_v + 2) * 4

    def refresh(self, seq_lens: "Sequence[int] | IntArray") -> None:
        """Go on with other lengths, in place: the groups stay, the suffixes grow or shrink.

        Pages that have become equal since are not looked for: plan again for those.

        Raises:
            ValueError: another number of requests, a length beyond ``capacity``, or one for which a
            request's shared tokens are no longer seen by all of its queries; the plan is then
            unchanged.
        """
        lengths = as_lengths("seq_lens", seq_lens)
        self.check_lengths(lengths)
        _check_capacity(lengths, self.capacity)
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: IntArray) -> None:
        """All lengths at once: a call in another thread sees the old ones or the new."""
        own = np.array(lengths, np.int64)
        own.flags.writeable = False
        object.__setattr__(self, "seq_lens", own)

    def check_lengths(self, lengths: IntArray) -> None:
        """Raise ValueError unless the groups are exact for these lengths, int64 [B]."""
        if len(lengths) != self.batch:
            raise ValueError(f"the plan holds {self.batch} requests, got {len(lengths)} lengths")
        limit = shareable_tokens(self.spec, lengths, self.counts, self.mask_tokens)
        lost = np.flatnonzero(self.shared > limit)
        if lost.size:
            index = int(lost[0])
            raise ValueError(
                f"seq_lens[{index}] is {lengths[index]}: of its {self.shared[index]} shared tokens "
                f"all queries see {limit[index]} in whole pages; plan the cascade again"
            )

    def check_table(self, table: IntArray) -> None:
        """Raise ValueError unless the groups' pages stand in ``table`` [B, columns] as planned."""
        for number, group in enumerate(self.groups):
            columns = slice(group.first, group.first + len(group.pages))
            rows = table[group.members, columns]
            if rows.shape[1] == len(group.pages) and (rows == rows[:1]).all():
                continue
            raise ValueError(
                f"group {number} of the plan shares columns {columns.start} to {columns.stop} of "
                f"the block table among requests {group.members.tolist()[:8]} and "
                f"{max(len(group.members) - 8, 0)} more, where this table's pages differ; plan the "
                "cascade again"
            )

    def summary(self) -> dict[str, object]:
        """The reported figures, ready for JSON."""
        return {
            "profile": self.profile.name,
            "requests": self.batch,
            "groups": len(self.groups),
            "levels": self.levels,
            "members": [len(group.members) for group in self.groups],
            "group_tokens": self.group_tokens.tolist(),
            "group_reads": self.group_reads.tolist(),
            "sharing_requests": int((self.shared > 0).sum()),
            "kv_bytes": self.kv_bytes,
            "flat_kv_bytes": self.flat_kv_bytes,
            "saved_bytes": self.flat_kv_bytes - self.kv_bytes,
            "state_bytes": self.state_bytes,
            "saved_us": round(self.saved_seconds * 1e6, 2),
            "why": list(self.why),
        }


def plan_groups(
    spec: DecodeSpec,
    table: IntArray,
    seq_lens: "Sequence[int] | IntArray",
    *,
    profile: DeviceProfile,
    query_counts: "Sequence[int] | IntArray | None" = None,
    mask_tokens: int | None = None,
    queries_per_read: int | None = None,
    most_queries: int | None = None,
    always: bool = False,
) -> CascadePlan:
    """Find the prefixes that requests share, and keep those that pay.

    table: int [B, columns] on the host; seq_lens: [B] tokens, the new ones included. query_counts:
    [B] queries of each request (None: ``spec.num_queries``). mask_tokens: n of an ``attn_mask`` or
    ``attn_bias``. most_queries: queries that one group may have; larger ones are cut. always: share
    whatever the cost model says; what would not be exact is never shared.

    Raises:
        ValueError: a layout without pages, lengths, counts or table that do not fit together, or a
        number out of its range.
    """
    page_size = page_size_of(spec)
    lengths = as_lengths("seq_lens", seq_lens)
    if (query_counts is not None) != spec.packed_queries:
        raise ValueError(
            f"spec.packed_queries is {spec.packed_queries}, but query_counts says otherwise"
        )
    counts = np.full(len(lengths), spec.num_queries)
    if query_counts is not None:
        counts = as_lengths("query_counts", query_counts)
    if counts.max(initial=0) > spec.num_queries:
        raise ValueError(f"query_counts has {counts.max()}, spec.num_queries is {spec.num_queries}")
    if table.ndim != 2 or not len(table) == len(lengths) == len(counts):
        raise ValueError(
            f"the table must be [B, columns] and seq_lens, query_counts [B]; got "
            f"{list(table.shape)}, {len(lengths)} lengths and {len(counts)} counts"
        )
    for name, value in (("queries_per_read", queries_per_read), ("most_queries", most_queries)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more (None: no limit), got {value}")
    check_mask_tokens(mask_tokens)
    capacity = table.shape[1] * page_size
    _check_capacity(lengths, capacity)
    plan = CascadePlan(
        spec=replace(spec, sinks=False),
        profile=profile,
        groups=(),
        shared=np.zeros(len(lengths), np.int64),
        counts=counts,
        seq_lens=lengths,
        capacity=capacity,
        mask_tokens=mask_tokens,
        queries_per_read=queries_per_read,
        saved_seconds=0.0,
        why=tuple(unshareable(spec, mask_tokens)),
    )
    if plan.why:
        return plan
    limit = shareable_tokens(spec, lengths, counts, mask_tokens)
    trie = find_prefixes(table, limit // page_size)
    why = _hidden_by_window(spec, lengths)
    if not trie.nodes:
        return replace(plan, why=(*why, "no two requests begin with the same whole page"))
    choice = choose_prefixes(trie, counts, plan.spec, profile, queries_per_read, always=always)
    if choice.why is not None:
        return replace(plan, why=(*why, choice.why))
    groups = _groups(plan, table, trie, choice, most_queries)
    shared = np.zeros_like(plan.shared)
    for group in groups:
        shared[group.members] = (group.first + len(group.pages)) * page_size
    return replace(plan, groups=groups, shared=shared, saved_seconds=choice.saved_seconds, why=why)


def page_size_of(spec: DecodeSpec) -> int:
    """Tokens of a page.

    Raises:
        ValueError: the layout has none.
    """
    if spec.page_size is None:
        raise ValueError(f"requests share pages, and layout {spec.layout.value} has none: use NHD")
    return spec.page_size


def check_mask_tokens(mask_tokens: int | None) -> None:
    """Raise ValueError unless this is None, or an integer of 0 or more."""
    if mask_tokens is None:
        return
    whole = isinstance(mask_tokens, int | np.integer) and not isinstance(mask_tokens, bool)
    if not (whole and mask_tokens >= 0):
        raise ValueError(
            "mask_tokens must be an integer of 0 or more (None: there is no mask or bias, or of "
            f"unknown width), got {mask_tokens!r}"
        )


def _check_capacity(lengths: IntArray, capacity: int) -> None:
    if (over := np.flatnonzero(lengths > capacity)).size:
        index = int(over[0])
        raise ValueError(
            f"seq_lens[{index}] is {lengths[index]}, the capacity of the block table planned for "
            f"is {capacity} tokens; plan the cascade again with a wider table"
        )


def unshareable(spec: DecodeSpec, mask_tokens: int | None) -> list[str]:
    """What in ``spec`` makes one reading for several requests inexact, or unknown: sentences."""
    found = []
    if spec.alibi:
        found.append(
            "ALiBi: a score depends on how far each request's own queries are from the key"
        )
    if ScaleKind.REQUEST_HEAD in (spec.k_scale, spec.v_scale):
        found.append("scales of each request: shared codes would mean different values")
    if (spec.attn_mask or spec.attn_bias) and mask_tokens is None:
        found.append("a mask or bias of unknown width: say how many positions in mask_tokens")
    return found


def shareable_tokens(
    spec: DecodeSpec, lengths: IntArray, counts: IntArray, mask_tokens: int | None
) -> IntArray:
    """Tokens from position 0 on, in whole pages, that every query of a request sees with a plain
    score; int64 [B].

    The first query sees lengths - counts + 1 (causal); a mask or bias covers the last
    ``mask_tokens``; a request longer than its window has queries that miss its beginning.
    """
    tokens = np.where(counts > 0, lengths - (counts - 1 if spec.causal else 0), 0)
    if spec.attn_mask or spec.attn_bias:
        tokens = np.minimum(tokens, lengths - (mask_tokens or 0))
    if spec.sliding_window is not None:
        tokens = np.where(lengths > spec.sliding_window, 0, tokens)
    page = page_size_of(spec)
    return np.maximum(tokens, 0) // page * page


def _hidden_by_window(spec: DecodeSpec, lengths: IntArray) -> tuple[str, ...]:
    if spec.sliding_window is None or not (hidden := int((lengths > spec.sliding_window).sum())):
        return ()
    return (
        f"{hidden} of {len(lengths)} requests are longer than the window of {spec.sliding_window}: "
        "their first pages are out of sight",
    )


def _own_bytes(plan: CascadePlan, lengths: IntArray) -> int:
    """Bytes that requests of these lengths read each for itself."""
    anchor_end, start = visible_bounds(lengths, plan.counts, plan.spec)
    reads = reads_of(plan.counts, plan.queries_per_read)
    return int(((anchor_end + lengths - start) * reads).sum()) * plan.spec.kv_bytes_per_token


def _groups(
    plan: CascadePlan, table: IntArray, trie: Trie, choice: Choice, most_queries: int | None
) -> tuple[Group, ...]:
    groups = []
    for index, begin in choice.begins.items():
        node = trie.nodes[index]
        members = np.sort(trie.order[node.low : node.high])
        pages = table[members[0], begin : node.end].astype(np.int64)
        for part in _parts(members, plan.counts, most_queries):
            groups.append(Group(begin, pages, part, choice.levels[index]))
    return tuple(sorted(groups, key=lambda group: group.level))


def _parts(members: IntArray, counts: IntArray, most_queries: int | None) -> list[IntArray]:
    """Members in runs of at most ``most_queries`` queries (or one request, if it has more)."""
    if most_queries is None:
        return [members]
    cuts, room = [], most_queries
    for place, count in enumerate(counts[members].tolist()):
        if count > room and place:
            cuts.append(place)
            room = most_queries
        room -= count
    return [part for part in np.split(members, cuts) if len(part)]
