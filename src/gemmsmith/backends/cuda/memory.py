"""Device memory without torch or CuPy, for the command line and tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmsmith.backends.cuda.driver import check


class DeviceArray:
    """An array in the current device's memory, with numpy's dtype and strides (in bytes); freed with the object."""

    def __init__(
        self, nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, stream: int = 0
    ) -> None:
        self.stream = stream
        from cuda.bindings import driver

        self.nbytes, self.shape, self.strides, self.dtype = max(nbytes, 1), shape, strides, np.dtype(dtype)
        self.address = int(check(driver.cuMemAlloc(self.nbytes), f"cuMemAlloc({nbytes})"))

    @classmethod
    def from_numpy(cls, x: np.ndarray[Any, Any]) -> DeviceArray:
        """Return a copy of x on the GPU with the same strides; x has no gaps between its elements."""
        from cuda.bindings import driver

        device = cls(x.nbytes, x.shape, x.strides, x.dtype)
        if x.nbytes:
            check(driver.cuMemcpyHtoD(device.address, x.ctypes.data, x.nbytes), "cuMemcpyHtoD")
        return device

    @classmethod
    def allocate(cls, nbytes: int) -> DeviceArray:
        """Return an uninitialized array of bytes, such as a plan's workspace."""
        return cls(nbytes, (max(nbytes, 1),), (1,), np.uint8)

    def fill(self, pattern: np.ndarray[Any, Any]) -> None:
        """Fill the array with repetitions of the bytes of `pattern`, a contiguous array on the host."""
        from cuda.bindings import driver

        for first in range(0, self.nbytes, pattern.nbytes):
            size = min(pattern.nbytes, self.nbytes - first)
            check(driver.cuMemcpyHtoD(self.address + first, pattern.ctypes.data, size), "cuMemcpyHtoD")

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host, after pending work on the array's stream."""
        from cuda.bindings import driver

        raw = np.empty(self.nbytes, np.uint8)
        check(driver.cuMemcpyDtoHAsync(raw.ctypes.data, self.address, self.nbytes, self.stream), "cuMemcpyDtoHAsync")
        check(driver.cuStreamSynchronize(self.stream), "cuStreamSynchronize")
        return np.ndarray(self.shape, self.dtype, raw, strides=self.strides)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3, "shape": self.shape, "strides": self.strides, "data": (self.address, False),
            "typestr": self.dtype.str, "stream": self.stream or None,
        }  # fmt: skip

    def __del__(self) -> None:
        try:
            from cuda.bindings import driver

            driver.cuMemFree(self.address)
        except Exception:  # the interpreter or the driver is shutting down
            return


class DeviceView(DeviceArray):
    """An array in memory that another object owns, which the view keeps alive; used on a stream of its own."""

    def __init__(
        self, owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, stream: int
    ) -> None:
        self.owner, self.address, self.stream = owner, address, stream
        self.nbytes, self.shape, self.strides, self.dtype = 0, shape, strides, np.dtype(dtype)

    def __del__(self) -> None:
        """Free nothing: the owner frees the memory."""
