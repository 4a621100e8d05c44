"""What runs for one product: at most two packings, the GEMM, and a step for each reduction; with their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from gemmsmith.core.config import Config
from gemmsmith.core.dtypes import FP32, in_fp32
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.graph import Result
from gemmsmith.core.pointer import Pointer
from gemmsmith.core.problem import MAX_EXTENT, Matrix, Problem
from gemmsmith.core.spec import EpilogueSpec, KernelSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import ATOM_ROWS, Tile
from gemmsmith.designs.build import build
from gemmsmith.designs.pack import THREADS, Packing, pack
from gemmsmith.designs.reduce import arguments as reduce_arguments
from gemmsmith.designs.reduce import reduce
from gemmsmith.designs.reduce import shape as reduce_shape
from gemmsmith.epilogue.inputs import operand_argument, strides
from gemmsmith.epilogue.layout import layout
from gemmsmith.epilogue.outputs import is_result, result_argument
from gemmsmith.epilogue.reductions import (
    MOST_PARTIALS,
    Partials,
    is_atomic,
    partials,
    partials_arguments,
    representatives,
)
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import ORDER_LENGTH
from gemmsmith.schedule.lockstep import meeting_bytes
from gemmsmith.schedule.partial_sums import bytes_of_slots
from gemmsmith.schedule.tiles import TileScheduler

Argument = int | float | TensorMap | tuple[int, ...] | Pointer
Addresses = Mapping[str, int | float]
"""By the names of Pointers: A and B are "a" and "b", "workspace" and "flags" what they say, operands and results what
the kernel's arguments for them are called."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and how many clusters have work; a backend starts at most as many as fit,
    and no more than an order has entries."""

    kernel: Kernel
    clusters: int
    arguments: Mapping[str, Argument]

    def at(self, addresses: Addresses) -> dict[str, Any]:
        """The arguments with every Pointer put in."""
        return {name: placed(x, addresses) for name, x in self.arguments.items()}


def placed(argument: Argument, addresses: Addresses) -> Any:
    """An argument for arrays at these addresses."""
    if isinstance(argument, Pointer):
        place = addresses[argument.name]
        return place + argument.offset if argument.offset else place
    if isinstance(argument, TensorMap) and isinstance(argument.address, Pointer):
        return replace(argument, address=placed(argument.address, addresses))
    return argument


@lru_cache(maxsize=1)
def pack_kernel() -> Kernel:
    return pack()


@dataclass(frozen=True)
class Route:
    """How a problem is computed: what is packed first, the GEMM with its epilogue, and what is reduced afterwards.

    `arrays` are the epilogue's operands and results in memory, by name: (rows, columns) each, 1 where it does not
    vary. Reductions' results are contiguous.
    """

    problem: Problem
    packings: tuple[Packing | None, Packing | None]
    spec: KernelSpec
    arrays: Mapping[str, Matrix]

    @staticmethod
    def of(
        problem: Problem,
        config: Config,
        epilogue: EpilogueSpec | None = None,
        arrays: Mapping[str, Matrix] | None = None,
    ) -> Route:
        """ConfigError where the config cannot work; ArgumentError where a packed operand would be too large.

        Without an epilogue: the bare product, whose only array is "out".
        """
        packings = tuple(None if m.tma_ready or problem.k == 0 else Packing.of(m) for m in (problem.a, problem.b))
        for name, packing in zip("ab", packings, strict=True):
            if packing and packing.source.batch * packing.source.rows * packing.chunks > MAX_EXTENT:
                raise ArgumentError(
                    f"{name}: TMA cannot read its strides or address and it is too large to pack; "
                    "use rows that are multiples of 16 bytes at a 16-byte aligned address"
                )
        a, b = (p.packed if p else m for p, m in zip(packings, (problem.a, problem.b), strict=True))
        reached = replace(problem, a=a, b=b)
        spec = KernelSpec.of(reached, config, epilogue)
        return Route(reached, (packings[0], packings[1]), spec, arrays or {"out": problem.d})

    @cached_property
    def reductions(self) -> list[tuple[Result, Partials, dict[str, int]]]:
        """Results that are reduced in a second step: their partials, and the GEMM's arguments for them. ArgumentError
        where they are more than kernels count."""
        graph, p = self.spec.epilogue.graph, self.problem
        extents, found = graph.extents(), []
        for result in graph.results:
            node = graph.nodes[result.node]
            if node.op == "reduce":
                kind, axis = node.value
                width = extents[node.inputs[0]].width
                shape, counts = partials(kind, axis, width, self.spec, p.m, p.n, p.batch)
                count = shape.batch * max(shape.parts, shape.elements)
                if count > MOST_PARTIALS:
                    raise ArgumentError(
                        f"{result.name}: got {p}, whose {kind} takes {count} partial results, and kernels count up to "
                        f"{MOST_PARTIALS}; reduce a part of the product at a time"
                    )
                found.append((result, shape, counts))
        return found

    @property
    def workspace_bytes(self) -> int:
        """Device memory the packings and partials need; every one starts at a multiple of 256 bytes."""
        if self.empty:
            return 0
        packed = sum(_aligned(p.bytes) for p in self.packings if p)
        two_steps = [
            shape
            for r, shape, _ in self.reductions
            if self._partials_of.get(r.name) == r.name and not is_atomic(r, self.spec)
        ]
        partials, _ = self._shared_tiles
        return packed + sum(_aligned(shape.bytes) for shape in two_steps) + _aligned(partials)

    @property
    def flag_bytes(self) -> int:
        """Device memory that is zero before and after every run, for clusters that share tiles or keep step."""
        return 0 if self.empty else self._shared_tiles[1] + meeting_bytes(self.spec)

    @property
    def empty(self) -> bool:
        """Whether the product has no elements: only the reductions, of nothing, are then left to write."""
        return 0 in (self.problem.batch, self.problem.m, self.problem.n)

    @property
    def clusters(self) -> int:
        """How many clusters the GEMM's launch asks for."""
        p, config = self.problem, self.spec.config
        tiles_m, tiles_n = TileScheduler.grid(self.spec, p.m, p.n)
        tiles = tiles_m * tiles_n * p.batch
        if tiles > MAX_EXTENT:
            raise ArgumentError(f"{p}: {tiles} tiles are more than an int32 can count; use a larger tile")
        if config.splits == 1 or p.k == 0:
            return tiles
        k_tiles = -(-p.k // config.tile[2])
        clusters = min(tiles * min(config.splits or k_tiles, k_tiles), ORDER_LENGTH)
        if min(tiles, 2 * clusters) * k_tiles * clusters > MAX_EXTENT:
            raise ArgumentError(f"{p}: too deep for {config.splits or 'stream-K'} splits of K; use splits=1")
        return clusters

    @property
    def _shared_tiles(self) -> tuple[int, int]:
        return bytes_of_slots(self.spec, self.clusters) if self.spec.config.splits != 1 else (0, 0)

    @cached_property
    def _partials_of(self) -> dict[str, str]:
        return representatives(self.spec.epilogue.graph, self.spec.epilogue.atomic)

    @cached_property
    def launches(self) -> list[Launch]:
        """The launches, in order. Of an empty product only the reductions are left."""
        if self.empty:
            return [
                self._second(r, replace(shape, parts=0), 0)
                for r, shape, _ in self.reductions
                if shape.batch * shape.elements
            ]
        result, operands, workspace = [], [], Pointer("workspace")
        for packing, name in zip(self.packings, "ab", strict=True):
            if packing is None:
                operands.append(Pointer(name))
                continue
            chunks = packing.source.batch * packing.source.rows * packing.chunks
            result.append(Launch(pack_kernel(), -(-chunks // THREADS), packing.arguments(Pointer(name), workspace)))
            operands.append(workspace)
            workspace += _aligned(packing.bytes)
        arguments = self._gemm_arguments(operands[0], operands[1]) | self._epilogue_arguments()
        seconds = []
        places: dict[str, Pointer] = {}
        for r, shape, counts in self.reductions:
            own = self._partials_of.get(r.name)  # None: its value is known
            if own == r.name:
                atomic = is_atomic(r, self.spec)
                places[r.name] = Pointer(result_argument(r.name)) if atomic else workspace
                arguments |= partials_arguments(r.name, places[r.name], shape, counts)
                if atomic:
                    result.append(self._second(r, replace(shape, parts=0), 0))  # zeros
                    continue
                workspace += _aligned(shape.bytes)
            seconds.append(self._second(r, shape, places[own] if own else 0))
        if self.spec.config.splits != 1:
            arguments |= {"partials": workspace, "flags": Pointer("flags")}
        if self.spec.config.lockstep:
            arguments["meetings"] = Pointer("flags")
        return [*result, Launch(build(self.spec), self.clusters, arguments), *seconds]

    def _gemm_arguments(self, a: Pointer, b: Pointer) -> dict[str, Argument]:
        p, spec = self.problem, self.spec
        rows, columns = spec.config.cluster
        parts = {"a": part_rows(spec.a_tile, p.m, columns), "b": part_rows(spec.b_tile, p.n, rows)}
        a_map, b_map, stage_bytes = _unread_map(spec), _unread_map(spec), 0
        if p.k:
            a_map = operand_map(p.a, spec.a_tile, box_rows(spec.a_tile, p.m, parts["a"]), a, p.batch)
            b_map = operand_map(p.b.T, spec.b_tile, box_rows(spec.b_tile, p.n, parts["b"]), b, p.batch)
            stage_bytes = a_map.box_bytes * spec.a_tile.boxes * columns + b_map.box_bytes * spec.b_tile.boxes * rows
        return {
            **TileScheduler.arguments(spec, p.m, p.n, p.k, p.batch),
            "a": a_map, "b": b_map, "a_part": parts["a"], "b_part": parts["b"], "stage_bytes": stage_bytes,
            "m": p.m, "n": p.n,
        }  # fmt: skip

    def _epilogue_arguments(self) -> dict[str, Argument]:
        plan = layout(self.spec)
        arguments: dict[str, Argument] = {}
        tiles = dict(plan.loads) | dict(plan.stores)
        names = {o.name: operand_argument(o.name) for o in self.spec.epilogue.graph.operands}
        names |= {r.name: result_argument(r.name) for r in self.spec.epilogue.graph.results}
        for name, argument in names.items():
            address, matrix = Pointer(argument), self.arrays.get(name)
            if matrix is None:  # a number, or a reduction's result
                arguments[argument] = address
            elif name in self.spec.epilogue.tma:
                tile = tiles[name]  # what is loaded is counted in whole tiles
                rows = box_rows(tile, matrix.rows, tile.outer) if is_result(argument) else tile.outer
                arguments[argument] = operand_map(matrix, tile, rows, address, self.problem.batch)
            else:
                arguments |= {argument: address, **strides(argument, matrix)}
        return arguments

    def _second(self, result: Result, shape: Partials, source: Pointer | int) -> Launch:
        out = Pointer(result_argument(result.name))
        (kind, axis), known = self.spec.epilogue.graph.nodes[result.node].value, self.spec.epilogue.graph.known(result)
        count, scale, offset = self._reduced_elements(result, axis), 1.0, 0.0
        if known is not None and count:
            offset = {"sum": known * count, "logsumexp": known + math.log(count)}.get(kind, known)
            kind, shape = "sum", replace(shape, parts=0)
        elif kind == "mean":
            scale = 1 / count if count else math.nan
        columns, threads = reduce_shape(shape)
        clusters = -(-shape.batch * shape.elements // columns)
        kernel = reduce(kind, result.dtype or FP32, columns, threads)
        return Launch(kernel, clusters, reduce_arguments(shape, source, out, scale, in_fp32(offset)))

    def _reduced_elements(self, result: Result, axis: str) -> int:
        """How many elements of the product, or of a half, one element of the result is made of."""
        graph, p = self.spec.epilogue.graph, self.problem
        n = p.n // max(graph.extents()[graph.nodes[result.node].inputs[0]].width, 1)
        return {"n": n, "m": p.m, "all": p.batch * p.m * n}[axis]


def part_rows(tile: Tile, extent: int, parts: int) -> int:
    """Rows of a tile's boxes that each of `parts` CTAs brings, for an operand of `extent` rows: its share of those that
    there are, in whole swizzle atoms."""
    if tile.major == "MN" or extent >= tile.outer:
        return tile.outer // parts
    return min(-(-extent // (parts * ATOM_ROWS)) * ATOM_ROWS, tile.outer // parts)


def box_rows(tile: Tile, extent: int, part: int) -> int:
    """Rows of the boxes in which a part is read, no more than the operand has. Those outside of a tensor take the copy
    engine about 5 cycles each to fill with zeros; what lies in their place instead reaches only what is never stored.
    Where rows count depth they must be zeros."""
    return part if tile.major == "MN" else min(part, extent)


def operand_map(matrix: Matrix, tile: Tile, rows: int, address: Pointer, batch: int) -> TensorMap:
    """The tensor map of a (M or N) x K matrix, read in a tile's boxes, of so many rows."""
    inner, outer, stride = matrix.cols, matrix.rows, matrix.row_stride
    if tile.major == "MN":
        inner, outer, stride = matrix.rows, matrix.cols, matrix.col_stride
    size = matrix.dtype.bytes
    return TensorMap(
        address, matrix.dtype, (inner, outer, batch), (stride * size, matrix.batch_stride * size),
        (tile.box_inner, rows, 1), tile.swizzle,
    )  # fmt: skip


def _unread_map(spec: KernelSpec) -> TensorMap:
    """For K = 0: no k-tile is ever loaded, and zero extents cannot be encoded."""
    return TensorMap(0, spec.operand, (8, 1, 1), (16, 0), (8, 1, 1), 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
