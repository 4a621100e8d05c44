"""What a layout costs: what TMA asks of the L2 for MN-major tiles, in the model and counted by the simulator; and that
no choice reads rows narrower than a line without need."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.sim.execute.counters import Counters
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.tile import LINE_BYTES
from gemmsmith.kernels.pack import with_packed_operands
from gemmsmith.tuning import model
from gemmsmith.tuning.candidates import spec_for
from gemmsmith.tuning.choose import choose, estimate_us
from gemmsmith.tuning.gpus import GPUS, Gpu
from gemmsmith.tuning.model import tile_bytes

SIZES = some.sampled_from([*range(64, 700, 8), 1000, 1536, 2304, 4096, 8192, 11008])


@pytest.mark.parametrize("width", [32, 64, 72, 96, 128, 136, 160, 176, 192])
def test_lines_of_an_mn_major_operand(width: int, rng: np.random.Generator) -> None:
    """Of B, whose rows are of N: each k of a tile takes whole lines, and one more where they begin within a line. The
    model has the same mean, over tiles that lie inside."""
    k, tiles = 64, 8
    n = width * tiles
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((64, k), (k, n)))
    config, counters = Config(tile=(64, width, 64), cluster=(1, 1), stages=2, consumers=1), Counters()
    plan = gemmsmith.plan(a, b, config=config)
    done = plan.simulate(a, b, counters=counters)
    assert not done.hazards
    assert np.allclose(done.result.astype(float), a.astype(float) @ b.astype(float), atol=0.2, rtol=2**-7)
    (kernel,) = counters.kernels
    loads = [x for x in counters.lines(kernel) if x.instruction == "tma_load"]
    of_a = 64 * tiles  # a line a row
    tile = plan._planned.spec.tiles[1]
    expected = within = 0
    for i in range(tiles):
        for box in range(tile.boxes):
            first = (i * width + box * tile.box_inner) * 2
            stop = min(first + tile.box_inner * 2, 2 * n)
            if first < stop:
                expected += k * ((stop - 1) // LINE_BYTES - first // LINE_BYTES + 1)
            within += k * (first % LINE_BYTES > 0)
    assert sum(x.lines for x in loads) - of_a == expected
    nbytes, slower = tile_bytes(plan.problem.operands[1], np.array([float(width)]), np.array([float(k)]))
    assert nbytes[0] == k * tile.boxes * tile.pitch
    assert slower[0] - 1 == pytest.approx(model.UNALIGNED_TILE_OVERHEAD * within / (k * tiles * tile.boxes))


@given(m=SIZES, n=SIZES, k=SIZES, layout=some.sampled_from(["nn", "tn", "tt"]), gpu=some.sampled_from(GPUS))
def test_no_choice_reads_narrow_rows_without_need(m: int, n: int, k: int, layout: str, gpu: Gpu) -> None:
    """An MN-major tile is read in whole lines, or as wide as the operand or the tile. Where its lines do not begin
    where the L2's do, the model says that tiles in steps of 64 are no faster."""
    a = Spec((m, k), "bf16", (1, m) if layout[0] == "t" else None)
    b = Spec((k, n), "bf16", (1, k) if layout[1] == "t" else None)
    problem = bind(Request(a, b)).problem
    config = choose(problem, gpu=gpu)
    spec, oriented = spec_for(config, problem), with_packed_operands(problem.T if config.swap_ab else problem)
    for operand, tile in zip(oriented.operands, spec.tiles, strict=True):
        if operand.major == "K":
            continue
        assert tile.pitch == LINE_BYTES or tile.boxes == 1
        within = tile.mn < operand.rows and tile.mn * operand.dtype.bytes % LINE_BYTES
        if within and tile.mn > 64:
            whole = config.replace(tile=(config.tile[0], tile.mn // 64 * 64, config.tile[2]))
            assert estimate_us(problem, config, gpu=gpu) <= estimate_us(problem, whole, gpu=gpu)
