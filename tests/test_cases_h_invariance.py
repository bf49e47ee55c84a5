"""Faults that users met elsewhere: bits that depend on batch mates, runs or devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends_in_reach import INTERPRETED, InReach, backends
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    random_history,
    random_queries,
    same_bits,
)
from splitkv import decode_attention

ROOT = Path(__file__).resolve().parent.parent


def row_of(out: tuple[Tensor, Tensor], row: int) -> tuple[Tensor, Tensor]:
    return out[0][row], out[1][row]


def batch_around(history: History, batch: int, place: int, seed: int) -> dict[str, Any]:
    """The request of ``history`` at row ``place`` among mates of up to 9000 tokens."""
    pages_of_mate = -(-9000 // 16)
    cache = history.paged(16, fill=0.0, spare_pages=pages_of_mate, width=pages_of_mate, seed=seed)
    own = cache["block_table"][0]
    spare = sorted(set(range(len(cache["k"]))) - set(own.tolist()))[:pages_of_mate]
    random = torch.Generator().manual_seed(seed)
    for name in ("k", "v"):
        shape = cache[name][spare].shape
        cache[name][spare] = torch.randn(shape, generator=random).to(cache[name].dtype)
    table = torch.tensor([spare] * batch, dtype=torch.int32)
    lengths = torch.randint(1, 9001, (batch,), generator=random, dtype=torch.int32)
    table[place], lengths[place] = own, history.lengths[0]
    return {**cache, "block_table": table, "seq_lens": lengths}


def assert_row_keeps_its_bits(on: InReach, batch: int, splits: dict[str, Any]) -> None:
    for length in (5, 700, 5000):
        history = random_history([length], 8, 128, dtype=torch.bfloat16)
        q = random_queries(1, 32, 128, dtype=torch.bfloat16)
        alone = on.decode(q, **history.paged(16), **splits)
        for place, seed in ((0, 1), (batch - 1, 2)):
            mates = random_queries(batch, 32, 128, dtype=torch.bfloat16, seed=seed)
            mates[place] = q[0]
            together = on.decode(mates, **batch_around(history, batch, place, seed), **splits)
            assert same_bits(row_of(together, place), row_of(alone, 0))


SPLITS = pytest.mark.parametrize("splits", [{"split_size": 1024}, {"num_splits": 4}], ids=str)


@SPLITS
@pytest.mark.parametrize("batch", [2, 7])
@backends(slow=INTERPRETED)
def test_H01_row_has_the_same_bits_alone_and_in_any_batch(
    on: InReach, batch: int, splits: dict[str, Any]
) -> None:
    assert_row_keeps_its_bits(on, batch, splits)


@pytest.mark.slow
@SPLITS
@pytest.mark.parametrize("batch", [16, 64, 256])
@backends(without=INTERPRETED)
def test_H01_row_has_the_same_bits_alone_and_in_a_large_batch(
    on: InReach, batch: int, splits: dict[str, Any]
) -> None:
    assert_row_keeps_its_bits(on, batch, splits)


@pytest.mark.parametrize("head_dim", [256, 384, 512])
@backends(slow=INTERPRETED)
def test_H03_row_does_not_change_with_batch_size_for_large_heads(
    on: InReach, head_dim: int
) -> None:
    lengths = [100, 200, 300, 400, 500]
    history = random_history(lengths, 1, head_dim, dtype=torch.bfloat16)
    q = random_queries(5, 8, head_dim, dtype=torch.bfloat16)
    wanted, wanted_lse = attend(q[:, None], history)
    for batch in (1, 3, 5):
        part = History(history.k[:batch], history.v[:batch])
        together = on.decode(q[:batch], **part.paged(16), split_size=128)
        assert_near(together[0], torch.cat(wanted[:batch]))
        assert_near_lse(together[1], torch.cat(wanted_lse[:batch]))
        for row in range(batch):
            single = History([history.k[row]], [history.v[row]])
            alone = on.decode(q[row : row + 1], **single.paged(16), split_size=128)
            assert same_bits(row_of(together, row), row_of(alone, 0))


def assert_repeats(
    on: InReach, longest: int, repeats: int, num_splits: int, kv_dtype: torch.dtype
) -> None:
    history = random_history([longest, 3000, 17], 2, 128, dtype=kv_dtype)
    q = random_queries(3, 16, 128, dtype=torch.bfloat16)
    cache = history.paged(16)
    first = on.decode(q, **cache, num_splits=num_splits)
    for _ in range(repeats - 1):
        assert same_bits(on.decode(q, **cache, num_splits=num_splits), first)


KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
NUM_SPLITS = pytest.mark.parametrize("num_splits", [1, 8, 16, 32])


@KV_DTYPES
@NUM_SPLITS
@backends(slow=INTERPRETED)
def test_H04_same_call_gives_the_same_bits_every_time(
    on: InReach, num_splits: int, kv_dtype: torch.dtype
) -> None:
    assert_repeats(on, 16384, 5, num_splits, kv_dtype)


@pytest.mark.slow
@KV_DTYPES
@NUM_SPLITS
@backends(without=INTERPRETED)
def test_H04_same_long_call_gives_the_same_bits_two_hundred_times(
    on: InReach, num_splits: int, kv_dtype: torch.dtype
) -> None:
    assert_repeats(on, 65536, 200, num_splits, kv_dtype)


@pytest.mark.parametrize("name", ["k", "block_table", "sinks", "attn_bias"])
def test_H05_tensor_on_another_device_is_named(name: str) -> None:
    # With one device only: the meta device stands for the other one. Device 1 of two needs two.
    arguments: dict[str, Any] = random_history([100], 4, 64).paged(16)
    arguments["sinks"] = torch.zeros(4)
    arguments["attn_bias"] = torch.zeros(1, 1, 1, 100)
    moved = ("k", "v") if name == "k" else (name,)
    arguments |= {key: arguments[key].to("meta") for key in moved}
    with pytest.raises(ValueError, match=rf"{name} must be .*on cpu.*meta"):
        decode_attention(random_queries(1, 4, 64), **arguments)


@backends(slow=INTERPRETED)
def test_H07_float32_inputs_are_not_computed_in_reduced_precision(on: InReach) -> None:
    # N(0, 1) queries of norm 11 and keys scaled by 3 give scores up to 40.
    history = random_history([1000, 64], 1, 128)
    history = History([3 * rows for rows in history.k], history.v)
    q = random_queries(2, 16, 128)
    wanted, wanted_lse = attend(q[:, None], history, sm_scale=128**-0.5 * 3)
    assert 20 < float(torch.cat(wanted_lse).max()) < 60
    out, lse = on.decode(q, **history.dense(), sm_scale=128**-0.5 * 3)
    largest = max(float(rows.abs().max()) for rows in wanted)
    assert_near(out, torch.cat(wanted), bound=1e-5 * largest)
    assert_near(lse, torch.cat(wanted_lse), bound=1e-5 * float(torch.cat(wanted_lse).abs().max()))


FIRST_CALL = """
import json, sys, torch
from backends_in_reach import IN_REACH, RefusedAsDeclaredError
from histories import random_history, random_queries, attend, same_bits
on = next(on for on in IN_REACH if on.name == sys.argv[1])
history = random_history([300, 5], 2, 128, dtype=torch.float16)
q = random_queries(2, 8, 128, dtype=torch.float16)
cache = history.paged(128)
def call():
    return on.decode(q, **cache, out=torch.full_like(q, float("nan")))
try:
    first = call()
except RefusedAsDeclaredError:
    print(json.dumps({"refused": True}))
else:
    error = float((first[0].double() - torch.cat(attend(q[:, None], history)[0])).abs().max())
    repeats = [same_bits(call(), first) for _ in range(50)]
    print(json.dumps({"refused": False, "error": error, "same": all(repeats)}))
"""


@backends(slow=INTERPRETED)
def test_H09_first_launch_of_a_fresh_process_writes_everything(on: InReach) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, on.name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if not answer["refused"]:
        assert answer["error"] <= 2e-3
        assert answer["same"]
