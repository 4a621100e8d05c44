"""probe_mma.py finds the model by which a tensor core adds, whichever it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.probe import mma as probe_mma
from benchmarks.probe.findings import Measured
from benchmarks.probe.models import Model, assumed, ranked, unequal
from benchmarks.probe.vectors import numbers, random_tiles, selected_vectors
from gemmsmith.core.dtypes import BF16, FP16, FP32, TF32
from gemmsmith.core.mma import MMA_SYNC, Mma, select_mma
from gemmsmith.hw.mma import fused_sum

BF16_FP32, FP16_FP16, TF32_FP32 = (
    select_mma(a, a, d, MMA_SYNC) for a, d in ((BF16, FP32), (FP16, FP16), (TF32, FP32))
)  # fmt: skip
AMPERE = Model(24, "truncated", parts=2)


def vectors(mma: Mma) -> Measured:
    """Those of the probe, with D of nothing yet."""
    p = selected_vectors(mma)
    *tiles, c = random_tiles(mma, np.random.default_rng(0), 2)
    a, b, of_vectors = p.arrays()
    return Measured(mma, p.names, (a, b, of_vectors, of_vectors), (*tiles, c, c))


@pytest.mark.parametrize(("mma", "model"), [
    (BF16_FP32, AMPERE), (TF32_FP32, AMPERE), (FP16_FP16, replace(AMPERE, stored="nearest")),
    (FP16_FP16, Model(25, "truncated to fp32, then nearest", parts=2)), (BF16_FP32, Model(23, "nearest", parts=4)),
    (BF16_FP32, Model(24, "truncated", parts=2, backwards=True)), (BF16_FP32, Model(24, "nearest", c_after=True)),
    (TF32_FP32, Model(26, "truncated", nearest=True)),
])  # fmt: skip
def test_the_only_model_that_fits_is_found(mma: Mma, model: Model) -> None:
    a, b, c, _ = vectors(mma).sums()
    (wrong, best), (of_next, _), *_ = ranked(a, b, c, model.sums(a, b, c, mma), mma)
    assert (wrong, best) == (0, model)
    assert of_next > 0


@pytest.mark.parametrize("mma", [BF16_FP32, FP16_FP16, TF32_FP32], ids=str)
def test_the_assumed_model_is_the_simulators(mma: Mma) -> None:
    a, b, c, _ = vectors(mma).sums()
    assert not unequal(assumed(mma).sums(a, b, c, mma), fused_sum(a, b, c, mma)).any()


def test_halves_are_two_instructions() -> None:
    a, b, c, _ = vectors(BF16_FP32).sums()
    mma = replace(BF16_FP32, aligned_fraction_bits=24)
    first = fused_sum(a[:8], b[:8], c, mma)
    chained = fused_sum(a[8:], b[8:], first.astype(float), mma)
    assert not unequal(AMPERE.sums(a, b, c, BF16_FP32), chained).any()


@pytest.mark.slow
@pytest.mark.parametrize("instruction", ["mma", "wmma", "wgmma"])
def test_the_simulator_is_probed(
    instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the file tells the same."""
    tables = []
    for words in (["--backend", "sim", "--tiles", "1", "--out"], ["--read"]):
        options = ["--instruction", instruction, "--only", "f16_f16", *words, str(tmp_path / "probe.npz")]
        monkeypatch.setattr(sys, "argv", ["probe_mma.py", *options])
        probe_mma.main()
        table = capsys.readouterr().out.split("every stored bit\n")[1].split("\n")[1:-2]
        tables.append([line if line.startswith(" ") else line.split()[:5] for line in table])
    ran, read = tables
    assert ran == read
    assert [cells[:2] for cells in ran[::2]] == [["f32_f16_f16", "equal"], ["f16_f16_f16", "equal"]]


def test_tf32_ignores_the_lower_bits() -> None:
    x = np.array([0x3F801FFF], np.uint32).view(np.float32)
    assert numbers(x, TF32) == 1
    assert numbers(x, FP32) > 1
