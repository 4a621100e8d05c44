"""The cubin cache: whole entries or none, whatever happens to the folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith.backends.cuda import cache, compiler
from gemmsmith.backends.cuda.compiler import Compiled, compile_source

SOURCE = 'extern "C" __global__ void one(int* p) { *p = 1; }'
KEY = "ab" + "0" * 62


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def never(*_: object) -> tuple[bytes, str]:
    raise AssertionError("compiled again")


def test_the_second_time_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_source(SOURCE, "one")
    assert len(entries(folder)) == 1
    monkeypatch.setattr(compiler, "_compile", never)
    second = compile_source(SOURCE, "one")
    assert (second.cubin, second.log, second.resources) == (first.cubin, first.log, first.resources)


def test_cache_false_neither_reads_nor_writes(folder: Path) -> None:
    compile_source(SOURCE, "one", cache=False)
    assert not folder.exists()


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 4000])
def test_a_damaged_entry_is_compiled_again_and_repaired(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    first = compile_source(SOURCE, "one")
    (entry,) = entries(folder)
    entry.write_bytes(damage)
    assert compile_source(SOURCE, "one").cubin == first.cubin
    assert entries(folder) == [entry]
    monkeypatch.setattr(compiler, "_compile", never)
    assert compile_source(SOURCE, "one").cubin == first.cubin


@given(cubin=some.binary(max_size=300), log=some.text(max_size=100), data=some.data())
def test_an_entry_comes_back_whole_or_not_at_all(cubin: bytes, log: str, data: some.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMSMITH_CACHE_DIR", folder)
        assert cache.load(KEY) is None
        cache.store(KEY, cubin, log)
        assert cache.load(KEY) == (cubin, log)
        (entry,) = entries(Path(folder))
        whole = entry.read_bytes()
        at = data.draw(some.integers(0, len(whole) - 1), label="at")
        entry.write_bytes(whole[:at])
        assert cache.load(KEY) is None
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(some.integers(1, 255))]) + whole[at + 1 :])
        assert cache.load(KEY) is None


def test_what_a_key_depends_on() -> None:
    keys = [
        cache.make_key("a", ["x"], "13.0"), cache.make_key("b", ["x"], "13.0"),
        cache.make_key("a", ["y"], "13.0"), cache.make_key("a", ["x"], "13.1"),
    ]  # fmt: skip
    assert len(set(keys)) == 4
    assert keys[0] == cache.make_key("a", ["x"], "13.0")


def test_many_processes_fill_it_at_once(folder: Path) -> None:
    code = (
        "import sys; from gemmsmith.backends.cuda.compiler import compile_source, _nvrtc; _nvrtc()\n"
        "sys.stdin.read()\n"
        f"for i in range(3): print(len(compile_source({SOURCE!r} + '//' * i, 'one').cubin))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:  # all are imported by now, or soon: let them go together
        assert process.stdin
        process.stdin.close()
    outputs = []
    for process in processes:
        assert process.stdout
        outputs.append(process.stdout.read())
        process.stdout.close()
        assert process.wait() == 0
    assert len(set(outputs)) == 1
    assert len(entries(folder)) == 3
    assert all(path.suffix == ".cubin" for path in entries(folder))


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(2):
            assert isinstance(compile_source(SOURCE + "//" * i, "one"), Compiled)
    (once,) = said
    assert f"cannot write to its cache folder {tmp_path / 'file' / 'cache'} (" in str(once.message)
    assert "set GEMMSMITH_CACHE_DIR" in str(once.message)


def test_a_failed_rename_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="no space left"):
        cache.store(KEY, b"cubin", "log")
    assert entries(folder) == []


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", "/somewhere/else")
    assert cache.directory() == Path("/somewhere/else")
    monkeypatch.setenv("HOME", "/home/of")
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", "~/kernels")
    assert cache.directory() == Path("/home/of/kernels")
    monkeypatch.delenv("GEMMSMITH_CACHE_DIR")
    assert cache.directory() == Path(platformdirs.user_cache_dir("gemmsmith"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_in_an_entrys_place_is_replaced(folder: Path) -> None:
    """It is not waited for."""
    path = cache._path("0" * 64)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert cache.load("0" * 64) is None
    cache.store("0" * 64, b"cubin", "log")
    assert cache.load("0" * 64) == (b"cubin", "log")


def test_the_cache_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "home/cache"))
    cache.store(cache.make_key("source", (), "13"), b"cubin", "log")
    assert stat.S_IMODE((tmp_path / "home/cache").stat().st_mode) == 0o700
