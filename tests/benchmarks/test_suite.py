"""The problems for which speed is claimed: the class of shapes that were not tuned."""

from __future__ import annotations

import hashlib

from benchmarks.models import PUBLIC_LAYERS
from benchmarks.rows import load, names
from benchmarks.suite import (
    CUBES,
    LARGEST,
    LAYERS,
    MODELS,
    OBLONG,
    SQUARES,
    SUITE,
    TRAINED,
    TRAINING,
    UNALIGNED,
    UNSEEN,
    classes,
    roles,
)
from gemmsmith.tuning.tuned_table import builtin_rows


def is_power_of_two(m: int) -> bool:
    return m & (m - 1) == 0


def test_unseen_shapes_are_200_of_their_own() -> None:
    """Their (N, K) are tuned only if they are layers of public models: an entry serves its N and K, whatever M."""
    assert len(set(UNSEEN)) == len(UNSEEN) == 200
    assert not set(UNSEEN) & {*SUITE, *CUBES, *LAYERS, *UNALIGNED}
    table = builtin_rows()
    assert table
    tuned = {(row["n"], row["k"]) for row in table} - set(PUBLIC_LAYERS)
    assert not {(n, k) for _, n, k in UNSEEN} & tuned
    assert {name for shape in UNSEEN for name in classes(shape)} == {"unseen"}
    assert "unseen" not in {name for shape in [*SUITE, *UNALIGNED] for name in classes(shape)}


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


def fitted_to() -> set[tuple[int, int]]:
    """(N, K) of the table of tuned configs, of the model's training, and of all surveys and sweeps; those of gradients
    are of the training's layers."""
    files = [load(name) for name in names() if name.startswith(("survey-", "sweep-"))]
    rows = [row for file in files if file.get("operands") not in ("nn", "tn", "tt") for row in file["rows"]]
    return {(row["n"], row["k"]) for row in (*rows, *builtin_rows())} | {(n, k) for _, n, k in (*TRAINING, *UNSEEN)}


def test_a_training_steps_products_are_of_twenty_layers_that_nothing_is_fitted_to() -> None:
    """In none of a layer's three products."""
    products = [product for layer in TRAINED for product in roles(layer).values()]
    assert len(set(TRAINED)) == len(TRAINED) == 20
    assert not {(n, k) for _, n, k in (*products, *SQUARES, *OBLONG)} & fitted_to()
    assert all(2048 <= m <= 16384 and m * n * k <= LARGEST for m, n, k in TRAINED)
    assert all(min(n, k) in MODELS.values() for _, n, k in TRAINED)
    assert len({*SQUARES, *OBLONG}) == 20


def test_a_layers_gradients_contract_what_its_product_keeps() -> None:
    assert roles((2, 3, 5)) == {"nt": (2, 3, 5), "nn": (2, 5, 3), "tn": (3, 5, 2)}


def test_a_training_steps_layers_are_the_same_everywhere() -> None:
    digest = hashlib.sha256(repr(TRAINED).encode()).hexdigest()
    assert digest == "e9e8ede3f9ee2b6139a7407be2e769c9d35dbca5672464c1572998afcf58c8b9"
