"""A product and its epilogue in float64, rounded as the results are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmsmith.arrays import ArrayInfo, as_numpy
from gemmsmith.backends.reference.epilogue import execute
from gemmsmith.backends.reference.product import exact, in_blocks, multiplied, rounded
from gemmsmith.core.dtypes import as_dtype
from gemmsmith.core.graph import Graph
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.outputs import result_argument


def run(
    graph: Graph, mma: Mma, arguments: Mapping[str, ArrayInfo | float], block_rows: Mapping[str, int] | None = None,
    *, low_parts: bool = False,
) -> None:  # fmt: skip
    """Writes the graph's results of a product by `mma`. `arguments`: arrays on the CPU and numbers, by their Pointers'
    names. `block_rows`: for how many rows (columns, of b) one of the block scales is, by the names of those there are.
    `low_parts`: what `mma` does not read of its operands counts, too.
    """
    arrays: dict[str, Any] = {
        name: as_numpy(x, name) if isinstance(x, ArrayInfo) else x for name, x in arguments.items()
    }
    operands = {o.name: arrays[operand_argument(o.name)] for o in graph.operands}
    a, b = arrays["a"], arrays["b"]
    if block_rows:
        scales = [arrays[operand_argument(name)] if name in block_rows else None for name in SCALE_NAMES]
        product = in_blocks(a, b, *scales)
    else:
        product = exact(a, b) if low_parts else multiplied(a, b, mma)
    values = execute(graph, product, operands)
    for r in graph.results:
        out = arrays[result_argument(r.name)]
        out[...] = rounded(values[r.name], as_dtype(out.dtype, integers=True))
