"""Atomic file writes: a file or folder is complete or absent, even if the process that writes it is killed."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, ELOOP
from pathlib import Path
from typing import BinaryIO

from genai.common.interrupts import InterruptsDeferred, temporary_folder
from genai.common.locks import locked

_UNFINISHED = ".unfinished"
# File systems allow 255 bytes in a name. The temporary file's name has 26 characters more than the file's.
_MOST_NAME = 200


@contextmanager
def replacing(path: Path, *, private: bool = True) -> Iterator[BinaryIO]:
    """Yield a temporary file beside `path` that replaces `path` if the block succeeds and is deleted if it fails.

    The file is synced before it replaces `path`. An existing file keeps its permissions. Each call also removes the
    temporary files of processes that were killed.

    Args:
        path: the file; if it is a link, the target of the link.
        private: True to make a new file readable only by the user; False to let the umask decide.

    Raises:
        OSError: the file cannot be written, or is not a regular file.
    """
    try:
        path = path.resolve()  # the link is kept, and its target is replaced
    except RuntimeError as error:  # a loop of links, in Python 3.11 and 3.12; later versions fail at the open
        raise OSError(ELOOP, os.strerror(ELOOP), str(path)) from error
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "the path is a folder, a pipe or a device", str(path))
    temporary = path.with_name(f".{_stem(path)}.{secrets.token_hex(8)}.partial")
    try:
        _remove_abandoned(path)
        with temporary.open("xb") as file:
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o777)
            elif private:
                temporary.chmod(0o600)
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
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for a result that the user named. It replaces an existing file only when it is complete.

    A pipe or a device, such as /dev/stdout, is written directly.

    Raises:
        OSError: the file cannot be written.
    """
    is_stream = path.exists() and not path.is_file() and not path.is_dir()
    with path.open("wb") if is_stream else replacing(path, private=False) as file:
        yield file


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write the content of a file; see whole_file."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder. Its files appear at `path` if the block succeeds, and are deleted if it fails.

    Args:
        path: a folder that does not exist, or an empty one, which can be a mount point. Its parents are created.

    Raises:
        OSError: the folder cannot be written.
    """
    if path.is_dir():
        with temporary_folder(path, ".", _UNFINISHED) as folder:
            yield folder
            with InterruptsDeferred():
                for file in folder.iterdir():
                    file.replace(path / file.name)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(path) as folder:
        yield folder
        folder.rename(path)


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder in the target's parent folder, so that the final rename stays within one file system.

    Folders that killed processes left behind are deleted first. The new folder is deleted afterwards unless it was
    renamed.
    """
    _remove_dead(target)
    with temporary_folder(target.parent, f".{target.name}.", _UNFINISHED) as folder, locked(folder):
        yield folder


def _remove_dead(target: Path) -> None:
    """Delete the folders that killed processes left behind for the same target, which nothing locks any more."""
    with suppress(OSError):
        for folder in target.parent.iterdir():
            if folder.name.startswith(f".{target.name}.") and folder.name.endswith(_UNFINISHED):
                with locked(folder, wait=False) as dead:
                    if dead:
                        shutil.rmtree(folder, ignore_errors=True)


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
    for left in path.parent.glob(f".{_escaped(_stem(path))}.*.partial"):
        with suppress(OSError), left.open("rb") as file:
            if _lock(file):
                left.unlink(missing_ok=True)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return True if `path` still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _stem(path: Path) -> str:
    """Return the file's name, or a hash of the name if the name of a temporary file would be too long."""
    name = os.fsencode(path.name)
    return path.name if len(name) <= _MOST_NAME else hashlib.sha256(name).hexdigest()


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
