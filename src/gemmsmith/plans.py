"""A plan: a problem, the kernels that compute it, and running them on a GPU, in the simulator, or by the reference."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gemmsmith import checks
from gemmsmith.arrays import ArrayInfo, address_of, describe, empty_like_kind, is_array, signature
from gemmsmith.binding import Binding, arranged, bind, by_name, first_name
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32, DType, number_operand
from gemmsmith.core.errors import ArgumentError, ConfigError, HazardError
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.switches import switches
from gemmsmith.epilogue.device.inputs import operand_argument
from gemmsmith.epilogue.device.outputs import result_argument
from gemmsmith.epilogue.frontend.snapshot import snapshot
from gemmsmith.kernels.build import build
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launches
from gemmsmith.launches import kernel_spec, launches
from gemmsmith.scaling import ARGUMENTS, argument_name, with_scales

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.compiler import Compiled, Resources
    from gemmsmith.backends.cuda.run import Call
    from gemmsmith.backends.sim.counters import Counters
    from gemmsmith.backends.sim.hazards import Hazard
    from gemmsmith.backends.sim.timeline import Timeline

Backend = Literal["auto", "cuda", "sim", "reference"]
BACKENDS = ("auto", "cuda", "sim", "reference")
MOST_CALLS = 4096
"""Signatures that a plan remembers."""


@dataclass(frozen=True)
class Simulation:
    """What a simulated product gave: D, hazards (none, in a right kernel), the timeline, and cycles of the model."""

    result: Any
    hazards: list[Hazard]
    timeline: Timeline
    cycles: int


class Plan:
    """A compiled product with its epilogue. One plan serves every problem with the same dtypes, layouts and alignment,
    of any size. (Rows of 16-bit elements are aligned alike if both or neither have lengths that are multiples of 8.)"""

    def __init__(
        self, a: Any, b: Any, out: Any = None, *, out_dtype: Any = None, accumulate: Any = None,
        precision: Any = None, epilogue: Any = None, operands: Mapping[str, Any] | None = None, exact: bool = False,
        atomic: bool = False, config: Config | None = None, batch_invariant: bool = False, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        exact, atomic, batch_invariant = switches(exact=exact, atomic=atomic, batch_invariant=batch_invariant)
        if backend not in BACKENDS:
            raise ArgumentError(f"backend: got {backend!r}; use one of {', '.join(BACKENDS)}")
        if config is not None and not isinstance(config, Config):
            raise ArgumentError(f"config: got {type(config).__name__}; use a gemmsmith.Config")
        self.backend: Backend = backend
        self.fingerprint: Hashable
        """The epilogue's, None if it has none."""
        epilogue, self.fingerprint = snapshot(epilogue)
        binding = bind(
            a, b, out, operands, epilogue=epilogue, out_dtype=out_dtype, accumulate=accumulate, precision=precision,
            exact=exact, atomic=atomic,
        )  # fmt: skip
        self._origin = "given"
        if batch_invariant:
            from gemmsmith.tuning.invariant import refuse

            refuse(config, binding.spec)
            binding = binding.transposed() if binding.swapped else binding
        self._configure(binding, config, describe(a, "a"), batch_invariant)
        self.problem: Problem = self.binding.problem
        self.output: DType = self.binding.output
        self.accumulate: DType = self.problem.accumulate
        self._fused = epilogue is not None
        self._options = {
            "epilogue": epilogue, "out_dtype": self.output, "accumulate": accumulate, "precision": precision,
            "exact": exact, "atomic": atomic,
        }  # fmt: skip
        self._calls: dict[Hashable, Call] = Bounded(MOST_CALLS)
        self._names, self._first = self.binding.names, first_name(self.binding.graph)
        self._alone = self._names == ["out"]

    def _configure(self, binding: Binding, config: Config | None, a: ArrayInfo, batch_invariant: bool) -> None:
        """Chooses a config for a's GPU where none is given, and orients the product as it says."""
        from gemmsmith.tuning.choose import choose
        from gemmsmith.tuning.fitting import fitting
        from gemmsmith.tuning.gpus import gpu_at
        from gemmsmith.tuning.invariant import invariant
        from gemmsmith.tuning.multistage import choose_multistage, tuned_multistage
        from gemmsmith.tuning.table import tuned
        from gemmsmith.tuning.whole_rows import check_rows, explained

        given, problem, epilogue = config is not None, binding.problem, binding.spec
        chip, self._gpu = chip_of(a), gpu_at(a.index if a.device == "cuda" else 0)
        by_waves = chip != HOPPER or problem.a.dtype == FP32
        select = partial(choose, gpu=self._gpu)
        if by_waves:
            select = partial(choose_multistage, chip=chip, invariant=batch_invariant)
        try:
            if config is None and by_waves:
                config = None if batch_invariant else tuned_multistage(problem, epilogue, chip)
                self._origin = f"{'tuned' if config else 'chosen'} for {chip}"
                config = config or select(problem, epilogue)
            if config is None and batch_invariant:
                config, self._origin = invariant(binding, self._gpu), "batch-invariant"
            if config is None:
                config = tuned(problem, epilogue, self._gpu)
                fused = not binding.graph.is_bare
                self._origin = "tuned" + " without its epilogue" * fused if config else "chosen by the model"
                config = config or select(problem, epilogue)
            self.binding: Binding = binding.transposed() if config.swap_ab else binding
            self.config: Config = config
            self.spec: KernelSpec = kernel_spec(self.binding, config)
            """What is constant in the kernel."""
            if not given and (settled := fitting(config, self.spec)) != config:
                self.config, self.spec = settled, kernel_spec(self.binding, settled)
            if not given:
                check_rows(self.spec)
        except ConfigError as error:
            if given:
                raise
            raise explained(error, problem, epilogue, select) from None

    # -- what it is ------------------------------------------------------------------------------------
    @cached_property
    def launches(self) -> Launches:
        """What runs for the problem that was planned for."""
        return launches(self.binding, self.spec)

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

        return compile_source(self.source, self.kernel.name, self.kernel.chip.target)

    @property
    def ptx(self) -> str:
        """The GEMM kernel's PTX."""
        from gemmsmith.backends.cuda.compiler import compile_ptx

        return compile_ptx(self.source, self.kernel.name, self.kernel.chip.target)

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
        return self.launches.workspace_bytes

    @property
    def why(self) -> str:
        """Where the config comes from, and what the model says of it and of others."""
        from gemmsmith.tuning.why import why

        if self.spec.mma.by != "wgmma":  # the model knows no other instruction
            return f"{self.config}: {self._origin}"
        binding = self._as_chosen
        return why(
            binding.problem, self.config, binding.spec, self._origin, gpu=self._gpu, swapped=binding.swapped
        )  # fmt: skip

    @property
    def estimate(self) -> float:
        """What the model says that the GEMM kernel takes, in us."""
        from gemmsmith.tuning.choose import microseconds

        return microseconds(self._as_chosen.problem, self.config, self._as_chosen.spec, self._gpu)

    @property
    def _as_chosen(self) -> Binding:
        """The product as it was when the config was chosen, which may transpose it."""
        return self.binding.transposed() if self.config.swap_ab else self.binding

    @property
    def epilogue(self) -> str:
        """The epilogue as a visitor tree, after the passes."""
        from gemmsmith.epilogue.frontend.show import tree

        return tree(self.binding.graph)

    # -- running -----------------------------------------------------------------------------------------
    def run(
        self, a: Any, b: Any, out: Any = None, *, scale_a: Any = None, scale_b: Any = None,
        operands: Mapping[str, Any] | None = None, workspace: Any = None, **named: Any,
    ) -> Any:  # fmt: skip
        """out = epilogue(a @ b); gives `out`, or new arrays of a's library.

        Shapes as in `gemm`; they may differ from those planned for, dtypes, layouts, alignment and what scales are for
        may not. The epilogue's operands by name. Arrays on a GPU run there, on the caller's current stream; arrays on
        the CPU by the plan's backend. `workspace`: device bytes, at least `workspace_bytes` of the problem at hand;
        made where not given. Raises ArgumentError.
        """
        return self.run_checked(a, b, out, with_scales(checks.operands(operands, named), scale_a, scale_b), workspace)

    def run_checked(self, a: Any, b: Any, out: Any, given: Mapping[str, Any], workspace: Any = None) -> Any:
        """`run` with operands whose names have been checked, and scales among them."""
        results = by_name(out, self._first, self._fused)
        key, addresses = signatures(a, b, results, given)
        call = self._calls.get(key)
        if call is not None and call.apart(addresses):
            return self.launch(call, addresses, results, a, workspace)
        return self.run_bound(self._bind(a, b, out, given), a, workspace, key)

    def prepare(
        self, a: Any, b: Any, out: Any = None, *, scale_a: Any = None, scale_b: Any = None,
        operands: Mapping[str, Any] | None = None, workspace: Any = None, **named: Any,
    ) -> Callable[[], Any]:  # fmt: skip
        """A run of these very arrays, to be called again and again; arguments as in `run`.

        All that can be is done now, nothing is launched yet. Each call launches on the stream that is current then, as
        one CUDA graph, and gives `out`, the same each time; the arrays are kept, and must stay where they are, with
        their shapes. Operands that are numbers keep their values. Calls that are not captured into a graph do not
        overlap one another, not even on two streams; the workspace that is made where none is given belongs to the
        stream that is current now. Arrays on the CPU run as in `run`. Raises ArgumentError, and DeviceError where the
        stream is being captured; a call of what it gives may be captured.
        """
        given = with_scales(checks.operands(operands, named), scale_a, scale_b)
        self.key(a, b, out, given)  # refuses what would lose its gradient
        backend, binding, found = self._checked(self._bind(a, b, out, given), a)
        if backend != "cuda":
            return partial(self.run_checked, a, b, binding.value, given)
        from gemmsmith.backends.cuda.run import PreparedRun

        return PreparedRun(found, binding.arguments, a, workspace, binding.value, (b, given))

    def simulate(
        self, a: Any, b: Any, out: Any = None, *, scale_a: Any = None, scale_b: Any = None,
        operands: Mapping[str, Any] | None = None, seed: int = 0, progress: Callable[[float], None] | None = None,
        counters: Counters | None = None, **named: Any,
    ) -> Simulation:  # fmt: skip
        """Executes the kernel on the CPU, every barrier and asynchronous hazard checked. Arrays on the CPU.

        Other seeds give other schedules; seed 0 is the one the timeline's cost model predicts. `progress` is told the
        fraction that is done, now and then. `counters` (backends/sim/counters.py) count instructions, wavefronts of
        shared memory and sectors of global memory, if given.
        """
        given = with_scales(checks.operands(operands, named), scale_a, scale_b)
        self.key(a, b, out, given)  # refuses what would lose its gradient
        binding = self._bind(a, b, out, given).complete(a)
        return self._simulated(binding, self._launches(binding), seed, progress, counters)

    def key(self, a: Any, b: Any, out: Any, operands: Mapping[str, Any]) -> Hashable:
        """What a run of these arrays depends on besides addresses and numbers. Raises ArgumentError."""
        return signatures(a, b, by_name(out, self._first, self._fused), operands)[0]

    def call_of(self, key: Hashable) -> Call | None:
        """The launches that an earlier run of arrays with that `key` left."""
        return self._calls.get(key)

    def launch(
        self, call: Call, addresses: dict[str, Any], results: dict[str, Any], like: Any, workspace: Any = None
    ) -> Any:
        """A run of arrays with a known key: `addresses` and `call` are theirs. Adds to addresses and results."""
        for name, pointer, layout in call.missing:
            results[name] = made = empty_like_kind(like, *layout)
            addresses[pointer] = address_of(made)
        call.start(addresses, like, workspace)
        return results["out"] if self._alone else arranged(results, self._names)

    def release(self) -> Binding:
        """The binding of the arrays that the plan was made from, to which it keeps no reference."""
        binding = self.binding
        self.binding = replace(binding, results={})
        return binding

    def run_bound(self, binding: Binding, a: Any, workspace: Any = None, key: Hashable = None) -> Any:
        """`run` for arrays that are bound already; `key` is theirs."""
        backend, complete, found = self._checked(binding, a)
        if backend == "reference":
            run_reference(complete)
        elif backend == "cuda":
            from gemmsmith.backends.cuda.run import Call, addresses_of

            call = Call(found, complete.arguments, a, binding.missing)
            call.start(addresses_of(complete.arguments), a, workspace)
            if key is not None and 0 not in binding.shape:
                self._calls[key] = call
        else:
            simulation = self._simulated(complete, found)
            if simulation.hazards:
                raise HazardError(simulation.hazards)
        return complete.value

    def _bind(self, a: Any, b: Any, out: Any, operands: Mapping[str, Any]) -> Binding:
        """Arrays for a run, in the plan's orientation: D of one row or one column has both."""
        return bind(a, b, out, operands, planned=self.binding.block_rows, **self._options).like(self.binding)

    def _checked(self, binding: Binding, a: Any) -> tuple[Backend, Binding, Launches]:
        """The product where arrays are run, with all results, and the launches for them."""
        backend = self._backend(describe(a, "a"))
        return backend, binding.complete(a), self._launches(binding)

    def _launches(self, binding: Binding) -> Launches:
        """The launches for arrays in the plan's layouts."""
        same = binding.problem == self.problem and binding.arrays == self.binding.arrays
        if same and binding.graph == self.binding.graph:
            return self.launches
        for name, planned, given in zip(ARGUMENTS.values(), self.binding.scales, binding.scales, strict=True):
            if given != planned:
                raise ArgumentError(f"{name}: got {given}, this plan has {planned}; make a plan from arrays like these")
        if 0 not in binding.shape and (spec := self._spec_of(binding)) != self.spec:
            if binding.graph != self.binding.graph:
                raise ArgumentError(
                    "epilogue: got operands, sizes or constants with which it is another one than this plan's; make a "
                    "plan from arrays like these"
                )
            names = list(ARGUMENTS.values())[:: -1 if binding.swapped else 1]
            for name, planned_scale, scale in zip(names, self.spec.scales, spec.scales, strict=True):
                if scale != planned_scale:
                    raise ArgumentError(
                        f"{name}: got scales of {scale}, this plan has a kernel for {planned_scale}; make a plan from "
                        "arrays like these"
                    )
            raise ArgumentError(
                f"a, b, out: their layouts need the kernel {spec.name} ({spec.layouts}), this plan has "
                f"{self.spec.name} ({self.spec.layouts}); make a plan from arrays like these"
            )
        return launches(binding, self.spec)

    def _spec_of(self, binding: Binding) -> KernelSpec:
        """What arrays ask for, which read scales as the plan's kernel does where that takes them."""
        spec = kernel_spec(binding, self.config)
        both = zip(self.spec.scales, spec.scales, strict=True)
        own, other = (mine if mine and given and mine.takes(given) else given for mine, given in both)
        return replace(spec, scales=(own, other))

    def _simulated(
        self, binding: Binding, found: Launches, seed: int = 0, progress: Callable[[float], None] | None = None,
        counters: Counters | None = None,
    ) -> Simulation:  # fmt: skip
        from gemmsmith.backends.sim.run import run

        done = run(found, binding.arguments, seed, progress, counters)
        return Simulation(binding.value, done.hazards, done.timeline, done.cycles)

    def _backend(self, a: ArrayInfo) -> Backend:
        if a.device == "spec":
            raise ArgumentError("a: got a Spec, which has no data; run takes arrays")
        if self.backend == "auto":
            return "cuda" if a.device == "cuda" else "reference"
        if (self.backend == "cuda") != (a.device == "cuda"):
            raise ArgumentError(
                f"backend: got {self.backend!r} with arrays on {a.device_name}; "
                + ("use arrays on a GPU" if self.backend == "cuda" else "use arrays on the CPU")
            )
        return self.backend


def run_reference(complete: Binding) -> None:
    """Computes a product's results by the float64 reference, which has no kernel and needs no config."""
    from gemmsmith.backends.reference.run import run

    low_parts = complete.problem.low_parts
    run(complete.written, complete.mma, complete.arguments, complete.block_rows, low_parts=low_parts)


def chip_of(a: ArrayInfo) -> Chip:
    """The chip of the array's GPU; Hopper where there is none. DeviceError for a GPU before compute capability 8.0."""
    from gemmsmith.backends.cuda import driver

    return driver.chip_at(a.index) if a.device == "cuda" and driver.available() else HOPPER


def signatures(a: Any, b: Any, out: Mapping[str, Any], operands: Mapping[str, Any]) -> tuple[Hashable, dict[str, Any]]:
    """What a run depends on besides addresses and numbers, and those, by their Pointers' names."""
    a_signed, a_place = signature(a, "a")
    b_signed, b_place = signature(b, "b")
    addresses: dict[str, Any] = {"a": a_place, "b": b_place}
    key: tuple[Hashable, ...] = a_signed, a_place & 15, b_signed, b_place & 15
    for name, x in operands.items():
        key += name, _signed(x, argument_name(name), operand_argument(name), addresses)
    for name, x in out.items():
        signed, address = signature(x, name)
        addresses[result_argument(name)] = address
        key += name, signed, address & 15
    return key, addresses


def _signed(x: Any, name: str, pointer: str, addresses: dict[str, Any]) -> Hashable:
    """An argument's signature; its address, or the number it is, goes into `addresses`."""
    if not is_array(x) and (
        isinstance(x, (int, float, np.generic)) or (not hasattr(x, "shape") and isinstance(x, numbers.Real))
    ):
        try:
            addresses[pointer] = float(x)
        except OverflowError:
            addresses[pointer] = number_operand(name, x)  # refuses it
        return "number"
    signed, address = signature(x, name)
    addresses[pointer] = address
    return signed, address & 15
