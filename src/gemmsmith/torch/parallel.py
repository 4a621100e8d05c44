"""torch.distributed.tensor.parallel's styles, which accept FusedLinear too, though it is not an nn.Linear."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import parallel

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
