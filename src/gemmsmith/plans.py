"""A plan: a problem, the kernels that compute it, and running them on a GPU, in the simulator, or by the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemmsmith.arrays import ArrayInfo, as_numpy, byte_range, current_stream, describe, empty_like_kind
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.designs.build import build
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import ORDER_LENGTH
from gemmsmith.launches import Launch, Route
from gemmsmith.problems import Formulation, formulate

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.compiler import Compiled, Resources
    from gemmsmith.backends.sim.hazards import Hazard
    from gemmsmith.backends.sim.timeline import Timeline
    from gemmsmith.epilogues import Bound

Backend = Literal["auto", "cuda", "sim", "reference"]
BACKENDS = ("auto", "cuda", "sim", "reference")
RESIDENT_CTAS = 4
"""CTAs that the simulator holds at once, so that small problems are persistent too."""


@dataclass(frozen=True)
class Simulation:
    """What a simulated product gave: D, hazards (none, in a right kernel), the timeline, and cycles of the model."""

    result: Any
    hazards: list[Hazard]
    timeline: Timeline
    cycles: int


class Plan:
    """A compiled product with its epilogue. One plan serves every problem with the same dtypes, layouts and alignment,
    of any size."""

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

        if epilogue is None and operands:
            given = ", ".join(operands)
            raise ArgumentError(f"{given}: got an operand without an epilogue that reads it; give `epilogue`")
        self.backend: Backend = backend
        self._source, self._exact, self._atomic = epilogue, exact, atomic
        arguments = (a, b, out, operands or {}, out_dtype, accumulate)
        self.formulation, self.bound = self._formulated(*arguments, swap=config is not None and config.swap)
        if config is None:
            bound = self.bound
            config = choose(bound.problem if bound else self.formulation.problem, bound.spec if bound else None)
            if config.swap:
                self.formulation, self.bound = self._formulated(*arguments, swap=True)
        self.config: Config = config
        self.problem: Problem = self.bound.problem if self.bound else self.formulation.problem
        self.output: DType = self.formulation.output
        self.accumulate: DType = self.problem.accumulate
        self._route = self._routed(self.problem, self.bound)

    def _formulated(
        self, a: Any, b: Any, out: Any, operands: Mapping[str, Any], out_dtype: Any, accumulate: Any, swap: bool
    ) -> tuple[Formulation, Bound | None]:
        """What the arrays are; with an epilogue also what its operands and results are."""
        if self._source is None:
            return formulate(a, b, out, out_dtype, accumulate, swap=swap), None
        from gemmsmith.epilogues import bind

        formulation = formulate(a, b, None, out_dtype, accumulate, literal=True)
        bound = bind(self._source, formulation, a, operands, out, exact=self._exact, atomic=self._atomic, swap=swap)
        return formulation, bound

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
        """Registers, spills and compiler advisories."""
        return self.compiled.resources

    @property
    def workspace_bytes(self) -> int:
        """Device memory a run needs for packed operands; 0 where TMA reads both as they are."""
        return self._route.workspace_bytes

    @property
    def epilogue(self) -> str:
        """The epilogue as a visitor tree, after the passes."""
        from gemmsmith.core.graph import bare
        from gemmsmith.epilogue.show import tree

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
        given = {**(operands or {}), **named}
        found = self._formulated(a, b, out, given, self.output, self.accumulate, self.config.swap)
        return self.run_formulated(*found, a, b, out, workspace)

    def run_formulated(
        self, formulation: Formulation, bound: Bound | None, a: Any, b: Any, out: Any, workspace: Any = None
    ) -> Any:
        """`run` for arrays that have been checked: `formulation` and `bound` are theirs."""
        a_info, b_info = describe(a, "a"), describe(b, "b")
        backend = self._backend(a_info)
        job = self._job(formulation, bound, a_info, b_info, a, out)
        if bound and 0 in formulation.shape:
            _expect_values(bound, formulation.shape)
        if backend == "reference":
            _reference(a, b, job)
        elif backend == "cuda":
            self._run_cuda(job, a, a_info.index, workspace)
        else:
            simulation = _simulate(job, seed=0)
            if simulation.hazards:
                raise HazardError(simulation.hazards)
        return job.value

    def simulate(
        self, a: Any, b: Any, out: Any = None, *, operands: Mapping[str, Any] | None = None, seed: int = 0,
        **named: Any,
    ) -> Simulation:  # fmt: skip
        """Executes the kernel on the CPU, every barrier and asynchronous hazard checked. Arrays on the CPU.

        Other seeds give other schedules; seed 0 is the one the timeline's cost model predicts.
        """
        given = {**(operands or {}), **named}
        found = self._formulated(a, b, out, given, self.output, self.accumulate, self.config.swap)
        return _simulate(self._job(*found, describe(a, "a"), describe(b, "b"), a, out), seed)

    def _job(
        self, formulation: Formulation, bound: Bound | None, a: ArrayInfo, b: ArrayInfo, like: Any, out: Any
    ) -> _Job:
        """The route of arrays like those planned for, with where they are."""
        problem, swapped, shape, _ = formulation
        if bound is None:
            if out is None:
                out = empty_like_kind(like, shape, self.output)
            infos: dict[str, ArrayInfo | float] = {"out": describe(out, "out")}
            results, value = {"out": out}, out
        else:
            problem, swapped = bound.problem, bound.swapped
            infos, results, value = dict(bound.places), dict(bound.results), bound.value
        route = self._route
        if problem != self.problem or (bound and bound.arrays != route.arrays):
            route = self._routed(problem, bound) if 0 not in shape else replace(route, problem=problem)
        if route.spec != self.spec:
            raise ArgumentError(
                f"a, b, out: their layouts need the kernel {route.spec.name}, this plan has {self.spec.name}; "
                "make a plan from arrays like these"
            )
        first, second = (b, a) if swapped else (a, b)
        return _Job(route, first, second, infos, bound, results, value)

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

    def _run_cuda(self, job: _Job, like: Any, device: int, workspace: Any) -> None:
        from gemmsmith.backends.cuda import driver, launcher
        from gemmsmith.backends.cuda.flags import flags

        driver.require_hopper(device)
        stream = current_stream(like)
        need = job.route.workspace_bytes
        place = 0
        if need:
            if workspace is None:
                workspace = empty_like_kind(like, (need // self.problem.a.dtype.bytes,), self.problem.a.dtype)
            place = _workspace_address(workspace, need)
        with launcher.device_guard(device):
            zeros = flags(device, stream, job.route.flag_bytes) if job.route.flag_bytes else 0
            launches = job.route.launches(job.a.address, job.b.address, job.addresses, place, zeros)
            for i, launch in enumerate(launches):
                launch_cuda(launch, device, stream, pdl=i > 0)


@dataclass(frozen=True)
class _Job:
    """One run: a route, where its operands and results are, and what the caller gets."""

    route: Route
    a: ArrayInfo
    b: ArrayInfo
    infos: Mapping[str, ArrayInfo | float]
    bound: Bound | None
    results: Mapping[str, Any]
    value: Any

    @property
    def addresses(self) -> dict[str, int | float]:
        return {name: x.address if isinstance(x, ArrayInfo) else x for name, x in self.infos.items()}


def _expect_values(bound: Bound, shape: tuple[int, ...]) -> None:
    """Nothing has no largest element."""
    for r in bound.graph.results:
        node = bound.graph.nodes[r.node]
        extreme = node.op == "reduce" and node.value[0] in ("max", "min")
        if extreme and 0 not in describe(bound.results[r.name], r.name).shape:
            raise ArgumentError(f"a, b: the product is empty, {shape}; {r.name}, a {node.value[0]}, has no value")


def launch_cuda(launch: Launch, device: int, stream: int, *, pdl: bool = False) -> None:
    """Starts one kernel on a stream; compiles and loads it at the first use on a device.

    `pdl`: it may be scheduled while the stream's last kernel ends; it waits for that one's results itself.
    """
    from gemmsmith.backends.cuda import launcher

    kernel = launch.kernel
    loaded = launcher.load(
        kernel.source, kernel.name, device, stream,
        threads=kernel.threads, cluster=kernel.cluster, shared_bytes=kernel.shared_bytes,
        parameter_kinds=kernel.parameter_kinds,
    )  # fmt: skip
    clusters = min(launch.clusters, loaded.max_active_clusters())
    arguments = launch.arguments
    if "order" in arguments:
        clusters = min(clusters, ORDER_LENGTH)
        if "flags" not in arguments:  # who waits for others waits for lower blocks, which are started first
            arguments = {**arguments, "order": loaded.order(clusters)}
    loaded.launch(clusters * kernel.cluster[0], [arguments[p.name or ""] for p in kernel.parameters], stream, pdl=pdl)


def _workspace_address(workspace: Any, need: int) -> int:
    if hasattr(workspace, "data_ptr"):
        address, size = int(workspace.data_ptr()), workspace.numel() * workspace.element_size()
    elif hasattr(workspace, "__cuda_array_interface__"):
        address, size = int(workspace.__cuda_array_interface__["data"][0]), int(workspace.nbytes)
    else:
        raise ArgumentError(f"workspace: got {type(workspace).__name__}; use an array on the GPU")
    if size < need or address % 16:
        raise ArgumentError(f"workspace: got {size} bytes at {address:#x}; use {need} at a multiple of 16")
    return address


def _reference(a: Any, b: Any, job: _Job) -> None:
    from gemmsmith.backends.reference.product import exact, rounded

    product = exact(as_numpy(a, "a"), as_numpy(b, "b"))
    if job.bound is None:
        values = {"out": product}
    else:
        from gemmsmith.backends.reference.epilogue import execute

        operands = {o.name: job.bound.operands[o.name] for o in job.bound.graph.operands}
        numbers = {n: as_numpy(x, n) if hasattr(x, "shape") else float(x) for n, x in operands.items()}
        values = execute(job.bound.written, product, numbers)
    for name, out in job.results.items():
        as_numpy(out, name)[...] = rounded(values[name], describe(out, name).dtype)


def _simulate(job: _Job, seed: int) -> Simulation:
    from gemmsmith.backends.sim import GlobalMemory, Timeline, simulate
    from gemmsmith.backends.sim.hazards import Hazard
    from gemmsmith.lang.statements import Where

    arrays = {name: x for name, x in job.infos.items() if isinstance(x, ArrayInfo)}
    for name, info in (("a", job.a), ("b", job.b), *arrays.items()):
        if info.device != "cpu":
            raise ArgumentError(f"{name}: the simulator runs on the CPU; got an array on {info.place}")
    memory = GlobalMemory()
    a, b = (_place(memory, info, name, writable=False) for info, name in ((job.a, "A"), (job.b, "B")))
    addresses: dict[str, int | float] = dict(job.addresses)
    for name, info in arrays.items():
        addresses[name] = _place(memory, info, name, writable=name in job.results)
    workspace = 0
    if job.route.workspace_bytes:
        workspace = memory.place(np.zeros(job.route.workspace_bytes, np.uint8), "workspace", unwritten=True)
    hazards: list[Hazard] = []
    timeline, cycles = Timeline(), 0
    longest = 0
    words = np.zeros(max(job.route.flag_bytes, 4) // 4, np.uint32)
    flags = memory.place(words, "flags", granule=4)
    for launch in job.route.launches(a, b, addresses, workspace, flags):
        size = launch.kernel.cluster[0]
        clusters = min(launch.clusters, max(1, RESIDENT_CTAS // size))
        done = simulate(launch.kernel, clusters * size, launch.arguments, memory, seed=seed)
        hazards += done.hazards
        if done.cycles >= longest:  # the product's, not a packing's or a second step's
            timeline, longest = done.timeline, done.cycles
        cycles += done.cycles
    if words.any():
        hazards.append(Hazard("semaphore", f"{np.count_nonzero(words)} flags are left raised", Where("?", 0)))
    return Simulation(job.value, hazards, timeline, cycles)


def _place(memory: Any, info: ArrayInfo, name: str, *, writable: bool) -> int:
    """An array's bytes at a simulated address with the same alignment."""
    if 0 in info.shape:
        return int(memory.place(np.zeros(16, np.uint8), name, writable=writable))
    first, end = byte_range(info)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
    return int(memory.place(raw, name, alignment_offset=first % 16, writable=writable, granule=min(2, info.itemsize)))
