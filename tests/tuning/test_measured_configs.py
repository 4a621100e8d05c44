"""Measured configs: one file for each problem, which serve plans; damaged files and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, Spec
from gemmsmith.backends.cuda import cache
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.core.grouping import Grouping
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.measured_configs import Entry, Key, bucket, key_of

SMALL = Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1, stages=4)
GPU = "NVIDIA H200"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a GPU that this machine does not have; nothing is saved yet."""
    folder = tmp_path / "tuned" / "h200"
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured_configs, "folder", lambda device=0: folder)
    monkeypatch.setattr(measured_configs, "_about", lambda device: {"gpu": GPU})
    monkeypatch.setattr(measured_configs, "_SAVED", {})
    return folder


def operands(m: int = 512, n: int = 4096, k: int = 1024, dtype: str = "bf16") -> tuple[Spec, Spec]:
    return Spec((m, k), dtype), Spec((k, n), dtype, (1, k))


def entry_for(*arrays: Spec, config: Config = SMALL, us: float = 12.5, **options: Any) -> Entry:
    binding = bind(Request(*arrays, **options))
    return Entry(key_of(binding.problem, binding.spec), binding.problem.m, config, us, GPU)


def test_buckets_are_finer_where_a_tile_matters() -> None:
    assert [bucket(m) for m in (0, 1, 2, 3, 64, 65, 128, 129, 448, 449, 512, 513, 1024, 1025)] == [
        1, 1, 2, 4, 64, 128, 128, 192, 448, 512, 512, 1024, 1024, 2048,
    ]  # fmt: skip


def test_what_is_saved_is_chosen(here: Path) -> None:
    """By calls of the same bucket, in this process and, from the file, in another."""
    assert gemmsmith.plan(*operands()).config != SMALL
    measured_configs.save([entry_for(*operands())])
    assert gemmsmith.plan(*operands()).config == SMALL
    assert gemmsmith.plan(*operands()).origin == "tuned"
    assert gemmsmith.plan(*operands(dtype="fp16")).config == SMALL
    assert "measured 12.5 us (H200, M = 512)" in gemmsmith.plan(*operands()).why
    measured_configs._SAVED.clear()
    assert gemmsmith.plan(*operands()).config == SMALL
    for other in (
        operands(513),
        operands(n=4088),
        operands(dtype="fp8_e4m3"),
        (operands()[0], Spec((1024, 4096), "bf16")),
    ):
        assert gemmsmith.plan(*other).config != SMALL
    measured_configs.save([entry_for(*operands(), config=SMALL.replace(stages=3))])
    assert gemmsmith.plan(*operands()).config == SMALL.replace(stages=3)
    assert {x.name for x in here.iterdir()} == {f"{entry_for(*operands()).key.name}.json", "about.json"}


def test_another_m_of_the_bucket_is_served_if_the_model_expects_no_loss(here: Path) -> None:
    best = gemmsmith.plan(*operands(512)).config
    measured_configs.save([entry_for(*operands(512), config=best)])
    assert gemmsmith.plan(*operands(504)).config.tile == best.tile
    wide = Config(tile=(64, 256, 64), cluster=(1, 1), consumers=1, stages=4, swap_ab=True)
    measured_configs.save([entry_for(*operands(4096, 4096, 4096), config=wide)])
    assert gemmsmith.plan(*operands(4096, 4096, 4096)).config == wide
    assert gemmsmith.plan(*operands(2100, 4096, 4096)).config != wide  # its last tiles are nearly empty


def test_an_epilogue_has_an_entry_of_its_own_or_the_plain_products(here: Path) -> None:
    def relu(acc: Any) -> Any:
        return acc.relu()

    measured_configs.save([entry_for(*operands())])
    fused = gemmsmith.plan(*operands(), epilogue=relu)
    assert (fused.config.tile, fused.origin) == (SMALL.tile, "tuned without its epilogue")
    own = SMALL.replace(tile=(64, 128, 64), stages=3)
    measured_configs.save([entry_for(*operands(), config=own, epilogue=relu)])
    assert gemmsmith.plan(*operands(), epilogue=relu).config == own
    assert gemmsmith.plan(*operands()).config == SMALL
    assert gemmsmith.plan(*operands(), epilogue=lambda acc: acc * 2).config.tile == SMALL.tile
    assert gemmsmith.plan(*operands(), epilogue=relu, fast_math=False).config.tile == SMALL.tile


def test_a_digest_of_an_epilogue_is_the_same_in_every_process() -> None:
    program = (
        "import gemmsmith; from gemmsmith import Spec; from gemmsmith.binding.bind import bind\n"
        "from gemmsmith.binding.request import Request; from gemmsmith.tuning.measured_configs import key_of\n"
        "a, b = Spec((512, 1024), 'bf16'), Spec((1024, 4096), 'bf16', (1, 1024)); c = Spec((512, 4096), 'bf16')\n"
        "x = bind(Request(a, b, None, {'c': c, 'e': c}, lambda acc, c, e: {'y': acc * c + e, 'z': acc.sum(0)}))\n"
        "print(key_of(x.problem, x.spec).name)"
    )
    names = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                       capture_output=True, text=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(names) == 1


def test_kinds_of_products_have_entries_of_their_own() -> None:
    a, b = operands()
    row, blocks = Spec((512, 1), "fp32"), Spec((8, 32), "fp32")
    a8, b8 = operands(dtype="fp8_e4m3")
    sizes = {"operands": {"sizes": Spec((8,), "int32")}, "grouping": Grouping("sizes")}
    grouped = Spec((8, 1024, 4096), "bf16", (4096 * 1024, 1, 1024))
    keys = [
        entry_for(a, b).key,
        entry_for(a, b, out_dtype="fp32").key,
        entry_for(Spec((512, 1024), "bf16", (1, 512)), b).key,
        entry_for(Spec((512, 1024), "bf16", (1025, 1)), b).key,
        entry_for(a8, b8).key,
        entry_for(a8, b8, accumulate="fast").key,
        entry_for(a8, b8, scale_a=row).key,
        entry_for(a8, b8, scale_b=blocks).key,
        entry_for(a, grouped, **sizes).key,
        entry_for(Spec((2, 512, 1024), "bf16"), Spec((2, 1024, 4096), "bf16")).key,
    ]
    assert len({key.name for key in keys}) == len(keys)
    assert keys[7].plain == keys[4]


def test_groups_are_served(here: Path) -> None:
    a, b = Spec((512, 1024), "bf16"), Spec((8, 1024, 4096), "bf16", (4096 * 1024, 1, 1024))
    options: dict[str, Any] = {"operands": {"sizes": Spec((8,), "int32")}, "grouping": Grouping("sizes")}
    before = gemmsmith.plan(a, b, **options)
    config = Config(tile=(64, 128, 64), cluster=(1, 1), consumers=1, stages=4)
    assert before.config.tile != config.tile
    measured_configs.save([entry_for(a, b, config=config, **options)])
    plan = gemmsmith.plan(a, b, **options)
    assert (plan.config.tile, plan.origin) == (config.tile, "tuned")


def damaged_files(good: dict[str, Any]) -> list[bytes]:
    changes: list[dict[str, Any]] = [
        {"format": 99}, {"key": None}, {"m": "512"}, {"config": {"warps": 4}}, {"config": {"tile": [100, 64, 64]}},
        {"us": "fast"}, {"key": {**good["key"], "n": "4096"}}, {"key": {**good["key"], "n": 4088}},
    ]  # fmt: skip
    text = json.dumps(good).encode()
    return [
        b"",
        b"damaged",
        text[:-9],
        b"\0\xff",
        b"7",
        b"[]",
        b"null",
        *(json.dumps({**good, **x}).encode() for x in changes),
    ]


def test_a_damaged_file_is_a_miss(here: Path) -> None:
    """Torn, of another version, of another problem: without a word, and it is replaced by the next measurement."""
    entry = entry_for(*operands())
    want = gemmsmith.plan(*operands()).config
    here.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for content in damaged_files(json.loads(json.dumps(entry.to_json()))):
            (here / f"{entry.key.name}.json").write_bytes(content)
            assert gemmsmith.plan(*operands()).config == want, content
            assert [x for x in measured_configs.entries() if x.key == entry.key] == []
    measured_configs.save([entry])
    measured_configs._SAVED.clear()
    assert gemmsmith.plan(*operands()).config == SMALL
    assert measured_configs.entries() == [entry]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_what_is_no_file_is_not_waited_for(here: Path) -> None:
    here.mkdir(parents=True)
    name = here / f"{entry_for(*operands()).key.name}.json"
    for make in (os.mkfifo, os.mkdir):
        make(name)
        assert measured_configs.find(entry_for(*operands()).key) is None
        name.unlink() if name.is_fifo() else name.rmdir()


def test_a_folder_that_cannot_be_written_serves_this_process(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one warning."""
    monkeypatch.setattr(cache, "_WARNED", set())
    tmp_path.joinpath("tuned").write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="cannot write to its cache folder") as said:
        measured_configs.save([entry_for(*operands()), entry_for(*operands(8))])
    assert len(said) == 1
    assert gemmsmith.plan(*operands()).config == SMALL


def test_tables_of_the_environment(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve what has no file of its own, are read again when they change, and are ignored, with a warning, if bad."""
    file = tmp_path / "table.json"
    monkeypatch.setenv("GEMMSMITH_TABLE", os.pathsep.join([str(tmp_path / "none.json"), str(file)]))
    measured_configs.write_table(file, [entry_for(*operands())])
    with pytest.warns(UserWarning, match="ignoring GEMMSMITH_TABLE: .*none.json"):
        assert gemmsmith.plan(*operands()).config == SMALL
    measured_configs.write_table(file, [entry_for(*operands(), config=SMALL.replace(stages=3))])
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
    assert gemmsmith.plan(*operands()).config.stages == 3
    measured_configs.save([entry_for(*operands())])
    assert gemmsmith.plan(*operands()).config == SMALL
    file.write_text("[]")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 2 * 10**9))
    with pytest.warns(UserWarning, match="use a table that `gemmsmith table export` has written"):
        assert gemmsmith.plan(*operands(8)).origin != "none"
    with pytest.raises(ArgumentError, match="table.json: TypeError"):
        measured_configs.read_table(file)


def test_caches_of_compiled_graphs_see_a_new_entry(here: Path) -> None:
    before = measured_configs.state()
    measured_configs.save([entry_for(*operands())])
    assert measured_configs.state() != before


def test_an_entry_survives_json() -> None:
    entry = entry_for(*operands(), epilogue=lambda acc: acc.relu())
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    assert isinstance(entry.key, Key)
