"""Models of transformers with random weights: a training step, and a prefill, in one run.

The contenders, the checks and the rows are those of layers.py: eager PyTorch, Inductor in its modes, and the same model
by torch.compile(options=gt.options()). Sizes are the published models', with four layers; dropout is off.

    python -m benchmarks.torch.hf_models --json benchmarks/results/hf-models-h100.json --resume --seconds 300
    python -m benchmarks.torch.hf_models --tiny     # every case on the CPU, in seconds: times mean nothing
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.torch import layers
from benchmarks.torch.layers import Case, Work

LAYERS = 4


def decoder(dim: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    """Return the configuration of a decoder in the names of Llama's."""
    return {
        "hidden_size": dim, "intermediate_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "num_hidden_layers": LAYERS, "use_cache": False, **others,
    }  # fmt: skip


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("LlamaForCausalLM", decoder(4096, 14336, 32, 8, 128256)),
    "mistral-7b": ("MistralForCausalLM", decoder(4096, 14336, 32, 8, 32000)),
    "qwen2-7b": ("Qwen2ForCausalLM", decoder(3584, 18944, 28, 4, 152064)),
    "qwen3-8b": ("Qwen3ForCausalLM", decoder(4096, 12288, 32, 8, 151936, head_dim=128)),
    "gemma-2b": ("GemmaForCausalLM", decoder(2048, 16384, 8, 1, 256000, head_dim=256)),
    "gpt2-xl": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": LAYERS, "n_head": 25, "use_cache": False}),
    "bert-large": ("BertForMaskedLM", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": LAYERS,
    }),
    "vit-large": ("ViTForImageClassification", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": LAYERS,
        "num_labels": 1000,
    }),
}  # fmt: skip
"""transformers' class, and the configuration."""
FEW = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64,
    "max_position_embeddings": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32, "num_key_value_heads": 1,
    "head_dim": 16, "image_size": 8, "patch_size": 4, "num_labels": 16,
}  # fmt: skip
"""Sizes of small models."""


class Model(nn.Module):
    """A model whose forward returns its loss, or its logits without labels."""

    def __init__(self, name: str, is_tiny: bool) -> None:
        super().__init__()
        import transformers

        class_name, configuration = MODELS[name]
        of = getattr(transformers, class_name)
        if is_tiny:
            known = {*of.config_class().to_dict(), *of.config_class.attribute_map, *configuration}
            configuration = configuration | {key: x for key, x in FEW.items() if key in known}
        config = of.config_class(**configuration)
        for key, value in vars(config).items():
            if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
                setattr(config, key, 0.0)
        self.config, self.model = config, of(config)
        self.input = "pixel_values" if hasattr(config, "image_size") else "input_ids"

    def forward(self, x: Any, labels: Any = None) -> Any:
        outputs = self.model(**{self.input: x}, **({} if labels is None else {"labels": labels}))
        return outputs.logits if labels is None else outputs.loss


def make(model: str, batch: int, length: int, training: bool, is_tiny: bool = False) -> Work:
    """Return a model and random inputs; `length` is the tokens of a sequence."""
    plain = Model(model, is_tiny)
    config = plain.config
    if plain.input == "pixel_values":
        x = torch.randn(batch, 3, config.image_size, config.image_size)
        labels = torch.randint(config.num_labels, (batch,))
    else:
        x, labels = (torch.randint(config.vocab_size, (batch, length)) for _ in range(2))
    return Work(plain, (x, labels) if training else (x,))


def case(model: str, training: bool) -> Case:
    """Return the case of a model, of about 4096 tokens."""
    batch, length = (2, 2048) if model not in ("gpt2-xl", "bert-large", "vit-large") else (8, 512)
    sizes = {"model": model, "training": training, "length": length, "batch": 32 if model == "vit-large" else batch}
    return Case(make, sizes, {**sizes, "batch": 2, "length": 8, "is_tiny": True}, training)


CASES = {
    f"{model}{'' if training else '-prefill'}": case(model, training) for training in (True, False) for model in MODELS
}


if __name__ == "__main__":
    layers.main(__doc__, CASES)
