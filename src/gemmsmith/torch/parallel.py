"""Styles for parallelize_module: torch's, which accept FusedLinear too, and one of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)

from gemmsmith.core.errors import ArgumentError
from gemmsmith.torch.mlp.layers import FusedLinear
from gemmsmith.torch.moe.experts import check_count


class _Fused(parallel.ParallelStyle):
    """Extends a style of torch, the next base class, to `FusedLinear`."""

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        """Distribute a module as torch does; a FusedLinear by way of an nn.Linear that shares its parameters and hooks.

        torch distributes modules of its own types only.
        """
        if not isinstance(module, FusedLinear):
            return super()._apply(module, device_mesh)
        linear = nn.Linear.__new__(nn.Linear)
        linear.__dict__ = module.__dict__  # shares its parameters and hooks
        super()._apply(linear, device_mesh)
        return module


class ColwiseParallel(_Fused, parallel.ColwiseParallel):
    """torch's ColwiseParallel, for `FusedLinear` too: shards the layer's columns. Arguments and errors are torch's."""


class RowwiseParallel(_Fused, parallel.RowwiseParallel):
    """torch's RowwiseParallel, for `FusedLinear` too: shards K. Arguments and errors are torch's."""


class ExpertParallel(parallel.ParallelStyle):
    """Distributes the experts of a `FusedMoE` (its submodule `experts`) over the ranks; each computes its own ones.

    Parameters become DTensors, Shard(0). Forward sums the results over the ranks, backward the gradients of x and of
    the routing weights. The router and the shared MLP stay as they are.

    With Shard(0) and plain tensors, ranks may have different numbers of tokens, also 0: the ranks exchange these
    numbers, for which the host waits, and add the missing rows. Under torch.compile and in a CUDA graph they exchange
    none, and must have equal numbers. With Replicate() all ranks have the same tokens; their number is compared on a
    CPU only.

    Args:
        input_layouts: placement of x, experts and weights along their tokens; Shard(0) gathers them from all ranks.
        output_layouts: placement of the result; Shard(0) scatters its tokens.
        use_local_output: whether the result is a plain tensor.

    Raises:
        ArgumentError: the module has other parameters than gate_up_proj and down_proj, or the number of experts is no
            multiple of the ranks; in forward, on every rank, ranks with Replicate() have different numbers of tokens,
            or those with Shard(0) have, and the result is not to be a plain tensor of Shard(0).
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        """Distribute the module's parameters, and install the conversions of its inputs and its result."""
        if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
            raise ArgumentError(f"ExpertParallel: got {type(module).__name__}; use the submodule experts of FusedMoE")
        check_count(len(module.gate_up_proj), device_mesh)
        return distribute_module(module, device_mesh, self._shard, self._inputs, self._output)

    @staticmethod
    def _shard(_: str, module: Any, mesh: Any) -> None:
        for name, x in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(sharded, x.requires_grad))

    def _inputs(self, module: Any, inputs: Any, mesh: Any) -> Any:
        """Return the module's inputs x, experts and weights as DTensors on `mesh`.

        Before, a rank with fewer tokens than others gets further rows, which no expert computes.
        """
        module.local_tokens = None
        if not any(isinstance(x, DTensor) for x in inputs) and self._exchanges_counts(mesh):
            inputs = self._even(module, inputs, mesh)
        layouts = [self.input_layouts] * mesh.ndim
        return tuple(
            x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, layouts, run_check=False) for x in inputs
        )

    def _exchanges_counts(self, mesh: Any) -> bool:
        """Return whether the ranks exchange the numbers of their tokens, for which the host waits.

        In compiled code and in the capture of a CUDA graph it cannot wait.
        """
        if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return False
        return bool(self.input_layouts == Shard(0) or mesh.device_type == "cpu")

    def _even(self, module: Any, inputs: Any, mesh: Any) -> Any:
        """Return the inputs with rows added that no expert computes (expert -1), so that all ranks have as many tokens.

        If ranks had different numbers, this rank's is stored in `module.local_tokens`, for `_output`. Raises
        ArgumentError, on all ranks, if the layouts do not allow different numbers.
        """
        x, experts, weights = inputs
        counts = torch.tensor([len(x), -len(x)], device=x.device)  # one MAX yields the most and minus the least
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
        most, least = (abs(count) for count in counts.tolist())
        if most == least:
            return inputs
        if self.input_layouts != Shard(0):
            raise ArgumentError(
                f"input_layouts: got {self.input_layouts} and {least} to {most} tokens on the ranks; use Shard(0), or "
                "the same tokens on each"
            )
        if self.output_layouts != Shard(0) or not self.use_local_output:
            raise ArgumentError(
                f"output_layouts: got {self.output_layouts} and {least} to {most} tokens on the ranks; use Shard(0), "
                "with use_local_output=True"
            )
        module.local_tokens = len(x)
        pad = partial(nn.functional.pad, pad=(0, 0, 0, most - len(x)))
        return pad(x), pad(experts, value=-1), pad(weights)

    def _output(self, module: Any, y: Any, mesh: Any) -> Any:
        """Return the module's result in the output's layout, without the rows that `_even` has added."""
        y = y.redistribute(placements=[self.output_layouts] * mesh.ndim)
        y = y.to_local() if self.use_local_output else y
        return y if module.local_tokens is None else y[: module.local_tokens]
