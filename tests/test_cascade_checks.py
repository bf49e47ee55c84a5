"""What a cascade refuses, and that plans, their copies and their calls do not mix."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import splitkv
from histories import offsets32
from shared_pages import cache_of_names, named
from splitkv.backends.cascade import checks
from splitkv.backends.cascade.decode import cascade_decode, cascade_partial, plan_cascade
from splitkv.backends.cascade.plan import CascadePlan, plan_groups
from splitkv.backends.cpu import CpuBackend
from splitkv.common.cache import PagedCache
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Layout

LENGTHS = [9, 8, 14]
SPEC = DecodeSpec(
    num_q_heads=4, num_kv_heads=2, head_dim=16, layout=Layout.NHD, page_size=4, dtype=torch.float32
)
Q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(3))


def pool(lengths: list[int] = LENGTHS) -> PagedCache:
    """Three requests with two shared pages each, and room for 16 tokens."""
    whole = cache_of_names(named(4, [16, 16, 16], "ab", "ab", "ab"), [16, 16, 16], 4)
    return replace(whole, seq_lens=torch.tensor(lengths))


def planned(cache: PagedCache, **options: Any) -> CascadePlan:
    plan = plan_cascade(cache, SPEC, always=True, **options)
    assert plan.groups
    return plan


def is_right(cache: PagedCache, plan: CascadePlan) -> bool:
    out, lse = cascade_decode(Q, cache, SPEC, plan=plan)
    flat, flat_lse = splitkv.decode(Q, cache, SPEC)
    return torch.allclose(out, flat, atol=1e-5) and torch.allclose(lse, flat_lse, atol=1e-5)


# --- lengths ------------------------------------------------------------------------------------


def test_a_refresh_in_the_middle_of_a_call_leaves_nothing_stale() -> None:
    """Another thread goes on to longer histories while this one plans the suffixes."""
    plan, honest = planned(pool()), CpuBackend.plan

    def interrupted(backend: CpuBackend, spec: DecodeSpec, lengths: Any, **more: Any) -> SplitPlan:
        made = honest(backend, spec, lengths, **more)
        if not spec.packed_queries and plan.seq_lens.tolist() == LENGTHS:
            plan.refresh([16, 16, 16])
        return made

    with patch.object(CpuBackend, "plan", interrupted):
        assert is_right(pool(), plan)  # by the lengths that it was checked with
    assert plan.seq_lens.tolist() == [16, 16, 16]
    assert is_right(pool([16, 16, 16]), plan)


def test_a_check_by_lengths_of_before_vouches_for_nothing() -> None:
    plan, honest = planned(pool()), checks.check_call

    def interrupted(*args: Any) -> None:
        honest(*args)
        plan.refresh([8, 8, 8])

    with patch.object(checks, "check_call", interrupted):
        assert is_right(pool(), plan)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 9, the plan was made for 8"):
        cascade_decode(Q, pool(), SPEC, plan=plan)


def test_lengths_change_by_refresh_alone() -> None:
    plan = planned(pool())
    with pytest.raises(ValueError, match="read-only"):
        plan.seq_lens[:] = 16
    lengths = np.array([16, 16, 16])
    plan.refresh(lengths)
    lengths[:] = 9
    with pytest.raises(ValueError, match=r"seq_lens\[2\] is 17, the capacity .* is 16 tokens"):
        plan.refresh([16, 16, 17])
    assert plan.seq_lens.tolist() == [16, 16, 16]


COPIES: dict[str, Callable[[CascadePlan], CascadePlan]] = {
    "replace": replace,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_owns_its_lengths_and_what_is_bound(how: str) -> None:
    plan = planned(pool())
    assert is_right(pool(), plan)
    other = COPIES[how](plan)
    assert (other.bound, other.spec, len(other.groups)) == ({}, plan.spec, len(plan.groups))
    other.refresh([16, 16, 16])
    assert plan.seq_lens.tolist() == LENGTHS
    assert is_right(pool([16, 16, 16]), other)
    assert is_right(pool(), plan)


def test_a_plan_without_its_groups_is_planned_anew() -> None:
    plan = planned(pool())
    assert is_right(pool(), plan)
    assert is_right(pool(), replace(plan, groups=(), shared=np.zeros_like(plan.shared)))


# --- calls --------------------------------------------------------------------------------------


def test_shapes_compare_the_shared_pages_that_the_host_has() -> None:
    cache = pool()
    plan = planned(cache)
    table = cache.block_table.clone()
    table[1, 1] = table[1, 2]
    other = replace(cache, block_table=table)
    cascade_decode(Q, cache, SPEC, plan=plan, validate="shapes")
    with pytest.raises(ValueError, match="group 0 of the plan shares columns 0 to 2"):
        cascade_decode(Q, other, SPEC, plan=plan, validate="shapes")
    cascade_decode(Q, other, SPEC, plan=plan, validate="none")  # looks at nothing
    with patch.object(CascadePlan, "check_table", side_effect=AssertionError("once is enough")):
        cascade_decode(Q, cache, SPEC, plan=plan, validate="shapes")


def test_a_call_checked_for_shapes_vouches_for_no_full_check() -> None:
    spec = replace(SPEC, alibi=True)
    plan = plan_cascade(pool(), spec)
    call: dict[str, Any] = {"plan": plan, "alibi_slopes": torch.full((4,), torch.inf)}
    for validate in ("full", None):
        with pytest.raises(ValueError, match="alibi_slopes must be finite"):
            cascade_decode(Q, pool(), spec, validate=validate, **call)
        cascade_decode(Q, pool(), spec, validate="shapes", **call)


def test_a_partial_state_holds_no_sink() -> None:
    with pytest.raises(ValueError, match="a partial state never holds a sink"):
        cascade_partial(Q, pool(), replace(SPEC, sinks=True), plan=planned(pool()))


# --- planning -----------------------------------------------------------------------------------

RAGGED = replace(SPEC, packed_queries=True, num_queries=3)
MASKED = replace(SPEC, attn_mask=True)


def with_page(row: int, column: int, page: int) -> PagedCache:
    cache = pool()
    cache.block_table[row, column] = page
    return cache


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv heads": ({"spec": replace(SPEC, num_kv_heads=1)}, "k has 2 kv heads, spec.num_kv_heads"),
    "head dim": ({"spec": replace(SPEC, head_dim=8)}, "k has head dim 16, spec says"),
    "dtype": ({"spec": replace(SPEC, kv_dtype=torch.float16)}, "k is torch.float32, spec.kv_dtype"),
    "page size": ({"spec": replace(SPEC, page_size=8)}, "page size"),
    "a page below the pool": (
        {"cache": with_page(2, 3, -7)},
        r"block_table\[2, 3\] is -7, the pool has pages 0 to 9",
    ),
    "a page beyond the pool": (
        {"cache": with_page(0, 1, 10)},
        r"block_table\[0, 1\] is 10, the pool has pages 0 to 9",
    ),
    "no spec": ({"spec": None}, "spec must be a DecodeSpec, got NoneType"),
    "no cache": ({"cache": None}, "cache must be a PagedCache, got NoneType"),
    "mask_tokens True": ({"mask_tokens": True}, "mask_tokens must be an integer .* got True"),
    "mask_tokens 2.0": ({"mask_tokens": 2.0}, "mask_tokens must be an integer .* got 2.0"),
    "mask_tokens text": (
        {"spec": MASKED, "mask_tokens": "2"},
        "mask_tokens must be an integer .* got '2'",
    ),
    "mask_tokens -1": ({"mask_tokens": -1}, "mask_tokens must be an integer of 0 .* got -1"),
    "offsets of no ragged queries": (
        {"cu_seqlens_q": offsets32([1, 1, 1])},
        "packed_queries is False, but cu_seqlens_q",
    ),
    "no offsets": ({"spec": RAGGED}, "packed_queries is True, but cu_seqlens_q"),
    "offsets from 1": (
        {"spec": RAGGED, "cu_seqlens_q": offsets32([1, 1, 1]) + 1},
        r"cu_seqlens_q\[0\] must be 0, got 1",
    ),
    "falling offsets": (
        {"spec": RAGGED, "cu_seqlens_q": torch.tensor([0, 2, 1, 3])},
        r"cu_seqlens_q must not fall: cu_seqlens_q\[2\] is 1 after 2",
    ),
    "too few offsets": (
        {"spec": RAGGED, "cu_seqlens_q": torch.tensor([0, 2])},
        r"cu_seqlens_q must have B \+ 1 = 4 entries, got 2",
    ),
    "offsets of floats": (
        {"spec": RAGGED, "cu_seqlens_q": torch.tensor([0.0, 1, 2, 3])},
        "cu_seqlens_q must be int32 or int64",
    ),
    "offsets of a list": (
        {"spec": RAGGED, "cu_seqlens_q": [0, 1, 2, 3]},
        "cu_seqlens_q must be a torch tensor, got list",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_planning_refuses(wrong: str) -> None:
    fields, sentence = REFUSED[wrong]
    given = {"cache": pool(), "spec": SPEC, **fields}
    with pytest.raises(ValueError, match=sentence):
        plan_cascade(given.pop("cache"), given.pop("spec"), **given)


def test_planning_by_a_table_alone_refuses_mask_tokens_too() -> None:
    table = pool().block_table.numpy()
    with pytest.raises(ValueError, match=r"mask_tokens must be an integer of 0 .* got -1"):
        plan_groups(SPEC, table, LENGTHS, profile=splitkv.PROFILES["cpu"], mask_tokens=-1)


def test_planning_looks_at_no_page_that_is_not_used() -> None:
    assert planned(with_page(1, 2, -7)).groups  # request 1 ends with column 1
    late = with_page(2, 3, -7)  # of request 2 the last two tokens, which a mask may hide
    assert plan_cascade(late, MASKED, mask_tokens=2, always=True).groups
    assert plan_cascade(late, MASKED).why
    with pytest.raises(ValueError, match=r"block_table\[2, 3\] is -7"):
        plan_cascade(late, MASKED, mask_tokens=1)
