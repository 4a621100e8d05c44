"""The styles of torch.distributed.tensor.parallel that take FusedLinear, which is no nn.Linear, too."""

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
        linear.__dict__ = module.__dict__  # the same parameters and hooks
        super()._apply(linear, device_mesh)
        return module


class ColwiseParallel(_Fused, parallel.ColwiseParallel):
    """torch's, for `FusedLinear` too: the layer's columns are split. Arguments and errors are torch's."""


class RowwiseParallel(_Fused, parallel.RowwiseParallel):
    """torch's, for `FusedLinear` too: K is split. Arguments and errors are torch's."""
