"""Plans: a problem, the kernels that compute it, and their execution on a GPU, in the simulator or by the reference."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gemmsmith.arrays import ArrayLike, Operand, Pair, as_numpy
from gemmsmith.backends import Backend, chip_of, resolve_backend
from gemmsmith.binding import checks
from gemmsmith.binding.bind import bind
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.request import Out, Request, read_arrays
from gemmsmith.binding.results import arrange_results, outputs_by_name, primary_result_name
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.cached_property import cached_property
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.core.frozen import changed
from gemmsmith.core.integers import as_integer
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.outputs import result_argument
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host.launch_sequence import build_launches
from gemmsmith.kernels.build import build
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launches
from gemmsmith.tuning.batch_invariant import check_batch_invariant
from gemmsmith.tuning.choice import Choice, choose_config
from gemmsmith.tuning.choose import estimate_us
from gemmsmith.tuning.explain_config import explain_config
from gemmsmith.tuning.gpus import gpu_at
from gemmsmith.tuning.grouped import equal_groups
from gemmsmith.tuning.model import covers_config

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.compiler import Compiled, Resources
    from gemmsmith.backends.cuda.run import BoundLaunches
    from gemmsmith.backends.reference.evaluation import Evaluation
    from gemmsmith.backends.sim.execute.counters import Counters
    from gemmsmith.backends.sim.report.hazards import Hazard
    from gemmsmith.backends.sim.report.record import Record
    from gemmsmith.backends.sim.report.timeline import Timeline
    from gemmsmith.backends.sim.report.verdict import Verdict

_LOGGER = logging.getLogger("gemmsmith")
MAX_CACHED_CALLS = 4096
"""Entries of a plan's cache of launches, by signature of the arrays. Chosen; not measured."""
_SCALES = "scale_a", "scale_b"
MAX_LISTED_HAZARDS = 5
"""Hazards in the representation of a simulation."""


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated GEMM.

    Attributes:
        result: The results, in the form that `gemm` returns.
        hazards: The errors found, an empty list for a correct kernel.
        cycles: Cycles of the cost model.
        verdict: Whether every other schedule of the kernels would give the same result and hazards; if not, why.
        records: Every event of each launch, in the order of the launches, with `record=True`; else empty.
    """

    result: Any
    hazards: list[Hazard]
    cycles: int
    verdict: Verdict
    records: tuple[Record, ...] = ()

    def __repr__(self) -> str:
        hazards = [f"  {hazard}".split("\n")[0] for hazard in self.hazards[:MAX_LISTED_HAZARDS]]
        lines = [f"Simulation of {self.cycles} cycles", f"verdict  {self.verdict}"]
        lines.append(f"hazards  {len(self.hazards) or 'none'}" + ", the first:" * bool(hazards))
        return "\n".join(lines + hazards)

    def _repr_html_(self) -> str:
        """Return the representation in a notebook: with a record, and matplotlib, also the timeline as SVG."""
        text = f"<pre>{html.escape(repr(self))}</pre>"
        if self.record is None or find_spec("matplotlib") is None:
            return text
        with TemporaryDirectory() as folder:
            self.timeline.plot(picture := Path(folder) / "timeline.svg")
            svg = picture.read_text()
        return text + svg[svg.index("<svg") :].replace("<svg", '<svg style="max-width: 100%; height: auto"', 1)

    @property
    def record(self) -> Record | None:
        """The record of the longest launch; None without `record=True`."""
        return max(reversed(self.records), key=lambda record: record.cycles, default=None)

    @cached_property
    def timeline(self) -> Timeline:
        """What each engine and each warp does at which cycle of the longest launch.

        Raises ArgumentError without a record.
        """
        if self.record is None:
            raise ArgumentError("timeline: this simulation has no record; use simulate(..., record=True)")
        return self.record.timeline()

    def to_json(self) -> dict[str, Any]:
        """Return the verdict, the cycles and the hazards for JSON, as `gemmsmith simulate --json` prints them."""
        hazards = [hazard.to_json() for hazard in self.hazards]
        return self.verdict.to_json() | {"cycles": self.cycles, "hazards": hazards}


class Plan:
    """A GEMM with its epilogue: the config that was chosen, and the kernels, which are compiled at their first use.

    One plan serves every problem with the same dtypes, layouts and alignment, of any size. Rows are aligned if their
    length is a multiple of 16 bytes, or 8 elements of 16 bits.

    Args:
        request: What the caller of `plan` asks for; its arrays may be Specs.

    Attributes:
        config: The kernel's configuration.
        origin: Where the config comes from, in words.
        problem: The GEMM of strided matrices that the kernel computes.
        spec: The kernel's compile-time parameters.
        out_dtype: Dtype of matrix results that the epilogue does not convert.
        accumulator_dtype: Dtype of the accumulator.
        fingerprint: Hash key of the epilogue's source and captured values; None if the epilogue may change without a
            change of these.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
    """

    def __repr__(self) -> str:
        problem = self.problem.T if self.binding.swapped else self.problem
        lines = [f"Plan of {problem}", f"config     {self.config}", f"origin     {self.origin}"]
        if covers_config(self.config):
            lines.append(f"estimate   {self.estimated_us:.1f} us, of the kernel alone")
        names = *self.binding.graph.tensor_names, *self.binding.graph.number_names
        return "\n".join([*lines, f"operands   {', '.join(names) or 'none'}"])

    def _repr_html_(self) -> str:
        """Return the representation in a notebook, with the explanation and the visitor tree below."""
        parts = {"why": self.why, "epilogue": self.epilogue}
        below = (
            f"<details><summary>{x}</summary><pre>{html.escape(text)}</pre></details>" for x, text in parts.items()
        )
        return f"<pre>{html.escape(repr(self))}</pre>{''.join(below)}"

    def __init__(self, request: Request) -> None:
        """Bind the request to a problem, and choose a config unless the request has one. Nothing is compiled."""
        if not isinstance(request, Request):
            raise ArgumentError(f"request: got {type(request).__name__}; use gemmsmith.plan(a, b)")
        self.fingerprint = request.fingerprint or fingerprint(request.epilogue)
        request = request._replace(fingerprint=self.fingerprint)
        binding = bind(request)
        a = binding.a
        if request.batch_invariant:
            check_batch_invariant(request.config, binding.spec)
        self._gpu = gpu_at(a.device_index if a.device == "cuda" else 0)
        if request.config is None:
            choice = choose_config(binding, chip_of(a), self._gpu, batch_invariant=request.batch_invariant)
        else:
            choice = Choice.of(binding, request.config)
        self.binding, self.config, self.origin = choice.binding, choice.config, choice.origin
        _LOGGER.info("plan of %s: %s, %s", binding.problem, self.config, self.origin)
        # What `config.swap_ab` transposes, for the model
        self._unswapped, self._unswapped_epilogue = binding.problem, binding.spec
        self.spec: KernelSpec = choice.spec
        self.problem: Problem = self.binding.problem
        self.out_dtype: DType = self.binding.out_dtype
        self.accumulator_dtype: DType = self.problem.accumulator_dtype
        self._request = request._replace(
            a=None, b=None, out=None, operands={}, scale_a=None, scale_b=None, out_dtype=self.out_dtype
        )
        self._has_epilogue = request.epilogue is not None
        self._cached_launches: dict[Hashable, BoundLaunches] = BoundedCache(MAX_CACHED_CALLS)
        graph = self.binding.graph
        self._result_names, self._primary_result = graph.result_names, primary_result_name(graph)
        self._has_single_result = self._result_names == ("out",)

    # -- kernels ---------------------------------------------------------------------------------------
    @cached_property
    def launches(self) -> Launches:
        """The launches for the problem that was planned for."""
        return build_launches(self.binding, self.spec)

    @property
    def kernel(self) -> Kernel:
        """The GEMM kernel's description."""
        return build(self.spec)

    @property
    def source(self) -> str:
        """The GEMM kernel as one CUDA C++ file."""
        return self.kernel.source

    @cached_property
    def compiled(self) -> Compiled:
        """The GEMM kernel's cubin and compiler log, compiled on first use; needs no GPU."""
        from gemmsmith.backends.cuda.compiler import compile_source

        return compile_source(self.source, self.kernel.name, self.kernel.chip.target)

    @cached_property
    def ptx(self) -> str:
        """The GEMM kernel's PTX."""
        from gemmsmith.backends.cuda.compiler import compile_ptx

        return compile_ptx(self.source, self.kernel.name, self.kernel.chip.target)

    @cached_property
    def sass(self) -> str:
        """The GEMM kernel's machine code (SASS), disassembled."""
        from gemmsmith.backends.cuda.disassembler import disassemble

        return disassemble(self.compiled.cubin)

    @property
    def resources(self) -> Resources:
        """Registers, spills, compiler advisories, and shared memory in bytes, static and dynamic."""
        resources = self.compiled.resources
        return replace(resources, shared_bytes=resources.shared_bytes + self.kernel.shared_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Workspace in bytes: packed operands, partial reductions, split-K partial sums."""
        return self.launches.workspace_bytes

    @property
    def why(self) -> str:
        """The source of the config, and the model's estimates for it and for alternatives."""
        if not covers_config(self.config) or self.binding.grouping:
            return f"{self.config}: {self.origin}"
        names = "ba" if self.binding.swapped else "ab"
        return explain_config(self._unswapped, self.config, self._unswapped_epilogue, self.origin, self._gpu, names)

    @property
    def estimated_us(self) -> float:
        """Model estimate of the GEMM kernel's time on the plan's GPU, in microseconds."""
        problem = equal_groups(self._unswapped) if self._unswapped.grouping else self._unswapped
        return estimate_us(problem, self.config, self._unswapped_epilogue, self._gpu)

    @property
    def epilogue(self) -> str:
        """The epilogue as a visitor tree, after the passes."""
        from gemmsmith.graph.frontend.show import format_tree

        return format_tree(self.binding.graph)

    # -- running -----------------------------------------------------------------------------------------
    def run(
        self, a: ArrayLike, b: ArrayLike | Pair, out: Out = None, *, scale_a: ArrayLike | None = None,
        scale_b: ArrayLike | Pair | None = None, operands: Mapping[str, Operand] | None = None,
        workspace: ArrayLike | None = None, **named_operands: Operand,
    ) -> Any:  # fmt: skip
        """Compute out = epilogue(a @ b).

        Arrays on a GPU are computed there, on the caller's current stream; arrays on the CPU by the plan's backend.

        The arguments are those of `gemm`. Shapes may differ from those planned for, but not dtypes, layouts, alignment
        and the granularity of scales. `workspace`: a device array of at least `workspace_bytes`, which depends on the
        shapes: that of a plan for these arrays. Default: one is allocated per run.

        Returns:
            `out`, or new arrays of a's library.

        Raises:
            ArgumentError: If an argument does not match the plan.
            HazardError: With backend="sim", if the simulator finds hazards.
        """
        checks.check_workspace(workspace)
        all_operands = checks.merge_operands(operands, named_operands)
        results = self._results(out)
        cache_key, addresses = read_arrays(a, b, results, all_operands, scale_a, scale_b)
        call = self._cached_launches.get(cache_key)
        if call is not None and call.outputs_do_not_overlap(addresses):
            return self.launch(call, addresses, results, a, workspace)
        return self._run_bound(self._bind(a, b, out, all_operands, scale_a, scale_b), workspace, cache_key)

    def prepare(
        self, a: ArrayLike, b: ArrayLike | Pair, out: Out = None, *, scale_a: ArrayLike | None = None,
        scale_b: ArrayLike | Pair | None = None, operands: Mapping[str, Operand] | None = None,
        workspace: ArrayLike | None = None, **named_operands: Operand,
    ) -> Callable[[], Any]:  # fmt: skip
        """Prepare a run of these arrays without launching it; return a function that launches it.

        The arguments are those of `run`. Each call replays one CUDA graph on the current stream and returns `out`. The
        arrays must not be moved or resized, and the returned function keeps references to them; scalar operands keep
        their values. Calls outside of a stream capture do not overlap one another, not even on two streams; the default
        workspace belongs to the stream that is current now. Arrays on the CPU run as in `run`.

        Returns:
            A function without arguments, whose calls may be captured into a CUDA graph.

        Raises:
            ArgumentError: If an argument does not match the plan.
            DeviceError: If the stream is being captured.
        """
        checks.check_workspace(workspace)
        inputs = checks.merge_operands(operands, named_operands), scale_a, scale_b
        read_arrays(a, b, self._results(out), *inputs)  # raises for tensors whose gradient would be lost
        backend, binding, launches = self._prepare_run(self._bind(a, b, out, *inputs))
        if backend != "cuda":
            return partial(self.run, a, b, binding.value, scale_a=scale_a, scale_b=scale_b, operands=inputs[0])
        from gemmsmith.backends.cuda.run import PreparedRun

        return PreparedRun(launches, binding.arguments, a, workspace, binding.value, (b, *inputs))

    def simulate(
        self, a: ArrayLike, b: ArrayLike | Pair, out: Out = None, *, scale_a: ArrayLike | None = None,
        scale_b: ArrayLike | Pair | None = None, operands: Mapping[str, Operand] | None = None, seed: int = 0,
        progress: Callable[[float], None] | None = None, counters: Counters | None = None, record: bool = False,
        schedules: int = 1, **named_operands: Operand,
    ) -> Simulation:  # fmt: skip
        """Execute the kernels on the CPU, and check every barrier and asynchronous access.

        The arguments are those of `run`, with arrays on the CPU. `seed`: which schedule (order in which warps and
        engines proceed) to run; 0 follows the cost model, others are random. `progress` is called from time to time
        with the completed fraction, 0 to 1. `counters`: counters of instructions, shared-memory wavefronts and
        global-memory sectors. `record`: record every event. `schedules`: the most schedules to run, with the seeds
        `seed`, `seed` + 1 and so on, until one proves that all schedules give the same result.

        Returns:
            The result, the hazards and the cycles, and the records if asked.

        Raises:
            ArgumentError: If an argument does not match the plan.
        """
        from gemmsmith.backends.sim.execute.counters import Counters
        from gemmsmith.backends.sim.run import run as run_simulation

        seed, schedules = as_integer("seed", seed), as_integer("schedules", schedules, least=1)
        if not (progress is None or callable(progress)):
            raise ArgumentError(f"progress: got {progress!r}; use a function of the completed fraction")
        if not (counters is None or isinstance(counters, Counters)):
            raise ArgumentError(f"counters: got {counters!r}; use gemmsmith.backends.sim.execute.counters.Counters()")
        inputs = checks.merge_operands(operands, named_operands), scale_a, scale_b
        read_arrays(a, b, self._results(out), *inputs)  # raises for tensors whose gradient would be lost
        binding = self._bind(a, b, out, *inputs)
        resolve_backend("sim", binding.a, "a")  # raises for a Spec, and for an array on a GPU
        binding = binding.allocate_results()
        result = run_simulation(
            self._launches(binding), binding.arguments, seed, progress, counters, record=record, schedules=schedules
        )
        return Simulation(binding.value, result.hazards, result.cycles, result.verdict, result.records)

    def cached_launches(self, cache_key: Hashable) -> BoundLaunches | None:
        """Return the launches that a run prepared for arrays with that key of `read_arrays`, or None."""
        return self._cached_launches.get(cache_key)

    def launch(
        self, call: BoundLaunches, addresses: dict[str, Any], results: dict[str, Any], like: Any, workspace: Any = None
    ) -> Any:
        """Launch a run whose launches are cached, and return its results, as `run` does.

        Args:
            call: The launches.
            addresses: Addresses of the arrays, and the numbers, by Pointer name; modified.
            results: The caller's arrays for results, by name; the others are allocated, and added.
            like: An array of the library and device in which results and the workspace are allocated.
            workspace: As in `run`.
        """
        allocated = call.run(addresses, like, workspace)
        if self._has_single_result:
            return allocated[0] if allocated else results["out"]
        for (name, _, _), array in zip(call.unallocated_results, allocated):  # noqa: B905 - strict=True takes longer
            results[name] = array
        return arrange_results(results, self._result_names)

    def _detach_arrays(self) -> Binding:
        """Return the binding, and drop the plan's references to the arrays, so that a cached plan keeps none alive."""
        binding = self.binding
        self.binding = changed(binding, results={}, like=None)
        return binding

    def _run_bound(self, binding: Binding, workspace: Any = None, cache_key: Hashable = None) -> Any:
        """Run a GEMM whose arrays are bound to the plan already, and return its results.

        `cache_key`: the key of the arrays (of `read_arrays`), under which the launches are cached; None: they are not.
        """
        backend, complete, launches = self._prepare_run(binding)
        if backend == "reference":
            run_reference(complete)
        elif backend == "cuda":
            from gemmsmith.backends.cuda.run import BoundLaunches, pointer_values

            call = BoundLaunches(launches, complete.arguments, binding.like, binding.unallocated_results)
            call.launch(pointer_values(complete.arguments), binding.like, workspace)
            if cache_key is not None and 0 not in binding.shape:
                self._cached_launches[cache_key] = call
        else:
            from gemmsmith.backends.sim.run import run as run_simulation

            if hazards := run_simulation(launches, complete.arguments, 0, None).hazards:
                raise HazardError(hazards)
        return complete.value

    def _results(self, out: Any) -> dict[str, Any]:
        """Return the arrays of `out` (one, several, or None) by the results' names."""
        return outputs_by_name(out, self._primary_result, self._has_epilogue)

    def _bind(self, a: Any, b: Any, out: Any, operands: Mapping[str, Any], scale_a: Any, scale_b: Any) -> Binding:
        """Bind other arrays, with the plan's options, epilogue and orientation."""
        request = self._request._replace(a=a, b=b, out=out, operands=operands, scale_a=scale_a, scale_b=scale_b)
        return bind(request, self.binding)

    def _prepare_run(self, binding: Binding) -> tuple[Backend, Binding, Launches]:
        """Return the backend, the binding with all results allocated, and the launches."""
        backend = resolve_backend(self._request.backend, binding.a, "a")
        return backend, binding.allocate_results(), self._launches(binding)

    def _launches(self, binding: Binding) -> Launches:
        """Return the launches for other arrays. Raises ArgumentError if the plan's kernel cannot compute them.

        They must need the plan's kernel: extents, strides and addresses may differ as long as the spec is the same.
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
