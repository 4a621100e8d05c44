"""The problems for which speed is claimed, by class."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import gemmsmith

Shape = tuple[int, int, int]
SCALE_BLOCK = 128
SMALL = gemmsmith.Config(tile=(64, 64, 128), cluster=(1, 1), consumers=1)
"""A config that every GEMM supports, for its problem as it is given: a chosen config may transpose it."""

FLAGSHIPS: list[Shape] = [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 14336), (4096, 28672, 4096)]
CUBES: list[Shape] = [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384)]
ROWS = (1, 16, 64, 128, 256, 512, 2048, 4096, 8192)
"""M: numbers of tokens."""
WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (57344, 8192),
           (8192, 28672), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (7168, 2048)]  # fmt: skip
"""(N, K) of layers of Llama 3 8B and 70B, and of DeepSeek V3."""
LAYERS: list[Shape] = [(m, n, k) for m in ROWS for n, k in WEIGHTS]
UNALIGNED: list[Shape] = [
    (dice.randint(1, 10000), dice.randint(1, 10000), dice.randint(1, 10000))
    for dice in [random.Random(2026)]
    for _ in range(40)
]


MODELS = {
    "Llama 7B": 4096, "Llama 13B": 5120, "Llama 33B": 6656, "Llama 65B": 8192, "Llama 3.2 1B": 2048,
    "Llama 3.2 3B": 3072, "Llama 3 8B": 4096, "Llama 3 405B": 16384, "Llama 4 Scout": 5120, "TinyLlama": 2048,
    "Mistral 7B": 4096, "Mistral Nemo": 5120, "Mistral Large 2": 12288, "Mixtral 8x7B": 4096, "Mixtral 8x22B": 6144,
    "Qwen 7B": 4096, "Qwen 14B": 5120, "Qwen 72B": 8192, "Qwen2 0.5B": 896, "Qwen2 1.5B": 1536, "Qwen2 7B": 3584,
    "Qwen2.5 3B": 2048, "Qwen2.5 32B": 5120, "Qwen3 0.6B": 1024, "Qwen3 4B": 2560, "Qwen3 8B": 4096,
    "Qwen3 30B-A3B": 2048, "Gemma 2B": 2048, "Gemma 7B": 3072, "Gemma 2 2B": 2304, "Gemma 2 9B": 3584,
    "Gemma 2 27B": 4608, "Gemma 3 1B": 1152, "Gemma 3 4B": 2560, "Gemma 3 12B": 3840, "Gemma 3 27B": 5376,
    "Phi-1.5": 2048, "Phi-2": 2560, "Phi-3 mini": 3072, "Phi-3 medium": 5120, "DeepSeek LLM 7B": 4096,
    "DeepSeek LLM 67B": 8192, "DeepSeek V2-Lite": 2048, "DeepSeek V2": 5120, "DeepSeek V3": 7168, "GPT-2": 768,
    "GPT-2 medium": 1024, "GPT-2 large": 1280, "GPT-2 XL": 1600, "GPT-Neo 2.7B": 2560, "GPT-J 6B": 4096,
    "GPT-NeoX 20B": 6144, "gpt-oss 120B": 2880, "Pythia 410M": 1024, "Pythia 1.4B": 2048, "Pythia 12B": 5120,
    "OPT 350M": 1024, "OPT 2.7B": 2560, "OPT 30B": 7168, "OPT 66B": 9216, "OPT 175B": 12288, "BLOOM 1B1": 1536,
    "BLOOM 3B": 2560, "BLOOM 176B": 14336, "Falcon 7B": 4544, "Falcon 40B": 8192, "Falcon 180B": 14848, "Yi 6B": 4096,
    "Yi 34B": 7168, "InternLM2 7B": 4096, "InternLM2 20B": 6144, "ChatGLM3 6B": 4096, "GLM-4 9B": 4096,
    "Baichuan 13B": 5120, "MPT 7B": 4096, "MPT 30B": 7168, "StarCoder": 6144, "StarCoder2 3B": 3072,
    "StarCoder2 7B": 4608, "Command R": 8192, "Command R+": 12288, "DBRX": 6144, "Grok-1": 6144,
    "Nemotron-4 340B": 18432, "OLMo 1B": 2048, "OLMo 7B": 4096, "SmolLM 135M": 576, "SmolLM 360M": 960,
    "MiniCPM 2B": 2304, "Kimi K2": 7168, "BERT base": 768, "BERT large": 1024, "DeBERTa V2 XL": 1536, "T5 small": 512,
    "T5 base": 768, "T5 large": 1024, "Whisper tiny": 384, "Whisper base": 512, "Whisper small": 768,
    "Whisper medium": 1024, "Whisper large": 1280, "ViT-B": 768, "ViT-L": 1024, "ViT-H": 1280, "ViT-G": 1664,
    "ViT-22B": 6144, "DINOv2 ViT-g": 1536, "SigLIP So400m": 1152, "DiT-XL": 1152, "FLUX.1": 3072, "ESM-2 3B": 2560,
    "ESM-2 15B": 5120,
}  # fmt: skip
"""Hidden sizes of public models."""
FACTORS = (1, 1.5, 2.67, 8 / 3, 3, 3.5, 4)
"""The wider side of a layer over the hidden size: feed-forward layers, and Q, K and V together."""
MULTIPLES = (8, 64, 256)
"""The wider side is rounded up to one of these."""
LARGEST = 1.05e12
"""MNK: 3 ms at 700 TFLOP/s."""
CLASSES = {"up to 64 rows": range(65), "65 to 512 rows": range(65, 513), "more rows": range(513, 1 << 20)}
"""Classes of layers by their rows."""
POWER_LIMITED = 5e10
"""FLOPs from which a GEMM is power-limited in blocks of a second."""


def layers(count: int, seed: int, without: Sequence[Shape] = ()) -> list[Shape]:
    """Return layers of the widths of public models.

    (N, K) are neither in WEIGHTS nor a cube's, but may be those of models.py. M is log-uniform from 1 to 32768, every
    other one a power of two. The generator is its own: random() gives the same numbers in every Python.
    """
    draw = random.Random(seed).random
    tuned, hidden = {*WEIGHTS, *((n, k) for _, n, k in CUBES)}, list(MODELS.values())
    shapes: list[Shape] = []

    def one_of(options: Sequence[Any]) -> Any:
        return options[int(draw() * len(options))]

    while len(shapes) < count:
        if len(shapes) % 2:
            m = 2 ** int(draw() * 16)
        else:
            m = 1
            while m & (m - 1) == 0:  # a power of two
                m = round(2 ** (draw() * 15))
        while True:
            narrow, multiple = one_of(hidden), one_of(MULTIPLES)
            wide = -int(-narrow * one_of(FACTORS) // multiple) * multiple
            n, k = one_of(((wide, narrow), (narrow, wide)))
            if (n, k) not in tuned and m * n * k <= LARGEST and (m, n, k) not in (*shapes, *without):
                break
        shapes.append((m, n, k))
    return shapes


UNSEEN = layers(200, 20261123)
"""Shapes that the model is not fitted to. Some are layers of models.py, which the table holds; autotuned.py has others.
"""
TRAINING = layers(400, 1, UNSEEN)
"""Shapes that the model is fitted to (survey.py)."""


TOKENS = (2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Rows of a training step."""
SQUARES: list[Shape] = [(n, n, n) for n in (704, 1408, 1920, 2432, 3200, 4224, 5312, 7424, 9472)]
OBLONG: list[Shape] = [
    (16384, 1088, 3200), (1088, 16384, 3200), (1088, 3200, 16384), (8192, 5376, 1088), (3200, 12800, 2432),
    (512, 6400, 6400), (6400, 512, 6400), (2048, 2432, 16384), (4096, 11520, 2432), (20480, 704, 2432),
    (1000, 5000, 3000),
]  # fmt: skip
"""With SQUARES, the shapes for all layouts: neither tuned nor fitted to."""


def trained(count: int, seed: int, without: Sequence[Shape] = ()) -> list[Shape]:
    """Return (M, N, K) of layers of public models, with M of TOKENS.

    (N, K) of none of their `roles` is tuned or fitted to, or that of a GEMM of the layers `without`.
    """
    dice, others = random.Random(seed).random, [product for layer in without for product in roles(layer).values()]
    known = {(n, k) for _, n, k in (*LAYERS, *CUBES, *UNALIGNED, *UNSEEN, *TRAINING, *others)}
    shapes: list[Shape] = []

    def one_of(options: Sequence[Any]) -> Any:
        return options[int(dice() * len(options))]

    while len(shapes) < count:
        m, narrow, multiple = one_of(TOKENS), one_of(list(MODELS.values())), one_of(MULTIPLES)
        wide = -int(-narrow * one_of(FACTORS) // multiple) * multiple
        n, k = one_of(((wide, narrow), (narrow, wide)))
        products = roles((m, n, k)).values()
        if m * n * k <= LARGEST and not known & {x[1:] for x in products} and (n, k) not in {x[1:] for x in shapes}:
            shapes.append((m, n, k))
    return shapes


def roles(layer: Shape) -> dict[str, Shape]:
    """Return the three GEMMs of a training step of a layer, by layout.

    The layer has M tokens, N outputs and K inputs; its GEMMs are the forward one (nt), the input's gradient (nn), and
    the weight's (tn).
    """
    m, n, k = layer
    return {"nt": (m, n, k), "nn": (m, k, n), "tn": (n, k, m)}


def token_count(row: Mapping[str, Any]) -> int:
    """Return the tokens of a row of one of a layer's `roles`: its M, or K for the weight's gradient."""
    return int(row["k" if row["layout"] == "tn" else "m"])


def specs(shape: Shape, dtype: str = "bf16", layout: str = "nt") -> tuple[gemmsmith.Spec, gemmsmith.Spec]:
    """Return stand-ins for A and B, row-major (n) or column-major (t)."""
    m, n, k = shape
    strides = (1, m) if layout[0] == "t" else None, (1, k) if layout[1] == "t" else None
    return gemmsmith.Spec((m, k), dtype, strides[0]), gemmsmith.Spec((k, n), dtype, strides[1])


def in_blocks(shapes: Sequence[Shape]) -> list[Shape]:
    """Return shapes with N and K that all contenders with block scales support: multiples of 64 and of 128."""
    return list(dict.fromkeys((m, -(-n // 64) * 64, -(-k // SCALE_BLOCK) * SCALE_BLOCK) for m, n, k in shapes))


def block_scaled(
    shape: Shape,
) -> tuple[tuple[gemmsmith.Spec, gemmsmith.Spec], dict[str, gemmsmith.Spec]]:
    """Return stand-ins for K-major FP8 operands, and their scales.

    Those of A's rows are contiguous along M, and each scale block along K begins at a multiple of 16 bytes; those of
    blocks of B are padded likewise.
    """
    m, n, k = shape
    blocks, wide = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    operands = gemmsmith.Spec((m, k), "fp8_e4m3"), gemmsmith.Spec((k, n), "fp8_e4m3", (1, k))
    scale_b = gemmsmith.Spec((blocks, wide), "fp32", (1, -(-blocks // 4) * 4))
    return operands, {"scale_a": gemmsmith.Spec((m, blocks), "fp32", (1, -(-m // 4) * 4)), "scale_b": scale_b}


def classes(shape: Shape) -> list[str]:
    """Return the classes of a shape of the suite."""
    m, n, k = shape
    if shape in UNALIGNED:
        return ["unaligned"]
    if shape in UNSEEN:
        return ["unseen"]
    names = ["cubes" if shape in CUBES else "layers", "all"]
    if m <= 64:
        names.append("memory-bound, M <= 64")
    if 128 <= m <= 512:
        names.append("middle, M 128 to 512")
    if 2 * m * n * k >= 1e11:
        names.append("large, 2MNK >= 1e11")
    return names


SWEPT = trained(20, 20261126)
SWEPT += trained(20, 20261128, SWEPT)
"""Layers of training steps whose GEMMs the model is fitted to (sweep-layouts-h100.json, sweep-choice-h100.json)."""
TRAINED = trained(20, 20261130, SWEPT)
"""Layers of training steps."""
SUITE: list[Shape] = list(dict.fromkeys([*CUBES, *LAYERS]))
