"""A plan: a problem, the kernels that compute it, and running them on a GPU, in the simulator, or by the reference."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
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
    """A compiled product. One plan serves every problem with the same dtypes, layouts and alignment, of any size."""

    def __init__(
        self, a: Any, b: Any, out: Any = None, *, out_dtype: Any = None, accumulate: Any = "fp32",
        config: Config | None = None, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        if backend not in BACKENDS:
            raise ArgumentError(f"backend: got {backend!r}; use one of {', '.join(BACKENDS)}")
        if config is not None and not isinstance(config, Config):
            raise ArgumentError(f"config: got {type(config).__name__}; use a gemmsmith.Config")
        from gemmsmith.tuning.choose import choose

        self.formulation = formulation = formulate(a, b, out, out_dtype, accumulate)
        self.problem: Problem = formulation.problem
        self.output: DType = formulation.output
        self.accumulate: DType = self.problem.accumulate
        self.backend: Backend = backend
        self.config: Config = config or choose(self.problem)
        self._route = Route.of(self.problem, self.config)

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

    # -- running -----------------------------------------------------------------------------------------
    def run(self, a: Any, b: Any, out: Any = None, *, workspace: Any = None) -> Any:
        """out = a @ b; gives `out`, or a new array of a's library.

        Shapes as in `gemm`; they may differ from those planned for, dtypes, layouts and alignment may not.
        Arrays on a GPU run there, on the caller's current stream; arrays on the CPU by the plan's backend.
        `workspace`: device bytes, at least `workspace_bytes` of the problem at hand; made where not given.
        Raises ArgumentError.
        """
        return self.run_formulated(formulate(a, b, out, self.output, self.accumulate), a, b, out, workspace)

    def run_formulated(self, formulation: Formulation, a: Any, b: Any, out: Any, workspace: Any = None) -> Any:
        """`run` for arrays that have been checked: `formulation` is theirs."""
        problem, swapped, shape, _ = formulation
        a_info, b_info = describe(a, "a"), describe(b, "b")
        backend = self._backend(a_info)
        if 0 in shape:
            return empty_like_kind(a, shape, self.output) if out is None else out
        if out is None:
            out = empty_like_kind(a, shape, self.output)
        if backend == "reference":
            _reference(a, b, out, self.output)
            return out
        route = self._route_of(problem)
        addresses = _in_order(swapped, a_info, b_info)
        if backend == "cuda":
            self._run_cuda(route, addresses, describe(out, "out").address, a, a_info.index, workspace)
        else:
            simulation = _simulate(route, addresses, describe(out, "out"), seed=0)
            if simulation.hazards:
                raise HazardError(simulation.hazards)
        return out

    def simulate(self, a: Any, b: Any, out: Any = None, *, seed: int = 0) -> Simulation:
        """Executes the kernel on the CPU, every barrier and asynchronous hazard checked. Arrays on the CPU.

        Other seeds give other schedules; seed 0 is the one the timeline's cost model predicts.
        """
        problem, swapped, shape, _ = formulate(a, b, out, self.output, self.accumulate)
        if out is None:
            out = empty_like_kind(a, shape, self.output)
        infos = _in_order(swapped, describe(a, "a"), describe(b, "b"))
        return _simulate(self._route_of(problem), infos, describe(out, "out"), seed, out)

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

    def _route_of(self, problem: Problem) -> Route:
        route = self._route if problem == self.problem else Route.of(problem, self.config)
        if route.spec != self.spec:
            raise ArgumentError(
                f"a, b, out: their layouts need the kernel {route.spec.name}, this plan has {self.spec.name}; "
                "make a plan from arrays like these"
            )
        return route

    def _run_cuda(
        self, route: Route, infos: tuple[ArrayInfo, ArrayInfo], out: int, like: Any, device: int, workspace: Any
    ) -> None:
        from gemmsmith.backends.cuda import driver, launcher

        driver.require_hopper(device)
        stream = current_stream(like)
        need = route.workspace_bytes
        place = 0
        if need:
            if workspace is None:
                workspace = empty_like_kind(like, (need // self.problem.a.dtype.bytes,), self.problem.a.dtype)
            place = _workspace_address(workspace, need)
        with launcher.device_guard(device):
            for launch in route.launches(infos[0].address, infos[1].address, out, place):
                launch_cuda(launch, device, stream)


def launch_cuda(launch: Launch, device: int, stream: int) -> None:
    """Starts one kernel on a stream; compiles and loads it at the first use on a device."""
    from gemmsmith.backends.cuda import launcher

    kernel = launch.kernel
    loaded = launcher.load(
        kernel.source, kernel.name, device, stream,
        threads=kernel.threads, cluster=kernel.cluster, shared_bytes=kernel.shared_bytes,
        parameter_kinds=kernel.parameter_kinds,
    )  # fmt: skip
    clusters = min(launch.clusters, loaded.max_active_clusters(), ORDER_LENGTH)
    arguments = launch.arguments
    if "order" in arguments:
        arguments = {**arguments, "order": loaded.order(clusters)}
    loaded.launch(clusters * kernel.cluster[0], [arguments[p.name or ""] for p in kernel.parameters], stream)


def _in_order(swapped: bool, a: ArrayInfo, b: ArrayInfo) -> tuple[ArrayInfo, ArrayInfo]:
    """The arrays of the problem's a and b."""
    return (b, a) if swapped else (a, b)


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


def _reference(a: Any, b: Any, out: Any, output: DType) -> None:
    from gemmsmith.backends.reference.product import product

    as_numpy(out, "out")[...] = product(as_numpy(a, "a"), as_numpy(b, "b"), output)


def _simulate(
    route: Route, infos: tuple[ArrayInfo, ArrayInfo], out: ArrayInfo, seed: int, result: Any = None
) -> Simulation:
    from gemmsmith.backends.sim import GlobalMemory, Timeline, simulate

    if any(info.device != "cpu" for info in (*infos, out)):
        raise ArgumentError(f"a, b: the simulator runs on the CPU; got an array on {infos[0].place}")
    memory = GlobalMemory()
    a, b = (_place(memory, info, name, writable=False) for info, name in zip(infos, "AB", strict=True))
    d = _place(memory, out, "D", writable=True)
    workspace = 0
    if route.workspace_bytes:
        workspace = memory.place(np.zeros(route.workspace_bytes, np.uint8), "workspace", unwritten=True)
    hazards: list[Hazard] = []
    timeline, cycles = Timeline(), 0
    for launch in route.launches(a, b, d, workspace):
        size = launch.kernel.cluster[0]
        clusters = min(launch.clusters, max(1, RESIDENT_CTAS // size))
        done = simulate(launch.kernel, clusters * size, launch.arguments, memory, seed=seed)
        hazards += done.hazards
        timeline, cycles = done.timeline, cycles + done.cycles
    return Simulation(result, hazards, timeline, cycles)


def _place(memory: Any, info: ArrayInfo, name: str, *, writable: bool) -> int:
    """An array's bytes at a simulated address with the same alignment."""
    if 0 in info.shape:
        return int(memory.place(np.zeros(16, np.uint8), name, writable=writable))
    first, end = byte_range(info)
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
    return int(memory.place(raw, name, alignment_offset=first % 16, writable=writable))
