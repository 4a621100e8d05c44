"""The problems that speed is claimed for: the class of shapes that nobody tuned."""

from __future__ import annotations

import hashlib
import json
from importlib import resources

from suite import CUBES, LAYERS, RAGGED, SUITE, UNSEEN, classes


def is_power_of_two(m: int) -> bool:
    return m & (m - 1) == 0


def test_unseen_shapes_are_200_of_their_own() -> None:
    """Not even their (N, K) are tuned: an entry of the table serves every N and K like its own, whatever M."""
    assert len(set(UNSEEN)) == len(UNSEEN) == 200
    assert not set(UNSEEN) & {*SUITE, *CUBES, *LAYERS, *RAGGED}
    table = json.loads((resources.files("gemmsmith.tuning") / "h200.json").read_text())["rows"]
    assert table
    assert not {(n, k) for _, n, k in UNSEEN} & {(row["n"], row["k"]) for row in table}
    assert {name for shape in UNSEEN for name in classes(shape)} == {"unseen"}
    assert "unseen" not in {name for shape in [*SUITE, *RAGGED] for name in classes(shape)}


def test_unseen_shapes_are_the_same_everywhere() -> None:
    digest = hashlib.sha256(repr(UNSEEN).encode()).hexdigest()
    assert digest == "cea5e6b24b5e8e90a044aa46ac1433da60a40e922d7aa595da8b4e72cc2c3633"


def test_unseen_rows_are_log_uniform_and_half_of_them_no_powers_of_two() -> None:
    rows = [m for m, _, _ in UNSEEN]
    assert sum(map(is_power_of_two, rows)) == 100
    assert all(1 <= m <= 32768 for m in rows)
    for least in (1, 32, 1024):  # five octaves each; powers of two, of which many are small, are left out of a half
        assert sum(least <= m < 32 * least for m in rows) >= 30, least


def test_unseen_products_take_less_than_3_ms_at_700_tflops() -> None:
    assert all(2 * m * n * k / 700e12 < 3.001e-3 for m, n, k in UNSEEN)
