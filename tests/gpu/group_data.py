"""Random tables and rows of groups on a GPU."""

from __future__ import annotations

import random
from typing import Any

import torch

from gemmsmith import Config

SIZES = (0, 0, 1, 7, 63, 64, 65, 127, 128, 129, 255, 300)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
GROUPED_CONFIGS = [
    None,
    Config("cooperative", (256, 128, 64), (2, 1)),
    Config("cooperative", (128, 256, 64), (1, 1), raster="n", alias_epilogue=True),
    Config("cooperative", (192, 128, 64), (1, 1), 3, 3),
    Config("cooperative", (256, 160, 64), (1, 2), 3, swap_ab=True),
    Config("cooperative", (128, 16, 64), (1, 1), 6, swap_ab=True),
    Config("cooperative", (64, 8, 256), (1, 1), 5, 1, swap_ab=True),
    Config("pingpong", (64, 256, 64), (2, 1)),
    Config("pingpong", (128, 128, 64), (1, 1)),
    Config("pingpong", (64, 64, 64), (1, 2), swap_ab=True),
    Config("mma_multistage", (128, 128, 32), (1, 1), 3),
]
"""Of each schedule, and with few and with many columns."""


def normal(*shape: int, dtype: str = "bf16") -> Any:
    return torch.randn(shape, device="cuda").to(DTYPES[dtype])


def table(values: Any) -> Any:
    return torch.as_tensor(values, device="cuda", dtype=torch.int32)


def drawn(rng: random.Random, groups: int) -> list[int]:
    return [rng.choice(SIZES) for _ in range(groups)]


def random_rows(count: int, extent: int) -> Any:
    """Return indices with repeats, of which some are negative and some too large."""
    rows = torch.randint(0, extent, (count,), device="cuda", dtype=torch.int32)
    for share, index in ((0.1, -1), (0.02, extent), (0.02, 2**31 - 1), (0.02, -(2**31))):
        rows[torch.rand(count, device="cuda") < share] = index
    return rows


def check(d: Any, a: Any, b: Any, dtype: str = "bf16") -> None:
    """Compare a group's result with float64, element by element."""
    product = a.double() @ b.double()
    epsilon = 2.0**-8 if dtype == "bf16" else 2.0**-11
    allowed = epsilon * 1.01 * product.abs() + 2.0**-16 * max(1, a.shape[-1])
    assert bool(((d.double() - product).abs() <= allowed).all())
