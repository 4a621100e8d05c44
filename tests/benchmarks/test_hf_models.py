"""The benchmark of transformers' models, at tiny size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs transformers")

from benchmarks import timing  # noqa: E402
from benchmarks.torch import hf_models, layers  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["qwen3-8b", "gpt2-xl-prefill", "bert-large", "vit-large-prefill"])
def test_a_case_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "machine", dict)  # there is no GPU to name
    monkeypatch.setattr(sys, "argv", ["hf_models.py", "--tiny", "--json", str(tmp_path / "rows.json"), "--case", name])
    layers.main(hf_models.__doc__, hf_models.CASES)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["case"] == name
    assert row["training"] != name.endswith("prefill")
    assert row["theirs"] in layers.THEIRS
    assert row["ours"] in layers.OURS
    assert row["compiled_error"] <= 2 * row["eager_error"] + 1e-6


def test_cases_have_the_published_sizes() -> None:
    """Of each model two cases, of about 4096 tokens."""
    assert len(hf_models.CASES) == 2 * len(hf_models.MODELS)
    for case in hf_models.CASES.values():
        sizes: dict[str, Any] = case.sizes
        assert sizes["model"] == "vit-large" or sizes["batch"] * sizes["length"] == 4096
    llama = hf_models.MODELS["llama-3-8b"][1]
    assert (llama["hidden_size"], llama["intermediate_size"], llama["num_hidden_layers"]) == (4096, 14336, 4)
