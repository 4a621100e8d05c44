"""What runs for one product: at most two packings and the GEMM, each a kernel with its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import MAX_EXTENT, Matrix, Problem
from gemmsmith.core.spec import KernelSpec
from gemmsmith.core.tensor_map import TensorMap
from gemmsmith.core.tile import Tile
from gemmsmith.designs.build import build
from gemmsmith.designs.pack import THREADS, Packing, pack
from gemmsmith.lang.kernel import Kernel
from gemmsmith.schedule.tiles import TileScheduler

Argument = int | TensorMap | tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and how many clusters have work; a backend starts at most as many as fit,
    and no more than an order has entries."""

    kernel: Kernel
    clusters: int
    arguments: Mapping[str, Argument]


@lru_cache(maxsize=1)
def pack_kernel() -> Kernel:
    return pack()


@dataclass(frozen=True)
class Route:
    """How a problem is computed: what is packed first, and the GEMM on what remains."""

    problem: Problem
    packings: tuple[Packing | None, Packing | None]
    spec: KernelSpec

    @staticmethod
    def of(problem: Problem, config: Config) -> Route:
        """ConfigError where the config cannot work; ArgumentError where a packed operand would be too large."""
        packings = tuple(None if m.tma_ready or problem.k == 0 else Packing.of(m) for m in (problem.a, problem.b))
        for name, packing in zip("ab", packings, strict=True):
            if packing and packing.source.batch * packing.source.rows * packing.chunks > MAX_EXTENT:
                raise ArgumentError(
                    f"{name}: TMA cannot read its strides or address and it is too large to pack; "
                    "use rows that are multiples of 16 bytes at a 16-byte aligned address"
                )
        a, b = (p.packed if p else m for p, m in zip(packings, (problem.a, problem.b), strict=True))
        reached = replace(problem, a=a, b=b)
        return Route(reached, (packings[0], packings[1]), KernelSpec.of(reached, config))

    @property
    def workspace_bytes(self) -> int:
        """Device memory the packings need; every packed operand starts at a multiple of 256 bytes."""
        return sum(_aligned(p.bytes) for p in self.packings if p)

    def launches(self, a: int, b: int, d: int, workspace: int) -> list[Launch]:
        """The launches for operands at these addresses, in order. `workspace` may be 0 where none is needed."""
        result, addresses = [], []
        for packing, address in zip(self.packings, (a, b), strict=True):
            if packing is None:
                addresses.append(address)
                continue
            chunks = packing.source.batch * packing.source.rows * packing.chunks
            result.append(Launch(pack_kernel(), -(-chunks // THREADS), packing.arguments(address, workspace)))
            addresses.append(workspace)
            workspace += _aligned(packing.bytes)
        result.append(self._gemm(addresses[0], addresses[1], d))
        return result

    def _gemm(self, a: int, b: int, d: int) -> Launch:
        p, spec = self.problem, self.spec
        columns, rows = spec.config.cluster[1], spec.config.cluster[0]
        arguments: dict[str, Argument] = {
            **TileScheduler.arguments(spec, p.m, p.n, p.k, p.batch),
            "a": operand_map(p.a, spec.a_tile, columns, a, p.batch) if p.k else _unread_map(spec, d),
            "b": operand_map(p.b.T, spec.b_tile, rows, b, p.batch) if p.k else _unread_map(spec, d),
        }
        tiles = arguments["tiles"]
        if not isinstance(tiles, int) or tiles > MAX_EXTENT:
            raise ArgumentError(f"{p}: {tiles} tiles are more than an int32 can count; use a larger tile")
        if spec.store == "tma":
            arguments["d"] = operand_map(p.d, spec.store_tile, 1, d, p.batch)
        else:
            arguments |= {
                "d": d, "m": p.m, "n": p.n,
                "d_row": p.d.row_stride, "d_column": p.d.col_stride, "d_batch": p.d.batch_stride,
            }  # fmt: skip
        return Launch(build(spec), tiles, arguments)


def operand_map(matrix: Matrix, tile: Tile, parts: int, address: int, batch: int) -> TensorMap:
    """The tensor map of a (M or N) x K matrix, read in boxes of a tile; `parts` CTAs bring a part each."""
    inner, outer, stride = matrix.cols, matrix.rows, matrix.row_stride
    if tile.major == "MN":
        inner, outer, stride = matrix.rows, matrix.cols, matrix.col_stride
    size = matrix.dtype.bytes
    return TensorMap(
        address, matrix.dtype, (inner, outer, batch), (stride * size, matrix.batch_stride * size),
        (tile.box_inner, tile.outer // parts, 1), tile.swizzle,
    )  # fmt: skip


def _unread_map(spec: KernelSpec, address: int) -> TensorMap:
    """For K = 0: no k-tile is ever loaded, and zero extents cannot be encoded."""
    return TensorMap(address // 16 * 16, spec.operand, (8, 1, 1), (16, 0), (8, 1, 1), 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
