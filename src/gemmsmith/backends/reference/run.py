"""A product and its epilogue in float64, rounded as the results are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmsmith.arrays import ArrayInfo, as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.product import exact, rounded
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.graph import Graph
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.outputs import result_argument


def run(graph: Graph, arguments: Mapping[str, ArrayInfo | float]) -> None:
    """Writes the graph's results. `arguments`: arrays on the CPU and numbers, by the names of their Pointers."""
    arrays: dict[str, Any] = {
        name: as_numpy(x, name) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()
    }
    operands = {o.name: arrays[operand_argument(o.name)] for o in graph.operands}
    values = execute(graph, exact(arrays["a"], arrays["b"]), operands)
    for r in graph.results:
        out = arrays[result_argument(r.name)]
        out[...] = rounded(values[r.name], as_dtype(out.dtype))
