"""The recording of a real model in matrix/fixtures, and the example that makes it."""

import hashlib
import json
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from splitkv.integrations import smollm2

RECORDING = files("splitkv.matrix") / "fixtures" / "smollm2_qkv.npz"
EXAMPLE = Path(__file__).parents[1] / "examples" / "capture_qkv.py"


def recorded() -> dict[str, Any]:
    with RECORDING.open("rb") as file, np.load(file) as content:
        return dict(content)


def values(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).float()


def test_recording_is_what_its_provenance_says() -> None:
    content = recorded()
    said = json.loads(str(content["provenance"]))
    digest = hashlib.sha256(b"".join(content[name].tobytes() for name in "qkv")).hexdigest()
    assert digest == said["sha256"]
    shapes = [content[name].shape for name in "qkv"]
    assert shapes == [(2, 4, 9, 64), (2, 2048, 3, 64), (2, 2048, 3, 64)]
    assert all(torch.isfinite(values(content[name])).all() for name in "qkv")


@pytest.mark.slow
@pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing()))
def test_example_records_the_same_again() -> None:
    """To a rounding of bfloat16: another CPU sums in another order."""
    spec = spec_from_file_location("capture_qkv", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    loaded = smollm2.load()
    text = (files("splitkv.cli") / "demo.txt").read_text(encoding="utf-8")
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, : example.TOKENS]
    seen = example.capture(loaded.model, ids)
    content = recorded()
    for index, name in enumerate("qkv"):
        again = values(example.bits([seen[layer][index] for layer in example.LAYERS]))
        wanted = values(content[name])
        scale = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(again, wanted, rtol=scale, atol=scale * float(wanted.std()))
