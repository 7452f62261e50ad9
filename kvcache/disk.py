"""A folder on disk that keeps published blocks, within a limit of bytes, for this process and others, now and later.

    FOLDER/<2 digits>/<62>   a block: 8 bytes "genai-kv", 4 bytes length of its note, the note, the block, SHA-256 of
                             its name and these. Its name is the SHA-256 of what it depends on and of its key
    FOLDER/lock              held by who changes the sum of all sizes, which it holds

A block is written beside its place and renamed, so that it is whole or absent. One that a power cut damaged, or that
was copied over another one, has another digest: it counts as absent. Whoever finds a block makes it the youngest; when
the sum exceeds the limit, the blocks that were not used for longest are removed.
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
from genai.kernels.cpu.jit.kernel_cache import reason_to_distrust
from genai.kernels.device import DeviceArray, DeviceFailed

_MAGIC = b"genai-kv"
_NOTE = struct.Struct("<I")
_DIGEST = hashlib.sha256().digest_size
# Blocks wait to be written in memory; those that come while so many bytes do are not kept.
_MOST_WAITING_BYTES = 2**28
# When the limit is exceeded, blocks are removed until so much of it is used.
_AFTER_REMOVAL = 0.9
# Files that a killed process was writing are removed when they are that old.
_ABANDONED_SECONDS = 3600.0


class BlockMover(Protocol):
    """What is asked of a device here; see `genai.kernels.device.Executor`."""

    def read_block(self, blocks: DeviceArray, index: int) -> NDArray[np.uint8]:
        """A copy of a block on the host."""

    def write_block(self, blocks: DeviceArray, index: int, content: NDArray[np.uint8]) -> None:
        """Copy bytes into a block."""


class DirectoryError(OSError):
    """A folder cannot keep blocks; says why."""


class BlockDirectory:
    """Blocks of a cache in a folder; a `Backing` of its pool.

    Args:
        folder: made if there is none, for this user only. It is refused where others could write into it.
        identity: all that the content of blocks depends on besides their keys: model, numerics, layout.
        max_bytes: most bytes of all files in the folder, whatever they are of.
        blocks: their memory, uint8 [blocks, bytes]. device: whose it is.
        note_size: most bytes of a note.

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
            raise DirectoryError(f"{error.filename or folder} is a file") from error
        except NotADirectoryError as error:
            raise DirectoryError(f"{error.filename or folder} lies below a file") from error
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
        """See Backing.load. A file that is damaged, or vanishes meanwhile, is none."""
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
        try:
            with self._path(key).open("rb") as file:
                content = file.read(start + self._note_size)
        except OSError:
            return None
        if len(content) < start or content[: len(_MAGIC)] != _MAGIC:
            return None
        (length,) = _NOTE.unpack(content[len(_MAGIC) : start])
        note = content[start : start + length]
        return note if len(note) == length else None

    def fill(self, block: int, content: NDArray[np.uint8]) -> None:
        """See Backing.fill."""
        self._device.write_block(self._blocks, block, content)

    def store(self, key: bytes, note: bytes, block: int) -> None:
        """See Backing.store: copied now, written by a thread of its own; not kept where the device fails, of which the
        next step tells.
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
        """Blocks found and written by this process, and not kept; bytes of the folder, as last counted."""
        return {"found": self._found, "written": self._written, "dropped": self._dropped, "bytes": self._bytes}

    def flush(self) -> None:
        """Wait until all that was stored is written."""
        while self._waiting_bytes and self._writer is not None and self._writer.is_alive():
            time.sleep(0.005)

    def close(self) -> None:
        """Write what waits, and end."""
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
        """The note and the block of a file; None if it is not there or damaged."""
        size = self._blocks.shape[1]
        most = len(_MAGIC) + _NOTE.size + _DIGEST + size + self._note_size
        try:
            with path.open("rb") as file:
                content = file.read(most + 1)
        except OSError:
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
            with suppress(OSError):  # a full disk: the cache in memory goes on
                if self._read(self._path(key)) is None:  # others may have written it meanwhile
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
            with temporary.open("xb") as file:
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
        """The bytes of all files, to be changed by nobody else meanwhile; counted anew where nobody knows them."""
        with (self.folder / "lock").open("a+b") as file:
            _lock_whole(file.fileno())
            file.seek(0)
            said = file.read(32)
            known = said.strip()
            total = [int(known) if known.isdigit() else sum(size for _, size, _ in self._files())]
            try:
                # Who is killed in between leaves no sum, so that the next one counts.
                file.truncate(0)
                yield total
            finally:
                file.seek(0)
                file.write(b"%d" % total[0])
                file.flush()
                self._bytes = total[0]

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """When each was used last, its size, its path."""
        for folder in self.folder.iterdir():
            if len(folder.name) == 2 and folder.is_dir():
                for entry in os.scandir(folder):
                    with suppress(OSError):
                        facts = entry.stat(follow_symlinks=False)
                        yield facts.st_mtime, facts.st_size, Path(entry.path)

    def _remove_oldest(self, most_bytes: int) -> int:
        """Remove blocks, those first that were not used for longest, until the others take so much; what they take."""
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
    """Of the name of a block's file, and of what it begins with."""
    digest = hashlib.sha256((path.parent.name + path.name).encode())
    digest.update(content)
    return digest


def _check_trust(folder: Path) -> None:
    if reason := reason_to_distrust(folder):
        raise DirectoryError(reason.replace("compiled code is loaded", "keys and values are read"))


def _lock_whole(descriptor: int) -> None:
    """Wait for the lock of a file, which ends with its descriptor."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes may count the same bytes twice, and remove too much
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
