"""What a design says of itself, and how it is found."""

from __future__ import annotations

from typing import Any

import pytest

from gemmsmith import Config, ConfigError, Design, register_design
from gemmsmith.core.design import design_names, designs_supporting, get_design
from gemmsmith.core.dtypes import BF16, INT32


def test_those_of_the_package() -> None:
    assert {"tma", "pingpong", "cooperative"} <= set(design_names())
    assert "cooperative" in designs_supporting("sync_clusters")
    assert "pingpong" not in designs_supporting("splits")
    assert get_design("pingpong").warpgroups(2) == (1, 1)
    assert get_design("tma").warpgroups(2) == (2, 1)


def test_a_name_is_taken_once_and_must_be_known() -> None:
    with pytest.raises(ConfigError, match="'pingpong', which is registered already"):
        register_design(Design("pingpong", print, {2: 200}))
    assert register_design(get_design("pingpong")) is get_design("pingpong")
    for name in ("ping", 3, None):
        with pytest.raises(ConfigError, match="design: got .*; use .*pingpong"):
            Config(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("name", "my design"), ("name", 3), ("record", "record"), ("max_accumulator_registers", {}),
        ("max_accumulator_registers", 200), ("max_accumulator_registers", {"1": 200}),
        ("max_promoted_registers", {1: 0}), ("producer_warpgroups", -1), ("producer_warpgroups", True),
        ("tile_per_warpgroup", 1), ("supported_options", {"splits"}), ("supported_options", frozenset({"split"})),
        ("defaults", [("stages", 2)]), ("defaults", ["stages"]),
        ("mma_op", "wgmma"), ("required_arch", "hopper"), ("required_arch", None),
        ("uses_tma", None), ("warpgroups_split_n", "no"), ("groups_along", "m"), ("groups_along", frozenset({"n"})),
        ("arrays", ["ends"]), ("arrays", {"a": INT32}), ("arrays", {"epilogue": INT32}), ("shapes", None),
        ("shapes", "mk"), ("clips_rows", 0), ("dtypes", {BF16: BF16}), ("dtypes", {(BF16, BF16): "bf16"}),
        ("majors", {"c": ("K",)}), ("majors", {"b": ("N",)}),
    ],
)  # fmt: skip
def test_a_wrong_design_is_refused_before_it_is_registered(field: str, wrong: Any) -> None:
    """Functions of all designs, such as those for errors' messages, never meet it."""
    fields = {"name": "wrong", "record": print, "max_accumulator_registers": {1: 200}, field: wrong}
    with pytest.raises(ConfigError, match=f"{field}: got .*; use "):
        register_design(Design(**fields))
    with pytest.raises(ConfigError, match="design: got str; use a Design"):
        register_design("wrong")  # type: ignore[arg-type]
    assert "wrong" not in design_names()


def test_a_design_does_not_follow_what_it_was_made_from() -> None:
    registers = {1: 200}
    design = Design("own", print, registers, defaults={"stages": 2})
    registers.clear()
    assert design.max_accumulator_registers == {1: 200}


def test_a_config_of_a_table_row() -> None:
    row: dict[str, Any] = {"design": "tma", "tile": [128, 128, 64], "swap_ab": 1}
    assert Config(**row) == Config("tma", (128, 128, 64), swap_ab=True)
    with pytest.raises(ConfigError, match="swap: a Config has no such field; use swap_ab"):
        Config(swap=True)  # type: ignore[call-arg]


def test_a_config_takes_what_its_design_takes() -> None:
    assert Config("pingpong").warpgroups == (1, 1)
    assert Config("cooperative").can_sync_clusters
    assert not Config("tma").can_sync_clusters
    assert not Config("cooperative", splits=2).can_sync_clusters
