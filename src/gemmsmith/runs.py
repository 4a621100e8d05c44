"""Runs of kernels that make new arrays from given ones, on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from gemmsmith.arrays import ArrayInfo, address_of, describe, empty_like_kind, signature
from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ArgumentError, HazardError
from gemmsmith.core.problem import TMA_ALIGNMENT, Matrix
from gemmsmith.lang.launch import Launches
from gemmsmith.matrices import matrix_of as as_matrix
from gemmsmith.plans import BACKENDS

T = TypeVar("T")
MOST_RUNS = 1024
"""How many of one kind are remembered."""


@dataclass(frozen=True)
class Made:
    """An array that a run makes: `shape` as the caller sees it, memory row-major or column-major (`column_major`), and
    each of its rows (columns) padded to a multiple of `padding` elements."""

    shape: tuple[int, ...]
    dtype: DType
    column_major: bool = False
    padding: int = 1

    @staticmethod
    def for_tma(shape: tuple[int, ...], dtype: DType, column_major: bool = False) -> Made:
        """One whose rows (columns) are padded to 16 bytes, so that TMA reads it."""
        return Made(shape, dtype, column_major, TMA_ALIGNMENT // dtype.bytes)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """The shape of what lies in memory, padding included."""
        if len(self.shape) < 2:
            return self.shape
        *batch, rows, columns = self.shape
        outer, inner = (columns, rows) if self.column_major else (rows, columns)
        return *batch, outer, -(-inner // self.padding) * self.padding

    @property
    def matrix(self) -> Matrix:
        """The array as a kernel's argument."""
        if len(self.shape) < 2:
            return Matrix(self.dtype, 1, 1, 1, 1)
        *batch, rows, columns = self.shape
        pitch = self.memory[-1]
        row, column = (1, pitch) if self.column_major else (pitch, 1)
        return Matrix(self.dtype, rows, columns, row, column, *((batch[0], self.memory[-2] * pitch) if batch else ()))

    def view(self, memory: Any) -> Any:
        """What the caller gets of an array of the shape `memory`."""
        if len(self.shape) < 2:
            return memory
        inner = self.shape[-2] if self.column_major else self.shape[-1]
        cut = memory if inner == self.memory[-1] else memory[..., :inner]
        return cut.swapaxes(-1, -2) if self.column_major else cut


class Run:
    """Launches for arrays of one signature. `made`: what they make, by the names of their Pointers."""

    def __init__(self, launches: Launches, made: Mapping[str, Made]) -> None:
        self.launches, self.made = launches, made
        self._call: Any = None

    def __call__(self, backend: str, given: Mapping[str, Any], like: Any) -> dict[str, Any]:
        """The arrays made, of `like`'s library, from those given by the names of their Pointers."""
        memory = {name: empty_like_kind(like, x.memory, x.dtype) for name, x in self.made.items()}
        if self.launches.all and backend == "cuda":
            from gemmsmith.backends.cuda.run import Call

            self._call = self._call or Call(self.launches, {}, like, {})
            self._call.start({name: address_of(x) for name, x in (*given.items(), *memory.items())}, like, None)
        elif self.launches.all:
            from gemmsmith.backends.sim.run import run

            infos = {name: describe(x, name) for name, x in (*given.items(), *memory.items())}
            if found := run(self.launches, infos, 0, None).hazards:
                raise HazardError(found)
        return {name: x.view(memory[name]) for name, x in self.made.items()}


def remembered(known: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """What `known` has for the key; made where it has nothing."""
    if key not in known:
        known[key] = make()
    return known[key]


def without_gradient(x: Any, argument: str) -> ArrayInfo:
    """What `describe` says of an array. ArgumentError also for a torch tensor whose gradient would be lost."""
    signature(x, argument)
    return describe(x, argument)


def chosen(backend: str, x: ArrayInfo, argument: str) -> str:
    """The backend for an array: "auto" is "cuda" on a GPU and "reference" on the CPU. ArgumentError for others."""
    if backend not in BACKENDS:
        raise ArgumentError(f"backend: got {backend!r}; use one of {', '.join(BACKENDS)}")
    if x.device == "spec":
        raise ArgumentError(f"{argument}: got a Spec, which has no data; use an array")
    if backend == "auto":
        return "cuda" if x.device == "cuda" else "reference"
    if (backend == "cuda") != (x.device == "cuda"):
        where = "a GPU" if backend == "cuda" else "the CPU"
        raise ArgumentError(f"backend: got {backend!r} with {argument} on {x.device_name}; use an array on {where}")
    return backend


def matrix_of(x: ArrayInfo) -> Matrix:
    """An array as a kernel's argument."""
    return as_matrix(x, x.shape[0] if len(x.shape) == 3 else 1).canonical()
