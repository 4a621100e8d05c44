"""Every instruction and every operand layout: the simulator, the GPU and plain numpy leave the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conformance.kernels import CASES, Case

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, simulate

POISON = 0xEE
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name.replace(" ", "-"))


def poisoned(case: Case) -> np.ndarray:
    out = np.empty_like(case.expected)
    out.reshape(-1).view(np.uint8)[:] = POISON
    return out


def simulated(case: Case) -> tuple[np.ndarray, list]:
    out = poisoned(case)
    memory = GlobalMemory()
    at = {f"in{i}": memory.place(x, f"in{i}", writable=False) for i, x in enumerate(case.inputs)}
    at["out"] = memory.place(out, "out")
    arguments = at | {name: make(at) for name, make in case.maps.items()}
    return out, simulate(case.kernel(), case.cluster, arguments, memory).hazards


@every_case
def test_simulator(case: Case) -> None:
    out, hazards = simulated(case)
    assert hazards == []
    assert out.tobytes() == case.expected.tobytes()


@every_case
def test_it_compiles(case: Case) -> None:
    resources = compile_source(case.kernel().source, "conformance").resources
    assert resources.spill_stores == 0


@pytest.mark.gpu
@every_case
def test_gpu(case: Case) -> None:
    from gemmsmith.backends.cuda import launcher
    from gemmsmith.backends.cuda.memory import DeviceArray

    kernel = case.kernel()
    with launcher.device_guard(0):
        arrays = {f"in{i}": DeviceArray.from_numpy(np.ascontiguousarray(x)) for i, x in enumerate(case.inputs)}
        arrays["out"] = DeviceArray.from_numpy(poisoned(case))
        at = {name: x.address for name, x in arrays.items()}
        values = at | {name: make(at) for name, make in case.maps.items()}
        loaded = launcher.load(
            kernel.source, kernel.name, 0, 0, threads=kernel.threads, cluster=kernel.cluster,
            shared_bytes=kernel.shared_bytes, parameter_kinds=kernel.parameter_kinds,
        )  # fmt: skip
        loaded.launch(case.cluster, [values[p.name or ""] for p in kernel.parameters], 0)
        out = arrays["out"].numpy()
    assert out.tobytes() == simulated(case)[0].tobytes()
