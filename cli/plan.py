"""``splitkv plan``: how histories are cut into splits on a device. Needs no such device."""

import argparse
import re
from itertools import pairwise

from splitkv.backends.profiles import SUFFIXES, read_profile
from splitkv.cli.output import print_json, print_table
from splitkv.cli.spec_arguments import add_spec_arguments, spec_from, spec_json
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import PROFILES, DeviceProfile
from splitkv.common.spec import MOST_TOKENS

HELP = "How histories are cut into splits on a device, and what the planner expects of it."

MOST_REQUESTS = 1_000_000
"""More would only fill the memory of whoever mistyped a count."""
SHOWN_REQUESTS = 32
SHOWN_SPLITS = 4


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", metavar="L,LxN", help="tokens per request; 1024,8192x8 is one and eight")
    add("--profile", metavar="NAME", help="the device as the planner knows it, or a file of tune")
    add("--list-profiles", action="store_true", help="the known profiles, with their sources")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--num-splits", type=int, metavar="N", help="at most N splits per request")
    how.add_argument(
        "--split-size",
        type=int,
        metavar="T",
        help="T tokens per split, rounded up to granule_tokens",
    )
    add_spec_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.list_profiles:
        _list_profiles(args.json)
        return 0
    if args.lengths is None:
        raise ValueError("--lengths is needed: tokens per request, as in 1024,8192x8")
    lengths = parse_lengths(args.lengths)
    if args.profile is None:
        raise ValueError(f"--profile is needed: a file of tune, or one of {list(PROFILES)}")
    plan = plan_splits(
        spec_from(args),
        lengths,
        profile=_profile(args.profile),
        num_splits=args.num_splits,
        split_size=args.split_size,
    )
    if args.json:
        print_json(
            {
                "spec": spec_json(plan.spec),
                "summary": plan.summary(),
                "requests": [
                    {"length": int(length), "splits": cuts}
                    for length, cuts in zip(plan.seq_lens, request_cuts(plan), strict=True)
                ],
            }
        )
    else:
        _show(plan)
    return 0


def parse_lengths(text: str) -> list[int]:
    """``"1024,8192x2"`` is [1024, 8192, 8192].

    Raises:
        ValueError: naming the part that is no length, is too long, or makes too many requests.
    """
    lengths: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"--lengths takes L or LxN between commas, got {part!r} in {text!r}")
        length, count = int(match[1]), int(match[2] or 1)
        if length > MOST_TOKENS:
            raise ValueError(f"--lengths: {length} tokens in {part!r}, at most {MOST_TOKENS}")
        if len(lengths) + count > MOST_REQUESTS:
            raise ValueError(f"--lengths: {part!r} makes more than {MOST_REQUESTS} requests")
        lengths += [length] * count
    return lengths


def request_cuts(plan: SplitPlan) -> list[list[tuple[int, int]]]:
    """[start, end) of every split, request by request."""
    cuts = list(zip(plan.start.tolist(), plan.end.tolist(), strict=True))
    bounds = plan.indptr.tolist()
    return [cuts[low:high] for low, high in pairwise(bounds)]


def _profile(name: str) -> DeviceProfile:
    """One of those known by name, or that of a file, which ends as such files do."""
    if name in PROFILES:
        return PROFILES[name]
    if name.endswith(SUFFIXES):
        return read_profile(name)
    raise ValueError(
        f"unknown profile {name!r}, known: {list(PROFILES)}, or a file ({', '.join(SUFFIXES)})"
    )


def _list_profiles(as_json: bool) -> None:
    facts = ("name", "workers", "read_bandwidth", "tile_tokens", "source")
    rows = [[getattr(profile, fact) for fact in facts] for profile in PROFILES.values()]
    if as_json:
        print_json([dict(zip(facts, row, strict=True)) for row in rows])
        return
    shown = [[*row[:2], f"{row[2] / 1e12:g} TB/s", *row[3:]] for row in rows]
    print_table(("profile", "workers", "reads", "tile", "source of these numbers"), shown)


def _show(plan: SplitPlan) -> None:
    print_table(("figure", "value"), plan.summary().items())
    cuts = request_cuts(plan)
    rows = [
        (index, length, len(parts), _ranges(parts))
        for index, (length, parts) in enumerate(zip(plan.seq_lens.tolist(), cuts, strict=True))
    ]
    print_table(("request", "tokens", "splits", "positions"), rows[:SHOWN_REQUESTS])
    if len(rows) > SHOWN_REQUESTS:
        print(f"and {len(rows) - SHOWN_REQUESTS} more requests; --json has all of them")


def _ranges(parts: list[tuple[int, int]]) -> str:
    text = [f"{start}-{end}" for start, end in parts]
    if len(text) > SHOWN_SPLITS:
        text[SHOWN_SPLITS - 1 : -1] = ["..."]
    return " ".join(text)
