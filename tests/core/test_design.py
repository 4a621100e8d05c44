"""What a design says of itself, and how it is found."""

from __future__ import annotations

import pytest

from gemmsmith import Config, ConfigError, Design, register_design
from gemmsmith.core.design import design_names, designs_supporting, get_design


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


def test_a_config_of_a_table_row() -> None:
    row = {"design": "tma", "tile": [128, 128, 64], "swap_ab": 1}
    assert Config.from_table_row(row) == Config("tma", (128, 128, 64), swap_ab=True)
    with pytest.raises(ConfigError, match="swap: a Config has no such field; use swap_ab"):
        Config.from_table_row({"swap": True})


def test_a_config_takes_what_its_design_takes() -> None:
    assert Config("pingpong").warpgroups == (1, 1)
    assert Config("cooperative").can_sync_clusters
    assert not Config("tma").can_sync_clusters
    assert not Config("cooperative", splits=2).can_sync_clusters
