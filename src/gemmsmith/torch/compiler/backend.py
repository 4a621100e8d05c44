"""torch.compile with products that have epilogues: a pass in Inductor, and a backend that is Inductor with it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import gemmsmith
from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.compiler.factors import move
from gemmsmith.torch.compiler.fuse import fuse
from gemmsmith.tuning.table import kept_bytes


class _Pass(CustomGraphPass):
    def uuid(self) -> str:
        """What the pass depends on, for Inductor's caches: gemmsmith's sources and tables, and the GPU."""
        return hashlib.sha256(f"{_package()} {_gpus()}".encode() + kept_bytes()).hexdigest()


class Division(_Pass):
    """The first pass, over a forward and its backward, before they are divided into two graphs."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        move(graph)


class Fusion(_Pass):
    """The second pass: it runs over each graph, forward and backward, before Inductor fuses what is left."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        fuse(graph)


PASSES = {"joint_custom_pre_pass": Division(), "post_grad_custom_pre_pass": Fusion()}
"""By the names of Inductor's options for them."""


@lru_cache(maxsize=1)
def _package() -> str:
    """The version and a digest of the package's files."""
    digest = hashlib.sha256(gemmsmith.__version__.encode())
    waiting = [resources.files("gemmsmith")]
    while waiting:
        for file in sorted(waiting.pop().iterdir(), key=lambda x: x.name):
            if file.is_dir():
                waiting.append(file)
            elif file.name.endswith((".py", ".json")):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _gpus() -> list[str]:
    devices = range(torch.cuda.device_count())
    return [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}" for i in devices]


def options(**others: Any) -> dict[str, Any]:
    """For torch.compile(model, options=...): Inductor fuses what follows products into gemmsmith's.

    `others`: Inductor's options, such as max_autotune=True. Raises ArgumentError where they have a pass of their own in
    the same place.
    """
    for name in PASSES:
        if others.get(name) is not None:
            raise ArgumentError(f"{name}: got {others[name]!r}, which takes the place of gemmsmith's; leave it out")
    return {**others, **PASSES}


def backend(module: Any, inputs: Any, *, mode: str | None = None, **named: Any) -> Any:
    """torch.compile(model, backend="gemmsmith"): Inductor of that mode, or with those `options`, and with the pass."""
    patches = options(**(list_mode_options(mode) if mode else {}), **named.get("options", {}))
    return compile_fx(module, inputs, config_patches=patches)
