"""A prefix cache on disk: published blocks in a folder of limited size, shared by processes and kept after a restart.

    FOLDER/<2 digits>/<62>   a block: 8 bytes "genai-kv", the length of the note (4 bytes), the note, the block, and the
                             SHA-256 of the file's name and all preceding bytes. The name is the SHA-256 of the
                             identity (what the content of all blocks depends on) and of the block's key
    FOLDER/lock              locked while the total size of all blocks changes; contains that total

A block is written to a temporary file that is then renamed, so a block is either complete or absent. A block that was
damaged by a power failure, or that was copied over another block, has a different digest and counts as absent. A digest
is no secret, so a block that another user could have written counts as absent, too. Reading a block makes it the most
recently used. When the total exceeds the limit, the least recently used blocks are removed.
"""

from __future__ import annotations

import hashlib
import os
import queue
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from genai.common.forks import renew_locks
from genai.kernels.cpu.jit.kernel_cache import open_trusted, reason_to_distrust
from genai.kernels.device import DeviceArray, DeviceFailed

_MAGIC = b"genai-kv"
_NOTE = struct.Struct("<I")
_DIGEST = hashlib.sha256().digest_size
# Blocks that wait to be written occupy memory. While they fill this limit, additional blocks are dropped.
_MOST_WAITING_BYTES = 2**28
# When the limit is exceeded, blocks are removed until the folder uses this fraction of the limit.
_AFTER_REMOVAL = 0.9
# The age in seconds at which a partial file, left by a killed process, is removed.
_ABANDONED_SECONDS = 3600.0


class BlockMover(Protocol):
    """The operations that `BlockDirectory` needs from a device; see `genai.kernels.device.Executor`."""

    def read_block(self, blocks: DeviceArray, index: int) -> NDArray[np.uint8]:
        """Return a copy of a block on the host."""

    def write_block(self, blocks: DeviceArray, index: int, content: NDArray[np.uint8]) -> None:
        """Copy bytes into a block."""


class DirectoryError(OSError):
    """The folder cannot hold blocks; the message gives the reason."""


class BlockDirectory:
    """A folder of cache blocks, which serves as the `Backing` of their pool.

    Args:
        folder: the folder. If it does not exist, it is created for the current user only. It is refused if other users
            could write to it.
        identity: a value that identifies everything that the content of blocks depends on, except their keys: model,
            numerics, layout.
        max_bytes: maximum total size of all files in the folder, whatever identity they belong to.
        blocks: the memory of the blocks, uint8 [blocks, bytes].
        device: the device that holds `blocks`.
        note_size: maximum number of bytes of a note.

    Raises:
        DirectoryError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        max_bytes: int,
        blocks: DeviceArray,
        device: BlockMover,
        *,
        note_size: int,
    ) -> None:
        self.folder, self._identity, self.max_bytes = folder, identity, max_bytes
        self._blocks, self._device, self._note_size = blocks, device, note_size
        self._found = self._written = self._dropped = 0
        self._bytes = 0
        try:
            _check_trust(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_trust(folder)
            with self._sum():
                pass
        except DirectoryError:
            raise
        except FileExistsError as error:
            raise DirectoryError(f"{error.filename or folder} is a file, not a folder") from error
        except NotADirectoryError as error:
            raise DirectoryError(f"a parent of {error.filename or folder} is a file, not a folder") from error
        except OSError as error:
            raise DirectoryError(f"{error.filename or folder}: {error.strerror or error}") from error
        self._waiting: queue.SimpleQueue[tuple[bytes, bytes, NDArray[np.uint8]] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        renew_locks(self, "_lock")
        self._process = os.getpid()
        self._writer: threading.Thread | None = None

    # --- for the pool ------------------------------------------------------------------------------------------------

    def load(self, key: bytes) -> tuple[bytes, NDArray[np.uint8]] | None:
        """See Backing.load. Returns None for a file that is damaged, or that is deleted during the call."""
        path = self._path(key)
        found = self._read(path)
        if found is not None:
            with suppress(OSError):
                os.utime(path)
            self._found += 1
        return found

    def note_of(self, key: bytes) -> bytes | None:
        """See Backing.note_of."""
        start = len(_MAGIC) + _NOTE.size
        content = _content(self._path(key), start + self._note_size)
        if content is None or len(content) < start or content[: len(_MAGIC)] != _MAGIC:
            return None
        (length,) = _NOTE.unpack(content[len(_MAGIC) : start])
        note = content[start : start + length]
        return note if len(note) == length else None

    def fill(self, block: int, content: NDArray[np.uint8]) -> None:
        """See Backing.fill."""
        self._device.write_block(self._blocks, block, content)

    def store(self, key: bytes, note: bytes, block: int) -> None:
        """See Backing.store. The block is copied immediately, and a separate thread writes it.

        If the device fails, the block is dropped; the next step raises the error.
        """
        if self._process != os.getpid():
            return
        size = int(self._blocks.shape[1])
        with self._lock:
            if self._waiting_bytes + size > _MOST_WAITING_BYTES:
                self._dropped += 1
                return
            self._waiting_bytes += size
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="genai-prefix-cache", daemon=True)
                self._writer.start()
        try:
            content = self._device.read_block(self._blocks, block)
        except BaseException as error:
            with self._lock:
                self._waiting_bytes -= size
            if not isinstance(error, DeviceFailed):
                raise
            self._dropped += 1
            return
        self._waiting.put((key, note, content))

    def figures(self) -> dict[str, int]:
        """Return the number of blocks that this process found, wrote and dropped, and the last known folder size."""
        return {"found": self._found, "written": self._written, "dropped": self._dropped, "bytes": self._bytes}

    def flush(self) -> None:
        """Wait until all stored blocks are written."""
        while self._waiting_bytes and self._writer is not None and self._writer.is_alive():
            time.sleep(0.005)

    def close(self) -> None:
        """Write the queued blocks and stop the writer thread."""
        if self._process != os.getpid() or self._writer is None:
            return
        self._waiting.put(None)
        while self._writer.is_alive():
            self._writer.join(0.1)

    # --- files -------------------------------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = hashlib.sha256(self._identity + key).hexdigest()
        return self.folder / name[:2] / name[2:]

    def _read(self, path: Path) -> tuple[bytes, NDArray[np.uint8]] | None:
        """Return the note and the block in a file; None if the file is missing or damaged."""
        size = self._blocks.shape[1]
        most = len(_MAGIC) + _NOTE.size + _DIGEST + size + self._note_size
        content = _content(path, most + 1)
        if content is None:
            return None
        body, digest = memoryview(content)[:-_DIGEST], content[-_DIGEST:]
        if len(content) > most or content[: len(_MAGIC)] != _MAGIC or _digest_of(path, body).digest() != digest:
            return None
        start = len(_MAGIC) + _NOTE.size
        (length,) = _NOTE.unpack(body[len(_MAGIC) : start])
        if len(body) != start + length + size:
            return None
        return bytes(body[start : start + length]), np.frombuffer(body[start + length :], np.uint8)

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            key, note, content = item
            with suppress(OSError):  # if the disk is full, the cache in memory continues to work
                if self._read(self._path(key)) is None:  # another process may have written the block in the meantime
                    self._write(self._path(key), note, content)
            with self._lock:
                self._waiting_bytes -= content.nbytes

    def _write(self, path: Path, note: bytes, content: NDArray[np.uint8]) -> None:
        head = _MAGIC + _NOTE.pack(len(note)) + note
        digest = _digest_of(path, head)
        digest.update(content.data)
        size = len(head) + content.nbytes + _DIGEST
        if size > self.max_bytes:
            self._dropped += 1
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f"{secrets.token_hex(8)}.partial")
        try:
            with open(temporary, "xb", opener=_for_this_user) as file:
                file.write(head)
                file.write(content.data)
                file.write(digest.digest())
            with self._sum() as total:
                total[0] -= path.stat().st_size if path.exists() else 0
                if total[0] + size > self.max_bytes:
                    total[0] = self._remove_oldest(int(self.max_bytes * _AFTER_REMOVAL) - size)
                temporary.replace(path)
                total[0] += size
            self._written += 1
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _sum(self) -> Iterator[list[int]]:
        """Lock the folder and yield its total size, in a list so that the caller can change it.

        If the lock file contains no total, the files are counted.
        """
        with (self.folder / "lock").open("a+b") as file:
            _lock_whole(file.fileno())
            file.seek(0)
            said = file.read(32)
            known = said.strip()
            total = [int(known) if known.isdigit() else sum(size for _, size, _ in self._files())]
            try:
                # If the process is killed here, the file contains no total, and the next process counts the files.
                file.truncate(0)
                yield total
            finally:
                file.seek(0)
                file.write(b"%d" % total[0])
                file.flush()
                self._bytes = total[0]

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield each file's time of last use, size and path."""
        for folder in self.folder.iterdir():
            if len(folder.name) == 2 and folder.is_dir():
                for entry in os.scandir(folder):
                    with suppress(OSError):
                        facts = entry.stat(follow_symlinks=False)
                        yield facts.st_mtime, facts.st_size, Path(entry.path)

    def _remove_oldest(self, most_bytes: int) -> int:
        """Remove the least recently used blocks until the others fit into `most_bytes`; return the others' size."""
        now, left, files = time.time(), 0, sorted(self._files(), reverse=True)
        for used, size, path in files:
            if path.suffix == ".partial":
                if now - used > _ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
                continue
            if left + size > most_bytes:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    continue
            left += size
        return left


def _digest_of(path: Path, content: bytes | memoryview) -> hashlib._Hash:
    """Return a hash object for a block file, updated with the file's name and the beginning of its content."""
    digest = hashlib.sha256((path.parent.name + path.name).encode())
    digest.update(content)
    return digest


def _content(path: Path, most: int) -> bytes | None:
    """Return at most `most` bytes of a file; None if it is absent, or if another user could have written it."""
    try:
        file = open_trusted(path)
        if file is None:
            return None
        with file:
            return file.read(most)
    except OSError:
        return None


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # other users can neither read nor write it, whatever the umask allows


def _check_trust(folder: Path) -> None:
    if reason := reason_to_distrust(folder):
        raise DirectoryError(reason.replace("compiled code is loaded", "keys and values are read"))


def _lock_whole(descriptor: int) -> None:
    """Wait for an exclusive lock on a file; closing the descriptor releases it."""
    try:
        import fcntl
    except ImportError:  # on Windows two processes may count the same bytes twice and remove too many files
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
