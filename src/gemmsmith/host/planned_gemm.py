"""A GEMM that is planned: the binding, the config, the kernels, and their launches, which the library shares."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemmsmith.arrays import as_numpy
from gemmsmith.backends import Backend, chip_of, resolve_backend
from gemmsmith.binding.bind import bind
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.request import Request, read_arrays
from gemmsmith.binding.results import arrange_results, outputs_by_name, primary_result_name
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.core.frozen import cached_property, changed
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.kernels.build import build
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launches
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.batch_invariant import check_batch_invariant
from gemmsmith.tuning.choice import Choice, choose_config, rounded_rows
from gemmsmith.tuning.gpus import gpu_at

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.compiler import Compiled
    from gemmsmith.backends.cuda.run import BoundLaunches
    from gemmsmith.backends.reference.evaluation import Evaluation

_LOGGER = logging.getLogger("gemmsmith")
MAX_CACHED_CALLS = 4096
"""Entries of a GEMM's cache of launches, by signature of the arrays. Chosen; not measured."""
_SCALES = "scale_a", "scale_b"
_NO_OPERANDS: Mapping[str, Any] = {}


class PlannedGemm:
    """A request that is bound to a problem, with the config chosen for it. `Plan` is its face for users.

    Args:
        request: What the caller asks for; its arrays may be Specs.

    Attributes:
        binding: The GEMM of strided matrices that the kernel computes, and its epilogue, with the arrays.
        origin: Where the config comes from, in words.
        unswapped: The problem as it was before `config.swap_ab` transposed it, for the model.
        unswapped_epilogue: Its epilogue.
        gpu: The GPU that the model is for.
        calls: Launches that a run prepared, by the key of `read_arrays`.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
    """

    def __init__(self, request: Request) -> None:
        """Bind the request to a problem, and choose a config unless the request has one. Nothing is compiled."""
        request = request._replace(fingerprint=request.fingerprint or fingerprint(request.epilogue))
        binding = bind(request)
        a = binding.a
        if request.batch_invariant:
            check_batch_invariant(request.config, binding.spec)
        self.gpu = gpu_at(a.device_index if a.device == "cuda" else 0)
        if request.config is None:
            choice = choose_config(binding, chip_of(a), self.gpu, batch_invariant=request.batch_invariant)
        else:
            choice = Choice.of(binding, request.config)
        self.binding, self.config, self.origin = choice.binding, choice.config, choice.origin
        _LOGGER.info("plan of %s: %s, %s", binding.problem, self.config, self.origin)
        self.unswapped, self.unswapped_epilogue = binding.problem, binding.spec
        self.spec: KernelSpec = choice.spec
        self.problem: Problem = self.binding.problem
        self._request = request._replace(
            a=None, b=None, out=None, operands={}, scale_a=None, scale_b=None, out_dtype=self.binding.out_dtype
        )
        self._has_epilogue = request.epilogue is not None
        self.calls: dict[Hashable, BoundLaunches] = BoundedCache(MAX_CACHED_CALLS)
        self._version = choice.version
        graph = self.binding.graph
        self._result_names, self._primary_result = graph.result_names, primary_result_name(graph)
        self._has_single_result = self._result_names == ("out",)

    @property
    def caller_problem(self) -> Problem:
        """The problem in the orientation in which the caller gave it."""
        return self.problem.T if self.binding.swapped else self.problem

    @property
    def serves_other_rows(self) -> bool:
        """Whether `run_other_rows` is possible: whether all M with the same `rounded_rows` have the plan's kernel."""
        binding, is_rounded = self.binding, self.binding.swapped == self.config.swap_ab
        if self._version is None or not is_rounded or not binding.has_changeable_rows:
            return False
        m, most = binding.shape[0], rounded_rows(binding.shape[0])
        largest = changed(binding, problem=binding.problem_with_rows(most))
        try:  # a copy of so many rows may be too large
            return m == most or largest.kernel_spec(self.config) == self.spec
        except ArgumentError:
            return False

    # -- kernels ---------------------------------------------------------------------------------------
    @cached_property
    def launches(self) -> Launches:
        return build_launches(self.binding, self.spec)

    @property
    def kernel(self) -> Kernel:
        return build(self.spec)

    @cached_property
    def compiled(self) -> Compiled:
        """The GEMM kernel's cubin and compiler log, compiled on first use; needs no GPU."""
        from gemmsmith.backends.cuda.compiler import compile_source

        return compile_source(self.kernel.source, self.kernel.name, self.kernel.chip.target)

    def find_compiled(self) -> Compiled | None:
        """Return `compiled` if it was compiled before, by any process; None otherwise."""
        from gemmsmith.backends.cuda.compiler import find_compiled, is_available

        if "compiled" in vars(self):
            return self.compiled
        kernel = self.kernel
        return find_compiled(kernel.source, kernel.name, kernel.chip.target) if is_available() else None

    # -- running -----------------------------------------------------------------------------------------
    def run(
        self, a: Any, b: Any, out: Any = None, operands: Mapping[str, Any] = _NO_OPERANDS, scale_a: Any = None,
        scale_b: Any = None, workspace: Any = None,
    ) -> Any:  # fmt: skip
        results = outputs_by_name(out, self._primary_result, self._has_epilogue)
        cache_key, addresses = read_arrays(a, b, results, operands, scale_a, scale_b)
        call = self.calls.get(cache_key)
        if call is not None and call.outputs_do_not_overlap(addresses):
            return self.launch(call, addresses, results, a, workspace)
        return self.run_bound(self._bind(a, b, out, operands, scale_a, scale_b), workspace, cache_key)

    def prepare(
        self, a: Any, b: Any, out: Any, operands: Mapping[str, Any], scale_a: Any, scale_b: Any,
        backend: Backend | None = None,
    ) -> tuple[Backend, Binding, Launches]:  # fmt: skip
        """Return the backend for these arrays (default: the request's), the binding with results, and the launches."""
        results = outputs_by_name(out, self._primary_result, self._has_epilogue)
        read_arrays(a, b, results, operands, scale_a, scale_b)  # raises for tensors whose gradient would be lost
        return self._prepare(self._bind(a, b, out, operands, scale_a, scale_b), backend)

    def launch(
        self, call: BoundLaunches, addresses: dict[str, Any], results: dict[str, Any], like: Any, workspace: Any = None
    ) -> Any:
        """Launch a run whose launches are cached, and return its results, as `run` does.

        `addresses`: of the arrays, and the numbers, by Pointer name; modified. `results`: the caller's arrays, by name;
        the others are allocated as `like`, and added.
        """
        allocated = call.run(addresses, like, workspace)
        if self._has_single_result:
            return allocated[0] if allocated else results["out"]
        for (name, _, _), array in zip(call.unallocated_results, allocated):  # noqa: B905 - strict=True takes longer
            results[name] = array
        return arrange_results(results, self._result_names)

    def detach_arrays(self) -> Binding:
        """Return the binding, and drop the references to the arrays, so that a cached GEMM keeps none alive."""
        binding = self.binding
        self.binding = changed(binding, results={}, like=None)
        return binding

    def run_bound(
        self, binding: Binding, workspace: Any = None, cache_key: Hashable = None, launches: Launches | None = None
    ) -> Any:  # fmt: skip
        """Run a GEMM whose arrays are bound already, and return its results.

        `cache_key`: the key of the arrays (of `read_arrays`), under which the launches are cached, or None. `launches`:
        the binding's, if the plan's kernel is known to compute them.
        """
        backend, complete, launches = self._prepare(binding, launches=launches)
        if backend == "reference":
            run_reference(complete)
        elif backend == "cuda":
            from gemmsmith.backends.cuda.run import BoundLaunches, pointer_values

            call = BoundLaunches(launches, complete.arguments, binding.like, binding.unallocated_results)
            call.launch(pointer_values(complete.arguments), binding.like, workspace)
            if cache_key is not None and 0 not in binding.shape:
                self.calls[cache_key] = call
        else:
            from gemmsmith.backends.sim.run import run as run_simulation

            if hazards := run_simulation(launches, complete.arguments, 0, None).hazards:
                raise HazardError(hazards)
        return complete.value

    def run_other_rows(
        self, m: int, addresses: Mapping[str, Any], results: Mapping[str, Any], a: Any, cache_key: Hashable
    ) -> Any:  # fmt: skip
        """Run the GEMM of arrays that differ from the plan's only in M and in their addresses; `rounded_rows` is equal.

        Its own plan would take twice as long, and have the same kernel. Return None, and do nothing, if that
        plan's config may be another one meanwhile, or if it must check whether a result overlaps another array.
        """
        if self._version != measured_configs.version(self.binding.a.device_index):
            return None
        binding = self.binding.with_rows(m, addresses, results, a)
        if binding.results_overlap:
            return None
        return self.run_bound(binding, cache_key=cache_key, launches=build_launches(binding, self.spec))

    def _bind(self, a: Any, b: Any, out: Any, operands: Mapping[str, Any], scale_a: Any, scale_b: Any) -> Binding:
        request = self._request._replace(a=a, b=b, out=out, operands=operands, scale_a=scale_a, scale_b=scale_b)
        return bind(request, self.binding)

    def _prepare(
        self, binding: Binding, backend: Backend | None = None, launches: Launches | None = None
    ) -> tuple[Backend, Binding, Launches]:
        backend = resolve_backend(backend or self._request.backend, binding.a, "a")
        return backend, binding.allocate_results(), launches or self._launches(binding)

    def _launches(self, binding: Binding) -> Launches:
        """Return the launches for other arrays. Raises ArgumentError if the plan's kernel cannot compute them.

        Extents, strides and addresses may differ as long as the spec is the same.
        """
        planned = self.binding
        if (binding.problem, binding.arrays, binding.graph) == (planned.problem, planned.arrays, planned.graph):
            return self.launches
        for name, expected, actual in zip(_SCALES, planned.scales, binding.scales, strict=True):
            if actual != expected:
                raise ArgumentError(
                    f"{name}: got {actual}, this plan has {expected}; make a plan from arrays like these"
                )
        if binding.mma != planned.mma:
            raise ArgumentError(
                f"a, b: got {binding.mma.a} and {binding.mma.b}, this plan multiplies {planned.mma.a} and "
                f"{planned.mma.b}; make a plan from arrays like these"
            )
        if 0 not in binding.shape and (spec := self._required_spec(binding)) != self.spec:
            if binding.graph != planned.graph:
                raise ArgumentError(
                    "epilogue: for these operands, sizes or constants it differs from the plan's; make a plan from "
                    "arrays like these"
                )
            if self.spec.grouping and spec.grouping != self.spec.grouping:
                raise ArgumentError(
                    f"{self.spec.grouping.table}: got {binding.problem.groups} groups; this plan has room for "
                    f"{self.spec.grouping.capacity}, make a plan from arrays like these"
                )
            names = _SCALES[:: -1 if binding.swapped else 1]
            for name, planned_scale, scale in zip(names, self.spec.scales, spec.scales, strict=True):
                if scale != planned_scale:
                    raise ArgumentError(
                        f"{name}: got scales of {scale}, this plan has a kernel for {planned_scale}; make a plan from "
                        "arrays like these"
                    )
            raise ArgumentError(
                f"a, b, out: their layouts need the kernel {spec.name} ({spec.layout_summary}), this plan has "
                f"{self.spec.name} ({self.spec.layout_summary}); make a plan from arrays like these"
            )
        return build_launches(binding, self.spec)

    def _required_spec(self, binding: Binding) -> KernelSpec:
        """Return the spec of the kernel that the arrays require, to compare with the plan's.

        A plan's kernel that loads block scales element by element also accepts scales that TMA could load: then the
        plan's way of loading them is taken.
        """
        spec = binding.kernel_spec(self.config)
        both = zip(self.spec.scales, spec.scales, strict=True)
        scale_a, scale_b = (
            planned if planned and needed and planned.is_compatible_with(needed) else needed for planned, needed in both
        )
        return replace(spec, scales=(scale_a, scale_b))


def run_reference(binding: Binding) -> None:
    """Compute a GEMM's results in float64 with numpy, and store them; needs no kernel and no config.

    Raises ArgumentError as `evaluate_reference` does.
    """
    graph, arrays = binding.source_graph, binding.arguments
    results = {r.name: as_numpy(arrays[result_argument(r.name)], r.name) for r in graph.results}
    evaluate_reference(binding).execute(graph, results)


def evaluate_reference(binding: Binding) -> Evaluation:
    """Return the product of a GEMM in float64, on which epilogues can be evaluated.

    Raises ArgumentError for a design's own product, and for operands that are converted before they are multiplied.
    """
    from gemmsmith.backends.reference.evaluation import evaluate

    if (binding.product and not binding.grouping) or binding.multiplication.is_mixed:
        name = binding.product.name if binding.product else f"{binding.problem}"
        raise ArgumentError(f'backend: got "reference" for {name}, which it cannot compute; use "sim"')
    return evaluate(
        binding.source_graph, binding.mma, binding.arguments, binding.scale_granularity,
        is_3xtf32=binding.problem.is_3xtf32, grouping=binding.grouping, deterministic=binding.spec.deterministic,
    )  # fmt: skip
