"""A plan: a problem, the kernels that compute it, and running them on a GPU, in the simulator, or by the reference."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemmsmith import jobs
from gemmsmith.arrays import ArrayInfo, describe, empty_like_kind, is_array, signature
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import DType, number_operand
from gemmsmith.core.errors import ArgumentError, HazardError, meant
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.jobs import Job, Progress, Simulation
from gemmsmith.kernels.build import build
from gemmsmith.lang.kernel import Kernel
from gemmsmith.launches import Route
from gemmsmith.problems import Formulation, formulate

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.compiler import Compiled, Resources
    from gemmsmith.calls import Call
    from gemmsmith.epilogues import Bound

Backend = Literal["auto", "cuda", "sim", "reference"]
BACKENDS = ("auto", "cuda", "sim", "reference")
MOST_CALLS = 4096
"""Signatures that a plan remembers."""


class Plan:
    """A compiled product with its epilogue. One plan serves every problem with the same dtypes, layouts and alignment,
    of any size. (Rows of 16-bit elements are aligned alike if both or neither have lengths that are multiples of 8.)"""

    def __init__(
        self, a: Any, b: Any, out: Any = None, *, out_dtype: Any = None, accumulate: Any = "fp32",
        epilogue: Any = None, operands: Mapping[str, Any] | None = None, exact: bool = False, atomic: bool = False,
        config: Config | None = None, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        if backend not in BACKENDS:
            raise ArgumentError(f"backend: got {backend!r}; use one of {', '.join(BACKENDS)}")
        if config is not None and not isinstance(config, Config):
            raise ArgumentError(f"config: got {type(config).__name__}; use a gemmsmith.Config")
        from gemmsmith.tuning.choose import choose
        from gemmsmith.tuning.space import fitting
        from gemmsmith.tuning.table import tuned

        if epilogue is None and operands:
            given, hint = ", ".join(operands), next(filter(None, map(meant, operands)), "")
            raise ArgumentError(f"{given}: got an operand without an epilogue that reads it; give `epilogue`{hint}")
        self.backend: Backend = backend
        self._source, self._exact, self._atomic = epilogue, exact, atomic
        arguments = (a, b, out, operands or {}, out_dtype, accumulate)
        self.formulation, self.bound = self._formulated(*arguments, swap_ab=config is not None and config.swap_ab)
        self._origin = "given"
        if config is None:
            problem = self.bound.problem if self.bound else self.formulation.problem
            spec = self.bound.spec if self.bound else None
            config = tuned(problem, spec)
            self._origin = "tuned" + " without its epilogue" * bool(spec) if config else "chosen by the model"
            config = config or choose(problem, spec)
            if config.swap_ab:
                self.formulation, self.bound = self._formulated(*arguments, swap_ab=True)
        self.config: Config = config
        self.problem: Problem = self.bound.problem if self.bound else self.formulation.problem
        self.output: DType = self.formulation.output
        self.accumulate: DType = self.problem.accumulate
        self._route = self._routed(self.problem, self.bound)
        if self._origin != "given" and (settled := fitting(self.config, self.spec)) != self.config:
            self.config = settled
            self._route = self._routed(self.problem, self.bound)
        self._swapped = _swapped(self.formulation, self.bound)
        self._calls: dict[Hashable, Call] = {}
        self._names = [r.name for r in self.bound.graph.results] if self.bound else ["out"]
        self._first = self.bound.first if self.bound else "out"

    def _formulated(
        self, a: Any, b: Any, out: Any, operands: Mapping[str, Any], out_dtype: Any, accumulate: Any, swap_ab: bool
    ) -> tuple[Formulation, Bound | None]:
        """What the arrays are; with an epilogue also what its operands and results are."""
        if self._source is None:
            return formulate(a, b, out, out_dtype, accumulate, swap_ab=swap_ab), None
        from gemmsmith.epilogues import bind

        formulation = formulate(a, b, None, out_dtype, accumulate, literal=True)
        bound = bind(
            self._source, formulation, a, operands, out, exact=self._exact, atomic=self._atomic, swap_ab=swap_ab
        )
        return formulation, bound

    def _as_planned(self, a: Any, b: Any, out: Any, given: Mapping[str, Any]) -> tuple[Formulation, Bound | None]:
        """What arrays for a run are, D in the plan's orientation: of one row or one column it has both."""
        arguments = (a, b, out, given, self.output, self.accumulate)
        found = self._formulated(*arguments, self.config.swap_ab)
        if _swapped(*found) != self._swapped:
            found = self._formulated(*arguments, not self.config.swap_ab)
        formulation, bound = found
        if bound is None:
            return formulation._replace(problem=formulation.problem.read_like(self.problem)), None
        assert self.bound is not None
        known, matrices = self.bound.arrays, bound.spec.matrices
        arrays = {name: x.read_like(known.get(name, x)) if name in matrices else x for name, x in bound.arrays.items()}
        problem, spec = bound.problem.read_like(self.problem), bound.spec.over(arrays)
        return formulation, replace(bound, problem=problem, arrays=arrays, spec=spec)

    def _routed(self, problem: Problem, bound: Bound | None) -> Route:
        if bound is None:
            return Route.of(problem, self.config)
        return Route.of(problem, self.config, bound.spec, bound.arrays)

    # -- what it is ------------------------------------------------------------------------------------
    @property
    def spec(self) -> KernelSpec:
        """What is constant in the kernel."""
        return self._route.spec

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
        """The GEMM kernel's cubin and compiler log; compiles at the first use, without a GPU too."""
        from gemmsmith.backends.cuda.compiler import compile_source

        return compile_source(self.source, self.kernel.name)

    @property
    def ptx(self) -> str:
        """The GEMM kernel's PTX."""
        from gemmsmith.backends.cuda.compiler import compile_ptx

        return compile_ptx(self.source, self.kernel.name)

    @property
    def sass(self) -> str:
        """The GEMM kernel's machine code, disassembled."""
        from gemmsmith.backends.cuda.disassembler import sass

        return sass(self.compiled.cubin)

    @property
    def resources(self) -> Resources:
        """Registers, spills, compiler advisories, and shared memory: what ptxas counts and what a launch asks for."""
        found = self.compiled.resources
        return replace(found, shared=found.shared + self.kernel.shared_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Device memory a run needs: packed operands, partial reductions, shares of tiles; 0 where there are none."""
        return self._route.workspace_bytes

    @property
    def why(self) -> str:
        """Where the config comes from, and what the model says of it and of others."""
        from gemmsmith.tuning.why import why

        problem, spec = self.problem.T if self.config.swap_ab else self.problem, self.bound.spec if self.bound else None
        return why(problem, self.config, None if self.config.swap_ab else spec, self._origin)

    @property
    def epilogue(self) -> str:
        """The epilogue as a visitor tree, after the passes."""
        from gemmsmith.core.graph import bare
        from gemmsmith.epilogue.frontend.show import tree

        return tree(self.bound.graph if self.bound else bare(self.output))

    # -- running -----------------------------------------------------------------------------------------
    def run(
        self, a: Any, b: Any, out: Any = None, *, operands: Mapping[str, Any] | None = None, workspace: Any = None,
        **named: Any,
    ) -> Any:  # fmt: skip
        """out = epilogue(a @ b); gives `out`, or new arrays of a's library.

        Shapes as in `gemm`; they may differ from those planned for, dtypes, layouts and alignment may not. The
        epilogue's operands by name. Arrays on a GPU run there, on the caller's current stream; arrays on the CPU by
        the plan's backend. `workspace`: device bytes, at least `workspace_bytes` of the problem at hand; made where
        not given. Raises ArgumentError.
        """
        given = {**operands, **named} if operands else named
        key, places = signatures(a, b, self.given(out), given)
        return self.run_signed(key, self.call_of(key), places, a, b, out, given, workspace)

    def prepare(
        self, a: Any, b: Any, out: Any = None, *, operands: Mapping[str, Any] | None = None, workspace: Any = None,
        **named: Any,
    ) -> Callable[[], Any]:  # fmt: skip
        """A run of these very arrays, to be called again and again; arguments as in `run`.

        All that can be is done now, nothing is launched yet. Each call launches on the stream that is current then, as
        one CUDA graph, and gives `out`, the same each time; the arrays are kept, and must stay where they are, with
        their shapes. Operands that are numbers keep their values. Calls that are not captured into a graph do not
        overlap one another, not even on two streams; the workspace that is made where none is given belongs to the
        stream that is current now. Arrays on the CPU run as in `run`. Raises ArgumentError, and DeviceError where the
        stream is being captured; a call of what it gives may be captured.
        """
        given = {**(operands or {}), **named}
        signatures(a, b, self.given(out), given)  # refuses what would lose its gradient
        found = self._as_planned(a, b, out, given)
        job, backend = self._checked(*found, a, b, out)
        if backend != "cuda":
            results = job.value if found[1] is None else dict(job.results)
            return partial(self.run, a, b, results, operands=given)
        from gemmsmith.calls import PreparedRun

        return PreparedRun(job, a, workspace, (b, given))

    def call_of(self, key: Hashable) -> Call | None:
        """What earlier runs of arrays with such `signatures` left."""
        return self._calls.get(key)

    def run_signed(
        self, key: Hashable, call: Call | None, places: dict[str, Any], a: Any, b: Any, out: Any,
        given: Mapping[str, Any], workspace: Any = None,
    ) -> Any:  # fmt: skip
        """`run` for arrays whose `signatures` and `call_of` them are known."""
        if call is not None and call.apart(places):
            return self._called(call, places, a, out, workspace)
        found = self._as_planned(a, b, out, given)
        return self.run_formulated(*found, a, b, out, workspace, key)

    def run_formulated(
        self, formulation: Formulation, bound: Bound | None, a: Any, b: Any, out: Any, workspace: Any = None,
        key: Hashable = None,
    ) -> Any:  # fmt: skip
        """`run` for arrays that have been checked: `formulation` and `bound` are theirs, `key` their signature."""
        job, backend = self._checked(formulation, bound, a, b, out)
        if backend == "reference":
            jobs.reference(a, b, job)
        elif backend == "cuda":
            self._start(job, a, workspace, key)
        else:
            simulation = jobs.simulate(job, seed=0)
            if simulation.hazards:
                raise HazardError(simulation.hazards)
        return job.value

    def _checked(self, formulation: Formulation, bound: Bound | None, a: Any, b: Any, out: Any) -> tuple[Job, Backend]:
        """What is to be run, and where."""
        a_info, b_info = describe(a, "a"), describe(b, "b")
        backend = self._backend(a_info)
        return self._job(formulation, bound, a_info, b_info, a, out), backend

    def _start(self, job: Job, like: Any, workspace: Any, key: Hashable) -> None:
        from gemmsmith.calls import Call

        call = Call(job, like)
        call.start(job.places, like, workspace)
        p = job.route.problem
        if key is not None and p.batch * p.m * p.n:
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[key] = call

    def take(self) -> tuple[Formulation, Bound | None]:
        """What the arrays were that the plan was made from; it forgets them."""
        bound = self.bound
        if bound:
            self.bound = replace(bound, operands={}, results={})
        return self.formulation, bound

    def given(self, out: Any) -> dict[str, Any]:
        """The results' arrays that a caller gives, by name. Raises ArgumentError."""
        if out is None:
            return {}
        if self.bound is None or is_array(out) or not isinstance(out, (Mapping, tuple, list)):
            return {self._first: out}
        from gemmsmith.epilogues import given_results

        return given_results(self._names, self._first, out)

    def _called(self, call: Call, places: dict[str, Any], like: Any, out: Any, workspace: Any) -> Any:
        """A run whose arrays have a known signature."""
        if call.swapped:
            places["a"], places["b"] = places["b"], places["a"]
        if self.bound is None and out is not None:  # an array, or it would have no signature
            call.start(places, like, workspace)
            return out
        results = self.given(out)
        for name, shape, dtype in call.results:
            if name not in results:
                results[name] = made = empty_like_kind(like, shape, dtype)
                places[result_argument(name)] = signature(made)[1]
        call.start(places, like, workspace)
        if self._names == ["out"]:
            return results["out"]
        from gemmsmith.epilogues import arranged

        return arranged(results, self._names)

    def simulate(
        self, a: Any, b: Any, out: Any = None, *, operands: Mapping[str, Any] | None = None, seed: int = 0,
        progress: Progress | None = None, **named: Any,
    ) -> Simulation:  # fmt: skip
        """Executes the kernel on the CPU, every barrier and asynchronous hazard checked. Arrays on the CPU.

        Other seeds give other schedules; seed 0 is the one the timeline's cost model predicts. `progress` is told the
        fraction that is done, now and then.
        """
        given = {**(operands or {}), **named}
        signatures(a, b, self.given(out), given)  # refuses what would lose its gradient
        found = self._as_planned(a, b, out, given)
        return jobs.simulate(self._job(*found, describe(a, "a"), describe(b, "b"), a, out), seed, progress)

    def _job(
        self, formulation: Formulation, bound: Bound | None, a: ArrayInfo, b: ArrayInfo, like: Any, out: Any
    ) -> Job:
        """The route of arrays like those planned for, with where they are."""
        problem, swapped, shape, _ = formulation
        if bound and 0 in shape:
            jobs.expect_values(bound, shape)
        if bound is None:
            if out is None:
                out = empty_like_kind(like, shape, self.output)
            arrays: dict[str, ArrayInfo | float] = {"out": describe(out, "out")}
            results, value = {"out": out}, out
        else:
            problem, swapped = bound.problem, bound.swapped
            results, value = dict(bound.results), bound.value
            arrays = {
                result_argument(name) if name in results else operand_argument(name): x
                for name, x in bound.places.items()
            }
        route = self._route
        if problem != self.problem or (bound and bound.arrays != route.arrays):
            route = self._routed(problem, bound) if 0 not in shape else replace(route, problem=problem)
        if route.spec != self.spec:
            raise ArgumentError(
                f"a, b, out: their layouts need the kernel {route.spec.name} ({route.spec.layouts}), this plan has "
                f"{self.spec.name} ({self.spec.layouts}); make a plan from arrays like these"
            )
        first, second = (b, a) if swapped else (a, b)
        return Job(route, {"a": first, "b": second, **arrays}, bound, results, value, swapped)

    def _backend(self, a: ArrayInfo) -> Backend:
        if a.device == "spec":
            raise ArgumentError("a: got a Spec, which has no data; run takes arrays")
        if self.backend == "auto":
            return "cuda" if a.device == "cuda" else "reference"
        if (self.backend == "cuda") != (a.device == "cuda"):
            raise ArgumentError(
                f"backend: got {self.backend!r} with arrays on {a.place}; "
                + ("use arrays on a GPU" if self.backend == "cuda" else "use arrays on the CPU")
            )
        return self.backend


def _swapped(formulation: Formulation, bound: Bound | None) -> bool:
    return bound.swapped if bound else formulation.swapped


def signatures(a: Any, b: Any, out: Mapping[str, Any], operands: Mapping[str, Any]) -> tuple[Hashable, dict[str, Any]]:
    """What a run depends on besides addresses and numbers, and those, by their Pointers' names."""
    a_signed, a_place = signature(a, "a")
    b_signed, b_place = signature(b, "b")
    places: dict[str, Any] = {"a": a_place, "b": b_place}
    key: tuple[Hashable, ...] = a_signed, a_place & 15, b_signed, b_place & 15
    for name, x in operands.items():
        key += name, _signed(x, name, operand_argument(name), places)
    for name, x in out.items():
        signed, place = signature(x, name)
        places[result_argument(name)] = place
        key += name, signed, place & 15
    return key, places


def _signed(x: Any, name: str, pointer: str, places: dict[str, Any]) -> Hashable:
    """An argument's signature; its address, or the number it is, goes into `places`."""
    if not is_array(x) and (
        isinstance(x, (int, float, np.generic)) or (not hasattr(x, "shape") and isinstance(x, numbers.Real))
    ):
        try:
            places[pointer] = float(x)
        except OverflowError:
            places[pointer] = number_operand(name, x)  # refuses it
        return "number"
    signed, address = signature(x, name)
    places[pointer] = address
    return signed, address & 15
