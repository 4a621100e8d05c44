"""What a design says of itself, and how it is found."""

from __future__ import annotations

import pytest

from gemmsmith import Config, ConfigError, Design, register_design
from gemmsmith.core.design import find, names, taking


def test_those_of_the_package() -> None:
    assert {"multistage", "pingpong", "warp_specialized"} <= set(names())
    assert "warp_specialized" in taking("lockstep")
    assert "pingpong" not in taking("splits")
    assert find("pingpong").tile_warpgroups(2) == 1
    assert find("multistage").tile_warpgroups(2) == 2


def test_a_name_is_taken_once_and_must_be_known() -> None:
    with pytest.raises(ConfigError, match="'pingpong', which is registered already"):
        register_design(Design("pingpong", print, {2: 200}))
    assert register_design(find("pingpong")) is find("pingpong")
    for name in ("ping", 3, None):
        with pytest.raises(ConfigError, match="design: got .*; use .*pingpong"):
            Config(name)  # type: ignore[arg-type]


def test_a_config_takes_what_its_design_takes() -> None:
    assert Config("pingpong").tile_warpgroups == 1
    assert Config("warp_specialized").can_keep_step
    assert not Config("multistage").can_keep_step
    assert not Config("warp_specialized", splits=2).can_keep_step
