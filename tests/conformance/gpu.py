"""Runs a case on the GPU."""

from __future__ import annotations

import numpy as np
from tests.conformance.case import Case

from gemmsmith.backends.cuda.driver import check
from gemmsmith.backends.cuda.kernel_loader import device_guard, load_kernel
from gemmsmith.backends.cuda.launch_template import LaunchTemplate
from gemmsmith.backends.cuda.memory import DeviceArray


def run(case: Case) -> np.ndarray:
    """What `out` holds after the kernel ran on device 0; it is poisoned first."""
    from cuda.bindings import driver

    kernel = case.kernel()
    with device_guard(0):
        loaded = load_kernel(kernel, 0, 0)
        arrays = {name: DeviceArray.from_numpy(x) for name, x in case.inputs.items()}
        arrays["out"] = DeviceArray.from_numpy(case.fresh_output())
        arguments = case.arguments({name: array.address for name, array in arrays.items()})
        LaunchTemplate(loaded, case.grid, [arguments[p.name or ""] for p in kernel.parameters], pdl=False).launch({}, 0)
        check(driver.cuCtxSynchronize(), f"{case.name}")
        return arrays["out"].numpy()
