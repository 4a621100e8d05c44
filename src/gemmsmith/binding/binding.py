"""A GEMM and its epilogue, bound to arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmsmith.arrays import ArrayInfo, arrays_overlap, describe, empty_like_kind
from gemmsmith.binding import scaling
from gemmsmith.binding.checks import Multiplication
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.binding.results import arrange_results
from gemmsmith.core.config import Config
from gemmsmith.core.design import get_design
from gemmsmith.core.dtypes import DType
from gemmsmith.core.epilogue_spec import EpilogueSpec
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.frozen import changed
from gemmsmith.core.graph import EpilogueGraph
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.make_spec import make_spec
from gemmsmith.core.mma import Mma
from gemmsmith.core.problem import MAX_EXTENT, SCALE_NAMES, Matrix, Problem
from gemmsmith.core.product import Product, Role
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.inputs import operand_argument
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.kernels.pack import operand_packings, replace_packed_operands, tf32_residual_packings

_SCALE_B = operand_argument(SCALE_NAMES["b"])


@dataclass(frozen=True)
class Binding:
    """A GEMM and its epilogue, bound to arrays. The user's orientation is D = A @ B; the kernel's may be D^T.

    Attributes:
        shape: (m, n) or (batch, m, n).
        out_dtype: Dtype of matrix results for which the epilogue names none.
        scale_granularity: Rows (columns, of b) per block scale, 1 or 128, by operand ("a", "b") with block scales.
        source_graph: The epilogue as the user wrote it, in the user's orientation.
        graph: The epilogue after the passes, in the user's orientation.
        arguments: Every array and number, by its Pointer's name. A result that the caller does not give has its
            `result_strides` and address 0; only results are writable.
        results: The given arrays of results, by name.
        problem: The GEMM that the kernel computes; its D is the first matrix result.
        product: The product that is computed, if it is not torch.matmul's: the design's, or a grouped GEMM's.
        swapped: Whether the kernel computes D^T = B^T @ A^T, so that the problem's `a` is the user's b.
        spec: The epilogue of the kernel, in the kernel's orientation.
        arrays: The epilogue's operands and matrix results as the kernel sees them, and arrays of the product, by name.
        like: The caller's a, in whose library results are allocated.
        depends_on_rows: Whether another M might have another graph.
    """

    shape: tuple[int, ...]
    out_dtype: DType
    multiplication: Multiplication
    scale_granularity: Mapping[Role, int]
    source_graph: EpilogueGraph
    graph: EpilogueGraph
    arguments: Mapping[str, ArrayInfo | float]
    results: Mapping[str, Any]
    product: Product | None
    problem: Problem
    swapped: bool
    spec: EpilogueSpec
    arrays: Mapping[str, Matrix]
    like: Any = field(default=None, compare=False)
    depends_on_rows: bool = False

    @property
    def a(self) -> ArrayInfo:
        a = self.arguments["a"]
        assert isinstance(a, ArrayInfo)
        return a

    @property
    def mma(self) -> Mma:
        return self.multiplication.mma

    @property
    def promoted(self) -> bool:
        """Whether sums are promoted to fp32 every 128 bytes of k."""
        return self.multiplication.promoted

    @property
    def grouping(self) -> Grouping | None:
        grouping = self.problem.grouping
        return grouping.transposed() if grouping and self.swapped else grouping

    @property
    def value(self) -> Any:
        """The results in the form in which the epilogue returned them: one, a tuple, or a dict."""
        return arrange_results(self.results, self.graph.result_names)

    @property
    def scales(self) -> list[str]:
        """The kinds of scales of a and of b in words, such as "a tensor scale", for comparisons and messages."""
        return [scaling.describe_granularity(role, self.graph, self.scale_granularity) for role in SCALE_NAMES]

    @property
    def unallocated_results(self) -> dict[str, ArrayInfo]:
        """The shapes, dtypes and strides of the results that have no array yet, by name."""
        missing = [name for name in self.graph.result_names if name not in self.results]
        infos = {name: self.arguments[result_argument(name)] for name in missing}
        return {name: x for name, x in infos.items() if isinstance(x, ArrayInfo)}

    def transposed(self) -> Binding:
        """Return the binding with the kernel's orientation changed: D^T instead of D, or D instead of D^T.

        Raises ConfigError if that is impossible.
        """
        if self.product and not self.product.is_transposable:
            raise ConfigError(f"swap_ab: got True for {self.product.name}, which supports False only")
        if self.multiplication.is_mixed:
            a, b = self.multiplication.stored
            raise ConfigError(f"swap_ab: got True for a of {a} and b of {b}; use False")
        if not self.graph.is_transposable:
            raise ConfigError("swap_ab: got True for an epilogue that needs full rows; use False")
        spec = self.spec.with_graph(self.graph)
        oriented = orient_problem(
            spec, self.arguments, self.shape, self.out_dtype, self.multiplication, self.scale_granularity,
            self.product, self.grouping, self.problem.groups, swapped=not self.swapped,
        )  # fmt: skip
        return changed(self, **oriented._asdict())

    @property
    def has_changeable_rows(self) -> bool:
        """Whether `with_rows` is possible: for 2-D matrices, unless the graph, or a result's layout, depends on M."""
        arrays = [x for x in self.arguments.values() if isinstance(x, ArrayInfo)]
        return (
            len(self.shape) == 2 and not (self.product or self.depends_on_rows)
            and all(len(x.shape) <= 2 and not x.interleave_stride for x in arrays)
            and all(len(x.shape) == 2 and x.strides[0] > (x.shape[1] - 1) * x.strides[1] for x in arrays if x.writable)
        )  # fmt: skip

    def with_rows(self, m: int, addresses: Mapping[str, Any], results: Mapping[str, Any], like: Any) -> Binding:
        """Return the binding of other arrays, which differ from these only in M and in their addresses.

        `addresses`: addresses and numbers, by Pointer name. `results` and `like`: as the attributes.
        """
        arguments, names = {**self.arguments, **addresses}, set()
        for name, x in self.arguments.items():
            if isinstance(x, ArrayInfo):
                if len(x.shape) == 2 and x.shape[0] == self.shape[0] and name not in ("b", _SCALE_B):
                    names.add(name)
                    x = x._replace(shape=(m, x.shape[1]))
                arguments[name] = x._replace(address=addresses.get(name, 0))
        extent = {"cols" if self.swapped else "rows": m}
        arrays = {
            name: changed(x, **extent) if names & {operand_argument(name), result_argument(name)} else x
            for name, x in self.arrays.items()
        }
        return changed(
            self, shape=(m, self.shape[1]), arguments=arguments, results=results, problem=self.problem_with_rows(m),
            arrays=arrays, like=like,
        )  # fmt: skip

    def problem_with_rows(self, m: int) -> Problem:
        """Return the problem with `m` rows of the user's D."""
        return self.problem.with_columns(m) if self.swapped else self.problem.with_rows(m)

    @property
    def results_overlap(self) -> bool:
        """Whether a given result shares a byte with another array."""
        arrays = {name: x for name, x in self.arguments.items() if isinstance(x, ArrayInfo)}
        results = [result_argument(name) for name in self.results]
        return any(arrays_overlap(arrays[r], x) for r in results for name, x in arrays.items() if name != r)

    def kernel_spec(self, config: Config) -> KernelSpec:
        """Return the GEMM kernel's compile-time parameters.

        Operands in layouts that the kernel cannot load are assumed to be packed: copied before into one that it can.
        Raises ConfigError if the config cannot work, ArgumentError if a packed operand would be too large.
        """
        design = get_design(config.design)
        packings = operand_packings(self.problem, design)
        for name, packing in zip("ab", packings, strict=True):
            if packing and packing.total_vectors > MAX_EXTENT:
                raise ArgumentError(
                    f"{name}: TMA cannot read its strides or address and it is too large to pack; "
                    "use rows that are multiples of 16 bytes at a 16-byte aligned address"
                )
        for name, packing in zip("ab", tf32_residual_packings(self.problem, design), strict=False):
            if packing.total_vectors > MAX_EXTENT:
                raise ArgumentError(f"{name}: its TF32 residual is too large to pack; use precision='tf32'")
        return make_spec(replace_packed_operands(self.problem, packings), config, self.spec)

    def with_degenerate_strides_of(self, other: Binding) -> Binding:
        """Return the binding with the strides of length-1 dimensions taken from `other`, in the same orientation.

        These strides have no effect, but a kernel's spec depends on them: so `other`'s kernel fits.
        """
        arrays = dict(self.arrays)
        for name in self.spec.graph.matrix_names:
            arrays[name] = arrays[name].with_degenerate_strides_of(other.arrays.get(name, arrays[name]))
        problem = self.problem.with_degenerate_strides_of(other.problem)
        return changed(self, problem=problem, arrays=arrays, spec=self.spec.for_arrays(arrays))

    def check_results_have_values(self) -> None:
        """Raise ArgumentError if a result is the maximum or minimum of no elements."""
        for r in self.graph.results:
            node, argument = self.graph.nodes[r.node], self.arguments[result_argument(r.name)]
            is_max_or_min = node.op == "reduce" and node.attribute[0] in ("max", "min")
            if 0 in self.shape and is_max_or_min and isinstance(argument, ArrayInfo) and 0 not in argument.shape:
                raise ArgumentError(
                    f"a, b: the GEMM's shape {self.shape} is empty; {r.name}, a {node.attribute[0]}, has no value"
                )

    def allocate_results(self) -> Binding:
        """Return the binding with the missing results allocated, uninitialized, in the library of `like`.

        Raises ArgumentError as `check_results_have_values` does.
        """
        self.check_results_have_values()
        unallocated = self.unallocated_results
        if not unallocated:
            return self
        allocated = {name: empty_like_kind(self.like, x.shape, x.dtype, x.strides) for name, x in unallocated.items()}
        arguments = {result_argument(name): describe(x, name) for name, x in allocated.items()}
        return changed(self, results={**self.results, **allocated}, arguments={**self.arguments, **arguments})
