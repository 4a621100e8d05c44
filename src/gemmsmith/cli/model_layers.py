"""The matrix products of a model's layers, from its config.json as Hugging Face publishes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gemmsmith.core.errors import ArgumentError


class Layer(NamedTuple):
    """A weight (n, k), or one for each of `experts`, of which each token takes `experts_per_token`."""

    name: str
    n: int
    k: int
    experts: int = 0
    experts_per_token: int = 1


UNGATED = {
    "bert", "roberta", "distilbert", "electra", "deberta-v2", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom",
    "falcon", "phi", "vit", "dinov2", "clip", "siglip", "whisper", "starcoder2", "mpt", "t5",
}  # fmt: skip
"""Values of model_type whose feed-forward layers have no gate."""


def layers_of(config: Mapping[str, Any]) -> list[Layer]:
    """Return the layers, each (n, k) once.

    Raises ArgumentError if the config lacks what they follow from.
    """
    text = {**config, **config.get("text_config", {})}
    unique: dict[tuple[int, ...], Layer] = {}
    for layer in _all_layers(text):
        unique.setdefault(layer[1:], layer)
    return list(unique.values())


def _all_layers(config: Mapping[str, Any]) -> Iterator[Layer]:
    """Yield the layers of attention, of the feed-forward part, of the experts, and the output layer."""
    hidden = _first(config, "hidden_size", "n_embd", "d_model", "hidden_dim")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
    yield from _attention(config, hidden, heads)
    wide = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim") or config.get("d_ff")
    wide = int(wide or 4 * hidden)
    gated = config.get("model_type") not in UNGATED
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    narrow = int(config.get("moe_intermediate_size") or wide)
    if experts:
        top = int(config.get("num_experts_per_tok") or config.get("experts_per_token") or 1)
        yield Layer("experts' gate and up", 2 * narrow, hidden, experts, top)
        yield Layer("experts' down", hidden, narrow, experts, top)
        yield Layer("router", experts, hidden)
        shared = int(config.get("n_shared_experts") or 0) * narrow
        if shared := shared or int(config.get("shared_expert_intermediate_size") or 0):
            yield Layer("shared expert's gate and up", 2 * shared, hidden)
            yield Layer("shared expert's down", hidden, shared)
    if not experts or config.get("first_k_dense_replace"):
        if gated:
            yield Layer("gate and up", 2 * wide, hidden)
        yield Layer("up", wide, hidden)
        yield Layer("down", hidden, wide)
    if vocabulary := config.get("vocab_size"):
        yield Layer("output", int(vocabulary), hidden)


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> Iterator[Layer]:
    """Yield the projections of attention: multi-head latent, or with separate and joined queries, keys and values."""
    if latent := config.get("kv_lora_rank"):
        rope, nope = (int(config[f"qk_{name}_head_dim"]) for name in ("rope", "nope"))
        values = int(config["v_head_dim"])
        if rank := config.get("q_lora_rank"):
            yield Layer("queries, down", int(rank), hidden)
        yield Layer("queries", heads * (nope + rope), int(rank or hidden))
        yield Layer("keys and values, down", int(latent) + rope, hidden)
        yield Layer("keys and values", heads * (nope + values), int(latent))
        yield Layer("attention's output", hidden, heads * values)
        return
    size = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)
    yield Layer("queries", heads * size, hidden)
    yield Layer("keys", kv_heads * size, hidden)
    yield Layer("queries, keys and values", (heads + 2 * kv_heads) * size, hidden)
    yield Layer("attention's output", hidden, heads * size)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that the config has. Raises ArgumentError if it has none."""
    value = next((config[name] for name in names if config.get(name)), None)
    if value is None:
        raise ArgumentError(f"config: got none of {', '.join(names)}; use a model's config.json")
    return int(value)
