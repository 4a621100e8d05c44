"""Access to the CUDA driver: GPUs and their attributes, loading and launches of kernels, encoding of tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemmsmith.backends.cuda.compiler import nvrtc_version
from gemmsmith.core.arguments import TensorMap
from gemmsmith.core.chip import CHIPS, HOPPER, Chip
from gemmsmith.core.dtypes import BF16, BOOL, E4M3, E5M2, FP16, FP32, INT8, INT32, TF32, DType
from gemmsmith.core.errors import DeviceError

MAX_CACHED_TENSOR_MAPS = 4096
"""Each takes 128 bytes, and a few hundred of Python objects."""


@lru_cache(maxsize=1)
def _driver_error() -> str:
    """Return an empty string if the driver works, else the reason why it does not."""
    try:
        from cuda.bindings import driver

        error = driver.cuInit(0)[0]
    except Exception as missing:  # the bindings raise their own exceptions if there is no libcuda
        return f"no CUDA driver: {missing}"
    return "" if int(error) == 0 else str(error.name)


def is_available() -> bool:
    """Return whether there is a driver and at least one GPU."""
    return not _driver_error() and device_count() > 0


def driver_version() -> str:
    """Return the newest CUDA version that the driver supports, such as "13.0"."""
    version = int(check(bindings().cuDriverGetVersion(), "cuDriverGetVersion()"))
    return f"{version // 1000}.{version % 1000 // 10}"


def device_count() -> int:
    """Return the number of GPUs that this process sees."""
    return int(check(bindings().cuDeviceGetCount(), "cuDeviceGetCount()"))


def check(result: tuple[Any, ...], call: str = "") -> Any:
    """Return what a driver call returned after its error code: one value, or a tuple of several. Raises DeviceError."""
    if int(result[0]):
        raise DeviceError(f"CUDA driver: {result[0].name}" + (f" in {call}" if call else ""))
    return result[1] if len(result) == 2 else result[1:]


@lru_cache(maxsize=64)
def require_chip(device: int, chip: Chip = HOPPER) -> None:
    """Raise DeviceError if the device cannot run kernels built for `chip`."""
    gpu = device_attributes(device)
    major, minor = gpu.capability
    if not chip.runs_on(10 * major + minor):
        required = "on Hopper (9.0): H100, H200, GH200" if chip.has_wgmma else f"on {chip}"
        raise DeviceError(
            f"device {device} is a {gpu.name} of compute capability {major}.{minor}; this kernel runs {required}"
        )


@lru_cache(maxsize=64)
def newest_supported_chip(gpu: DeviceAttributes) -> Chip | None:
    """Return the latest chip whose kernels a GPU runs; None below compute capability 8.0."""
    major, minor = gpu.capability
    supported = [chip for chip in CHIPS.values() if chip.runs_on(10 * major + minor)]
    return max(supported, key=lambda chip: chip.capability, default=None)


def get_device_chip(device: int) -> Chip:
    """Return the chip of a device. Raises DeviceError for a GPU before compute capability 8.0."""
    gpu = device_attributes(device)
    chip = newest_supported_chip(gpu)
    if chip is None:
        major, minor = gpu.capability
        raise DeviceError(
            f"device {device} is a {gpu.name} of compute capability {major}.{minor}; use a GPU of 8.0 or later"
        )
    return chip


@dataclass(frozen=True)
class DeviceAttributes:
    """Attributes of a GPU.

    `capability`: compute capability (major, minor). `max_shared_bytes_per_cta`: shared memory of a kernel that opts in
    to more than 48 KiB. `bandwidth`: of the GPU's memory in bytes/s, computed from its clock and bus width.
    """

    name: str
    capability: tuple[int, int]
    sm_count: int
    max_shared_bytes_per_cta: int
    bandwidth: float = 0.0


@lru_cache(maxsize=64)
def device_attributes(device: int) -> DeviceAttributes:
    """Return the attributes of a device, queried once. Raises DeviceError if there is no driver or no such device."""
    _require_driver()
    if not 0 <= device < device_count():
        raise DeviceError(f"device: got {device}, this process sees {device_count()} GPU(s)")
    from cuda.bindings import driver

    handle = check(driver.cuDeviceGet(device), f"cuDeviceGet({device})")

    def query(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(attribute, handle), f"cuDeviceGetAttribute({name}, {device})"))

    return DeviceAttributes(
        check(driver.cuDeviceGetName(128, handle), f"cuDeviceGetName({device})").split(b"\0")[0].decode(),
        (query("COMPUTE_CAPABILITY_MAJOR"), query("COMPUTE_CAPABILITY_MINOR")),
        query("MULTIPROCESSOR_COUNT"), query("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        2e3 * query("MEMORY_CLOCK_RATE") * query("GLOBAL_MEMORY_BUS_WIDTH") / 8,  # kHz, two transfers per cycle, bits
    )  # fmt: skip


def _require_driver() -> None:
    error = _driver_error()
    if error:
        raise DeviceError(f"no usable GPU ({error}); use backend='sim' or 'reference' on this machine")


@lru_cache(maxsize=1)
def bindings() -> Any:
    """Return the driver's bindings, imported once: an import statement takes as long as a call."""
    from cuda.bindings import driver

    return driver


DEFAULT_DYNAMIC_SHARED_BYTES = 48 * 1024
"""Above this size dynamic shared memory needs CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES (CUDA programming guide).
"""


def load_function(image: bytes, name: str, shared_bytes: int) -> Any:
    """Load a cubin or PTX on the current device, and return its kernel `name`. Raises DeviceError."""
    cu = bindings()
    module = check(cu.cuModuleLoadData(image), f"cuModuleLoadData({name}, by NVRTC {nvrtc_version()})")
    function = check(cu.cuModuleGetFunction(module, name.encode()), f"cuModuleGetFunction({name})")
    if shared_bytes > DEFAULT_DYNAMIC_SHARED_BYTES:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(
            cu.cuFuncSetAttribute(function, attribute, shared_bytes),
            f"cuFuncSetAttribute({name}, dynamic shared memory, {shared_bytes} bytes)",
        )
    return function


def launch_config(ctas: int, threads: int, shared_bytes: int, cluster: tuple[int, int, int] | None) -> Any:
    """Return a CUlaunchConfig of `ctas` CTAs along x, with one attribute.

    The attribute is the shape of a cluster, if `cluster` is given, else programmatic dependent launch. `shared_bytes`:
    dynamic shared memory per CTA.
    """
    cu = bindings()
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    if cluster:
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster
    else:
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


MAX_TENSOR_MAP_RANK = 5
"""Dimensions of a tensor map (CUDA driver API, cuTensorMapEncodeTiled)."""


@lru_cache(maxsize=MAX_CACHED_TENSOR_MAPS)
def encode_tensor_map(tensor_map: TensorMap) -> Any:
    """Return the driver's CUtensorMap, encoded once per address and shape.

    Raises DeviceError, whose message has the map's fields.
    """
    _require_driver()
    cu = bindings()
    element, swizzle, ones, interleave, promotion, fill = _tensor_map_codes(tensor_map.dtype, tensor_map.swizzle)
    extents, strides, box = tensor_map.encoded()
    rank, words = len(extents), [cu.cuuint64_t(x) for x in (*extents, *strides)]
    result = cu.cuTensorMapEncodeTiled(
        element, rank, tensor_map.address, words[:rank], words[rank:], [cu.cuuint32_t(x) for x in box], ones[:rank],
        interleave, swizzle, promotion, fill,
    )  # fmt: skip
    return check(result, f"cuTensorMapEncodeTiled({tensor_map})" if result[0] else "")


@lru_cache(maxsize=64)
def _tensor_map_codes(dtype: DType, swizzle: int) -> tuple[Any, ...]:
    """Return the driver's codes for a tensor map: dtype, swizzle, element strides, interleave, L2 promotion, fill."""
    from cuda.bindings import driver as cu

    element, mode = tensor_map_names(dtype, swizzle)
    # L2 promotion to 256 B made M <= 64 slower by 1 to 5 %: more sectors are read, and no fewer from DRAM.
    return (
        getattr(cu.CUtensorMapDataType, element),
        getattr(cu.CUtensorMapSwizzle, mode),
        [cu.cuuint32_t(1)] * MAX_TENSOR_MAP_RANK,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def tensor_map_names(dtype: DType, swizzle: int) -> tuple[str, str]:
    """Return the driver's names of a tensor map's dtype and swizzle."""
    element = {  # TMA copies bytes: types that the driver does not have are copied as UINT8
        BF16: "BFLOAT16", FP16: "FLOAT16", FP32: "FLOAT32", TF32: "FLOAT32", INT32: "INT32",
        E4M3: "UINT8", E5M2: "UINT8", INT8: "UINT8", BOOL: "UINT8",
    }[dtype]  # fmt: skip
    mode = f"{swizzle}B" if swizzle else "NONE"
    return f"CU_TENSOR_MAP_DATA_TYPE_{element}", f"CU_TENSOR_MAP_SWIZZLE_{mode}"
