"""Where a kernel runs: on a GPU (cuda), on any CPU (sim), and what its answer must be (reference)."""

from __future__ import annotations

from typing import Literal

from gemmsmith.arrays import ArrayInfo
from gemmsmith.core.chip import HOPPER, Chip
from gemmsmith.core.errors import ArgumentError

Backend = Literal["auto", "cuda", "sim", "reference"]
BACKENDS = {"cuda": "cuda", "sim": "cpu", "reference": "cpu"}
"""The device of the arrays that a backend takes, by its name."""
_NAMES = ("auto", *BACKENDS)
BACKENDS_FOR_ARRAYS: dict[str, Backend] = {"cuda": "cuda", "cpu": "reference"}
"""The backend that "auto" means, by the device of the arrays."""


def check_backend(name: str) -> None:
    """Raise ArgumentError if there is no backend of that name."""
    if not isinstance(name, str) or name not in _NAMES:
        raise ArgumentError(f"backend: got {name!r}; use one of {', '.join(_NAMES)}")


def resolve_backend(name: Backend, x: ArrayInfo, argument: str) -> Backend:
    """Return `name`, or the backend that "auto" means for the array `x`, by its device.

    Raises ArgumentError if `x` has no data or is on another device than the backend's.
    """
    check_backend(name)
    if not x.has_data:
        raise ArgumentError(f"{argument}: got a Spec, which has no data; use an array")
    if name == "auto":
        return BACKENDS_FOR_ARRAYS[x.device]
    if x.device != BACKENDS[name]:
        device = "a GPU" if BACKENDS[name] == "cuda" else "the CPU"
        raise ArgumentError(f"backend: got {name!r} with {argument} on {x.device_name}; use an array on {device}")
    return name


def chip_of(x: ArrayInfo) -> Chip:
    """Return the chip of the array's GPU; Hopper if the array is on the CPU or there is no GPU.

    Raises DeviceError for a GPU of a compute capability below 8.0.
    """
    from gemmsmith.backends.cuda import driver

    return driver.get_device_chip(x.device_index) if x.device == "cuda" and driver.is_available() else HOPPER
