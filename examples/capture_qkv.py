"""Record queries, keys and values of a real model for matrix/fixtures/smollm2_qkv.npz.

SmolLM2-135M reads the first 2048 tokens of cli/demo.txt; of two layers the last 4 queries and all
keys and values are kept, as bfloat16 bits. Needs the packages that `splitkv demo` asks for.

    python examples/capture_qkv.py [matrix/fixtures/smollm2_qkv.npz]
"""

import argparse
import hashlib
import json
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from splitkv.integrations import smollm2

TOKENS = 2048
QUERIES = 4
LAYERS = (0, 15)


def capture(model: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """q [S, H, D], k, v [T, K, D] of each layer in LAYERS, position embedding applied.

    ids: int64 [1, T].
    """
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def recording(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if module.layer_idx in LAYERS:
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            seen[module.layer_idx] = (q[-QUERIES:], k, v)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("recording", recording)
    AttentionMaskInterface.register("recording", sdpa_mask)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model(ids)
    return seen


def bits(tensors: list[Tensor]) -> np.ndarray:
    """bfloat16 bits as int16, one more axis in front."""
    return torch.stack(tensors).to(torch.bfloat16).contiguous().view(torch.int16).numpy()


def main() -> None:
    """Write the file and print what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(__file__).parents[1] / "matrix" / "fixtures" / "smollm2_qkv.npz"
    parser.add_argument("path", type=Path, nargs="?", default=default)
    path = parser.parse_args().path

    loaded = smollm2.load()
    text = (files("splitkv.cli") / "demo.txt").read_text(encoding="utf-8")
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    if ids.shape[1] != TOKENS:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, {TOKENS} are needed")
    seen = capture(loaded.model, ids)
    q, k, v = (bits([seen[layer][index] for layer in LAYERS]) for index in range(3))
    provenance = {
        "model": f"SmolLM2-135M-Instruct, package {smollm2.PACKAGE} {loaded.version}, Apache-2.0",
        "text": "cli/demo.txt, written for this project",
        "layers": LAYERS,
        "dtype": "bfloat16 bits as int16, rounded from float32",
        "shapes": "q [layers, S, H, D], k and v [layers, T, K, D], rotary embedding applied",
        "sm_scale": 0.125,
        "sha256": hashlib.sha256(q.tobytes() + k.tobytes() + v.tobytes()).hexdigest(),
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, q=q, k=k, v=v, provenance=np.array(json.dumps(provenance, indent=1)))
    print(json.dumps(provenance, indent=2))
    print(f"{path}: {path.stat().st_size} bytes, q {q.shape}, k {k.shape}, v {v.shape}")


if __name__ == "__main__":
    main()
