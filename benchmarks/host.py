"""What a call with a bound plan costs the host besides its backend: ``python -m benchmarks.host``.

Timed with a backend that hands back tensors made beforehand. "checking" is what the default adds to
``validate="none"``; "again" what ``validate="full"`` adds. Microseconds per call, best of rounds.
"""

import sys
import timeit
from collections.abc import Callable
from unittest.mock import patch

import torch

import splitkv
from splitkv.backends.cpu import CpuBackend
from splitkv.cli.output import print_table
from splitkv.common.spec import DecodeSpec, Layout

Q_HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 32, 8, 128, 16, 64
CALLS, ROUNDS = 4000, 9


def main() -> int:
    rows = [_measure(batch) for batch in (1, 8, 64)]
    title = f"microseconds per call, block table of {BLOCKS} columns"
    print_table(("requests", "whole call", "checking", "again"), rows, title=title)
    return 0


@torch.no_grad()
def _measure(batch: int) -> tuple[object, ...]:
    q = torch.randn(batch, Q_HEADS, DIM)
    pages = torch.randn(8, PAGE, KV_HEADS, DIM)
    table = (torch.arange(batch * BLOCKS) % len(pages)).view(batch, BLOCKS).int()
    lengths = torch.full((batch,), PAGE * BLOCKS - 3).int()
    cache = splitkv.PagedCache(pages, pages, table, lengths, Layout.NHD)
    spec = DecodeSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        layout=Layout.NHD,
        dtype=q.dtype,
        page_size=PAGE,
    )
    plan = splitkv.select(spec, q.device).plan(spec, lengths.tolist())
    result = q[:, None].clone(), q.new_empty(batch, 1, Q_HEADS)
    with patch.object(CpuBackend, "decode", lambda *_, **__: result):
        none, usual, full = (
            _micro(lambda how=how: splitkv.decode(q, cache, spec, plan=plan, validate=how))
            for how in ("none", None, "full")
        )
    return batch, f"{usual:.1f}", f"{usual - none:.1f}", f"{full - none:.1f}"


def _micro(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
