"""A Llama from Hugging Face, written for an engine's ranks by one command: what the engine computes of it.

vLLM's sources are looked for on the path; its stand-ins are those of `families/vllm_loads.py`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sizes", "groups", "is_tied"),
    [
        ("megatron", (2, 2), 4, False),
        ("megatron", (1, 2), 4, True),
        ("vllm", (2, 2), 4, False),
        ("vllm", (1, 2), 4, True),  # Both stages have the embedding.
        ("vllm", (4, 1), 2, False),  # Two ranks have the same heads of keys and values.
    ],
)
def test_engines_compute_what_transformers_does(
    engine: str, sizes: tuple[int, int], groups: int, is_tied: bool, tmp_path: Path
) -> None:
    """The engine's own loader takes the files, on stages and ranks, and its own model gives equal logits."""
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not here")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {
        "vocab_size": 200, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "head_dim": 6,
        "num_attention_heads": 8, "num_key_value_heads": groups, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    with torch.no_grad():
        for value in model.parameters():  # Norms are ones otherwise, and logits almost nothing.
            value.add_(torch.randn_like(value) / 3)
        tokens = torch.randint(0, 200, (2, 9))
        expected = model(tokens).logits.numpy()
    model.save_pretrained(tmp_path / "hf")
    tp, pp = sizes
    command = ["reshard", str(tmp_path / "hf"), str(tmp_path / "made"), "--for", f"{engine}(tp={tp}, pp={pp})"]
    assert main([*command, "--no-sync", "--quiet"]) == 0
    answer = tmp_path / "answer.npy"
    worker = [sys.executable, "-W", "ignore", "-m", f"tests.oracle.{engine}_logits", str(tmp_path / "made")]
    said = [json.dumps({**config, "rope_theta": 10000.0})] if engine == "megatron" else []
    asked = [*worker, *said, f"{tp},{pp}", json.dumps(tokens.tolist()), str(answer)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = np.load(answer)[:, :, :200]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert (found.argmax(-1) == expected.argmax(-1)).all()
