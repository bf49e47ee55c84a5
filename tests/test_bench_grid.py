"""The grid's bookkeeping: ids, resuming, merging, ratios, claims, and peers that answer wrongly."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import sweeps
from benchmarks.grid import __main__ as grid
from benchmarks.grid import claims, measure, report
from benchmarks.grid.check import relative_error
from benchmarks.grid.earlier import PAGED
from benchmarks.grid.measure import EAGER, GRAPH, Settings
from benchmarks.grid.peers import flashinfer_decode
from benchmarks.grid.peers.eager import TorchEager
from benchmarks.grid.peers.known import PEERS, peers
from benchmarks.grid.points import ANCHORS, GRID, SUBSETS, TINY, chosen, point
from benchmarks.grid.reading import kernel_reads
from benchmarks.grid.record import AGAIN, OURS, READING, SPLITS, Record, Row
from benchmarks.grid.results import Results, load
from benchmarks.grid.splits import splits_only
from cuda_calls import BACKEND, DEVICE
from splitkv.backends.cpu import CpuBackend
from splitkv.cli.bench_shapes import Shape, Step, steps
from splitkv.cli.bench_timing import Candidate, Timing
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.state import merge_states_torch

CPU = torch.device("cpu")


def record(point_id: str, digest: str = "d", **changes: Any) -> Record:
    """A point measured in graph mode with one peer, all numbers round."""
    rows = [
        Row(GRAPH, "contiguous", READING, 10.0, 10.0, 10.0, 1.0, 1.0),
        *(
            Row(GRAPH, layout, way, us, us, us, 1.0, 10.0 / us)
            for layout, base in (("contiguous", 12.0), ("p16", 12.6), ("p128", 12.1))
            for way, us in ((OURS, base), (AGAIN, base), (SPLITS, 9.0), ("other", 14.0))
        ),
    ]
    fields: dict[str, Any] = {
        "digest": digest,
        "date": "2026-01-01",
        "driver": None,
        "versions": {"torch": "2"},
        "kv_bytes": 64 << 20,
        "sets": 3,
        "turns": 5,
        "modes": (GRAPH,),
        "asked": ("other",),
        "plans": {
            name: {"balance": 0.9, "predicted_us": 10.0} for name in ("contiguous", "p16", "p128")
        },
        "aa": {GRAPH: 0.01},
        "rows": tuple(rows),
    }
    return Record(point_id, **fields | changes)


# Points


def test_ids_are_unique_and_lead_back_to_their_points() -> None:
    every = [*ANCHORS, *GRID, *TINY]
    by_id = {one.id: one for one in every}
    assert all(by_id[one.id] == one for one in every)
    assert [one.id for one in chosen("all")] == list(
        dict.fromkeys(one.id for one in (*ANCHORS, *GRID))
    )
    assert all(one.shape.kv_bytes <= 40e9 for one in every)


def test_ids_are_those_that_figures_are_recorded_under() -> None:
    assert {one.id for one in ANCHORS} == set(PAGED)
    assert len(ANCHORS) == 40
    assert chosen("32:8x128/64x8192")[0].shape == Shape(32, 8, 128, (8192,) * 64)
    assert sum(chosen("8:1x128/rag-b")[0].shape.lengths) == 254858
    heads = {one.heads for one in GRID}
    assert heads >= {"64:8x128", "16:2x128", "8:4x256", "16:8x256", "9:3x64"}
    assert point(32, 32, 128, "256x131072") not in GRID  # 550 GB


def test_patterns_choose_points_once_and_in_order() -> None:
    found = [one.id for one in chosen("8:1x128/rag-c,8:1x128/rag-?,tiny")]
    assert found == [
        *(f"8:1x128/rag-{letter}" for letter in "cab"),
        *(one.id for one in TINY),
    ]
    with pytest.raises(ValueError, match="'9:9/\\*' is no id"):
        chosen("9:9/*")
    assert len({one.id for one in SUBSETS["choice"]}) == 40
    assert len({one.heads for one in SUBSETS["choice"]}) == 9


# Peers


class Wrong(TorchEager):
    """Right but for a tenth of the last head."""

    name = "wrong"

    def prepare(self, step: Step) -> Candidate:
        first = super().prepare(step).calls[0]

        def call() -> Tensor:
            out = first()
            assert isinstance(out, Tensor)
            out[:, -1] *= 1.1
            return out

        return Candidate([call])


class NoTensor(TorchEager):
    name = "no tensor"

    def prepare(self, step: Step) -> Candidate:
        return Candidate([lambda: None])


class Raises(TorchEager):
    name = "raises"

    def prepare(self, step: Step) -> Candidate:
        raise KeyError("no kernel\nfor you")


class NotHere(TorchEager):
    name = "not here"

    def missing(self) -> str | None:
        return "it is elsewhere"


def test_a_point_is_measured_and_only_right_answers_are_timed() -> None:
    asked = (TorchEager(), Wrong(), NoTensor(), Raises(), NotHere())
    settings = Settings(CPU, asked, turns=2, cold_bytes=1 << 16)
    found = measure.measure(TINY[0], settings, "digest")
    assert {row.way for row in found.peers(EAGER, "contiguous")} == {"torch eager"}
    why = {(entry.layout, entry.way): entry.why for entry in found.absent}
    assert why["contiguous", "wrong"].startswith("wrong: differs from splitkv by ")
    assert why["contiguous", "no tensor"].startswith("wrong: ")
    assert why["contiguous", "raises"] == "failed: KeyError: 'no kernel\\nfor you'"
    assert why[measure.EVERY, "not here"] == "it is elsewhere"
    assert why["p16", "torch eager"] == "takes no pages"
    assert set(found.plans) == {"contiguous", "p16", "p128"}
    mine = found.row(EAGER, "p16", OURS)
    reading = found.row(EAGER, "contiguous", READING)
    assert mine is not None
    assert reading is not None
    assert mine.tb_s == pytest.approx(found.kv_bytes / mine.us / 1e6, rel=1e-3)
    assert mine.share == pytest.approx(reading.us / mine.us, rel=1e-3)
    assert mine.error is not None
    assert 0 < mine.error < 1e-2


def test_ours_is_not_timed_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "reference_error", lambda step, out: 0.5)
    found = measure.measure(TINY[1], Settings(CPU, turns=1, cold_bytes=1), "digest")
    assert {row.way for row in found.rows} == {READING}
    assert [entry.why for entry in found.absent] == ["wrong: error 5.0e-01 against float32"] * 3


def test_nan_and_another_shape_are_wrong_answers() -> None:
    good = torch.ones(2, 3)
    assert relative_error(good, good) == 0
    assert relative_error(good * float("nan"), good) == float("inf")
    assert relative_error(torch.ones(3, 2), good) == float("inf")


def test_peers_are_chosen_by_name_and_from_other_modules() -> None:
    assert peers("*", []) == list(PEERS)
    assert [peer.name for peer in peers("flashinfer*,torch flash", [])] == [
        "flashinfer tc",
        "flashinfer cc",
        "flashinfer batch",
        "torch flash",
    ]
    assert peers("", ["benchmarks.grid.peers.eager:TorchEager"])[0].name == "torch eager"
    with pytest.raises(ValueError, match="no peer is named 'flashinfre'"):
        peers("flashinfre", [])
    with pytest.raises(ValueError, match="module:Class"):
        peers("", ["nothing"])


def test_flashinfer_is_told_the_pages_of_the_table() -> None:
    shape = Shape(4, 2, 16, (33, 0, 32))
    step = steps(shape, (16,), CPU, cold_bytes=1)[16]
    pages = flashinfer_decode.Pages.of(step)
    table = step.caches[0].block_table.tolist()  # type: ignore[union-attr]
    assert pages.indptr.tolist() == [0, 3, 3, 5]
    assert pages.indices.tolist() == [*table[0][:3], *table[2][:2]]
    assert pages.last.tolist() == [1, 0, 16]
    assert pages.indptr.dtype == pages.indices.dtype == pages.last.dtype == torch.int32
    odd = flashinfer_decode.CUDA_CORES.refusal(
        steps(Shape(14, 2, 16, (8,)), (16,), CPU, cold_bytes=1)[16]
    )
    assert odd == "no CUDA-core kernel for 7 query heads per kv head"


def test_the_reading_kernel_reads_every_element() -> None:
    pytest.importorskip("triton")
    step = steps(Shape(1, 1, 8, (450,)), (None,), CPU, cold_bytes=1)[None]
    for way in ((1024, 2, 4), (2048, 1, 4)):
        for part, call in zip(step.necessary(), kernel_reads(step, way).calls, strict=True):
            sums = call()
            assert isinstance(sums, Tensor)
            assert len(sums) == -(-7200 // (way[0] * way[1]))
            assert float(sums.sum()) == pytest.approx(float(part.float().sum()), rel=1e-4)


def test_the_split_kernel_is_timed_without_the_merge() -> None:
    pytest.importorskip("triton")
    backend = BACKEND
    step = steps(Shape(4, 2, 16, (300, 40)), (16,), DEVICE, cold_bytes=1)[16]
    plan = backend.plan(step.spec, step.shape.lengths, num_splits=2)
    candidate = splits_only(step, backend, plan)
    assert candidate is not None
    out = candidate.first()
    assert isinstance(out, Tensor)
    out.fill_(float("nan"))
    candidate.first()
    assert out[0].isnan().all()  # left to the merge
    assert relative_error(out[1, 0], ours_of(step, plan)[1]) < 1e-2  # of one split: finished
    assert splits_only(step, CpuBackend(), plan) is None


def ours_of(step: Step, plan: SplitPlan) -> Tensor:
    call = DecodeCall(step.q[:, None], step.caches[0], step.spec)
    return BACKEND.decode(call, plan)[0][:, 0]


def test_the_merge_kernel_reads_states_of_16_bits() -> None:
    pytest.importorskip("triton")
    from splitkv.kernels_cuda.merge import merge_stacked

    where = sweeps.Where(DEVICE, turns=1, quick=True)
    states = sweeps.States16.random(where, 3, 2, 16)
    merged = merge_stacked(states)  # type: ignore[arg-type]
    wanted = merge_states_torch(states.widened())
    assert relative_error(merged.out, wanted.out) < 1e-6


# Results


def test_a_point_is_skipped_only_if_this_code_measured_all_that_is_asked() -> None:
    results = Results("X")
    results.add(record("a"))
    assert results.has("a", "d", ["other"], [GRAPH])
    assert not results.has("b", "d", ["other"], [GRAPH])
    assert not results.has("a", "newer", ["other"], [GRAPH])
    assert not results.has("a", "d", ["other", "one more"], [GRAPH])
    assert not results.has("a", "d", ["other"], [GRAPH, EAGER])


def test_merging_keeps_other_points_and_replaces_the_same(tmp_path: Path) -> None:
    first, second = Results("NVIDIA X"), Results("NVIDIA X")
    first.add(record("a", "old"))
    first.add(record("b"))
    second.add(record("a", "new"))
    path = second.save(tmp_path)
    assert path.name == "grid_nvidia-x.json"
    first.merge([path])
    assert {name: entry.digest for name, entry in first.records.items()} == {"a": "new", "b": "d"}
    assert load(first.save(tmp_path)).records == first.records
    with pytest.raises(ValueError, match="figures of NVIDIA X, not of NVIDIA Y"):
        Results("NVIDIA Y").merge([path])
    path.write_text('{"points": 3}')
    with pytest.raises(ValueError, match="holds no grid results"):
        load(path)


def test_a_run_resumes_after_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def fake(one: Any, settings: Settings, digest: str) -> Record:
        measured.append(one.id)
        return record(one.id, digest, modes=settings.modes, asked=("torch eager",))

    monkeypatch.setattr(grid, "measure", fake)
    monkeypatch.setattr(grid, "_render", lambda results, folder: [])
    command = ["--points", "tiny", "--peers", "torch eager", "--out", str(tmp_path)]
    command += ["--device", "cpu"]
    assert grid.main([*command, "--seconds", "-1"]) == 0
    assert measured == []
    assert "out of time: 2 points left, from 4:2x64/2x96 on" in capsys.readouterr().out
    grid.main(["--points", "4:2x64/3x40", *command[2:]])
    grid.main(command)
    assert measured == ["4:2x64/3x40", "4:2x64/2x96"]
    grid.main(command)
    assert len(measured) == 2
    grid.main([*command, "--again"])
    assert len(measured) == 4
    (written,) = tmp_path.glob("grid_*.json")
    assert [entry["id"] for entry in json.loads(written.read_text())["points"]] == [
        "4:2x64/2x96",
        "4:2x64/3x40",
    ]


def test_no_point_is_started_that_would_end_too_late() -> None:
    now = [0.0]
    points = [replace(TINY[0], id=name) for name in "abcd"]

    def work(one: Any) -> None:
        now[0] += {"a": 10.0, "b": 30.0, "c": 5.0, "d": 1.0}[one.id]

    left = grid.within(points, 74.0, work, lambda: now[0])
    assert [one.id for one in left] == ["d"]  # 45 s spent, the slowest took 30
    now[0] = 0.0
    assert grid.within(points, 75.0, work, lambda: now[0]) == []


# Figures


def test_shares_and_ratios_on_known_numbers() -> None:
    found = record("32:8x128/1x8192")
    assert found.merge_share(GRAPH, "contiguous") == pytest.approx(0.25)
    assert found.merge_share(EAGER, "contiguous") is None
    entry = measure.Entry("p16", OURS, Candidate([]))
    row = measure._row(GRAPH, entry, Timing((2e-5, 4e-5, 3e-5)), 60_000_000, 1.5e-5)
    assert (row.us, row.tb_s, row.share) == (30.0, 2.0, 0.5)
    again = [Row(GRAPH, "p16", way, us, us, us, 1, 1) for way, us in ((OURS, 11.0), (AGAIN, 10.0))]
    assert measure._again(again) == pytest.approx(0.1)


def test_claims_on_known_numbers() -> None:
    one = "32:8x128/1x8192"
    found = {
        (verdict.claim, verdict.layout): verdict
        for verdict in claims.verdicts({one: record(one), "unknown": record("unknown")})
    }
    paged = found["over the fastest paged peer of this run", "p16"]
    assert (paged.value, paged.held) == (pytest.approx(12.6 / 14), True)
    before = found["over the fastest paged peer of 2026-11-30", "p128"]
    assert before.value == pytest.approx(12.1 / 18.12, rel=1e-3)
    assert found["over contiguous", "p16"].held is False  # 5 % over, 4 % allowed
    assert found["over contiguous", "p128"].held is True
    share = found["reading's rate over ours", "contiguous"]
    assert (share.value, share.limit, share.held) == (pytest.approx(1.2), 1 / 0.75, True)
    assert ("prediction off by", "contiguous") not in found  # 34 MB
    assert ("over cuDNN", "contiguous") not in found  # it was not timed
    large = "8:1x128/64x2048"  # 67 MB
    off = [v for v in claims.verdicts({large: record(large)}) if v.claim == "prediction off by"]
    assert off[0].value == pytest.approx(1 / 6)
    slow = record(one)
    slower = replace(
        slow,
        rows=tuple(replace(row, us=20.0) if row.way == OURS else row for row in slow.rows),
    )
    assert not any(
        verdict.held
        for verdict in claims.verdicts({one: slower})
        if verdict.claim.startswith("over the fastest")
    )


def test_what_share_is_claimed_of_which_point() -> None:
    wanted = {
        "32:8x128/1x1024": 0.55,
        "32:8x128/1x8192": 0.75,
        "32:8x128/8x8192": 0.95,
        "32:8x128/rag-b": 0.92,
        "8:1x128/1x131072": 0.85,
        "8:1x128/rag-c": 0.85,
        "32:32x128/rag-a": None,
        "8:1x128/64x2048": None,
    }
    assert {one: claims.claimed_share(chosen(one)[0]) for one in wanted} == wanted


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    results = Results("NVIDIA X")
    results.add(record("32:8x128/1x8192"))
    text = "\n".join(report.markdown(results))
    assert "| 32:8x128/1x8192 | p16 | 67.1 | 12.6 | 1 | 79% | 29% | 90% | 10 | other | 14 |" in text
    assert "the same candidate timed twice differs by at most 1.0%" in text
    assert "| over contiguous | 1 | 1 | 1.050 (limit 1.040) at 32:8x128/1x8192 p16 |" in text
    table, rows = report.write(results, tmp_path)
    assert table.read_text().startswith("# Decode on NVIDIA X")
    assert len(rows.read_text().splitlines()) == 1 + 13


# Sweeps


def test_fits_on_known_numbers() -> None:
    sizes = [1.0, 2.0, 5.0, 10.0]
    line = [3.0 + 0.5 * size for size in sizes]
    assert sweeps.affine_fit(sizes, line) == pytest.approx((3.0, 0.5))
    assert sweeps._affine(sizes, [value * 1e-6 for value in line])["worst_residual"] == 0
    bent = [*line[:-1], line[-1] * 1.5]
    assert sweeps._affine(sizes, [value * 1e-6 for value in bent])["worst_residual"] > 0.05  # type: ignore[operator]
    assert sweeps.worst_ratio([1.0, 2.0], [1.0, 2.5]) == 1.25
    assert sweeps.worst_ratio([], []) == 1.0


def test_the_sweeps_run_and_parts_replace_themselves(tmp_path: Path) -> None:
    command = ["--quick", "--turns", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert sweeps.main([*command, "--only", "splits,merge"]) == 0
    assert sweeps.main([*command, "--only", "length"]) == 0
    (written,) = tmp_path.glob("sweeps_*.json")
    found = json.loads(written.read_text())
    assert list(found) == ["splits", "merge", "length"]
    assert [row["point"] for row in found["splits"]["points"]] == [one.id for one in TINY]
    assert found["splits"]["worst_over_best"] >= 1
