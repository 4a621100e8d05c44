"""Epilogues as graphs of what happens to the accumulator: front ends and passes.

Of the hardware it knows only what the functions of `functions.py` and `row_functions.py` lower to. To import it
registers the records of the package's operations. The names here are visitor trees, and the records of operations of
your own.
"""

# ruff: noqa: E402
from gemmsmith.lang import location

location.hide_frames(__file__)

from gemmsmith.core.graph import register_operation as register_operation
from gemmsmith.graph import operations  # noqa: F401 registers them
from gemmsmith.graph.approximations import fast_exp as fast_exp
from gemmsmith.graph.frontend.fusions import NAMED_FUSIONS as NAMED_FUSIONS
from gemmsmith.graph.frontend.values import call_row_function as call_row_function
from gemmsmith.graph.frontend.values import epilogue_function as epilogue_function
from gemmsmith.graph.frontend.visitors import EVT as EVT
from gemmsmith.graph.frontend.visitors import AccFetch as AccFetch
from gemmsmith.graph.frontend.visitors import AuxLoad as AuxLoad
from gemmsmith.graph.frontend.visitors import AuxStore as AuxStore
from gemmsmith.graph.frontend.visitors import ColBroadcast as ColBroadcast
from gemmsmith.graph.frontend.visitors import ColReduction as ColReduction
from gemmsmith.graph.frontend.visitors import Compute as Compute
from gemmsmith.graph.frontend.visitors import RowBroadcast as RowBroadcast
from gemmsmith.graph.frontend.visitors import RowReduction as RowReduction
from gemmsmith.graph.frontend.visitors import ScalarBroadcast as ScalarBroadcast
from gemmsmith.graph.frontend.visitors import ScalarReduction as ScalarReduction
from gemmsmith.graph.frontend.visitors import SrcFetch as SrcFetch
from gemmsmith.graph.frontend.visitors import TopologicalVisitor as TopologicalVisitor
from gemmsmith.graph.frontend.visitors import Void as Void
from gemmsmith.graph.function_costs import Cost as Cost
from gemmsmith.graph.functions import ZERO as ZERO
from gemmsmith.graph.functions import Function as Function
from gemmsmith.graph.functions import Refused as Refused
from gemmsmith.graph.reductions import Monoid as Monoid
from gemmsmith.graph.reductions import ReductionKind as ReductionKind
from gemmsmith.graph.reductions import register_reduction as register_reduction
from gemmsmith.graph.row_functions import RowFragment as RowFragment
from gemmsmith.graph.row_functions import RowFunction as RowFunction
