"""Explanation of what torch.compile with gemmsmith's passes replaces in a model, and why it does not fuse the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.utils._pytree import tree_leaves

from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.torch.compiler.backend import options
from gemmsmith.torch.compiler.fuse import Outcome, fuse
from gemmsmith.torch.compiler.kernel_choice import Times
from gemmsmith.torch.compiler.measure import configured_timer, time_on_gpu
from gemmsmith.torch.compiler.nodes import size_hints

BYTES_PER_MB = 1e6
TIMES = ("fused", "unfused", "plain", "torch")
"""The table's columns of times, which are the attributes of `Times` with these names."""


@dataclass(frozen=True)
class Explanation:
    """The matmuls of each graph that torch.compile makes of a model; `print` shows them as a table.

    The graphs are in the order in which they are compiled: a forward graph, then its backward graph if there is one,
    and so on for each graph break. On a GPU the table has times in us. "fused": the matmul with its epilogue. "plain",
    "torch": gemmsmith's and torch's kernel without an epilogue. "unfused": the faster of these two and the kernels that
    fusing would make unnecessary. A tilde marks estimates; the time of unnecessary kernels is always estimated.
    """

    graphs: tuple[tuple[Outcome, ...], ...]

    @property
    def matmuls(self) -> list[Outcome]:
        """The matmuls of all graphs."""
        return [outcome for graph in self.graphs for outcome in graph]

    @property
    def fused(self) -> list[Outcome]:
        """The matmuls with a fused epilogue."""
        return [outcome for outcome in self.matmuls if outcome.epilogue]

    @property
    def plain(self) -> list[Outcome]:
        """The matmuls that gemmsmith computes without a fused epilogue, since that is faster."""
        return [outcome for outcome in self.matmuls if outcome.replaced and not outcome.epilogue]

    def __str__(self) -> str:
        """Return a summary, and a table of the matmuls of each graph."""
        saved = sum(x.bytes_saved for x in self.fused) / BYTES_PER_MB
        counts = f"{len(self.fused)} of {len(self.matmuls)} matmuls have fused epilogues"
        if self.plain:
            counts += f"; replaced without: {len(self.plain)}"
        lines = [f"{counts}; memory traffic saved: {saved:.4g} MB"]
        for number, graph in enumerate(self.graphs):
            lines += _format_graph(number, graph)
        return "\n".join(lines)

    def plot(self, path: Path | str) -> None:
        """Plot the fused epilogues, each once, under the names of its matmuls.

        Args:
            path: the file to write; its suffix is the format.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ValueError: no matmul has a fused epilogue.
        """
        from gemmsmith.graph.frontend.show import plot_graphs

        names: dict[EpilogueGraph, list[str]] = {}
        for outcome in self.fused:
            if outcome.epilogue:
                names.setdefault(outcome.epilogue, []).append(outcome.matmul)
        if not names:
            raise ValueError("no matmul has a fused epilogue; print the explanation to see why")
        plot_graphs([(", ".join(of), graph) for graph, of in names.items()], path)


def _format_graph(number: int, graph: tuple[Outcome, ...]) -> list[str]:
    """Return lines of text: a heading, and a line for each matmul of a graph, in columns. `number`: the graph's."""
    columns = [name for name in TIMES if any(_format_us(x.times, name) for x in graph)]
    rows = [(f"graph {number}", "us" if columns else "", *columns, "", "")]
    for x in graph:
        times = [_format_us(x.times, name) for name in columns]
        rows.append((f"  {x.matmul}", " x ".join(map(str, size_hints(x.shape))), *times, _describe(x), x.source_line))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(2, 2 + len(columns))

    def align(i: int, x: str) -> str:
        return x.rjust(widths[i]) if i in numbers else x.ljust(widths[i])

    return ["  ".join(map(align, range(len(row)), row)).rstrip() for row in rows]


def _format_us(times: Times | None, name: str) -> str:
    """Return the time `name`, one of TIMES, as text, an estimated one with a tilde; "" if there is none."""
    us = getattr(times, name, None)
    return "" if times is None or us is None else f"{'' if times.measured else '~'}{us:.1f}"


def _describe(x: Outcome) -> str:
    """Return what was fused into a matmul and the traffic saved, or the reason why nothing was."""
    if x.reason:
        return f"{'plain: ' if x.replaced else '- '}{x.reason}"
    return f"{', '.join(x.operations) or 'another dtype'}: {x.bytes_saved / BYTES_PER_MB:.3g} MB saved"


def explain(model: Callable[..., Any], *inputs: Any, measure: bool = False, **named: Any) -> Explanation:
    """Explain what torch.compile with gemmsmith's passes would replace in a model.

    Torch traces `model(*inputs, **named)` as torch.compile would, and its backward pass if a result requires grad. In
    place of the compiled graphs, functions run that return zeros. So the model's state does not change, except by code
    at a graph break, which runs.

    Args:
        model: a module or function.
        *inputs: its positional arguments.
        measure: whether to time kernels of matmuls on the GPU and to choose by these times, as with max_autotune.
        **named: its keyword arguments.

    Returns:
        The matmuls of each graph with their fused epilogues, or the reasons why there is none, and on a GPU the times.

    Raises:
        Exception: whatever torch.compile raises.
    """
    graphs: list[tuple[Outcome, ...]] = []

    def compile_graph(module: Any, _: Any, **__: Any) -> Any:
        """Record what the pass does with a graph, and return a function that returns zeros like its results."""
        graphs.append(tuple(fuse(module.graph, time_on_gpu if measure else configured_timer())))
        results = next(node for node in module.graph.nodes if node.op == "output").args[0]
        fakes = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in results]
        return make_boxed_func(lambda *_: [_zeros(x) for x in fakes])

    def backend(module: Any, example_inputs: Any) -> Any:
        return compile_fx(module, example_inputs, inner_compile=compile_graph, config_patches=options())

    with torch._inductor.config.patch(force_disable_caches=True), functorch_config.patch(enable_autograd_cache=False):
        return _explained(model, inputs, named, backend, graphs)


def _explained(
    model: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], backend: Callable[..., Any],
    graphs: list[tuple[Outcome, ...]],
) -> Explanation:  # fmt: skip
    """Compile and run a model, and its backward pass if it has one, and return the explanation."""
    outputs = torch.compile(model, backend=backend)(*inputs, **named)
    differentiable = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    wrt = [x for x in [*parameters, *tree_leaves((inputs, named))] if isinstance(x, torch.Tensor) and x.requires_grad]
    if differentiable and wrt:
        torch.autograd.grad(differentiable, wrt, [torch.zeros_like(x) for x in differentiable], allow_unused=True)
    return Explanation(tuple(graphs))


def _zeros(fake: Any) -> Any:
    """Return a tensor of zeros, or a number, like the fake result of a graph; symbolic extents become their hints."""
    if isinstance(fake, torch.Tensor):
        zeros = torch.empty_strided(
            size_hints(fake.shape), size_hints(fake.stride()), dtype=fake.dtype, device=fake.device
        )
        return zeros.zero_()
    return size_hints([fake])[0] if isinstance(fake, torch.SymInt) else fake
