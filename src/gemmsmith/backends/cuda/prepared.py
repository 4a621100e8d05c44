"""Launches whose arguments are known except for addresses, which each call fills in. Executed in every call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gemmsmith.backends.cuda.driver import encode_tensor_map
from gemmsmith.backends.cuda.launcher import LoadedKernel
from gemmsmith.backends.cuda.placement import order_address
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.tensor_map import TensorMap

MOST_MAPS = 1024
"""Addresses whose tensor maps a launch remembers."""


class Prepared:
    """One kernel's launch. `arguments` in the parameters' order; a Pointer stands for an address or a number."""

    def __init__(self, kernel: LoadedKernel, grid: int, arguments: Sequence[Any], pdl: bool) -> None:
        self.kernel, self.grid, self.pdl = kernel, grid, pdl
        self._local = threading.local()
        self._addresses: list[tuple[int, str, int]] = []
        self._numbers: list[tuple[int, str]] = []
        self._maps: list[tuple[int, TensorMap, str, int, dict[int, Any]]] = []
        self._fixed: list[Any] = []
        self._kept: list[Any] = []
        self._slots: list[tuple[int, int]] = []
        """Entries of the block that point to scalars, and the scalars' own entries."""
        scalars: list[Any] = []
        count = len(arguments)
        for i, (kind, x) in enumerate(zip(kernel.parameter_kinds, arguments, strict=True)):
            if kind == "tensor_map" and isinstance(x.address, Pointer):
                self._maps.append((i, x, x.address.name, x.address.offset, Bounded(MOST_MAPS)))
                self._fixed.append(0)
            elif kind == "tensor_map":
                self._kept.append(encode_tensor_map(x))
                self._fixed.append(int(self._kept[-1].getPtr()))
            elif kind == "order":
                self._fixed.append(order_address(x))
            else:
                entry = count + len(scalars)
                if isinstance(x, Pointer):
                    if kind == "f32":
                        self._numbers.append((entry, x.name))
                    else:
                        self._addresses.append((entry, x.name, x.offset))
                    x = 0
                self._slots.append((i, entry))
                self._fixed.append(0)
                scalars.append(x)
        self._fixed += scalars

    def launch(self, addresses: Mapping[str, Any], stream: int) -> None:
        """Launches the kernel for addresses and numbers by the names of their Pointers."""
        local = self._local
        try:
            block, address = local.block
        except AttributeError:
            block, address = local.block = self._block()
            local.addresses = None
        if self._numbers or addresses != local.addresses:  # 0.0 == -0.0
            local.addresses = None  # until all are in
            local.maps = self._fill(block, address, addresses)
            local.addresses = addresses
        self.kernel.start(self.grid, address, stream, self.pdl)

    def _fill(self, block: Any, address: int, addresses: Mapping[str, Any]) -> list[Any]:
        """Writes addresses and numbers into the block; returns the objects it points to, which the caller must keep."""
        maps = []
        for entry, name, offset in self._addresses:
            block[entry] = addresses[name] + offset
        for entry, name in self._numbers:
            _put_number(address + 8 * entry, name, addresses[name])
        for entry, template, name, offset, encoded in self._maps:
            where = addresses[name] + offset
            found = encoded.get(where)
            if found is None:
                found = self._encode(template, where, encoded)
            block[entry] = found[1]
            maps.append(found)
        return maps

    def _block(self) -> tuple[Any, int]:
        """This thread's arguments: pointers to them, then the scalars. The driver copies them before it returns."""
        block = (ctypes.c_uint64 * len(self._fixed))()
        address = ctypes.addressof(block)
        self.kernel.pack(block, self._fixed)
        for entry, slot in self._slots:
            block[entry] = address + 8 * slot
        return block, address

    @staticmethod
    def _encode(template: TensorMap, address: int, encoded: dict[int, Any]) -> tuple[Any, int]:
        t = template
        made = encode_tensor_map(TensorMap(address, t.dtype, t.extents, t.strides, t.box, t.swizzle))
        entry = encoded[address] = made, int(made.getPtr())
        return entry


def _put_number(address: int, name: str, number: float) -> None:
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        raise ArgumentError(f"{name.removeprefix('in_')}: got {number}; use a number that fp32 can hold") from None
    ctypes.memmove(address, packed, 4)
