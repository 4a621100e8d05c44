"""What a design says of itself, and how it is found."""

from __future__ import annotations

import pytest

from gemmsmith import Config, ConfigError, Design, register_design
from gemmsmith.core.config import FORMERLY
from gemmsmith.core.design import find, names, taking


def test_those_of_the_package() -> None:
    assert {"tma", "pingpong", "cooperative"} <= set(names())
    assert "cooperative" in taking("sync_clusters")
    assert "pingpong" not in taking("splits")
    assert find("pingpong").warpgroups(2) == (1, 1)
    assert find("tma").warpgroups(2) == (2, 1)


def test_a_name_is_taken_once_and_must_be_known() -> None:
    with pytest.raises(ConfigError, match="'pingpong', which is registered already"):
        register_design(Design("pingpong", print, {2: 200}))
    assert register_design(find("pingpong")) is find("pingpong")
    for name in ("ping", 3, None):
        with pytest.raises(ConfigError, match="design: got .*; use .*pingpong"):
            Config(name)  # type: ignore[arg-type]


def test_an_old_name_is_refused_with_the_new_one() -> None:
    for old, new in (("warp_specialized", "cooperative"), ("multistage", "tma")):
        with pytest.raises(ConfigError, match=f"design: got '{old}', which is called {new} now"):
            Config(old)


def test_an_old_field_is_refused_with_the_new_one_and_read_from_tables() -> None:
    for old, new in FORMERLY.items():
        for make in (Config, Config().replace):
            with pytest.raises(ConfigError, match=f"{old}: this field is called {new} now"):
                make(**{old: 1})
        assert getattr(Config.stored({old: 1, "design": "multistage"}), new) == 1
    assert Config.stored({"design": "multistage"}) == Config("tma")


def test_a_config_takes_what_its_design_takes() -> None:
    assert Config("pingpong").warpgroups == (1, 1)
    assert Config("cooperative").can_sync_clusters
    assert not Config("tma").can_sync_clusters
    assert not Config("cooperative", splits=2).can_sync_clusters
