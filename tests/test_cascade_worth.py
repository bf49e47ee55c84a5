"""Which shared prefixes the planner keeps, for an H200's numbers: bytes, launches, levels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import splitkv
from splitkv.backends.cascade.plan import CascadePlan, plan_groups
from splitkv.common.spec import DecodeSpec, Layout

PROFILE = splitkv.PROFILES["NVIDIA H200"]
SPEC = DecodeSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, layout=Layout.NHD, page_size=16)
"""4096 bytes of K and V per token; a state row is 520 bytes."""


def serving(prefix: int, requests: int, suffix: int, **options: Any) -> CascadePlan:
    own = np.arange(requests * suffix // 16).reshape(requests, -1) + prefix // 16
    table = np.concatenate([np.tile(np.arange(prefix // 16), (requests, 1)), own], 1)
    lengths = [prefix + suffix] * requests
    return plan_groups(SPEC, table, lengths, profile=PROFILE, **options)


def test_a_long_prefix_of_many_requests_pays() -> None:
    plan = serving(32768, 64, 512)
    assert len(plan.groups) == 1
    assert plan.flat_kv_bytes == 64 * 33280 * 4096
    assert plan.kv_bytes == (32768 + 64 * 512) * 4096
    again = serving(32768, 64, 512, queries_per_read=8)
    assert again.kv_bytes == (8 * 32768 + 64 * 512) * 4096
    assert 0 < again.saved_seconds < plan.saved_seconds


def test_a_short_prefix_does_not_pay() -> None:
    plan = serving(128, 4, 512)
    assert plan.groups == ()
    assert "1 of 1 shared prefixes would save" in plan.why[0]
    assert "3 more launches cost 7.50 us" in plan.why[0]
    assert serving(128, 4, 512, always=True).groups
    one_each = serving(32768, 64, 512, queries_per_read=1)
    assert one_each.why == ("none of 1 shared prefixes saves as much reading as its merge costs",)


def test_a_level_that_does_not_pay_is_read_with_its_members() -> None:
    """Two halves of a batch share 32 tokens more each: not worth a level of states for all."""
    request, column = np.indices((64, 2080))
    shared = np.where(column < 2048, column, 5000 + column + 99 * (request % 32 // 16))
    table = np.where(column < 2050, shared, 9000 + request * 40 + column)
    lengths = [2080 * 16] * 64
    quick = replace(PROFILE, merge_seconds=1e-7)
    cheap = plan_groups(SPEC, table, lengths, profile=quick)
    assert [len(group.pages) for group in cheap.groups] == [2048, 2, 2]
    slow = replace(PROFILE, merge_seconds=1e-6)
    dear = plan_groups(SPEC, table, lengths, profile=slow)
    assert [len(group.pages) for group in dear.groups] == [2048]
    assert dear.saved_seconds < cheap.saved_seconds


def test_a_conversation_that_forks_everywhere_is_shared_in_few_levels() -> None:
    """Request i goes on with i pages of one history: a chain of as many nested prefixes."""
    request, column = np.indices((400, 400))
    table = np.where(column <= request, column, 1000 + request * 400 + column)
    lengths = [400 * 16] * 400
    plan = plan_groups(SPEC, table, lengths, profile=PROFILE)
    assert 1 < plan.levels <= 8
    common = sum(range(400)) * 16 * 4096
    assert plan.flat_kv_bytes - plan.kv_bytes > 0.8 * common
    assert (plan.shared <= (np.arange(400) + 1) * 16).all()


def test_groups_are_cut_to_what_a_backend_takes() -> None:
    plan = serving(32768, 64, 512, most_queries=24)
    assert [len(group.members) for group in plan.groups] == [24, 24, 16]
    assert np.concatenate([group.members for group in plan.groups]).tolist() == list(range(64))


@pytest.mark.parametrize("per_read", [None, 8])
def test_what_is_said_to_be_saved_adds_up(per_read: int | None) -> None:
    """Bytes not read, less states written once, and per level gathered, read and merged by all."""
    request, column = np.indices((64, 500))
    table = np.where(column < 300, column, 1000 + (request // 8) * 500 + column)
    table = np.where(column < 400, table, 9000 + request * 500 + column)
    plan = plan_groups(SPEC, table, [8000] * 64, profile=PROFILE, queries_per_read=per_read)
    assert (plan.levels, len(plan.groups)) == (2, 9)
    row = 32 * 520 / PROFILE.read_bandwidth
    level = 64 * (3 * row + 32 * PROFILE.merge_seconds / PROFILE.workers)
    reading = (plan.flat_kv_bytes - plan.kv_bytes) / PROFILE.read_bandwidth
    spent = 2 * 64 * row + 2 * level + 3 * PROFILE.launch_seconds
    assert plan.saved_seconds == pytest.approx(reading - spent)
