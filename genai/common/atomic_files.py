"""Files that are there whole or not at all, whoever is killed while they are written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, ELOOP
from pathlib import Path
from typing import BinaryIO

from genai.common.interrupts import InterruptsDeferred


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that is synced and takes its place when the block ends well, and vanishes if it does not.

    What processes left behind that were killed meanwhile is removed by the next one. A file in a place that others
    cannot read is not for them, either: what is new, only the user can read.
    """
    try:
        path = path.resolve()  # a link stays one
    except RuntimeError as error:  # Python 3.11 and 3.12; later ones leave it to whoever opens it
        raise OSError(ELOOP, os.strerror(ELOOP), str(path)) from error
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "it is a folder, a pipe or a device", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        _remove_abandoned(path)
        with temporary.open("xb") as file:
            temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o600)
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with InterruptsDeferred(), suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def alone_with(path: Path) -> Iterator[bool]:
    """Whether no other process is inside such a block for the same path; True for whoever came first.

    A file beside `path` is locked meanwhile, and vanishes at the end. The system drops the lock of who is killed.

    Raises:
        OSError: no file can be written there.
    """
    lock_path = path.with_name(f".{path.name}.lock")
    while True:
        lock_path.touch(0o600)
        file = lock_path.open("ab")  # the lock lasts as long as it is open
        is_ours = _lock(file)
        # Between opening and locking, whoever left may have removed it: the next one would lock another.
        if not is_ours or os.name == "nt" or _is_at(file, lock_path):
            break
        file.close()
    try:
        yield is_ours
    finally:
        if is_ours:
            with suppress(OSError):
                lock_path.unlink(missing_ok=True)
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Drop what processes left behind that were killed while they wrote to this path."""
    for left in path.parent.glob(f".{_escaped(path.name)}.*.partial"):
        with suppress(OSError), left.open("rb") as file:
            if _lock(file):
                left.unlink(missing_ok=True)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one that its name stands for."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _lock(file: BinaryIO) -> bool:
    """Say that this process works on a file, until it is closed; False if another one does."""
    try:
        import fcntl
    except ImportError:  # Windows removes no file that is open
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Let the new name survive a power cut."""
    with suppress(OSError):  # not every system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
