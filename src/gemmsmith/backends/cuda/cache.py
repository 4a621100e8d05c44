"""The cubin cache on disk. Several processes may write concurrently: entries appear atomically, by rename."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_DIGEST_BYTES = hashlib.sha256().digest_size


def directory() -> Path:
    """Return the cache folder: GEMMSMITH_CACHE_DIR (~ is the home folder) if it is set, else the platform's."""
    return _directory(*map(os.environ.get, ("GEMMSMITH_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@lru_cache(maxsize=16)
def _directory(path: str | None, xdg_cache_home: str | None, home: str | None) -> Path:
    """Return the cache folder.

    `xdg_cache_home` and `home` are unused here, but platformdirs reads these variables, so the cached result depends on
    them.
    """
    if path:
        return Path(os.path.expanduser(path))
    import platformdirs

    return Path(platformdirs.user_cache_dir("gemmsmith"))


def create() -> Path:
    """Create the cache folder for its owner alone, since kernels from it are executed; return it. Raises OSError."""
    folder = directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def make_key(source: str, options: Sequence[str], compiler: str) -> str:
    """Return a digest of everything that a cubin depends on: source, options, compiler version."""
    return hashlib.sha256("\0".join((compiler, *options, source)).encode()).hexdigest()


def load(key: str) -> tuple[bytes, str] | None:
    """Return the cubin and the compiler's log of an entry; None if it is missing or damaged.

    A file holds a SHA-256 digest of the rest, the cubin's size (8 bytes), the cubin, and the log.
    """
    try:
        data = read_regular_file(_path(key))
    except OSError:
        return None
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    size = int.from_bytes(body[:8], "little")
    return body[8 : 8 + size], body[8 + size :].decode()


def contains(key: str) -> bool:
    """Return whether there is a file for an entry, damaged or not."""
    return _path(key).exists()


def store(key: str, cubin: bytes, log: str) -> None:
    """Store a cubin and the compiler's log under `key`. Warns, and stores nothing, if the folder is not writable."""
    body = len(cubin).to_bytes(8, "little") + cubin + log.encode()
    write_atomically(_path(key), hashlib.sha256(body).digest() + body)


class Entry(NamedTuple):
    """A compiled kernel in the folder: its file, bytes, and when it was written, in seconds since the epoch."""

    path: Path
    bytes: int
    written: float


def entries() -> list[Entry]:
    """Return the compiled kernels in the folder, the oldest first."""
    result = []
    for path in directory().glob("??/*.cubin"):
        with suppress(OSError):  # another process may delete it
            status = path.stat()
            result.append(Entry(path, status.st_size, status.st_mtime))
    return sorted(result, key=lambda entry: entry.written)


def read_regular_file(path: Path) -> bytes:
    """Return a file's bytes. Raises OSError if it is not a regular file: reading a pipe would block."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file by rename, so that other processes see it complete or not at all; warn if that fails."""
    try:
        create()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        _warn_unwritable(directory(), str(error))


_WARNED: set[Path] = set()


def _warn_unwritable(folder: Path, why: str) -> None:
    """Warn that a folder is not writable, once per process. `why`: the error's text."""
    if folder not in _WARNED:
        _WARNED.add(folder)
        warnings.warn(
            f"gemmsmith cannot write to its cache folder {folder} ({why}): compiled kernels and tuning results "
            "will not be cached; set GEMMSMITH_CACHE_DIR to a writable folder",
            stacklevel=2,
        )


def _path(key: str) -> Path:
    return directory() / key[:2] / f"{key}.cubin"
