"""What a conformance case is, and the few lines of kernel language that most of them share."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import ml_dtypes
import numpy as np
from tests.instructions import cluster_arrive

from gemmsmith import hw
from gemmsmith.collective.tma_operand import TmaOperand
from gemmsmith.core.arguments import TensorMap
from gemmsmith.core.dtypes import DType
from gemmsmith.core.spec import MmaOperand
from gemmsmith.core.tile import Tile
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.shared import SharedView
from gemmsmith.lang.types import U32, U64
from gemmsmith.lang.values import RegisterArray, Value, ValueLike

POISON = 0xCD
"""Every byte of an output before the kernel runs."""


@dataclass(frozen=True)
class Map:
    """A tensor map over `array`: (inner, outer, batch) extents and (outer, batch) strides in elements."""

    array: str
    dtype: DType
    extents: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    swizzle: int

    def at(self, address: int) -> TensorMap:
        outer, batch = (stride * self.dtype.bytes for stride in self.strides)
        return TensorMap(address, self.dtype, self.extents, (outer, batch), self.box, self.swizzle)


@dataclass(frozen=True)
class Case:
    """A tiny kernel, recorded by `record`, and what numpy says its output `out` holds when it ends.

    Its pointers carry the names of `inputs` and "out", its tensor maps those of `maps`, its
    numbers those of `numbers`.
    """

    name: str
    record: Callable[[Builder], None]
    expected: np.ndarray
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    maps: Mapping[str, Map] = field(default_factory=dict)
    initial: np.ndarray | None = None
    threads: int = 128
    cluster: int = 1
    grid: int = 1
    numbers: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def kernel(self) -> Kernel:
        with Builder(re.sub(r"\W+", "_", self.name), threads=self.threads, cluster=(self.cluster, 1, 1)) as k:
            self.record(k)
            return k.finish()

    def fresh_output(self) -> np.ndarray:
        return poisoned(self.expected.shape, self.expected.dtype) if self.initial is None else self.initial.copy()

    def arguments(self, addresses: Mapping[str, int]) -> dict[str, int | TensorMap]:
        maps = {name: map.at(addresses[map.array]) for name, map in self.maps.items()}
        return {**addresses, **maps, **self.numbers}


def poisoned(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = POISON
    return array


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def integers(name: str, shape: tuple[int, ...], dtype: np.dtype | type = np.uint32, limit: int = 3) -> np.ndarray:
    """-limit..limit, exact in every dtype; or random words."""
    rng = seeded(name)
    if np.dtype(dtype) == np.uint32:
        return rng.integers(0, 1 << 32, shape, np.uint32)
    return rng.integers(-limit, limit + 1, shape).astype(dtype)


def floats(name: str, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Of exponents that differ by 0 to 60 in a row, as far as the type has them; some zeros; subnormals, an infinity
    and a NaN if it has them."""
    rng, info = seeded(name), ml_dtypes.finfo(dtype.numpy)
    spread = rng.choice([0, 2, 5, 9, 15, 60], (shape[0], 1))
    exponents = np.clip(rng.integers(-spread // 2, spread // 2 + 1, shape), info.minexp - 2, info.maxexp - 2)
    x = rng.uniform(1, 2, shape) * 2.0**exponents * rng.choice([-1, 1], shape)
    x[rng.random(shape) < 0.03] = 0
    x[0, 0], x[shape[0] // 2, -1] = np.nan, np.inf
    return x.astype(dtype.numpy)


# -- kernel language -----------------------------------------------------------------------------------


def staged(name: str, tile: Tile) -> TmaOperand:
    """One stage of an operand, whose tensor map the case gives by that name."""

    def unbound(problem: object) -> NoReturn:
        raise AssertionError("a case's maps and numbers are given")

    return TmaOperand(MmaOperand(name, "b", tile, unbound), 1)


def at(pointer: Value, index: Value, nbytes: int) -> Value:
    """The global address of element `index`, each of them `nbytes`."""
    return pointer + (index * nbytes).to(U64)


def slot(view: SharedView, index: Value, nbytes: int) -> Value:
    """The same in shared memory."""
    return view.address + (index * nbytes).to(U32)


def words(*values: ValueLike) -> RegisterArray:
    """u32 values side by side in registers."""
    registers = current_builder().registers(U32, len(values), "words")
    for i, value in enumerate(values):
        registers[i] = value
    return registers


def write(out: Value, index: Value, *values: ValueLike) -> None:
    """Row `index` of a table of u32 with as many columns."""
    for i, value in enumerate(values):
        hw.store_global(words(value), at(out, index * len(values) + i, 4), True)


def read_word(source: Value, index: Value) -> Value:
    word = current_builder().registers(U32, 1, "word")
    hw.load_global(word, at(source, index, 4), True)
    return word[0]


def load_shared_word(address: Value) -> Value:
    word = current_builder().registers(U32, 1, "word")
    hw.load_shared(word, address)
    return word[0]


def dump(shared: SharedView, nbytes: int, out: Value) -> None:
    """All threads copy shared memory to `out`."""

    def put(values: RegisterArray, index: Value) -> None:
        hw.store_global(values, at(out, index, 16), True)

    _copy(nbytes, lambda v, i: hw.load_shared(v, slot(shared, i, 16)), put)


def fill(shared: SharedView, nbytes: int, source: Value | None) -> None:
    """All threads copy `source`, or zeros, to shared memory."""

    def get(values: RegisterArray, index: Value) -> None:
        if source is not None:
            hw.load_global(values, at(source, index, 16), True)
        else:
            for i in range(4):
                values[i] = 0

    _copy(nbytes, get, lambda v, i: hw.store_shared(v, slot(shared, i, 16)))


def _copy(
    nbytes: int, get: Callable[[RegisterArray, Value], object], put: Callable[[RegisterArray, Value], object]
) -> None:
    k, chunks = current_builder(), nbytes // 16
    with k.range(-(-chunks // k.threads), name="turn") as turn:
        index = turn * k.threads + k.thread
        with k.when(index < chunks):
            values = k.registers(U32, 4, "chunk")
            get(values, index)
            put(values, index)


def barriers(*arrivals: int) -> list[SharedView]:
    """mbarriers for that many arrivals each, initialized and known to all threads of the cluster."""
    k = current_builder()
    buffer = k.shared(8, stages=len(arrivals), alignment=8, name="barrier")
    views = [buffer[i] for i in range(len(arrivals))]
    with k.when(k.thread == 0):
        for view, count in zip(views, arrivals, strict=True):
            hw.mbarrier_init(view, count)
        hw.fence_mbarrier_init()
    sync_cluster(relaxed=True)
    return views


def sync_cluster(*, relaxed: bool = False) -> None:
    """All threads of the cluster; `relaxed`: of what they did before, only fenced mbarrier inits are known then."""
    if current_builder().cluster == (1, 1, 1):
        hw.sync_threads()
    else:
        (hw.cluster_arrive_relaxed if relaxed else cluster_arrive)()
        hw.cluster_wait()
