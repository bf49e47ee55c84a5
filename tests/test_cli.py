"""The command line: exit codes, JSON and nothing but JSON on stdout, complete help."""

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import splitkv
from splitkv.cli import doctor, output
from splitkv.cli.main import COMMANDS, main
from splitkv.cli.plan import parse_lengths
from splitkv.cli.spec_arguments import add_spec_arguments, spec_from
from splitkv.common.plan import plan_splits
from splitkv.common.profile import PROFILES
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind

ROOT = Path(__file__).resolve().parent.parent
Run = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call ``main`` and get (exit code, stdout, stderr)."""

    def call(*arguments: str) -> Run:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# Which commands there are


def test_help_lists_every_command_and_says_which_are_not_there_yet(run: Any) -> None:
    code, out, _ = run("--help")
    words = " ".join(out.split())
    assert code == 0
    for name, what in COMMANDS.items():
        assert f"{name} {what}" in words


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_keeps_the_convention(command: str, run: Any) -> None:
    module = import_module(f"splitkv.cli.{command}")
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    module.configure(parser)
    assert callable(module.run)
    code, out, _ = run(command, "--help")
    assert code == 0
    assert module.HELP.split()[0] in out
    assert "--json" in out


@pytest.mark.parametrize(
    "arguments", [(), ("frobnicate",), ("plan", "--frobnicate"), ("--frobnicate",)]
)
def test_usage_errors_exit_2_and_leave_stdout_empty(arguments: tuple[str, ...], run: Any) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "usage: splitkv" in err


def test_usage_errors_are_json_where_json_is_asked_for(run: Any) -> None:
    for arguments in (["explain", "--json", "--bogus"], ["plan", "--json", "--lengths"]):
        code, out, err = run(*arguments)
        assert code == 2
        assert json.loads(out)["kind"] == "usage"
        assert json.loads(out)["error"] in err


def test_a_reader_who_leaves_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "splitkv", "matrix", "--json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        said = running.stderr.read().decode()
    assert said == ""
    assert running.returncode == 141


def test_python_m_splitkv_is_the_command() -> None:
    done = process("-m", "splitkv", "--version")
    assert (done.returncode, done.stdout) == (0, f"splitkv {splitkv.__version__}\n")


def test_a_gap_in_the_code_is_not_taken_for_an_answer(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gap(_: argparse.Namespace) -> int:
        raise NotImplementedError

    monkeypatch.setattr(import_module("splitkv.cli.plan"), "run", gap)
    with pytest.raises(NotImplementedError):
        run("plan")


# explain


def test_explain_names_the_chosen_one_and_everyones_reasons(run: Any) -> None:
    code, out, _ = run("explain", "--device", "cpu", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["chosen"] == "cpu"
    assert list(answer["reasons"]) == ["cuda", "ascend", "cpu"]
    assert answer["reasons"]["cpu"] == []
    assert "the tensors are on cpu, it takes cuda tensors" in answer["reasons"]["cuda"][0]
    assert answer["spec"]["layout"] == "NHD"
    assert answer["spec"]["dtype"] == "bfloat16"
    code, out, _ = run("explain", "--device", "cpu")
    assert code == 0
    assert "chosen: cpu" in out
    assert "it takes npu tensors" in " ".join(out.split())


def test_explain_emits_json_where_json_is_asked_for(run: Any) -> None:
    code, out, _ = run("explain", "--emit", "torch_npu", "--json", "--page-size", "16")
    assert code == 0
    emitted = json.loads(out)
    compile(emitted["source"], "emitted", "exec")
    assert "page size 16" in emitted["warnings"][0]
    code, out, _ = run("explain", "--emit", "torch_npu", "--json", "--soft-cap", "30")
    assert code == 1
    assert json.loads(out)["source"] is None
    code, out, err = run("explain", "--emit", "torch_npu", "--backend", "cpu")
    assert (code, out) == (2, "")
    assert "is a call of ascend, not of cpu" in err


def test_explain_shows_what_ascend_would_warn_of(run: Any) -> None:
    for asked in (("--all",), ("--soc", "910B"), ("--backend", "ascend"), ("--device", "npu")):
        out = run("explain", "--page-size", "16", *asked)[1]
        assert "on ascend: page size 16" in out
        assert "route of ascend" in out
    assert "on ascend" not in run("explain", "--page-size", "128", "--all")[1]
    code, out, _ = run("explain", "--backend", "cpu")
    assert code == 0
    assert "cpu is asked for" in out
    assert "route" not in out


def test_explain_is_short_where_nothing_of_ascend_is_here(run: Any) -> None:
    out = run("explain", "--page-size", "16")[1]
    assert "the routes of ascend: --all" in out
    assert "route of ascend" not in out
    assert len(out.splitlines()) < 15
    assert json.loads(run("explain", "--json")[1])["ascend"]["against"]


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--backend", "ascend"),
        ("explain", "--device", "npu"),
        ("parity", "--backend", "ascend", "--case", "page-64"),
        ("parity", "--backend", "ascend", "--device", "npu:1", "--case", "page-64"),
        ("fuzz", "--backend", "ascend", "--count", "1"),
        ("bench", "--device", "npu"),
        ("verify",),
    ],
)
def test_what_is_not_on_this_machine_exits_1(words: tuple[str, ...], run: Any) -> None:
    """Well formed, but not to be had here; what is malformed exits 2 (beside each command)."""
    code, out, err = run(*words)
    assert code == 1
    assert "torch_npu is not installed" in " ".join((out + err).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune")
def test_tune_exits_1_without_its_device(run: Any) -> None:
    code, out, err = run("tune", "--device", "cuda")
    assert (code, out) == (1, "")
    assert "sees no cuda device" in err


def test_explain_exits_1_if_the_named_backend_does_not_take_it(run: Any) -> None:
    code, out, _ = run("explain", "--device", "cpu", "--backend", "cuda", "--json")
    assert code == 1
    assert json.loads(out)["chosen"] is None
    code, out, _ = run("explain", "--device", "cpu", "--backend", "cuda")
    assert code == 1
    assert "chosen: none" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "gpu"), "unknown backend 'gpu', known: ['cuda', 'ascend', 'cpu']"),
        (("--heads", "5:2"), "num_q_heads 5 is not divisible by num_kv_heads 2"),
        (("--heads", "32"), "--heads must be H:K, as in 32:8, got '32'"),
        (("--layout", "BSND", "--page-size", "16"), "page_size 16 has no meaning for layout BSND"),
        (("--k-scale", "head"), "k_scale and v_scale need a quantised cache"),
        (("--window", "0"), "sliding_window must be a positive integer, got 0"),
    ],
)
def test_a_malformed_spec_exits_2_with_field_value_and_limit(
    arguments: tuple[str, ...], message: str, run: Any
) -> None:
    code, out, err = run("explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("splitkv explain: ")
    assert message in err
    code, out, err = run("explain", "--json", *arguments)
    assert code == 2
    assert json.loads(out) == {
        "error": err.removeprefix("splitkv explain: ").strip(),
        "kind": "ValueError",
    }


def test_every_field_of_a_spec_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_spec_arguments(parser)
    flags = (
        "--heads 16:4 --head-dim 192 --head-dim-v 128 --layout HND --page-size 32 --dtype float16 "
        "--kv-dtype int8 --queries 4 --packed-queries --non-causal --sm-scale 0.5 --window 100 "
        "--anchors 8 --soft-cap 30 --alibi --bias --mask --sinks "
        "--k-scale head --v-scale request_head"
    )
    assert spec_from(parser.parse_args(flags.split())) == DecodeSpec(
        num_q_heads=16,
        num_kv_heads=4,
        head_dim=192,
        head_dim_v=128,
        layout=Layout.HND,
        page_size=32,
        dtype=torch.float16,
        kv_dtype=torch.int8,
        num_queries=4,
        packed_queries=True,
        causal=False,
        sm_scale=0.5,
        sliding_window=100,
        anchor_tokens=8,
        logits_soft_cap=30.0,
        alibi=True,
        attn_bias=True,
        attn_mask=True,
        sinks=True,
        k_scale=ScaleKind.HEAD,
        v_scale=ScaleKind.REQUEST_HEAD,
    )
    plain = spec_from(parser.parse_args([]))
    assert plain == DecodeSpec(
        num_q_heads=32, num_kv_heads=8, head_dim=128, layout=Layout.NHD, page_size=16
    )
    assert spec_from(parser.parse_args(["--layout", "BNSD"])).page_size is None
    grouped = ["--k-scale", "group", "--v-scale", "group", "--kv-dtype"]
    for name in ("int4", "uint8"):
        assert spec_from(parser.parse_args([*grouped, name])).cache_dtype is torch.uint8


# plan


@pytest.mark.parametrize("how", [{}, {"num_splits": 3}, {"split_size": 2000}])
def test_plan_prints_what_the_planner_says(how: dict[str, int], run: Any) -> None:
    flags = [
        word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    code, out, _ = run(
        "plan", "--lengths", "1024,8192x2,0", "--profile", "NVIDIA H200", "--json", *flags
    )
    answer = json.loads(out)
    assert code == 0
    spec = DecodeSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, layout=Layout.NHD, page_size=16)
    plan = plan_splits(spec, [1024, 8192, 8192, 0], profile=PROFILES["NVIDIA H200"], **how)
    assert answer["summary"] == plan.summary()
    assert [request["length"] for request in answer["requests"]] == [1024, 8192, 8192, 0]
    found = [cut for request in answer["requests"] for cut in request["splits"]]
    assert found == list(map(list, zip(plan.start.tolist(), plan.end.tolist(), strict=True)))
    assert answer["requests"][3]["splits"] == []


def test_plan_shows_a_table_per_request_and_cuts_long_ones_short(run: Any) -> None:
    code, out, _ = run(
        "plan", "--lengths", "100,131072,7x40", "--profile", "NVIDIA H200", "--split-size", "4096"
    )
    assert code == 0
    assert "0-4096 4096-8192 8192-12288 ... 126976-131072" in out
    assert "and 10 more requests; --json has all of them" in out
    assert "predicted_us" in out


def test_plan_lists_its_profiles_with_their_sources(run: Any) -> None:
    code, out, _ = run("plan", "--list-profiles", "--json")
    assert code == 0
    assert [profile["name"] for profile in json.loads(out)] == list(PROFILES)
    code, out, _ = run("plan", "--list-profiles")
    assert code == 0
    assert "Ascend910B1" in out
    assert "assumed" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "cpu"), "--lengths is needed"),
        (("--lengths", "12"), "one of ['cpu', 'NVIDIA H200'"),
        (("--lengths", "12,a"), "got 'a' in '12,a'"),
        (("--lengths", "9" * 20, "--profile", "cpu"), "at most 2147483647"),
        (("--lengths", "1x1000001", "--profile", "cpu"), "more than 1000000 requests"),
        (("--lengths", "12", "--profile", "H100"), "unknown profile 'H100', known: ['cpu'"),
        (
            ("--lengths", "12,a", "--profile", "cpu"),
            "--lengths takes L or LxN between commas, got 'a' in '12,a'",
        ),
        (("--lengths=-5", "--profile", "cpu"), "got '-5'"),
        (("--lengths", str(2**31), "--profile", "cpu"), "--lengths: 2147483648 tokens"),
        (
            ("--lengths", "12", "--profile", "cpu", "--num-splits", "0"),
            "num_splits must be an integer of 1 or more",
        ),
        (
            ("--lengths", "1", "--profile", "cpu", "--num-splits", "1", "--split-size", "9"),
            "not allowed with",
        ),
    ],
)
def test_a_malformed_plan_exits_2(arguments: tuple[str, ...], message: str, run: Any) -> None:
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_lengths_may_repeat() -> None:
    assert parse_lengths("1024, 8192x3,0") == [1024, 8192, 8192, 8192, 0]
    assert parse_lengths("5x0,7") == [7]


# doctor


def test_doctor_reports_versions_devices_and_backends(run: Any) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["ok"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert set(doctor.LIBRARIES) < set(report["versions"])
    assert report["imports"][0] == {"library": "torch", "why": None, "remedy": None}
    assert report["devices"][0]["type"] == "cpu"
    backends = {entry["backend"]: entry for entry in report["backends"]}
    assert list(backends) == ["cuda", "ascend", "cpu"]
    assert backends["cpu"] == {"backend": "cpu", "available": True, "why": None}
    for entry in backends.values():
        assert entry["available"] == (entry["why"] is None)


def test_doctor_shows_tables(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_import_error", lambda *_, **__: None)
    code, out, _ = run("doctor")
    assert code == 0
    assert "available" in out
    assert f"{torch.get_num_threads()} torch threads" in out


def test_doctor_exits_1_without_torch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._installed
    monkeypatch.setattr(
        doctor, "_installed", lambda name: None if name == "torch" else installed(name)
    )
    code, out, _ = run("doctor", "--json")
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    assert report["imports"][0]["why"] == "it is not installed"
    assert report["backends"] == []


def test_doctor_gives_up_on_an_import_that_hangs(run: Any) -> None:
    code, out, _ = run("doctor", "--json", "--timeout", "0.001")
    assert code == 1
    assert json.loads(out)["imports"][0]["why"] == "importing torch took longer than 0.001 s"


@pytest.fixture
def torch_npu_without_cann(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, is an installed torch_npu whose libraries are missing."""
    package, facts = tmp_path / "torch_npu", tmp_path / "torch_npu-2.6.0.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").write_text(
        'raise ImportError("libhccl.so: cannot open shared object file")\n'
    )
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.6.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def test_doctor_answers_where_torch_npu_breaks_torch(torch_npu_without_cann: Path) -> None:
    done = process("-m", "splitkv", "doctor", "--json", PYTHONPATH=str(torch_npu_without_cann))
    assert done.returncode == 1
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["versions"]["torch-npu"] == "2.6.0"
    by_torch, by_torch_npu = report["imports"]
    assert by_torch["library"] == "torch"
    assert "Failed to load the backend extension: torch_npu" in by_torch["why"]
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in by_torch["remedy"]
    assert by_torch_npu["library"] == "torch_npu"
    assert "libhccl.so: cannot open shared object file" in by_torch_npu["why"]
    assert "set_env.sh" in by_torch_npu["remedy"]
    assert report["backends"] == []


def test_doctor_answers_with_the_remedy_in_force(
    run: Any, torch_npu_without_cann: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(torch_npu_without_cann))
    monkeypatch.setenv(doctor.AUTOLOAD, "0")
    monkeypatch.syspath_prepend(torch_npu_without_cann)
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["imports"][0]["why"] is None
    assert "libhccl.so" in report["imports"][1]["why"]
    available = {entry["backend"]: entry["available"] for entry in report["backends"]}
    assert available["ascend"] is False
    assert available["cpu"] is True


def test_doctor_shows_what_is_wrong_and_what_to_do(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor,
        "_import_error",
        lambda module, timeout, autoload=True: "ImportError: libhccl.so" if autoload else None,
    )
    code, out, _ = run("doctor")
    assert code == 1
    assert "torch cannot be imported: ImportError: libhccl.so" in out
    assert f"set {doctor.AUTOLOAD}=0" in out


# Before torch


def test_help_and_the_package_itself_do_not_import_torch() -> None:
    code = (
        "import sys, splitkv; from splitkv.cli.main import main; main(['--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert process("-c", code).returncode == 0


def test_every_public_name_has_a_home() -> None:
    homes = splitkv._HOMES  # type: ignore[attr-defined]
    assert sorted(name for names in homes.values() for name in names) == sorted(splitkv.__all__)
    for name in splitkv.__all__:
        assert getattr(splitkv, name) is not None
        assert name in dir(splitkv)
    with pytest.raises(AttributeError, match="module 'splitkv' has no attribute 'decode_atention'"):
        splitkv.decode_atention  # type: ignore[attr-defined]  # noqa: B018


# Output


@pytest.mark.parametrize("rich", [True, False])
def test_tables_show_shapes_as_they_are(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setattr(output, "find_spec", lambda name: None)
    output.print_table(("name", "shape"), [("q", "[B, H, D]"), ("k", None)], title="tensors")
    out = capsys.readouterr().out
    assert "[B, H, D]" in out
    assert "tensors" in out
    assert "None" not in out


def test_a_plain_table_is_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    output.print_table(("a", "long"), [(1, "x"), ("wide cell", 2)])
    assert capsys.readouterr().out == "a          long\n1          x\nwide cell  2\n"


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.print_json({"error": float("nan")})


def test_progress_goes_through_all_items_and_stays_off_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(output.track(iter([1, 2, 3]), "counting", total=3)) == [1, 2, 3]
    assert capsys.readouterr().out == ""
