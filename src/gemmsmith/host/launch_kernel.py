"""`launch` and `simulate_launch`: a kernel that its author has recorded, on arrays of a GPU or of the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmsmith.arrays import ArrayInfo, address_of, describe
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.core.scalars import as_integer
from gemmsmith.host.simulation import Simulation
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch, Launches


def launch(kernel: Kernel, problem: Any = None, **arguments: Any) -> None:
    """Launch a kernel that was recorded by `gemmsmith.lang.Builder`.

    On arrays on a GPU it runs there, on the current stream, and the call does not wait for it. On arrays on the CPU it
    runs in the simulator, which checks each access. The kernel reads and writes the arrays in place.

    Args:
        kernel: The kernel, as `Builder.finish` returns it.
        problem: What the kernel's `work_clusters` and the `compute` of its parameters and scratch buffers get: any
            object, such as a NamedTuple of sizes. A kernel whose `work_clusters` is not set gets one cluster.
        **arguments: Arrays, or numbers, by the names of the parameters without `compute`, and of the
            `gemmsmith.lang.Pointer` objects in what a `compute` returns, such as a tensor map's. A pointer ignores
            strides: of a view such as `base[::2]` the kernel gets the first element's address, and may access what lies
            between the elements.

    Raises:
        ArgumentError: If an argument is missing or unknown, no array is given, or the arrays are on several devices.
        DeviceError: If the GPU cannot run the kernel.
        HazardError: If the simulator finds hazards; they are its `hazards`.
    """
    launches, arrays, device = _prepare(kernel, problem, arguments)
    if device == "cpu":
        from gemmsmith.backends.sim.run import run

        if hazards := run(launches, {**arguments, **arrays}, 0, None, dependent=False).hazards:
            raise HazardError(hazards)
    else:
        from gemmsmith.backends.cuda.run import BoundLaunches

        like = arguments[next(iter(arrays))]
        values = {name: address_of(x) if name in arrays else x for name, x in arguments.items()}
        BoundLaunches(launches, {}, like, {}).launch(values, like, None)


def simulate_launch(
    kernel: Kernel, problem: Any, arguments: Mapping[str, Any], *, seed: int = 0, record: bool = False,
    dependent: bool = False,
) -> Simulation:  # fmt: skip
    """Execute a launch in the simulator, and return what it finds instead of raising it.

    Args:
        kernel: The kernel, as for `launch`.
        problem: The problem, as for `launch`.
        arguments: The arguments of `launch`, by name. Arrays are on the CPU; the kernel reads and writes them in place.
        seed: Which schedule (order in which warps and engines proceed) to run; 0 follows the cost model, others are
            random.
        record: Record every event, for `Simulation.to_html` and `Simulation.timeline`.
        dependent: The kernel may start before the stream's previous one has finished (programmatic dependent launch),
            so `griddepcontrol.wait` must come before its accesses to global memory.

    Returns:
        The hazards, the verdict and the record if asked; its `result` is `arguments`.

    Raises:
        ArgumentError: If an argument is missing or unknown, or an array is not on the CPU.
    """
    from gemmsmith.backends.sim.run import run

    launches, arrays, _ = _prepare(kernel, problem, arguments)
    done = run(launches, {**arguments, **arrays}, as_integer("seed", seed), None, record=record, dependent=dependent)
    return Simulation(arguments, done.hazards, done.cycles, done.verdict, done.records)


def _prepare(
    kernel: Kernel, problem: Any, arguments: Mapping[str, Any]
) -> tuple[Launches, dict[str, ArrayInfo], str]:  # fmt: skip
    if not isinstance(kernel, Kernel):
        raise ArgumentError(f"kernel: got {type(kernel).__name__}; use what Builder.finish returns")
    computed = Launch.from_kernel(kernel, problem)
    given = {x.name: Pointer(x.name) for x in kernel.parameters if x.name and x.name not in computed.arguments}
    one = Launch(kernel, computed.work_clusters, {**computed.arguments, **given})
    scratch = {x.parameter.name for x in kernel.scratch_buffers}
    addresses = [getattr(x, "address", x) for name, x in one.arguments.items() if name not in scratch]  # a map has one
    names = sorted({x.name for x in addresses if isinstance(x, Pointer)})
    if {*names} != {*arguments}:
        raise ArgumentError(f"arguments: got {', '.join(arguments) or 'none'}; {kernel.name} takes {', '.join(names)}")
    arrays = {name: describe(x, name) for name, x in arguments.items() if not isinstance(x, int | float)}
    devices = {x.device_name for x in arrays.values()}
    if len(devices) != 1 or devices == {"spec"}:
        raise ArgumentError(f"arguments: got arrays on {' and '.join(sorted(devices)) or 'no device'}; use one device")
    flag_bytes = kernel.scratch_bytes(problem, zero_initialized=True)
    launches = Launches(None, False, (one,), kernel.scratch_bytes(problem), flag_bytes)
    return launches, arrays, devices.pop()
