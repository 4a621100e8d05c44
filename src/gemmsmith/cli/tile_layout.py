"""What `gemmsmith layout` shows of a tile in shared memory, as data that can be written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from gemmsmith.backends.sim.execute.counters import LANES_PER_WAVEFRONT, wavefronts
from gemmsmith.collective.swizzle import VECTOR_BYTES
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import FP16, FP32, TF32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.mma import (
    A_FRAGMENT,
    B_FRAGMENT,
    D_FRAGMENT,
    MMA_SYNC,
    N8_COLUMNS,
    THREADS_PER_WARPGROUP,
    WARP_THREADS,
    WGMMA,
    Major,
)
from gemmsmith.core.tile import ATOM_ROWS, SWIZZLES, Tile, swizzled
from gemmsmith.hw import matrix
from gemmsmith.hw.wgmma import K_STEP_BYTES, descriptor_fields, k_step_descriptor_offset
from gemmsmith.hw.wmma import TILE_MN
from gemmsmith.machine import Access

MAX_EXTENT = 256
"""Elements of a box along a dimension, at most (CUDA driver API, cuTensorMapEncodeTiled)."""
FRAGMENTS = {"wgmma-a": (64, A_FRAGMENT), "wgmma-d": (64, D_FRAGMENT), "mma-a": (16, A_FRAGMENT),
             "mma-b": (8, B_FRAGMENT), "mma-d": (16, D_FRAGMENT), "wmma-d": (16, D_FRAGMENT)}  # fmt: skip
"""Rows of an instruction's matrix and the layout of its fragment, by kind."""
MATRIX_ROWS = 8
"""Rows of a matrix of ldmatrix."""
_FOUR = (0, 0), (8, 0), (0, 1), (8, 1)
MATRICES = {"wmma-a": _FOUR, "wmma-b": ((0, 0), (0, 1), (8, 0), (8, 1)), "ldmatrix": _FOUR,
            "ldmatrix.x2": ((0, 0), (0, 1)), "ldmatrix.x1": ((0, 0),), "stmatrix": _FOUR,
            "stmatrix.x2": ((0, 0), (8, 0)), "stmatrix.x1": ((0, 0),)}  # fmt: skip
"""Row and 16-byte unit at which the 8x8 matrix in each register of a warp begins, by kind. ldmatrix is shown with what
mma.sync multiplies: four matrices of A, two of B; stmatrix with results. wmma is as ptxas compiles it for sm_90a."""
KINDS = (*FRAGMENTS, *MATRICES)
ACCESSES = ("column", "fragment")


@dataclass(frozen=True)
class SwizzledTile(Tile):
    """A tile with another swizzle than the widest that divides its rows."""

    swizzle: int = 0


def make_tile(mn: int, k: int, dtype: DType, major: Major, swizzle: int | None = None) -> Tile:
    """Return the tile of mn x k elements that kernels use, or one with `swizzle` (bytes; 0: none).

    Raises ArgumentError if TMA cannot copy it, or if it does not fit into shared memory.
    """
    tile = Tile(dtype, mn, k, major) if swizzle is None else SwizzledTile(dtype, mn, k, major, swizzle)
    row_bytes, limit = dtype.bytes_of(tile.inner), HOPPER.max_shared_bytes_per_cta
    fitting = [x for x in (*SWIZZLES, 0) if not x or row_bytes % x == 0]
    boxes, outer = f"{tile.outer} x {tile.box_inner}", f"{'M or N' if major == 'K' else 'K'} {tile.outer}"
    for is_wrong, message in (
        (row_bytes % VECTOR_BYTES, f"MNxK: got K {k}; TMA copies 16-byte units, so use a multiple of "
                                   f"{VECTOR_BYTES // dtype.bytes}"),
        (tile.swizzle not in fitting, f"--swizzle: got {swizzle} for rows of {row_bytes} bytes; use "
         + " or ".join(map(str, fitting))),
        (tile.swizzle and tile.outer % ATOM_ROWS, f"MNxK: got {outer}; an atom has 8 rows, so use a multiple of 8"),
        (max(tile.outer, tile.box_inner) > MAX_EXTENT, f"MNxK: got boxes of {boxes}; use up to 256 x 256"),
        (tile.bytes > limit, f"MNxK: got {mn}x{k}, {tile.bytes} bytes; use a tile of up to {limit} bytes"),
    ):  # fmt: skip
        if is_wrong:
            raise ArgumentError(message)
    return tile


def describe(tile: Tile, fragment: str | None = None, access: str | None = None) -> dict[str, Any]:
    """Return the layout of a tile: its units, atom, boxes, descriptor, and a fragment and an access if they are given.

    `fragment`: one of KINDS. `access`: one of ACCESSES. Raises ArgumentError if they do not fit the tile.
    """
    if access == "fragment" and not fragment:
        raise ArgumentError("--access: got fragment without --fragment; add one, such as --fragment ldmatrix")
    outer, unit = np.arange(tile.outer)[:, None], np.arange(0, tile.inner, VECTOR_BYTES // tile.dtype.bytes)[None, :]
    place = _offset(tile, unit, outer)
    rows, columns, used = ("M or N", "K", tile.k) if tile.major == "K" else ("K", "M or N", tile.mn)
    return {
        "tile": {"mn": tile.mn, "k": tile.k, "dtype": tile.dtype.name, "major": tile.major, "bytes": tile.bytes,
                 "element_bytes": tile.dtype.bytes, "swizzle": tile.swizzle,
                 "default_swizzle": Tile(tile.dtype, tile.mn, tile.k, tile.major).swizzle},
        "rows": {"of": rows, "count": tile.outer},
        "columns": {"of": columns, "count": tile.inner, "padding": tile.inner - used},
        "atom": {"rows": ATOM_ROWS, "row_bytes": tile.swizzle, "bytes": ATOM_ROWS * tile.swizzle,
                 "count": tile.bytes // (ATOM_ROWS * tile.swizzle)} if tile.swizzle else None,
        "boxes": {"count": tile.boxes, "rows": tile.outer, "columns": tile.box_inner, "row_bytes": tile.pitch,
                  "bytes": tile.box_bytes},
        "units": {"without": swizzled(place, tile.swizzle).tolist(), "with": place.tolist()},
        "descriptor": _describe_descriptor(tile),
        "fragment": _describe_fragment(tile, fragment) if fragment else None,
        "access": _describe_access(tile, access, fragment) if access else None,
    }  # fmt: skip


def _offset(tile: Tile, inner: Any, outer: Any) -> np.ndarray:
    """Return the byte offsets of elements at `inner` along the contiguous dimension of the tile and `outer`."""
    return np.asarray(tile.offset(outer, inner) if tile.major == "K" else tile.offset(inner, outer))


def _describe_descriptor(tile: Tile) -> dict[str, Any]:
    """Return the fields of the matrix descriptor of k-step 0 of a tile at address 0, and the values of all k-steps."""
    operand = TF32 if tile.dtype == FP32 else tile.dtype
    source = 'PTX ISA, "Matrix descriptor format": an address or stride x is encoded as (x & 0x3FFFF) >> 4'
    if not any(x.a == operand and tile.major in x.majors for x in WGMMA.instructions):
        return {"reason": f"wgmma reads no {tile.major}-major {operand} from shared memory", "source": source}
    if not tile.swizzle or tile.k % (K_STEP_BYTES // tile.dtype.bytes):
        return {"reason": "kernels here give wgmma swizzled tiles, of whole k-steps of 32 bytes", "source": source}
    leading, stride, layout_type = descriptor_fields(tile)
    use_of_leading = ": from a box to the next along M or N" if tile.major == "MN" else ", not used here"
    fields = [
        ("start address", 0, 14, 0, "offset of the k-step + address of the tile, / 16"),
        ("leading byte offset", 16, 14, leading >> 4, f"{leading} bytes{use_of_leading}"),
        ("stride byte offset", 32, 14, stride >> 4, f"{stride} bytes: from an atom, 8 rows, to the next"),
        ("base offset", 49, 3, 0, f"the tile is aligned to {tile.alignment} bytes, a whole atom"),
        ("swizzle mode", 62, 2, layout_type, f"{tile.swizzle} bytes (0: none, 1: 128, 2: 64, 3: 32)"),
    ]
    value = sum(encoded << first for _, first, _, encoded, _ in fields)
    offsets = [cast(int, k_step_descriptor_offset(tile, i)) for i in range(tile.k * tile.dtype.bytes // K_STEP_BYTES)]
    return {"source": source, "value": f"{value:#018x}",
            "k_steps": [f"{value + offset:#018x}" for offset in offsets],
            "fields": [{"name": name, "first_bit": first, "bits": bits, "value": x, "binary": f"{x:0{bits}b}",
                        "meaning": meaning} for name, first, bits, x, meaning in fields]}  # fmt: skip


def _matrices(tile: Tile, kind: str) -> tuple[tuple[int, int], ...]:
    """Return the 8x8 matrices of `kind`, as in MATRICES; none if the instruction has no such matrices."""
    matrices = MATRICES.get(kind, ())
    if kind.startswith("wmma") and tile.dtype.bits == 8:  # K is 16 here, too
        return tuple(x for x in matrices if x[1] == 0)
    return matrices


def fragment_elements(tile: Tile, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, columns) of the elements that threads hold of the matrix of an instruction, a block of the tile.

    Each is (threads, elements of a thread), in the order of the thread's 32-bit registers: of M or N, and of K.
    Accumulators are fp32 or int32. Raises ArgumentError if the instruction does not take such a tile.
    """
    dtype, per_register = TF32 if tile.dtype == FP32 else tile.dtype, 32 // tile.dtype.bits
    matrices = _matrices(tile, kind)
    sums = {"mma-d": N8_COLUMNS, "wmma-d": TILE_MN, "wgmma-d": min(tile.k, MAX_EXTENT)}
    rows = max((row + MATRIX_ROWS for row, _ in matrices), default=0) or FRAGMENTS[kind][0]
    units = max((unit + 1 for _, unit in matrices), default=2)
    columns = sums.get(kind, units * VECTOR_BYTES // tile.dtype.bytes)
    multiple = N8_COLUMNS if kind == "wgmma-d" and tile.k <= MAX_EXTENT else columns
    if tile.mn % rows or tile.k % columns or columns % multiple:
        raise ArgumentError(f"--fragment: got {kind} for {tile.mn}x{tile.k}; use a multiple of {rows}x{multiple}")
    if kind in ("mma-a", "mma-b", "wmma-a", "wmma-b") and not MMA_SYNC.multiplies(dtype):
        raise ArgumentError(f"--fragment: got {kind} of {dtype}; use bf16, fp16, int8 or fp32, or wgmma-a")
    if "matrix" in kind and tile.major == "MN" and dtype.bits != 16:
        raise ArgumentError(f"--fragment: got {kind} of MN-major {dtype}; it transposes 16 bits, so use bf16 or fp16")
    threads = THREADS_PER_WARPGROUP if kind.startswith("wgmma") else WARP_THREADS
    if matrices:
        return np.divmod(_matrix_elements(matrices, rows, units, dtype).reshape(threads, -1), columns)
    thread, i = np.arange(threads)[:, None], np.arange(rows * columns // threads)[None, :]
    fragment = FRAGMENTS[kind][1]
    if kind in sums:
        row, column = fragment.element(thread, i)
    else:
        row, word = fragment.element(thread, i // per_register)
        column = word * per_register + i % per_register
    row, column = np.broadcast_arrays(row, column)
    return row, column


def _matrix_elements(matrices: tuple[tuple[int, int], ...], rows: int, units: int, dtype: DType) -> np.ndarray:
    """Return the index in a block of rows, of `units` units of 16 bytes, of each element of each lane.

    By the code of ldmatrix and stmatrix. `matrices`: as in MATRICES.
    """
    halves = np.arange(WARP_THREADS * len(matrices) * 2, dtype=np.uint16)  # of each register: its index, as its content
    indices = matrix.registers_to_matrices(halves.view(np.uint32).reshape(WARP_THREADS, -1), False)[0]
    block = np.zeros((rows, units, 8), int)
    for (row, unit), elements in zip(matrices, indices, strict=True):
        block[row : row + MATRIX_ROWS, unit] = elements
    bytes_held = block.reshape(-1, 1) * 2 + np.arange(2)
    return np.argsort(bytes_held.reshape(-1)[:: dtype.bytes])


def _describe_fragment(tile: Tile, kind: str) -> dict[str, Any]:
    """Return which element each thread holds where, and back."""
    row, column = fragment_elements(tile, kind)
    per_register = 1 if kind.endswith("-d") else 32 // tile.dtype.bits
    rows, columns = int(row.max()) + 1, int(column.max()) + 1
    thread, i = np.divmod(np.argsort((row * columns + column).reshape(-1)), row.shape[1])
    holders = np.stack([thread, i // per_register, i % per_register], -1).reshape(rows, columns, 3)
    note = "PTX leaves wmma's fragments open; these are what ptxas makes of them for sm_90a" * kind.startswith("wmma")
    if kind in ("wmma-a", "wmma-b") and tile.dtype == FP16:
        note += ", where registers 4 to 7 repeat 0 to 3"
    return {"kind": kind, "rows": rows, "columns": columns, "threads": len(row), "elements_per_register": per_register,
            "note": note, "elements": np.stack([row, column], -1).tolist(), "holders": holders.tolist()}  # fmt: skip


def _instructions(tile: Tile, access: str, kind: str | None) -> list[tuple[str, np.ndarray, np.ndarray, int]]:
    """Return (name, inner, outer, bytes) of each load or store of a warp: where each lane's bytes begin in the tile.

    `inner`: along the contiguous dimension.
    """
    lane, per_unit = np.arange(WARP_THREADS), VECTOR_BYTES // tile.dtype.bytes
    if access == "column" or kind is None:
        lane = lane[: tile.outer]
        return [("16 bytes of column 0", lane * 0, lane, VECTOR_BYTES)]
    row, column = (x[:WARP_THREADS] for x in fragment_elements(tile, kind))
    is_wmma, matrices, bits = kind.startswith("wmma"), _matrices(tile, kind), tile.dtype.bits
    if is_wmma and tile.swizzle:
        raise ArgumentError(f"--access: got {kind} of a swizzled tile, which wmma cannot access; use --swizzle 0")
    if matrices and (not is_wmma or bits == 16 or (bits == 8 and tile.major == "K")):  # else wmma has no ldmatrix
        first, unit = np.repeat(matrices, MATRIX_ROWS, 0).T  # lane 8 j + r has the address of row r of matrix j
        r = np.arange(len(first)) % MATRIX_ROWS
        name = f"{'ldmatrix' if is_wmma else kind.partition('.')[0]}.x{len(matrices)}"
        if tile.major == "K":
            return [(name, unit * per_unit, first + r, VECTOR_BYTES)]
        return [(f"{name}.trans", first, unit * per_unit + r, VECTOR_BYTES)]
    run = 1 if tile.major == "MN" else 2 if kind.endswith("-d") else 32 // tile.dtype.bits
    inner, outer = (column, row) if tile.major == "K" else (row, column)
    names = [f"element {i}" if run == 1 else f"elements {i} to {i + run - 1}" for i in range(0, row.shape[1], run)]
    return [(name, inner[:, i * run], outer[:, i * run], run * tile.dtype.bytes) for i, name in enumerate(names)]


def _describe_access(tile: Tile, access: str, kind: str | None) -> dict[str, Any]:
    """Return each instruction's lanes with their units, and its wavefronts without and with the swizzle.

    `ways`: for each lane, the wavefronts of the lanes that could share one, so more than 1 is a bank conflict.
    """
    instructions = []
    for name, inner, outer, width in _instructions(tile, access, kind):
        place, lanes = _offset(tile, inner, outer), np.arange(len(inner))
        item: dict[str, Any] = {"name": name, "bytes": width, "rows": outer.tolist(), "columns": inner.tolist()}
        for layout, bytes_ in (("without", swizzled(place, tile.swizzle)), ("with", place)):
            groups = lanes // LANES_PER_WAVEFRONT.get(width, WARP_THREADS)
            shares = [groups == group for group in range(groups[-1] + 1)]
            parts = [wavefronts(Access("shared", bytes_[x], width, threads=lanes[x])) for x in shares]
            actual, ideal = wavefronts(Access("shared", bytes_, width, threads=lanes))
            ways = np.array([count for count, _ in parts])[groups]
            item[layout] = {"wavefronts": actual, "ideal": ideal, "ways": ways.tolist()}
        instructions.append(item)
    totals = {layout: sum(x[layout]["wavefronts"] for x in instructions) for layout in ("without", "with")}
    totals["ideal"] = sum(x["with"]["ideal"] for x in instructions)
    return {"kind": access, "instructions": instructions, "wavefronts": totals}
