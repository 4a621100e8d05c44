"""The public models whose layers the built-in table is tuned for: fields of their config.json on Hugging Face."""

from __future__ import annotations

from typing import Any

from gemmsmith.cli.model_layers import layers_of

Fields = dict[str, Any]


def _config(
    hidden: int,
    wide: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    head_dim: int = 0,
    kind: str = "llama",
    **fields: int,
) -> Fields:  # fmt: skip
    """Return the fields by their names in config.json."""
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "head_dim": head_dim, **fields,
    }  # fmt: skip


def _experts(count: int, per_token: int, wide: int = 0, shared: int = 0) -> Fields:
    """Return the fields of a mixture of experts."""
    return {
        "num_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": wide,
        "n_shared_experts": shared,
    }  # fmt: skip


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_LATENT |= {"first_k_dense_replace": 1}
"""Multi-head latent attention of DeepSeek V2 and V3."""

PUBLIC_MODELS: dict[str, Fields] = {
    "Llama 2 13B": _config(5120, 13824, 40, 40, 32000),
    "Llama 2 70B": _config(8192, 28672, 64, 8, 32000),
    "Llama 3.1 8B": _config(4096, 14336, 32, 8, 128256),
    "Llama 3.1 70B": _config(8192, 28672, 64, 8, 128256),
    "Llama 3.1 405B": _config(16384, 53248, 128, 8, 128256),
    "Llama 4 Scout": _config(5120, 8192, 40, 8, 202048, 128, **_experts(16, 1)),
    "Llama 3.2 1B": _config(2048, 8192, 32, 8, 128256, 64),
    "Llama 3.2 3B": _config(3072, 8192, 24, 8, 128256, 128),
    "Qwen2.5 0.5B": _config(896, 4864, 14, 2, 151936),
    "Qwen2.5 1.5B": _config(1536, 8960, 12, 2, 151936),
    "Qwen2.5 3B": _config(2048, 11008, 16, 2, 151936),
    "Qwen2.5 7B": _config(3584, 18944, 28, 4, 152064),
    "Qwen2.5 14B": _config(5120, 13824, 40, 8, 152064),
    "Qwen2.5 32B": _config(5120, 27648, 40, 8, 152064),
    "Qwen2.5 72B": _config(8192, 29568, 64, 8, 152064),
    "Qwen3 0.6B": _config(1024, 3072, 16, 8, 151936, 128),
    "Qwen3 1.7B": _config(2048, 6144, 16, 8, 151936, 128),
    "Qwen3 4B": _config(2560, 9728, 32, 8, 151936, 128),
    "Qwen3 8B": _config(4096, 12288, 32, 8, 151936, 128),
    "Qwen3 14B": _config(5120, 17408, 40, 8, 151936, 128),
    "Qwen3 32B": _config(5120, 25600, 64, 8, 151936, 128),
    "Qwen3 30B-A3B": _config(2048, 6144, 32, 4, 151936, 128, **_experts(128, 8, 768)),
    "Qwen3 235B-A22B": _config(4096, 12288, 64, 4, 151936, 128, **_experts(128, 8, 1536)),
    "Mistral 7B": _config(4096, 14336, 32, 8, 32000),
    "Mistral Nemo": _config(5120, 14336, 32, 8, 131072, 128),
    "Mistral Small 24B": _config(5120, 32768, 32, 8, 131072, 128),
    "Mistral Large 2": _config(12288, 28672, 96, 8, 32768),
    "Mixtral 8x7B": _config(4096, 14336, 32, 8, 32000, **_experts(8, 2)),
    "Mixtral 8x22B": _config(6144, 16384, 48, 8, 32768, **_experts(8, 2)),
    "Gemma 2 2B": _config(2304, 9216, 8, 4, 256000, 256),
    "Gemma 2 9B": _config(3584, 14336, 16, 8, 256000, 256),
    "Gemma 2 27B": _config(4608, 36864, 32, 16, 256000, 128),
    "Gemma 3 1B": _config(1152, 6912, 4, 1, 262144, 256),
    "Gemma 3 4B": _config(2560, 10240, 8, 4, 262208, 256),
    "Gemma 3 12B": _config(3840, 15360, 16, 8, 262208, 256),
    "Gemma 3 27B": _config(5376, 21504, 32, 16, 262208, 128),
    "Phi-3 mini": _config(3072, 8192, 32, 32, 32064),
    "Phi-4": _config(5120, 17920, 40, 10, 100352),
    "DeepSeek V2-Lite": _config(2048, 10944, 16, 16, 102400, **_experts(64, 6, 1408, 2), **_LATENT),
    "DeepSeek V3": _config(7168, 18432, 128, 128, 129280, **_experts(256, 8, 2048, 1), **_LATENT, q_lora_rank=1536),
    "Kimi K2": _config(7168, 18432, 64, 64, 163840, **_experts(384, 8, 2048, 1), **_LATENT, q_lora_rank=1536),
    "gpt-oss 20B": _config(2880, 2880, 64, 8, 201088, 64, **_experts(32, 4)),
    "gpt-oss 120B": _config(2880, 2880, 64, 8, 201088, 64, **_experts(128, 4)),
    "GLM-4 9B": _config(4096, 13696, 32, 2, 151552, 128),
    "GLM-4.5 Air": _config(4096, 10944, 96, 8, 151552, 128, **_experts(128, 8, 1408, 1), first_k_dense_replace=1),
    "GLM-4.5": _config(5120, 12288, 96, 8, 151552, 128, **_experts(160, 8, 1536, 1), first_k_dense_replace=3),
    "BERT base": _config(768, 3072, 12, 12, 30522, kind="bert"),
    "BERT large": _config(1024, 4096, 16, 16, 30522, kind="bert"),
    "ViT-H": _config(1280, 5120, 16, 16, 0, kind="vit"),
    "Whisper large v3": _config(1280, 5120, 20, 20, 51866, kind="whisper"),
}

LEAST_N = 512
"""Narrower layers are left out: routers, and keys of few heads."""
PUBLIC_LAYERS = sorted(
    {(x.n, x.k) for model in PUBLIC_MODELS.values() for x in layers_of(model) if not x.experts and x.n >= LEAST_N}
)
"""(N, K) of the layers, without the experts'."""
