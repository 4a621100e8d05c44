"""Tuning on a GPU: what it finds and keeps; without one it says so."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import gemmsmith
from gemmsmith import Spec
from gemmsmith.backends.cuda import driver
from gemmsmith.cli.commands import main


def test_tuning_needs_a_gpu() -> None:
    if driver.available():
        pytest.skip("there is one")
    with pytest.raises(gemmsmith.DeviceError, match="tune: this machine has no GPU to measure on; use"):
        gemmsmith.tune(Spec((64, 64), "bf16"), Spec((64, 64), "bf16"))
    done = CliRunner().invoke(main, ["tune", "64x64x64"])
    assert done.exit_code == 1
    assert "Error: tune: this machine has no GPU" in done.output
    assert "backend=" not in done.output
    assert CliRunner().invoke(main, ["tune", "64x64"]).exit_code == 2


@pytest.mark.gpu
def test_tuning_finds_and_keeps(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    a, b = Spec((64, 1024), "bf16"), Spec((1024, 2048), "bf16", (1, 1024))
    steps: list[str] = []
    found = gemmsmith.tune(a, b, most=8, step=steps.append)
    assert len(found) >= 4
    assert found[0].us > 1
    assert {"compile", "measure"} == set(steps)
    assert gemmsmith.plan(a, b).config == found[0].config


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp8_e4m3", {}), ("fp8_e5m2", {"accumulate": "fast"}), ("int8", {}), ("fp32", {"precision": "3xtf32"})],
)
def test_tuning_of_other_operands(dtype: str, options: dict[str, str], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    a, b = Spec((64, 1024), dtype), Spec((1024, 2048), dtype, (1, 1024))
    found = gemmsmith.tune(a, b, most=4, **options)
    assert gemmsmith.plan(a, b, **options).config == found[0].config


def test_what_cannot_be_multiplied_is_refused_first() -> None:
    with pytest.raises(gemmsmith.ArgumentError, match="precision: got None for fp32 operands"):
        gemmsmith.tune(Spec((64, 64), "fp32"), Spec((64, 64), "fp32"))
