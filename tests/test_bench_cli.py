"""``splitkv bench``: rows of what was timed, on the CPU."""

import json
from pathlib import Path

import pytest

from benchmarks.grid import __main__ as grid
from splitkv.cli.main import main

SMALL = ("--heads", "4:2", "--head-dim", "16", "--turns", "1", "--device", "cpu")


def test_bench_times_layouts_beside_torch_and_reading(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--lengths", "64x2", "--page-sizes", "16", "--num-splits", "2")
    assert main(["bench", "--json", *flags, *SMALL]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {(row["layout"], row["way"]): row for row in answer["rows"]}
    assert list(rows) == [
        ("contiguous", "splitkv"),
        ("contiguous", "reading"),
        ("contiguous", "torch"),
        ("pages of 16", "splitkv"),
    ]
    reading, paged = rows["contiguous", "reading"], rows["pages of 16", "splitkv"]
    assert reading["share"] == pytest.approx(1)
    assert paged["share"] == pytest.approx(reading["microseconds"] / paged["microseconds"])
    assert paged["gb_per_second"] == pytest.approx(
        2 * 128 * 2 * 16 * 2 / paged["microseconds"] / 1e3
    )
    assert paged["predicted_microseconds"] > 0
    assert reading["predicted_microseconds"] is None
    assert answer["machine"]["versions"]["torch"]


def test_bench_leaves_torch_out_where_lengths_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--lengths", "64,9", "--page-sizes", "", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "reading" in out
    assert "no row for torch" in out
    assert out.count("torch") == 1
    assert "host clock" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--heads", "32"), "--heads must be H:K"),
        (("--page-sizes", "0"), "--page-sizes takes numbers of tokens"),
        (("--turns", "0"), "--turns must be 1 or more, got 0"),
        (("--lengths", "0x4"), "nothing to read"),
        (("--lengths", "99999999x9"), "GB: fewer or shorter lengths"),
        (("--device", "gpu"), "'gpu'"),
    ],
)
def test_a_malformed_bench_exits_2(
    flags: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_grid_runs_on_two_tiny_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--points", "tiny", "--peers", "torch eager", "--turns", "1", "--device", "cpu"]
    assert grid.main([*command, "--cold-bytes", "65536", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 points to measure" in out
    kinds = {path.suffix for path in tmp_path.iterdir()}
    assert {".json", ".md", ".csv"} <= kinds
    assert "4:2x64/2x96" in next(tmp_path.glob("*.md")).read_text()
