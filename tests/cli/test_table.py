"""Tables of measured configs, and the layers of models."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.cuda import driver
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli import main
from gemmsmith.cli.model_layers import layers_of
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.measured_configs import Entry, key_of

SMALL = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=4, raster="n")


def entry(m: int, us: float, gpu: str = "NVIDIA H200") -> Entry:
    binding = bind(Request(Spec((m, 128), "bf16"), Spec((128, 256), "bf16")))
    return Entry(key_of(binding.problem, binding.spec), m, SMALL, us, gpu)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured_configs, "folder", lambda device=0: tmp_path / "tuned")
    monkeypatch.setattr(measured_configs, "_about", lambda device: {})
    monkeypatch.setattr(measured_configs, "_SAVED", {})


def call(*words: str) -> str:
    result = CliRunner().invoke(main, ["table", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_what_was_measured_goes_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("list") == "0 configs\n"
    measured_configs.save([entry(64, 5.0), entry(200, 7.0)])
    assert "64x256x128 16 bits: 5.0 us\n" in call("list")
    assert call("export", "a.json") == "2 configs\n"
    measured_configs.write_table(Path("b.json"), [entry(64, 4.0), entry(64, 9.0, "NVIDIA H100 80GB HBM3")])
    assert call("merge", "a.json", "b.json", "both.json") == "3 configs\n"
    both = measured_configs.read_table(Path("both.json"))
    assert {(x.m, x.us, x.gpu) for x in both} == {
        (64, 4.0, "NVIDIA H200"), (200, 7.0, "NVIDIA H200"), (64, 9.0, "NVIDIA H100 80GB HBM3"),
    }  # fmt: skip
    result = CliRunner().invoke(main, ["table", "load", "both.json"])
    if not driver.is_available():
        assert "there is no GPU that the configs could be for; name the FILE in GEMMSMITH_TABLE" in result.stderr
    monkeypatch.setattr(driver, "is_available", lambda: True)
    attributes = driver.DeviceAttributes("NVIDIA H200", (9, 0), 132, 232448)
    monkeypatch.setattr(driver, "device_attributes", lambda device: attributes)
    assert call("load", "both.json") == "2 configs\n"
    assert {(x.m, x.us) for x in measured_configs.entries()} == {(64, 4.0), (200, 7.0)}
    listed = json.loads(call("list", "--json"))["entries"]
    assert sorted(listed, key=lambda x: x["us"]) == [
        json.loads(json.dumps(entry(*x).to_json())) for x in ((64, 4.0), (200, 7.0))
    ]
    assert gemmsmith.plan(Spec((64, 128), "bf16"), Spec((128, 256), "bf16")).config == SMALL


LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280}  # fmt: skip


def test_layers_of_published_configs() -> None:
    """Llama 3 8B and DeepSeek V3 have these shapes (their papers and their weights); GPT-2 has no gate."""
    assert {x[1:3] for x in layers_of(LLAMA)} == {
        (4096, 4096), (1024, 4096), (6144, 4096), (28672, 4096), (14336, 4096), (4096, 14336), (128256, 4096),
    }  # fmt: skip
    deepseek = layers_of(DEEPSEEK)
    assert {x[1:3] for x in deepseek if not x.experts} >= {
        (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432),
        (4096, 7168), (7168, 2048), (256, 7168), (129280, 7168),
    }  # fmt: skip
    assert {x[1:] for x in deepseek if x.experts} == {(4096, 7168, 256, 8), (7168, 2048, 256, 8)}
    gpt2 = layers_of({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "vocab_size": 50257})
    assert {x[1:3] for x in gpt2} == {(768, 768), (2304, 768), (3072, 768), (768, 3072), (50257, 768)}
    nested = layers_of({"model_type": "gemma3", "text_config": {**LLAMA, "head_dim": 256}})
    assert (32 * 256, 4096) in {x[1:3] for x in nested}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hidden_size": 4096}', '{"hidden_size": "wide"}'])
def test_a_file_that_is_no_models_config(content: str) -> None:
    Path("config.json").write_text(content)
    result = CliRunner().invoke(main, ["tune", "--model", "config.json"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert "use a model's config.json" in result.stderr


class Measured:
    """Plays the GPU: keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def __call__(self, request: Any, force: bool) -> bool:
        self.requests.append(request)
        return False


def test_a_models_layers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts with equal groups, and with --training their gradients, each in the layout that training has."""
    mixtral = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_local_experts": 4,
               "num_experts_per_tok": 2}  # fmt: skip
    Path("config.json").write_text(json.dumps(mixtral))
    measured = Measured()
    monkeypatch.setattr("gemmsmith.cli.tune.require_gpu", lambda: None)
    monkeypatch.setattr("gemmsmith.backends.cuda.kernel_loader.device_guard", lambda device: nullcontext())
    monkeypatch.setattr("gemmsmith.host.autotune.tune_first_call", measured)
    monkeypatch.setattr("gemmsmith.tuning.search.random_device_arrays", lambda specs, stream: specs)
    monkeypatch.setattr("gemmsmith.backends.cuda.memory.DeviceArray.from_numpy", lambda x: Spec(x.shape, "int32"))
    result = CliRunner().invoke(main, ["tune", "--model", "config.json", "--tokens", "1,6", "--training"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0 of 30 GEMMs tuned")
    seen = set()
    for request in measured.requests:
        plan = gemmsmith.plan(
            request.a, request.b, out=request.out, operands=request.operands, grouping=request.grouping
        )
        seen.add((plan.problem.T if plan.config.swap_ab else plan.problem, bool(request.grouping)))
        assert request.out.dtype == request.a.dtype
    grouped = {(x.m, x.n, x.k, x.groups) for x, is_grouped in seen if is_grouped}
    assert {(4, 256, 64, 4), (12, 256, 64, 4), (4, 64, 256, 4), (12, 64, 256, 4), (12, 64, 128, 4)} <= grouped
    assert {(1, 64, 64), (6, 192, 64), (6, 64, 192), (192, 64, 6)} <= {
        (x.m, x.n, x.k) for x, is_grouped in seen if not is_grouped
    }


def test_other_kinds_are_measured_on_random_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their epilogue, scales, groups or batch, each array on the GPU."""
    measured = Measured()
    monkeypatch.setattr("gemmsmith.cli.tune.require_gpu", lambda: None)
    monkeypatch.setattr("gemmsmith.backends.cuda.kernel_loader.device_guard", lambda device: nullcontext())
    monkeypatch.setattr("gemmsmith.host.autotune.tune_first_call", measured)
    monkeypatch.setattr("gemmsmith.backends.cuda.memory.DeviceArray.from_numpy", lambda x: x.view(OnGpu))
    lines = ["--epilogue LinCombPerColBiasEltAct", "--batch 3", "--groups 30,0,50", "--batch-invariant",
             "--dtype fp8_e4m3 --scale-a 1x128 --scale-b 128x128", "--out-dtype fp32"]  # fmt: skip
    for words in lines:
        result = CliRunner().invoke(main, ["tune", "80x128x256", *words.split()])
        assert result.exit_code == 0, result.output
        assert result.output.startswith("80x128x256: ")
        request = measured.requests[-1]
        arrays = [request.a, request.b, request.scale_a, request.scale_b, *request.operands.values()]
        assert all(isinstance(x, OnGpu) for x in arrays if isinstance(x, np.ndarray))
        assert request.out is None
    assert measured.requests[2].grouping
    assert list(measured.requests[2].operands["sizes"]) == [30, 0, 50]
    shown = json.loads(CliRunner().invoke(main, ["tune", "80x128x256", "--batch", "3", "--json"]).output)
    assert (shown["m"], shown["tuned_before"], len(shown["configs"])) == (80, True, 1)
    Path("config.json").write_text(json.dumps(LLAMA))
    refused = CliRunner().invoke(main, ["tune", "--model", "config.json", "--epilogue", "amax", "--batch", "2"])
    assert refused.exit_code == 2
    assert "--model: got it with --batch, --epilogue; use it without" in refused.stderr


class OnGpu(np.ndarray):
    """Plays an array on the GPU."""
