"""What the CUDA backend says: why it is missing, what it refuses, how it sees a device."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from splitkv.backends import cuda
from splitkv.backends.cuda import CudaBackend, InterpretedCudaBackend
from splitkv.backends.registry import BACKENDS, select
from splitkv.common.profile import A100, H200
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind
from splitkv.common.support import UnsupportedError

ROOT = Path(__file__).resolve().parent.parent
FLOAT8 = torch.float8_e4m3fn


def spec(**settings: object) -> DecodeSpec:
    fields = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "layout": Layout.BSND}
    return DecodeSpec(**{**fields, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head_dim": 577}, ["head_dim 577 is not in 1..576", "head_dim_v 577 is not in 1..512"]),
        ({"num_q_heads": 258}, ["query heads per kv head 129 is not in 1..128"]),
        (
            {"dtype": torch.float64},
            ["dtype float64 is not one of", "kv_dtype float64 is not one of"],
        ),
        ({"kv_dtype": torch.float32}, ["cache dtype other than the query's: "]),
        (
            {"kv_dtype": FLOAT8, "k_scale": ScaleKind.HEAD, "head_dim": 320},
            ["kv_dtype float8_e4m3fn with head dim 320: the kernel for head dims above 256"],
        ),
    ],
)
def test_what_is_not_done_is_refused_with_the_reason(
    settings: dict[str, object], words: list[str]
) -> None:
    refusals = CudaBackend().refusals(spec(**settings))
    assert len(refusals) == len(words)
    assert all(refusal.startswith(word) for refusal, word in zip(refusals, words, strict=True))


@pytest.mark.parametrize(("capability", "taken"), [((8, 6), False), ((8, 9), True)])
def test_e4m3_is_refused_where_no_instruction_converts_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    refused = CudaBackend().refusals(spec(kv_dtype=torch.float8_e4m3fn))
    words = "kv_dtype float8_e4m3fn needs compute capability 8.9, a device has 8.6; use float8_e5m2"
    assert (refused == []) if taken else refused[0].startswith(words)
    assert CudaBackend().refusals(spec(kv_dtype=torch.float8_e5m2)) == []


def test_everything_else_is_taken() -> None:
    everything = spec(
        num_q_heads=14,
        head_dim=80,
        head_dim_v=33,
        layout=Layout.HND,
        page_size=3,
        num_queries=9,
        packed_queries=True,
        causal=False,
        sliding_window=7,
        anchor_tokens=2,
        logits_soft_cap=5.0,
        alibi=True,
        attn_bias=True,
        attn_mask=True,
        sinks=True,
        kv_dtype=torch.int8,
        k_scale=ScaleKind.CHANNEL,
        v_scale=ScaleKind.TOKEN,
        k_zero=True,
        v_zero=True,
    )
    assert CudaBackend().refusals(everything) == []


def test_the_interpreter_is_never_chosen_by_itself() -> None:
    assert not any(isinstance(backend, InterpretedCudaBackend) for backend in BACKENDS)
    assert InterpretedCudaBackend().evidence == "interpreter"
    assert select(spec(), "cpu").name == "cpu"
    with pytest.raises(UnsupportedError, match="it takes cuda tensors"):
        select(spec(), "cpu", "cuda")


def test_the_interpreter_says_when_it_is_off() -> None:
    code = (
        "from splitkv.backends.cuda import InterpretedCudaBackend; "
        "print(InterpretedCudaBackend().missing())"
    )
    for value, said in (("0", "set TRITON_INTERPRET=1 before triton is imported"), ("1", "None")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"TRITON_INTERPRET": value, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert said in done.stdout


def fake_device(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], sms: int
) -> None:
    properties = SimpleNamespace(name=name, multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    cuda._profile.cache_clear()


def test_an_old_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device(monkeypatch, "Tesla T4", (7, 5), 40)
    missing = CudaBackend().missing()
    assert missing == "Tesla T4 has compute capability 7.5, the kernels need 8.0"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
def test_a_gpu_does_not_run_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device(monkeypatch, "NVIDIA H200", (9, 0), 132)
    assert "TRITON_INTERPRET is on" in (CudaBackend().missing() or "")


@pytest.mark.parametrize(
    ("name", "capability", "sms", "workers", "like", "bandwidth"),
    [
        ("NVIDIA H200", (9, 0), 132, 264, H200, H200.read_bandwidth),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 216, A100, A100.read_bandwidth),
        ("a workstation's", (12, 0), 54, 54, A100, A100.read_bandwidth / 2),
        ("NVIDIA H100 NVL", (9, 0), 66, 132, H200, H200.read_bandwidth / 2),
    ],
)
def test_the_profile_is_read_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    sms: int,
    workers: int,
    like: object,
    bandwidth: float,
) -> None:
    fake_device(monkeypatch, name, capability, sms)
    profile = CudaBackend().profile()
    cuda._profile.cache_clear()
    assert (profile.name, profile.workers, profile.read_bandwidth) == (name, workers, bandwidth)
    assert f"{sms} SMs" in profile.source
    assert isinstance(like, type(profile))
    assert profile.launch_seconds == like.launch_seconds
    assert ("assumed" in profile.source) == (bandwidth != like.read_bandwidth)
