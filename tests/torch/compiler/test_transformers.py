"""A training step of small models of `transformers`, with the pass, against the same model in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.torch.compiler import models
from tests.torch.compiler.passed import compiled

transformers = pytest.importorskip("transformers", reason="needs transformers")

CLASSES, ROWS, LENGTH = 64, 2, 8
OF_LAYERS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": CLASSES, "max_position_embeddings": 16,
}  # fmt: skip
SHARED = OF_LAYERS | {"num_key_value_heads": 1}
HEADS = SHARED | {"head_dim": 16}
OF_DECODER = {"d_model": 32, "vocab_size": CLASSES, "decoder_start_token_id": 1}
WHISPER = {
    **{f"{part}_{of}": 2 for part in ("encoder", "decoder") for of in ("layers", "attention_heads")},
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": LENGTH,
    "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SHARED,
    "Qwen3ForCausalLM": HEADS,
    "MistralForCausalLM": SHARED,
    "MixtralForCausalLM": SHARED | {"num_local_experts": 4},
    "DeepseekV3ForCausalLM": OF_LAYERS | LATENT,
    "GemmaForCausalLM": HEADS,
    "Olmo2ForCausalLM": SHARED,
    "PhiForCausalLM": OF_LAYERS | {"pad_token_id": 0},
    "Phi3ForCausalLM": SHARED | {"pad_token_id": 0},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": CLASSES, "n_positions": 16},
    "GPTNeoXForCausalLM": OF_LAYERS,
    "OPTForCausalLM": OF_LAYERS | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "FalconForCausalLM": OF_LAYERS,
    "BertForMaskedLM": OF_LAYERS,
    "RobertaForMaskedLM": OF_LAYERS,
    "ViTForImageClassification": OF_LAYERS | {"image_size": 8, "patch_size": 4, "num_labels": CLASSES},
    "T5ForConditionalGeneration": OF_DECODER | {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    "WhisperForConditionalGeneration": OF_DECODER | WHISPER,
}


def made(name: str) -> Any:
    """Return a model with random weights and no dropout, whose experts are one batched matmul, as float64 requires."""
    of = getattr(transformers, name)
    config = of.config_class(**MODELS[name])
    for key, value in vars(config).items():
        if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)
    config.use_cache, config._experts_implementation = False, "batched_mm"
    model = of(config).double().train()
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.training = False  # older releases branch on a random number, which no compiled code can
    if name == "GPT2LMHeadModel":
        model.loss_type = "ForCausalLM"  # else it warns, which no compiled code can
    return model


def inputs(name: str) -> dict[str, Any]:
    labels = torch.randint(3, CLASSES, (ROWS, LENGTH))
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(ROWS, 3, 8, 8, dtype=torch.float64), "labels": labels[:, 0]}
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(ROWS, 8, 2 * LENGTH, dtype=torch.float64), "labels": labels}
    return {"input_ids": torch.randint(3, CLASSES, (ROWS, LENGTH)), "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_eager_modes(name: str, rng: Any) -> None:
    """In float64, except for what the model computes in fp32 itself."""
    torch.manual_seed(int(rng.integers(2**31)))
    model, given = made(name), inputs(name)
    expected = models.trained(lambda: model(**given).loss, model, ())
    forward, passed = compiled(model)
    actual = models.trained(lambda: forward(**given).loss, model, ())
    for key, x in expected.items():
        if x is not None:  # a parameter that is not used
            error, size = (actual[key] - x).norm(), x.norm()
            assert error <= 1e-5 * size + 1e-12, f"{key}: {error / size:.3g}"
    assert len(passed.fused) >= 4
