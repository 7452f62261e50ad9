"""The output of a batch: whole lines only, each written once, found again after the process was killed."""

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
    """What an output line says of the input line that it answers, as its "id".

    Attributes:
        settings: of what all lines are asked with. number, digest: of the line.
    """

    settings: int
    number: int
    digest: int

    def __str__(self) -> str:
        return f"batch_req_{self.settings:08x}_{self.number}_{self.digest:016x}"


def digest(content: bytes, size: int = 8) -> int:
    """A number of so many bytes that no other content is likely to have."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=size).digest(), "big")


class Answered:
    """The input lines that an output answers: a bit each, and what they are together.

    Attributes:
        count: how many; `failed` of them with an error.
        in_order: whether they are the first ones of the input, in its order; of that, `fits` sees the first half.
    """

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = self.failed = self._last = self._sum = 0
        self.in_order = True

    def add(self, line_id: LineId, *, failed: bool) -> bool:
        """Note one; False if it was there already."""
        if line_id.number in self:
            return False
        byte, bit = divmod(line_id.number, 8)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << bit
        self.count, self.failed = self.count + 1, self.failed + failed
        self.in_order = self.in_order and line_id.number > self._last
        self._last = line_id.number
        self._sum = (self._sum + line_id.digest) % 2**64
        return True

    def __contains__(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return byte < len(self._bits) and bool(self._bits[byte] >> bit & 1)

    def fits(self, lines: Iterator[Line]) -> bool:
        """Whether these lines are there and are what they were when they were answered."""
        count = total = 0
        while count < self.count and (line := next(lines, None)) is not None:
            if line.number in self:
                count, total = count + 1, (total + digest(line.content)) % 2**64
            else:
                self.in_order = False
        return (count, total) == (self.count, self._sum)


class Journal:
    """The output file. Nobody else may write to it meanwhile: its lock ends with this process.

    Args:
        path: of the output.
        settings: of what all lines are asked with.
        most_lines: no input line has a larger number.
        begin: what becomes of an output that exists: "resume" keeps its lines, "retry" only those without an error,
            "force" none; "new" refuses it, unless it is empty.

    Attributes:
        answered: input lines that it holds.
        was_cut: whether an unfinished line was cut from its end.

    Raises:
        InputError: it exists, or cannot be written, or holds something else.
        StateError: another process writes to it.
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
        """Find the lines that are there. Errors that are to be tried again leave it."""
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
        """Note what line `number` of the output answers; whether it is to be dropped instead."""
        line_id = LineId(int(head[1], 16), int(head[2]), int(head[3], 16))
        failed = head[4] != b"null"
        if line_id.settings != self._settings:
            raise InputError(
                f"{self.path}: was begun with other options",
                "its answers are those of another model, template or other sampling options",
                "give the same as then, or another output; --force begins anew",
            )
        if line_id.number > self._most_lines:
            raise self.of_another_input()
        if failed and not keep_failed:
            return True
        if not self.answered.add(line_id, failed=failed):
            raise InputError(
                f"{self.path}: answers line {line_id.number} of the input twice",
                f"line {number} of it is the second time",
                "remove one of them, or begin anew with --force",
            )
        return False

    def put_in_order(self) -> None:
        """Put the lines into the order of those that they answer. Raises InputError: the system refuses it."""
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                file.seek(0)
                self._replace(_in_order(file))
        except OSError as error:
            raise self._refused(error) from error

    def _replace(self, pieces: Iterable[bytes]) -> None:
        """Replace the file by one with these pieces, which is whole before it has its name."""
        part = self.path.with_name(f"{self.path.name}.part")
        with suppress(FileNotFoundError):
            part.unlink()  # of a process that was killed here
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
        """Append a line. Raises InputError: the system refuses it; then what was written of it is cut off."""
        whole = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        try:
            _write_whole(self._descriptor, line)
            self._is_dirty = True
            self.sync(_SECONDS_BETWEEN_SYNCS)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, whole)
                os.lseek(self._descriptor, whole, os.SEEK_SET)
            raise self._refused(error) from error

    def sync(self, after: float = 0.0) -> None:
        """Wait until the disk has all lines, unless that was so less than so many seconds ago."""
        if self._is_dirty and time.monotonic() - self._synced >= after:
            os.fsync(self._descriptor)
            self._synced, self._is_dirty = time.monotonic(), False

    def close(self) -> None:
        """Bring all to the disk. Raises InputError: the system refuses it."""
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
        """The error of an output whose lines answer something else."""
        return InputError(
            f"{self.path}: does not belong to this input",
            "the lines that it answers are not those of the input",
            "give the input that it was begun with, or another output; --force begins anew",
        )

    def _damaged(self, number: int) -> InputError:
        return InputError(
            f"{self.path}: line {number} is damaged",
            "it does not end as it was written",
            "remove that line, so that it is answered again; --force begins anew",
        )

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"{self.path}: is no output of a batch",
            f"line {number} is not one that was written here",
            "give another name; --force replaces the file",
        )

    def _refused(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: cannot be written",
            error.strerror or str(error),
            "make room, or see to its permissions; then start again with --resume: the lines that are there stay",
        )


def check_output(path: Path, begin: str) -> None:
    """Raise InputError if a journal there could not begin like this."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file", "a file is to be written there", "give another name")
    if not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written", "its folder does not exist", "make it, or give another name")
    if begin == "new" and path.exists() and (size := path.stat().st_size):
        raise InputError(
            f"{path}: exists already",
            f"it has {size:,} bytes, which may be answers",
            "--resume goes on with it, --force begins anew; or give another name",
        )


def _opened(path: Path) -> int:
    """The file, made if need be and locked. Raises StateError: another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    if not _is_locked(descriptor, path):
        os.close(descriptor)
        raise StateError(
            f"{path}: another process writes to it", "two would write lines twice", "wait until it has ended"
        )
    return descriptor


def _is_locked(descriptor: int, path: Path) -> bool:
    """Whether nobody else has the file, nor has just replaced it; where locks do not work, nobody knows of others."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except (ImportError, OSError):  # Windows has no such locks, nor have some networks' disks
        return True


def _pieces(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """A file in pieces: the line of each, and whether that begins with it."""
    number, begins = 1, True
    while piece := file.readline(_PIECE):
        yield number, piece, begins
        begins = piece.endswith(b"\n")
        number += begins


def _answers(file: BinaryIO) -> Iterator[bytes]:
    """The pieces of the lines without an error."""
    succeeded = False
    for _, piece, begins in _pieces(file):
        if begins:
            head = _HEAD.match(piece)
            succeeded = head is not None and head[4] == b"null"
        if succeeded:
            yield piece


def _in_order(file: BinaryIO) -> Iterator[bytes]:
    """The pieces of all lines, by the number of what they answer. Of each line 16 bytes are kept."""
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
    """A new file is found again only when its folder is on the disk."""
    with suppress(OSError):  # not every system lets one
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
