"""The cubin cache on disk. Many processes may fill it at once: entries appear whole, by rename, or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def directory() -> Path:
    """GEMMSMITH_CACHE_DIR, where ~ is the home folder; else the platform's cache folder."""
    return _directory(*map(os.environ.get, ("GEMMSMITH_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@lru_cache(maxsize=16)
def _directory(given: str | None, *changing: str | None) -> Path:
    """For these values of environment variables, of which the platform's folder depends on the last two."""
    if given:
        return Path(os.path.expanduser(given))
    import platformdirs

    return Path(platformdirs.user_cache_dir("gemmsmith"))


def key(source: str, options: Sequence[str], compiler: str) -> str:
    """A digest of all that a cubin depends on: source, options, compiler version."""
    return hashlib.sha256("\0".join((compiler, *options, source)).encode()).hexdigest()


def load(key: str) -> tuple[bytes, str] | None:
    """The cubin and log of an entry; None if it is missing or damaged."""
    try:
        data = read_whole(_path(key))
    except OSError:
        return None
    digest, body = data[:_DIGEST], data[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        return None
    size = int.from_bytes(body[:8], "little")
    return body[8 : 8 + size], body[8 + size :].decode()


def store(key: str, cubin: bytes, log: str) -> None:
    """Adds an entry. If the folder cannot be written to, nothing is cached, with a warning."""
    body = len(cubin).to_bytes(8, "little") + cubin + log.encode()
    write_whole(_path(key), hashlib.sha256(body).digest() + body)


def read_whole(path: Path) -> bytes:
    """A file's bytes. OSError for what is no regular file: a pipe in its place would be waited for."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file by rename, so that other processes see it complete or not at all; warns if it cannot be written."""
    try:
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
        _unwritable(directory(), str(error))


_WARNED: set[Path] = set()


def _unwritable(folder: Path, why: str) -> None:
    """Warns that a folder cannot be written to, once a process."""
    if folder not in _WARNED:
        _WARNED.add(folder)
        warnings.warn(
            f"gemmsmith cannot write to its cache folder {folder} ({why}): what is compiled or tuned is not kept; "
            "set GEMMSMITH_CACHE_DIR to a folder that can be written to",
            stacklevel=2,
        )


def _path(key: str) -> Path:
    return directory() / key[:2] / f"{key}.cubin"
