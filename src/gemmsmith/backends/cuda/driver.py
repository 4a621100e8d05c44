"""The CUDA driver: which GPU there is, its attributes, and encoding tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmsmith.core.chip import CHIPS, HOPPER, Chip
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.errors import DeviceError
from gemmsmith.core.tensor_map import TensorMap

TENSOR_MAPS = 4096
"""Encoded maps that are kept; each takes 128 bytes and a few hundred of Python objects."""


@lru_cache(maxsize=1)
def _initialized() -> str:
    """An empty string if the driver works, else the reason why it does not."""
    try:
        from cuda.bindings import driver

        error = driver.cuInit(0)[0]
    except Exception as missing:  # the bindings raise their own kinds where there is no libcuda
        return f"no CUDA driver: {missing}"
    return "" if int(error) == 0 else str(error.name)


def available() -> bool:
    """Whether there is a driver and at least one GPU."""
    return not _initialized() and _count() > 0


def _count() -> int:
    from cuda.bindings import driver

    return int(check(driver.cuDeviceGetCount(), "cuDeviceGetCount()"))


def check(result: tuple[Any, ...], what: str = "") -> Any:
    """A driver call's result without its error code. Raises DeviceError, which names the error."""
    if int(result[0]):
        raise DeviceError(f"CUDA driver: {result[0].name}" + (f" in {what}" if what else ""))
    return result[1] if len(result) == 2 else result[1:]


@lru_cache(maxsize=64)
def require_chip(device: int, chip: Chip = HOPPER) -> None:
    """Raises DeviceError where device `device` does not run kernels for a chip: another runs them, if it is later and
    they have nothing that is Hopper's alone, once the driver has compiled their PTX."""
    found = attributes(device)
    later = chip != HOPPER and 10 * found.capability[0] + found.capability[1] >= chip.capability
    if chip_of(found) != chip and not later:
        meant = "on Hopper (9.0): H100, H200, GH200" if chip == HOPPER else f"on {chip}"
        raise DeviceError(
            f"device {device} is a {found.name} of compute capability {found.capability[0]}.{found.capability[1]}; "
            f"this kernel runs {meant}"
        )


def chip_of(found: Attributes) -> Chip | None:
    """The chip whose kernels a GPU runs: the latest one of the same or an earlier capability. Hopper's kernels run on
    Hopper alone. None before 8.0."""
    major, minor = found.capability
    earlier = [
        chip for chip in CHIPS.values()
        if chip.capability <= 10 * major + minor and (chip != HOPPER or major == 9)
    ]  # fmt: skip
    return max(earlier, key=lambda chip: chip.capability, default=None)


def chip_at(device: int) -> Chip:
    """The chip of device `device`. DeviceError for a GPU before compute capability 8.0."""
    found = attributes(device)
    chip = chip_of(found)
    if chip is None:
        major, minor = found.capability
        raise DeviceError(
            f"device {device} is a {found.name} of compute capability {major}.{minor}; use a GPU of 8.0 or later"
        )
    return chip


@dataclass(frozen=True)
class Attributes:
    """A GPU: its name, compute capability, SMs, the bytes of shared memory a CTA can ask for, and the bandwidth of its
    memory in bytes/s, by its clock and width."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    bandwidth: float = 0.0


@lru_cache(maxsize=64)
def attributes(device: int) -> Attributes:
    """The attributes of device `device`, queried once. Raises DeviceError if there is no driver or no such device."""
    _require_driver()
    if not 0 <= device < _count():
        raise DeviceError(f"device: got {device}, this process sees {_count()} GPU(s)")
    from cuda.bindings import driver

    handle = check(driver.cuDeviceGet(device), f"cuDeviceGet({device})")

    def ask(name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(which, handle), f"cuDeviceGetAttribute({name}, {device})"))

    return Attributes(
        check(driver.cuDeviceGetName(128, handle), f"cuDeviceGetName({device})").split(b"\0")[0].decode(),
        (ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
        ask("MULTIPROCESSOR_COUNT"), ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        2e3 * ask("MEMORY_CLOCK_RATE") * ask("GLOBAL_MEMORY_BUS_WIDTH") / 8,  # kHz, two transfers a cycle, bits
    )  # fmt: skip


def _require_driver() -> None:
    problem = _initialized()
    if problem:
        raise DeviceError(f"no usable GPU ({problem}); use backend='sim' or 'reference' on this machine")


@lru_cache(maxsize=TENSOR_MAPS)
def encode_tensor_map(map: TensorMap) -> Any:
    """The CUtensorMap, encoded once for an address and shape. Raises DeviceError naming the map."""
    _require_driver()
    from cuda.bindings import driver as cu

    element, swizzle, ones, interleave, promotion, fill = _codes(map.dtype, map.swizzle)
    extents, strides = [cu.cuuint64_t(x) for x in map.extents], [cu.cuuint64_t(x) for x in map.strides]
    box = [cu.cuuint32_t(x) for x in map.box]
    result = cu.cuTensorMapEncodeTiled(
        element, 3, map.address, extents, strides, box, ones, interleave, swizzle, promotion, fill
    )
    return check(result, f"cuTensorMapEncodeTiled({map})" if result[0] else "")


@lru_cache(maxsize=64)
def _codes(dtype: DType, swizzle: int) -> tuple[Any, ...]:
    """For encoding a tensor map: the driver's dtype and swizzle, element strides, interleave, L2 promotion, fill."""
    from cuda.bindings import driver as cu

    types, swizzles = cu.CUtensorMapDataType, cu.CUtensorMapSwizzle
    elements = {
        BF16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        FP16: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        FP32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        E4M3: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        E5M2: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        INT8: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        TF32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        INT32: types.CU_TENSOR_MAP_DATA_TYPE_INT32,
    }
    modes = {
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
    }
    # Promotion to 256 B made M <= 64 slower by 1 to 5 %: more sectors are read, no fewer come from DRAM.
    return (
        elements[dtype],
        modes[swizzle],
        [cu.cuuint32_t(1)] * 3,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
