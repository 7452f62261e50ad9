"""The output of a batch. It holds whole lines only, each written once, and can be recovered after a crash."""

from __future__ import annotations

import hashlib
import os
import re
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np

from ...errors import InputError, StateError
from .lines import Line

_SECONDS_BETWEEN_SYNCS = 1.0
_HEAD = re.compile(rb'\{"id": "batch_req_([0-9a-f]{8})_([1-9][0-9]{0,17})_([0-9a-f]{16})", "error": (null|\{)')
_BEGINNING = b'{"id": "batch_req_'
_PIECE = 2**20


class LineId(NamedTuple):
    """The "id" of an output line, which identifies the input line that the output line answers.

    Attributes:
        settings: digest of the settings that all lines share.
        number: input line number.
        digest: digest of the input line.
    """

    settings: int
    number: int
    digest: int

    def __str__(self) -> str:
        return f"batch_req_{self.settings:08x}_{self.number}_{self.digest:016x}"


def digest(content: bytes, size: int = 8) -> int:
    """Return a hash of `size` bytes as an integer."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=size).digest(), "big")


class Answered:
    """The set of input lines that an output answers: a bit per line, and a checksum of the lines' contents.

    Attributes:
        count: number of answered lines, including failed ones.
        failed: number of lines that were answered with an error.
        in_order: True if the output has its lines in the order of the input. `add` and `follow` check the order.
    """

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = self.failed = self._last = self._sum = 0
        self.in_order = True

    def add(self, line_id: LineId, *, failed: bool) -> bool:
        """Add a line. Return False if the line was already added."""
        if line_id.number in self:
            return False
        byte, bit = divmod(line_id.number, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << bit
        self.count, self.failed = self.count + 1, self.failed + failed
        self.follow(line_id.number)
        self._sum = (self._sum + line_id.digest) % 2**64
        return True

    def follow(self, number: int) -> None:
        """Note that the output continues with this line, which need not be added."""
        self.in_order = self.in_order and number > self._last
        self._last = number

    def __contains__(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def fits(self, lines: Iterator[Line]) -> bool:
        """Return True if `lines` contains all answered lines, with the same contents as when they were answered."""
        count = total = 0
        while count < self.count and (line := next(lines, None)) is not None:
            if line.number in self:
                count, total = count + 1, (total + digest(line.content)) % 2**64
        return (count, total) == (self.count, self._sum)


class Journal:
    """The output file. It is locked against other writers until this process ends.

    Args:
        path: the output file.
        settings: digest of the settings that all lines share.
        most_lines: maximum number of an input line.
        begin: handling of an existing output. "resume" keeps its lines, "retry" keeps only the lines without an error,
            "force" keeps no lines, and "new" refuses an output that is not empty.

    Attributes:
        answered: the input lines that the output answers.
        was_cut: True if an unfinished line was cut off at the end.

    Raises:
        InputError: the output exists, cannot be written, or is not the output of a batch.
        StateError: another process writes to the output.
    """

    def __init__(self, path: Path, settings: int, most_lines: int, begin: str = "new") -> None:
        self.path, self._settings, self._most_lines = path, settings, most_lines
        self.answered, self.was_cut, self._synced = Answered(), False, time.monotonic()
        self._is_dirty = False
        check_output(path, begin)
        try:
            self._descriptor = _opened(path)
            try:
                self._begin(begin)
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise self._refused(error) from error

    def _begin(self, begin: str) -> None:
        size = os.fstat(self._descriptor).st_size
        if begin == "force":
            os.ftruncate(self._descriptor, 0)
        elif size:
            self._read_back(keep_failed=begin != "retry")
        os.lseek(self._descriptor, 0, os.SEEK_END)
        _sync_folder(self.path.parent)

    def _read_back(self, *, keep_failed: bool) -> None:
        """Find the lines in the output. Remove failed lines if they are to be retried."""
        offset = whole = dropped = 0
        beginning, head, end = b"", None, b""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for number, piece, begins in _pieces(file):
                if begins:
                    beginning, head, end = piece[: len(_BEGINNING)], _HEAD.match(piece), b""
                offset, end = offset + len(piece), (end + piece)[-2:]
                if piece.endswith(b"\n"):
                    if head is None:
                        raise self._foreign(number)
                    if end != b"}\n":
                        raise self._damaged(number)
                    whole = offset
                    dropped += self._note(head, number, keep_failed=keep_failed)
            if whole < offset:
                if not whole and not _BEGINNING.startswith(beginning):
                    raise self._foreign(1)
                os.ftruncate(self._descriptor, whole)
                self.was_cut = True
            if dropped:
                file.seek(0)
                self._replace(_answers(file))

    def _note(self, head: re.Match[bytes], number: int, *, keep_failed: bool) -> bool:
        """Add line `number` of the output to the answered lines. Return True if the line must be dropped instead."""
        line_id = LineId(int(head[1], 16), int(head[2]), int(head[3], 16))
        failed = head[4] != b"null"
        if line_id.settings != self._settings:
            raise InputError(
                f"{self.path}: the output was started with other options",
                "its responses were generated with another model, tokenizer or template, with other options of the "
                "model or of sampling, on a processor with other instructions, or with another version of this toolkit",
                "pass the same options, choose another output, or start over with --force",
            )
        if line_id.number > self._most_lines:
            raise self.of_another_input()
        if failed and not keep_failed:
            return True
        if not self.answered.add(line_id, failed=failed):
            raise InputError(
                f"{self.path}: the output has two responses to line {line_id.number} of the input",
                f"the second response is in line {number}",
                "delete one of the two lines, or start over with --force",
            )
        return False

    def put_in_order(self) -> None:
        """Sort the lines by the input lines that they answer. Raise InputError if the file cannot be replaced."""
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                file.seek(0)
                self._replace(_in_order(file))
        except OSError as error:
            raise self._refused(error) from error

    def _replace(self, pieces: Iterable[bytes]) -> None:
        """Replace the file's contents with `pieces`. The new file is complete before it is renamed to this name."""
        part = self.path.with_name(f"{self.path.name}.part")
        with suppress(FileNotFoundError):
            part.unlink()  # left over from a process that was killed at this point
        new = _opened(part)
        try:
            for piece in pieces:
                _write_whole(new, piece)
            os.fsync(new)
            part.replace(self.path)
        except BaseException:
            os.close(new)
            with suppress(OSError):
                part.unlink()
            raise
        os.close(self._descriptor)
        self._descriptor = new

    def write(self, line: bytes) -> None:
        """Append a line. If that fails, cut off the part that was written, and raise InputError."""
        whole = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        try:
            _write_whole(self._descriptor, line)
            self._is_dirty = True
            self._sync(_SECONDS_BETWEEN_SYNCS)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, whole)
                os.lseek(self._descriptor, whole, os.SEEK_SET)
            raise self._refused(error) from error

    def sync(self, after: float = 0.0) -> None:
        """Flush all lines to the disk, unless they were flushed within the last `after` seconds.

        Raises:
            InputError: the lines cannot be flushed, for example because the disk is full.
        """
        try:
            self._sync(after)
        except OSError as error:
            raise self._refused(error) from error

    def _sync(self, after: float) -> None:
        if self._is_dirty and time.monotonic() - self._synced >= after:
            os.fsync(self._descriptor)
            self._synced, self._is_dirty = time.monotonic(), False

    def close(self) -> None:
        """Flush all lines to the disk and close the file. Raise InputError if that fails."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if self._is_dirty:
                os.fsync(descriptor)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            os.close(descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def of_another_input(self) -> InputError:
        """Return the error for an output that was written for another input."""
        return InputError(
            f"{self.path}: the output does not belong to this input",
            "it contains responses to lines that the input does not have",
            "pass the original input, choose another output, or start over with --force",
        )

    def _damaged(self, number: int) -> InputError:
        return InputError(
            f"{self.path}: line {number} of the output is damaged",
            "the line does not end like a response",
            "delete that line to process its request again, or start over with --force",
        )

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"{self.path}: the file is not the output of a batch",
            f"line {number} is not a response",
            "choose another name, or replace the file with --force",
        )

    def _refused(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: the file cannot be written",
            error.strerror or str(error),
            "free space on the disk, or check permissions; then continue with --resume, which keeps finished lines",
        )


def check_output(path: Path, begin: str) -> None:
    """Raise InputError if a journal at this path could not start with the given value of `begin`."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: the path is not a file", "the output must be a file", "choose another name")
    if not path.parent.is_dir():
        raise InputError(
            f"{path}: the file cannot be written",
            "its folder does not exist",
            "create the folder, or choose another name",
        )
    if begin == "new" and path.exists() and (size := path.stat().st_size):
        raise InputError(
            f"{path}: the file already exists",
            f"the file has {size:,} bytes, which may be responses",
            "continue with --resume, start over with --force, or choose another name",
        )


def _opened(path: Path) -> int:
    """Open and lock the file; create it if it does not exist. Raise StateError if another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    if not _is_locked(descriptor, path):
        os.close(descriptor)
        raise StateError(
            f"{path}: another process is writing to the file",
            "two writers would write lines twice",
            "wait until that process has ended",
        )
    return descriptor


def _is_locked(descriptor: int, path: Path) -> bool:
    """Lock the file. Return False if another process has locked or just replaced it, True if locks are unsupported."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except (ImportError, OSError):  # Windows and some network file systems have no such locks
        return True


def _pieces(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield a file in pieces: the line number, the piece, and True if the piece is the beginning of the line."""
    number, begins = 1, True
    while piece := file.readline(_PIECE):
        yield number, piece, begins
        begins = piece.endswith(b"\n")
        number += begins


def _answers(file: BinaryIO) -> Iterator[bytes]:
    """Yield the pieces of the lines without an error."""
    succeeded = False
    for _, piece, begins in _pieces(file):
        if begins:
            head = _HEAD.match(piece)
            succeeded = head is not None and head[4] == b"null"
        if succeeded:
            yield piece


def _in_order(file: BinaryIO) -> Iterator[bytes]:
    """Yield the pieces of all lines, sorted by input line number. Needs 16 bytes of memory per line."""
    numbers, offsets, offset = array("q"), array("q"), 0
    for _, piece, begins in _pieces(file):
        if begins and (head := _HEAD.match(piece)) is not None:
            numbers.append(int(head[2]))
            offsets.append(offset)
        offset += len(piece)
    for index in np.argsort(np.frombuffer(numbers, np.int64), kind="stable"):
        file.seek(offsets[index])
        while not (piece := file.readline(_PIECE)).endswith(b"\n"):
            yield piece
        yield piece


def _write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk; otherwise a new file can be lost if the machine crashes."""
    with suppress(OSError):  # not every system supports flushing a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
