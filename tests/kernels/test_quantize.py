"""The kernels that quantize: ptxas spills nothing, with as many CTAs in an SM as are asked for; no barrier is missing
and none is idle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.mutants.mutate import _changes

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.sim import GlobalMemory, Hazard, simulate
from gemmsmith.core.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8, UE8M0, DType
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import Matrix
from gemmsmith.kernels.dequantize import DequantizeSpec, dequantize
from gemmsmith.kernels.quantize import MAX_AMAX_PARTIALS, BoundQuantize, QuantizeSpec, ScaleGranularity, amax, quantize
from gemmsmith.kernels.quantize_groups import FILLED, BoundQuantizeGroups, filled_rows, quantize_groups
from gemmsmith.kernels.register_tile import QUANTIZATION_BLOCK
from gemmsmith.lang.kernel import Kernel

COPIES: list[tuple[ScaleGranularity | None, ScaleGranularity | None]] = [
    ("row", None), (None, "column"), ("row", "column"), ("tile", None), (None, "tile"), ("tile", "tile"),
    ("tensor", None), (None, "tensor"), ("tensor", "tensor"),
]  # fmt: skip


def check(kernel: Kernel) -> None:
    r = compile_source(kernel.source, kernel.name).resources
    assert (r.spill_store_bytes, r.spill_load_bytes, r.stack_bytes, r.advisories) == (0, 0, 0, ())
    assert r.registers <= kernel.max_registers_per_thread


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("source", [BF16, FP16, FP32])
@pytest.mark.parametrize("copies", COPIES)
def test_no_spills(
    copies: tuple[ScaleGranularity | None, ScaleGranularity | None], source: DType, chunked: bool,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """In one of the formats, by chance."""
    values, scales = [(E4M3, FP32), (E5M2, UE8M0), (INT8, FP32)][int(rng.integers(3))]
    check(quantize(QuantizeSpec(source, values, scales, *copies, vectorizable=chunked)))


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("source", [BF16, FP16, FP32])
def test_whole_rows_and_columns_do_not_spill(source: DType, chunked: bool) -> None:
    for columns in (128, 512, 2048, 4096, 8192, 16384):
        check(quantize(QuantizeSpec(source, E4M3, FP32, "row", None, True, columns, chunked)))
    check(quantize(QuantizeSpec(source, E4M3, FP32, None, "column", True, vectorizable=chunked)))


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_others_do_not_spill(dtype: DType, chunked: bool) -> None:
    check(amax(dtype, chunked))
    for per_column in (False, True):
        check(dequantize(DequantizeSpec(E4M3, FP32, dtype, per_column, chunked)))
        check(dequantize(DequantizeSpec(E5M2, UE8M0, dtype, per_column, chunked)))
        check(dequantize(DequantizeSpec(INT8, FP32, dtype, per_column, chunked)))


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("source", [BF16, FP16, FP32])
def test_groups_do_not_spill(source: DType, chunked: bool) -> None:
    for capacity in (32, 1024):
        grouping = Grouping("offsets", capacity=capacity)
        check(quantize_groups(QuantizeSpec(source, E4M3, FP32, None, "column", vectorizable=chunked), grouping))
        check(quantize_groups(QuantizeSpec(source, INT8, UE8M0, None, "column", vectorizable=chunked), grouping))


SYNCHRONIZED = [
    QuantizeSpec(BF16, E4M3, FP32, "row", "column"),
    QuantizeSpec(BF16, E4M3, FP32, "tile", "tile"),
    QuantizeSpec(BF16, E4M3, FP32, "tile", None),
    QuantizeSpec(BF16, E4M3, FP32, None, "tile"),
    QuantizeSpec(BF16, E4M3, FP32, "tensor", "tensor"),
    QuantizeSpec(BF16, E4M3, FP32, "row", None, True, 512),
    QuantizeSpec(BF16, E4M3, FP32, "row", None, True, 2048),
    QuantizeSpec(BF16, E4M3, FP32, None, "column"),
    QuantizeSpec(BF16, E4M3, FP32, None, "column", True),
]


def hazards(kernel: Kernel, spec: QuantizeSpec, limit: int = 20) -> list[Hazard]:
    """The first of a CTA with several tiles, or several in whole rows and columns."""
    rows, columns = (40, 3000) if spec.columns > QUANTIZATION_BLOCK else (260, 260)
    memory, made = GlobalMemory(), {"source": (rows, columns)}
    for layout, (m, n) in (("rowwise", (rows, columns)), ("columnwise", (columns, rows))):
        made |= {layout: (m, n), f"{layout}_scales": (m, -(-n // QUANTIZATION_BLOCK))}
    partials = memory.add_buffer(np.ones(MAX_AMAX_PARTIALS, np.float32), "amax_partials", writable=False)
    arrays, places = {}, {"amax_partials": partials}
    for name, (m, n) in made.items():
        dtype = spec.source_dtype if name == "source" else spec.scale_dtype if "scales" in name else spec.value_dtype
        pitch = -(-n // 16) * 16
        places[name] = memory.add_buffer(np.zeros((m, pitch), dtype.numpy), name)
        arrays[name] = Matrix(dtype, m, n, pitch, 1)
    arguments = kernel.arguments(BoundQuantize(arrays, spec))
    arguments |= {name: place for name, place in places.items() if name in arguments}
    return simulate(kernel, 1, arguments, memory, is_dependent_launch=True, max_hazards=limit).hazards


@pytest.mark.parametrize("spec", SYNCHRONIZED, ids=lambda spec: spec.name)
def test_every_barrier_is_needed(spec: QuantizeSpec) -> None:
    """Without one of them, or without the wait for the grid before, the simulator reports it."""
    check_that_barriers_are_needed(
        lambda: quantize.__wrapped__(spec), lambda kernel, limit: hazards(kernel, spec, limit)
    )


def hazards_of_groups(kernel: Kernel, limit: int) -> list[Hazard]:
    rows, columns, ends = 300, 200, np.array([130, 130, 299], np.int32)
    memory, end = GlobalMemory(), filled_rows(rows, len(ends))
    source = np.zeros((rows, columns), BF16.numpy)
    values, scales = np.zeros((columns, end), E4M3.numpy), np.zeros((columns, end // 128), np.float32)
    made = {"source": source, "columnwise": values, "columnwise_scales": scales}
    places = {name: memory.add_buffer(x, name) for name, x in made.items()}
    places |= {"offsets": memory.add_buffer(ends, "offsets"), FILLED.name: memory.add_buffer(ends.copy(), FILLED.name)}
    dtypes = {"source": BF16, "columnwise": E4M3, "columnwise_scales": FP32}
    arrays = {name: Matrix(dtypes[name], *x.shape, x.shape[1], 1) for name, x in made.items()}
    arguments = kernel.arguments(BoundQuantizeGroups(arrays, Grouping("offsets"), len(ends)))
    arguments |= {name: place for name, place in places.items() if name in arguments}
    return simulate(kernel, 1, arguments, memory, is_dependent_launch=True, max_hazards=limit).hazards


def test_every_barrier_of_groups_is_needed() -> None:
    spec = QuantizeSpec(BF16, E4M3, FP32, None, "column")
    check_that_barriers_are_needed(lambda: quantize_groups.__wrapped__(spec, Grouping("offsets")), hazards_of_groups)


def check_that_barriers_are_needed(
    build: Callable[[], Kernel], find_hazards: Callable[[Kernel, int], list[Hazard]]
) -> None:  # fmt: skip
    assert find_hazards(build(), 20) == []
    deletions = 0
    while True:
        kernel = build()
        changes = [c for c in _changes(kernel) if c[0] == "delete" and c[1] in ("sync_threads", "grid_dependency_wait")]
        if deletions == len(changes):
            break
        _, target, where, apply = changes[deletions]
        apply()
        (found,) = find_hazards(kernel, 1)
        assert found.kind in ("race", "uninitialized read"), (target, where)
        deletions += 1
    assert deletions > 1
