"""The plans of users: a GEMM's kernels to read and to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmsmith.arrays import ArrayLike, Operand, Pair
from gemmsmith.binding import checks
from gemmsmith.binding.request import Out
from gemmsmith.core.chip import occupancy
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.problem import Problem
from gemmsmith.core.scalars import as_integer
from gemmsmith.core.templates import html_section, html_table
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.simulation import Simulation
from gemmsmith.tuning.choose import estimate_us
from gemmsmith.tuning.costs import SM_CLOCK_MHZ
from gemmsmith.tuning.explain_config import estimate_sm80, explain_config, explain_sm80
from gemmsmith.tuning.grouped import equal_groups
from gemmsmith.tuning.model import covers_config

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.compiler import Resources
    from gemmsmith.backends.sim.execute.counters import Counters


class Plan:
    """A GEMM with its epilogue: the config that was chosen, and the kernels, which are compiled at their first use.

    One plan serves every problem with the same dtypes, layouts and alignment, of any size. Rows are aligned if their
    length is a multiple of 16 bytes, or 8 elements of 16 bits.

    Args:
        planned: What `gemmsmith.plan` has planned.
    """

    def __init__(self, planned: PlannedGemm) -> None:
        if not isinstance(planned, PlannedGemm):
            raise ArgumentError(f"planned: got {type(planned).__name__}; use gemmsmith.plan(a, b)")
        self._planned = planned

    def __repr__(self) -> str:
        lines = (f"{title:<10} {text}" for title, text in self._facts().items())
        return "\n".join([f"Plan of {self._planned.caller_problem}", *lines])

    def _repr_html_(self) -> str:
        """Return the representation in a notebook, with a table of resources, the visitor tree and the explanation."""
        facts = html_table((self._facts() | self._known_resources()).items())
        below = html_section("epilogue", self.epilogue) + html_section("why", self.why)
        return f"<p>Plan of {escape(str(self._planned.caller_problem))}</p>{facts}{below}"

    def _facts(self) -> dict[str, str]:
        """Return what the representations say of the plan, by title."""
        graph, estimate = self._planned.binding.graph, {}
        if not math.isnan(self.estimated_us):
            estimate = {"estimate": f"{self.estimated_us:.1f} us, of the kernel alone"}
        names = ", ".join((*graph.tensor_names, *graph.number_names))
        return {"config": f"{self.config}", "origin": self.origin, **estimate, "operands": names or "none"}

    def _known_resources(self) -> dict[str, str]:
        """Return the kernel's resources by title, without compiling it: its registers if it was compiled before."""
        kernel, compiled = self._planned.kernel, self._planned.find_compiled()
        facts = {"threads": f"{kernel.threads} per CTA", "shared memory": f"{kernel.shared_bytes} bytes per CTA"}
        if compiled is None:
            limits = occupancy(kernel.chip, kernel.threads, 1, kernel.shared_bytes)
            return facts | {"registers": "known when compiled: plan.resources", "resident": f"at most {limits}"}
        r = compiled.resources
        limits = occupancy(kernel.chip, kernel.threads, r.registers, r.shared_bytes + kernel.shared_bytes)
        spills = f"{r.spill_store_bytes} bytes stored, {r.spill_load_bytes} loaded"
        return facts | {"registers": f"{r.registers} per thread", "spills": spills, "resident": f"{limits}"}

    @property
    def config(self) -> Config:
        """The kernel's configuration."""
        return self._planned.config

    @property
    def origin(self) -> str:
        """Where the config comes from, in words."""
        return self._planned.origin

    @property
    def problem(self) -> Problem:
        """The GEMM of strided matrices that the kernel computes."""
        return self._planned.problem

    @property
    def source(self) -> str:
        """The GEMM kernel as one CUDA C++ file."""
        return self._planned.kernel.source

    @cached_property
    def ptx(self) -> str:
        """The GEMM kernel's PTX."""
        from gemmsmith.backends.cuda.compiler import compile_ptx

        kernel = self._planned.kernel
        return compile_ptx(kernel.source, kernel.name, kernel.chip.target)

    @cached_property
    def sass(self) -> str:
        """The GEMM kernel's machine code (SASS), disassembled."""
        from gemmsmith.backends.cuda.listing import disassemble

        return disassemble(self._planned.compiled.cubin)

    @property
    def resources(self) -> Resources:
        """Registers, spills, compiler advisories, and shared memory in bytes, static and dynamic."""
        resources = self._planned.compiled.resources
        return replace(resources, shared_bytes=resources.shared_bytes + self._planned.kernel.shared_bytes)

    @property
    def workspace_bytes(self) -> int:
        """Workspace in bytes: packed operands, partial reductions, split-K partial sums."""
        return self._planned.launches.workspace_bytes

    @property
    def why(self) -> str:
        """The source of the config, and the model's estimates for it and for alternatives.

        Without a model for the kernel, it says so.
        """
        p = self._planned
        if not covers_config(p.config):
            return explain_sm80(p.unswapped, p.unswapped_epilogue, p.origin, p.spec)
        names = "ba" if p.binding.swapped else "ab"
        text = explain_config(p.unswapped, p.config, p.unswapped_epilogue, p.origin, p.gpu, names)
        try:
            self._planned.kernel  # noqa: B018 builds it
        except ConfigError as error:
            return f"{text}\nno kernel can be built: {error}"
        return text

    @property
    def estimated_us(self) -> float:
        """Model estimate of the GEMM kernel's time on the plan's GPU, in microseconds; NaN if no model covers it."""
        p = self._planned
        if not covers_config(p.config):
            e = estimate_sm80(p.unswapped, p.spec)
            return e.cycles / SM_CLOCK_MHZ if e else math.nan
        problem = equal_groups(p.unswapped) if p.unswapped.grouping else p.unswapped
        return estimate_us(problem, p.config, p.unswapped_epilogue, p.gpu)

    @property
    def epilogue(self) -> str:
        """The epilogue as a visitor tree, after the passes."""
        from gemmsmith.graph.frontend.show import format_tree

        return format_tree(self._planned.binding.graph)

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
        if workspace is not None:
            checks.check_workspace(workspace)
        merged = checks.merge_operands(operands, named_operands)
        return self._planned.run(a, b, out, merged, scale_a, scale_b, workspace)

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
        backend, binding, launches = self._planned.prepare(a, b, out, *inputs)
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
        _, binding, launches = self._planned.prepare(a, b, out, *inputs, "sim")
        result = run_simulation(
            launches, binding.arguments, seed, progress, counters, record=record, schedules=schedules
        )
        return Simulation(binding.value, result.hazards, result.cycles, result.verdict, result.records, counters)

    def export(
        self, folder: str | Path, name: str = "gemm", others: Iterable[Plan] = (), *, tvm_ffi: bool = False
    ) -> Path:
        """Write the kernels and one C header that launches them, for any M, N, K, strides and addresses.

        The header needs cuda.h and functions of libcuda, which it finds by a function of the caller: no other library,
        and no Python. It computes grids, tensor maps and all other arguments, checks them, and launches. No GPU is
        needed to write it.

        Args:
            folder: Where `{name}.h` with the cubins, `{name}.cu`, `{name}.cubin`, and `{name}.json` with the arguments
                go. It is made if it does not exist.
            name: The prefix of the header's functions, a C identifier.
            others: Plans of the same GEMM for other M. The header then chooses by M: each plan serves M up to its own,
                and the one of the most rows every larger M.
            tvm_ffi: Also write `{name}_tvm_ffi.cc`, the source of a function of TVM-FFI (apache-tvm-ffi), for Python,
                PyTorch and JAX. It takes a, b, the epilogue's arrays, the results and the epilogue's numbers; its first
                lines say how to compile it.

        Returns:
            The path of the header.

        Raises:
            ArgumentError: The name is no identifier, a plan of `others` takes other arrays, or a plan is one that no
                header binds: with a batch of 1, or an epilogue that reads sizes or is traced at each call.
        """
        from gemmsmith.host.export.files import export

        if isinstance(others, Plan):
            raise ArgumentError("others: got a plan; use a list of plans")
        return export([self._planned, *(x._planned for x in others)], folder, name, tvm_ffi)
