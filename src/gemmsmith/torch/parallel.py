"""Styles for parallelize_module: torch's, which accept FusedLinear too, and one of experts."""

from __future__ import annotations

from typing import Any

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
from gemmsmith.torch.modules import FusedLinear


class _Fused(parallel.ParallelStyle):
    def _apply(self, module: Any, device_mesh: Any) -> Any:
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

    Args:
        input_layouts: placement of x, experts and weights along their tokens; Shard(0) gathers them from all ranks.
        output_layouts: placement of the result; Shard(0) scatters its tokens.
        use_local_output: whether the result is a plain tensor.

    Raises:
        ArgumentError: the module has other parameters than gate_up_proj and down_proj.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
            raise ArgumentError(f"ExpertParallel: got {type(module).__name__}; use the submodule experts of FusedMoE")
        return distribute_module(module, device_mesh, self._shard, self._inputs, self._output)

    @staticmethod
    def _shard(_: str, module: Any, mesh: Any) -> None:
        for name, x in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(sharded, x.requires_grad))

    def _inputs(self, _: Any, inputs: Any, mesh: Any) -> Any:
        layouts = [self.input_layouts] * mesh.ndim
        return tuple(
            x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, layouts, run_check=False) for x in inputs
        )

    def _output(self, _: Any, y: Any, mesh: Any) -> Any:
        y = y.redistribute(placements=[self.output_layouts] * mesh.ndim)
        return y.to_local() if self.use_local_output else y
