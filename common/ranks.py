"""One history over several ranks: each rank leaves a state, and all states merge into one."""

from typing import Any

from splitkv.common.state import PartialState


def merge_across_ranks(state: PartialState, group: Any = None, *, algo: str = "gather") -> PartialState:
    """Being written."""
    raise NotImplementedError
