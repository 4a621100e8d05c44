"""What a config's fields may be."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith import Config, ConfigError
from gemmsmith.core.check_config import check_config

TRIPLE, PAIR, INTEGER, SWITCH = "three integers: M, N and K", "two integers", "an integer", "True or False"


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("tile", (128, 256), TRIPLE),
        ("tile", (128, 256, 64, 1), TRIPLE),
        ("tile", (128.0, 256, 64), TRIPLE),
        ("tile", "128x256x64", TRIPLE),
        ("tile", 128, TRIPLE),
        ("tile", None, TRIPLE),
        ("cluster", 2, PAIR),
        ("cluster", (2,), PAIR),
        ("cluster", ("2", 1), PAIR),
        ("stages", 4.0, INTEGER),
        ("stages", "4", INTEGER),
        ("consumers", None, INTEGER),
        ("raster_group", True, INTEGER),
        ("splits", (1,), INTEGER),
        ("cluster_splits", 2.5, INTEGER),
        ("design", "pingpong ", "cooperative, "),
        ("design", ("pingpong",), "cooperative, "),
        ("raster", "M", "m or n"),
        ("raster", 0, "m or n"),
        ("evict", "first", "first, normal or last, one for A and one for B"),
        ("evict", ("first",), "first, normal or last"),
        ("swap_ab", "yes", SWITCH),
        ("serpentine", 2, SWITCH),
        ("alias_epilogue", (), SWITCH),
    ],
)
def test_a_field_of_another_type(name: str, given: Any, wanted: str) -> None:
    for make in (lambda: Config(**{name: given}), lambda: Config().replace(**{name: given})):
        with pytest.raises(ConfigError) as error:
            make()
        assert str(error.value).startswith(f"{name}: got {given!r}; use {wanted}")


@given(some.sampled_from([np.int8, np.int64, np.uint16]), some.sampled_from([list, tuple]))
def test_numpys_numbers_and_lists(integer: Any, sequence: Any) -> None:
    got = Config(
        tile=sequence(map(integer, (64, 96, 32))), cluster=np.array([1, 2]), stages=integer(3),
        evict=sequence(("last", "first")), serpentine=np.bool_(True), swap_ab=integer(1),
    )  # fmt: skip
    want = Config(tile=(64, 96, 32), cluster=(1, 2), stages=3, serpentine=True, evict=("last", "first"), swap_ab=True)
    assert got == want
    assert repr(got) == repr(want)
    assert hash(got) == hash(want)
    assert pickle.loads(pickle.dumps(got)) == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"consumers": 0}, "consumers: got 0; use 1, 2 or 3"),
        ({"stages": 2**31}, "stages: got 2147483648; use at most 100, what fits with the smallest tile"),
        ({"consumers": -2}, "consumers: got -2"),
        ({"cluster_splits": 5}, "cluster_splits: got 5; use 1 for none, up to 4 with a cluster of 2x1, at most 8 CTAs"),
        ({"cluster_splits": 0}, "cluster_splits: got 0; use 1 for none"),
        ({"cluster": (4, 4)}, r"cluster: got \(4, 4\); use 1, 2 or 4 each way, at most 8 CTAs"),
        ({"cluster": (0, 1)}, r"cluster: got \(0, 1\)"),
        ({"splits": -1}, "splits: got -1; use 1 for none, 2 to 64, or 0 for stream-K"),
        ({"raster_group": 0}, "raster_group: got 0; use 1 to 4096"),
        ({"raster_group": 2**29}, "raster_group: got 536870912; use 1 to 4096"),
        ({"raster_group": 2**63}, "raster_group: got 9223372036854775808; use 1 to 4096"),
        ({"splits": 2**40}, "splits: got 1099511627776; use 1 for none"),
        ({"consumers": 10**9}, "consumers: got 1000000000; use 1, 2 or 3"),
        ({"tile": (128, 256, 2**33)}, "tile K: got 8589934592; use rows of"),
        ({"tile": (0, 256, 64)}, "tile M: got 0"),
    ],
)
def test_choices_that_no_operands_suit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(Config(**changes))


@pytest.mark.parametrize(("name", "meant"), [("tyle", "tile"), ("raster_groups", "raster_group"), ("stage", "stages"),
                                             ("warps", "design, chip, tile")])  # fmt: skip
def test_a_field_that_there_is_not(name: str, meant: str) -> None:
    for make in (lambda: Config(**{name: 4}), lambda: Config().replace(**{name: 4})):
        with pytest.raises(ConfigError, match=f"^{name}: a Config has no such field; use {meant}"):
            make()


SIZES = some.integers(1, 512)
FIELDS: dict[str, Any] = {
    "design": some.sampled_from(["cooperative", "pingpong", "mma_multistage", "sgemm"]),
    "tile": some.tuples(SIZES, SIZES, SIZES), "cluster": some.tuples(SIZES, SIZES), "stages": SIZES,
    "consumers": SIZES, "raster": some.sampled_from("mn"), "raster_group": SIZES, "splits": some.integers(0, 32),
    "cluster_splits": SIZES, "swap_ab": some.booleans(),
    "evict": some.tuples(*[some.sampled_from(["first", "normal", "last"])] * 2),
    **dict.fromkeys(["streaming_stores", "alias_epilogue", "serpentine", "sync_clusters"], some.booleans()),
    "chip": some.sampled_from(["sm_80", "sm_90"]),
}  # fmt: skip
"""All fields of a Config, with values that need not suit one another."""


@given(some.fixed_dictionaries({}, optional=FIELDS))
def test_a_config_is_what_its_text_says(fields: dict[str, Any]) -> None:
    assert list(Config.__dataclass_fields__) == list(FIELDS)
    config = Config(**fields)
    assert Config.parse(str(config)) == config


@pytest.mark.parametrize("text", ["", f"{Config()} ", f"{Config()} splits", "cooperative 128x256", f"x{Config()}"])
def test_a_text_of_no_config(text: str) -> None:
    with pytest.raises(ConfigError):
        Config.parse(text)
