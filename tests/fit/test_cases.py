"""Public threads about models and sizes that did not fit: what the format allows, and what engines accept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.fit import fits_tensors

from ..oracle import corpora
from ..oracle.quantized_cases import Outline, answer_differs, answer_of, written

DATA = Path(__file__).parents[1] / "data" / "quantized"
CASES = json.loads((DATA / "cases.json").read_text())
#: Looked up later; arithmetic on the numbers that the threads name.
MORE = json.loads((DATA / "more_cases.json").read_text())


@pytest.mark.parametrize("case", CASES + MORE, ids=lambda case: case["id"])
def test_what_the_format_allows_and_what_engines_accept(case: dict[str, Any]) -> None:
    assert answer_differs(case) is None


def test_a_wrong_case_differs() -> None:
    for key, value in (
        ("unit", 64),
        ("padded_size_that_fits", 512),
        ("tp_that_cut_on_units", [1]),
        ("limit", "kernel"),
    ):
        assert answer_differs({**CASES[0], key: value}) is not None


def test_experts_fit_where_they_are_cut_whole() -> None:
    """vllm-project/vllm-gaudi 1411 and ROCm/ATOM 1944: the way out that the threads name is `ep` 8."""
    gaudi = next(case for case in CASES if case["id"] == "gaudi-1411")
    assert [answer_of(gaudi, ep).verdict for ep in (1, 8)] == ["padded", "fits"]
    tensors: Outline = {}
    for expert in range(16):
        for name, out, columns in (("gate", 512, 2048), ("up", 512, 2048), ("down", 2048, 512)):
            more, config = written("fp8", f"model.layers.0.mlp.experts.{expert}.{name}_proj", out, columns, 128)
            tensors |= more
    answer = fits_tensors(tensors, {"quantization_config": config}, (8,), (1, 2, 8, 3))
    assert [(size.ep, size.verdict) for size in answer.sizes] == [
        (1, "shared"),
        (2, "fits"),
        (8, "fits"),
        (3, "refused"),
    ]
    assert answer.sizes[3].problems[0].why == "16 experts are not divisible by 3"


@pytest.mark.heavy
def test_a_folder_of_them_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m tests.oracle.corpora FOLDER`."""
    shutil.copytree(DATA / "gptq", tmp_path / "gptq")
    (tmp_path / "cases.json").write_text(json.dumps(CASES[:3]))
    assert corpora.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "checkpoints: 1 cases, 1 equal, 0 refused as the framework refuses, 0 different\n"
        "cases: 3 cases, 3 equal, 0 refused as the framework refuses, 0 different\n"
    )
    expected = json.loads((tmp_path / "gptq" / "expected.json").read_text())
    (weight, *_) = expected["tensors"].values()
    weight["elements"][0][1] = "0x1p+9"
    (tmp_path / "gptq" / "expected.json").write_text(json.dumps(expected))
    assert corpora.main([str(tmp_path)]) == 1
    assert "1 different\n  gptq: " in capsys.readouterr().out
