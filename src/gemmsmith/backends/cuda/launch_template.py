"""Launches whose arguments are complete except for addresses, which each call fills in. Runs in every call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from gemmsmith.backends.cuda.driver import encode_tensor_map
from gemmsmith.backends.cuda.kernel_loader import LoadedKernel
from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.frozen import changed

MAX_TENSOR_MAPS = 1024
"""Addresses whose tensor maps are cached, per map of a launch. Chosen, not measured."""


class LaunchTemplate:
    """A launch of `grid` CTAs whose addresses are filled in at each call.

    Each thread has an argument block, an array of 8-byte entries: first a pointer to each argument, which the driver
    takes, then the arguments that have no memory of their own. `arguments`: in parameter order; a Pointer stands for
    the address or the number that a call gives under its name. `pdl`: see `LoadedKernel.launch`.
    """

    def __init__(self, kernel: LoadedKernel, grid: int, arguments: Sequence[Any], pdl: bool) -> None:
        """Lay out the argument block: what is fixed becomes an initial value, what a call gives an entry to fill.

        Tensor maps and cluster permutations have memory of their own, which their entry points to.
        """
        self.kernel, self.grid, self.pdl = kernel, grid, pdl
        self._local = threading.local()
        self._addresses: list[tuple[int, str, int]] = []  # (entry of the block, Pointer name, offset in bytes)
        self._scalars: list[tuple[int, str]] = []  # (entry, Pointer name)
        self._maps: list[tuple[int, TensorMap, str, int, dict[int, Any]]] = []  # (…, map, name, offset, encoded maps)
        self._initial_values: list[Any] = []
        self._keepalive: list[Any] = []
        self._slots: list[tuple[int, int]] = []  # (entry that points to an argument, the argument's own entry)
        scalars: list[Any] = []
        count = len(arguments)
        for i, (kind, x) in enumerate(zip(kernel.parameter_kinds, arguments, strict=True)):
            if kind == "tensor_map" and isinstance(x.address, Pointer):
                self._maps.append((i, x, x.address.name, x.address.offset, BoundedCache(MAX_TENSOR_MAPS)))
                self._initial_values.append(0)
            elif kind == "tensor_map":
                self._keepalive.append(encode_tensor_map(x))
                self._initial_values.append(int(self._keepalive[-1].getPtr()))
            elif kind == "cluster_permutation":
                self._keepalive.append(x)
                self._initial_values.append(ctypes.addressof(x))
            else:
                entry = count + len(scalars)
                if isinstance(x, Pointer):
                    if kind == "f32":
                        self._scalars.append((entry, x.name))
                    else:
                        self._addresses.append((entry, x.name, x.offset))
                    x = 0
                self._slots.append((i, entry))
                self._initial_values.append(0)
                scalars.append(x)
        self._initial_values += scalars

    def launch(self, addresses: Mapping[str, Any], stream: int) -> None:
        """Launch the kernel on a stream. `addresses`: addresses and numbers by Pointer name.

        The block is filled only if the addresses differ from those of this thread's last call.
        """
        local = self._local
        try:
            block, address = local.block
        except AttributeError:
            block, address = local.block = self._block()
            local.addresses = None
        if self._scalars or addresses != local.addresses:  # comparing scalars would miss 0.0 -> -0.0
            local.addresses = None  # in case filling the block raises
            local.maps = self._fill(block, address, addresses)
            local.addresses = addresses
        self.kernel.launch(self.grid, address, stream, self.pdl)

    def for_one_call(self) -> LaunchTemplate:
        """Return a copy with argument blocks of its own, for one place in a program that passes the same arrays again.

        No other call overwrites the block, so it keeps these addresses and need not be filled.
        """
        template = copy(self)
        template._local = threading.local()
        return template

    def _fill(self, block: Any, address: int, addresses: Mapping[str, Any]) -> list[Any]:
        """Write the addresses, numbers and pointers to tensor maps of a call into a block.

        Returns the encoded tensor maps, which the caller keeps alive while the block points to them.
        """
        maps = []
        for entry, name, offset in self._addresses:
            block[entry] = addresses[name] + offset
        for entry, name in self._scalars:
            _write_fp32(address + 8 * entry, name, addresses[name])
        for entry, template, name, offset, encoded in self._maps:
            map_address = addresses[name] + offset
            encoded_map = encoded.get(map_address)
            if encoded_map is None:
                tensor_map = encode_tensor_map(changed(template, address=map_address))
                encoded_map = encoded[map_address] = tensor_map, int(tensor_map.getPtr())
            block[entry] = encoded_map[1]
            maps.append(encoded_map)
        return maps

    def _block(self) -> tuple[Any, int]:
        """Return a new argument block for this thread, and its address.

        It may be overwritten after a launch, since the driver copies the arguments.
        """
        block = (ctypes.c_uint64 * len(self._initial_values))()
        address = ctypes.addressof(block)
        self.kernel.pack_arguments(block, self._initial_values)
        for entry, slot in self._slots:
            block[entry] = address + 8 * slot
        return block, address


def _write_fp32(address: int, name: str, value: float) -> None:
    """Write the number `value` as fp32 at a host address. Raises ArgumentError, with `name`, if fp32 cannot hold it."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        raise ArgumentError(f"{name.removeprefix('in_')}: got {value}; use a number that fp32 can hold") from None
    ctypes.memmove(address, packed, 4)
