"""Atomic file writes: a file is complete or absent, even if the process that writes it is killed."""

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
    """Yield a temporary file beside `path` that replaces `path` if the block succeeds and is deleted if it fails.

    The file is synced before it replaces `path`. An existing file keeps its permissions; a new file is readable only by
    the user. Each call also removes the temporary files of processes that were killed.
    """
    try:
        path = path.resolve()  # the link is kept, and its target is replaced
    except RuntimeError as error:  # a loop of links, in Python 3.11 and 3.12; later versions fail at the open
        raise OSError(ELOOP, os.strerror(ELOOP), str(path)) from error
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "the path is a folder, a pipe or a device", str(path))
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
    """Yield True to the first process that enters a block for a path, and False to others until that process leaves.

    The block locks a file beside `path` and deletes that file at the end. If the process is killed, the system
    releases the lock.

    Raises:
        OSError: if no file can be created beside `path`.
    """
    lock_path = path.with_name(f".{path.name}.lock")
    while True:
        lock_path.touch(0o600)
        file = lock_path.open("ab")  # the lock lasts until the file is closed
        is_ours = _lock(file)
        # The previous holder may have deleted the file between the open and the lock. The next process would then lock
        # a new file.
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
    """Remove the temporary files for this path that killed processes left behind."""
    for left in path.parent.glob(f".{_escaped(path.name)}.*.partial"):
        with suppress(OSError), left.open("rb") as file:
            if _lock(file):
                left.unlink(missing_ok=True)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return True if `path` still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _lock(file: BinaryIO) -> bool:
    """Lock a file for this process until it is closed; return False if another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows does not delete open files
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a file renamed in the folder survives a power cut."""
    with suppress(OSError):  # not every system can sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
