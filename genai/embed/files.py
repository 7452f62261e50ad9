"""Files of vectors: written in order, and complete or absent; an interrupted run continues where it stopped.

While a file is written, its rows are in `NAME.partial`, and `NAME.partial.json` records how many of them are durable,
the settings, and a digest of the input lines that they belong to. A run that continues cuts off rows after that number,
so that no line is lost or written twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..common.atomic_files import write_whole
from ..common.locks import locked
from ..common.parquet import import_parquet
from ..common.reading import file_text, json_object
from ..errors import InputError, OptionError
from ..llm.batch.lines import Line, Lines
from .pooling import Floats

FORMATS = {".npy": "npy", ".jsonl": "jsonl", ".parquet": "parquet"}
# The column of the input that contains the texts by default.
TEXT_COLUMN = "text"
# A part is the number of lines that are computed before they are written: more for fast models, so that batches have
# texts of similar lengths, and fewer for slow models, so that little is lost if the run is interrupted.
_LINES_AT_A_TIME, _FIRST_LINES = 1024, 32
_SECONDS_PER_PART = 0.5
_SECONDS_BETWEEN_SYNCS = 1.0
# An .npy file begins with a header of this size, which is written last, because it contains the number of rows.
_HEADER_BYTES = 128


@dataclass(frozen=True)
class EmbedProgress:
    """The state of a run.

    Attributes:
        texts: number of texts in the output so far.
        done, total: bytes or rows of the input that have been read, and in all (None = unknown).
    """

    texts: int
    done: int
    total: int | None


@dataclass(frozen=True)
class EmbedReport:
    """The result of a run: texts in the output, those of them from an earlier run, and the seconds of this run."""

    texts: int
    kept: int
    seconds: float


def output_format(path: Path) -> str:
    """Return the format of an output file. Raises OptionError for an unknown ending or a missing package."""
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise OptionError(
            f"--output {path}: the ending {path.suffix!r} is unknown",
            f"vectors are written as {', '.join(FORMATS)}",
            "choose one of these endings",
        )
    if found == "parquet":
        import_parquet(f"{path}: the file cannot be written", ", or write a .npy or .jsonl file")
    return found


def check_output(path: Path, begin: str) -> None:
    """Raise OptionError if a file, or the part that an interrupted run wrote, may not be replaced; see `embed_file`."""
    if begin != "force" and path.exists():
        raise OptionError(f"{path} already exists", "a finished file is never continued", "use --force to replace it")
    if begin == "new" and _journal_of(path).exists():
        raise OptionError(
            f"{path}: an interrupted run has written {path.name}.partial",
            "it can be continued or replaced",
            "use --resume to continue it, or --force to begin again",
        )


def _journal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial.json")


def embed_file(
    lines: Lines,
    output: Path,
    embed: Callable[[Sequence[str]], Floats],
    dimensions: int,
    *,
    column: str = TEXT_COLUMN,
    begin: str = "new",
    settings: Mapping[str, Any],
    progress: Callable[[EmbedProgress], None] = lambda progress: None,
) -> EmbedReport:
    """Write the vector of each line of an input to a file, in order.

    Args:
        lines: the input.
        output: the file, whose ending determines the format (see FORMATS).
        embed: function of texts that returns float32 [texts, dimensions].
        column: field of a line that contains its text.
        begin: "new": the file must not exist; "force": replace it; "resume": continue an interrupted run.
        settings: everything that determines a vector; a run continues only with the same settings.
        progress: called at the beginning and after each part.

    Raises:
        InputError: a line has no such field or cannot be embedded (the message has its number); the input changed; or
            the settings differ from those of the interrupted run. The vectors so far are kept for `resume`.
        OptionError: the output exists already, or there is nothing to continue.
    """
    lines.check_column(column, "--column", is_default=column == TEXT_COLUMN)
    began = time.monotonic()
    settings = {**settings, "column": column, "dimensions": dimensions}
    with _opened(output, dimensions, settings, begin) as file:
        iterator = iter(lines)
        kept, done = file.count, 0
        done = file.skip(iterator)
        progress(EmbedProgress(file.count, done, lines.total))
        most = min(_FIRST_LINES, _LINES_AT_A_TIME)
        while part := list(islice(iterator, most)):
            start = time.monotonic()
            texts, ids = zip(*(text_of(lines, line, column) for line in part), strict=True)
            file.append(part, ids, _embedded(embed, texts, part))
            done += sum(line.size for line in part)
            progress(EmbedProgress(file.count, done, lines.total))
            seconds = time.monotonic() - start
            if seconds < _SECONDS_PER_PART:
                most = min(2 * most, _LINES_AT_A_TIME)
            elif seconds > 4 * _SECONDS_PER_PART:
                most = max(most // 2, 1)
        file.finish()
    return EmbedReport(file.count, kept, time.monotonic() - began)


def vectors_of_lines(
    lines: Lines, embed: Callable[[Sequence[str]], Floats], *, column: str = TEXT_COLUMN
) -> Iterator[Floats]:
    """Yield the vector of each line of an input, in order; see `embed_file` for the arguments.

    Raises:
        InputError: a line has no such field or cannot be embedded; the message has its number.
    """
    iterator, most = iter(lines), _FIRST_LINES
    while part := list(islice(iterator, most)):
        yield from _embedded(embed, [text_of(lines, line, column)[0] for line in part], part)
        most = min(2 * most, _LINES_AT_A_TIME)


def _embedded(embed: Callable[[Sequence[str]], Floats], texts: Sequence[str], part: Sequence[Line]) -> Floats:
    try:
        return embed(texts)
    except InputError as error:
        for line, text in zip(part, texts, strict=True):
            try:
                embed([text])
            except InputError as one:
                if one.what.startswith("text 0"):
                    one.what = f"line {line.number}: the text{one.what.removeprefix('text 0')}"
                raise one from error
        raise


def text_of(lines: Lines, line: Line, column: str) -> tuple[str, Any]:
    """Return the text of a line and the line's "id". Raise InputError if the field is missing or not a text."""
    fields = lines.fields(line)
    text = fields.get(column)
    if not isinstance(text, str):
        known = ", ".join(map(str, fields))[:200]
        raise InputError(
            f"line {line.number}: the field {column!r} is {'missing' if column not in fields else 'not a text'}",
            f"its fields are {known}",
            "name the field with the text with --column",
        )
    return text, fields.get("id")


def _opened(output: Path, dimensions: int, settings: Mapping[str, Any], begin: str) -> _VectorFile:
    kinds: dict[str, type[_VectorFile]] = {"npy": _NumpyFile, "jsonl": _JsonFile, "parquet": _ParquetFile}
    return kinds[output_format(output)](output, dimensions, settings, begin)


class _VectorFile(ABC):
    """A file of vectors that is being written.

    Attributes:
        count: number of vectors that are durable or were written by this run.
    """

    def __init__(self, path: Path, dimensions: int, settings: Mapping[str, Any], begin: str) -> None:
        self.path, self._dimensions, self._settings = path, dimensions, json.loads(json.dumps(settings))
        self._partial = path.with_name(f"{path.name}.partial")
        self._journal = _journal_of(path)
        self.count = 0
        self._digest, self._synced = hashlib.blake2b(digest_size=16), time.monotonic()
        self._expected = ""
        check_output(path, begin)
        with ExitStack() as stack:
            try:
                self._partial.touch()
            except OSError as error:
                raise InputError(
                    f"{self._partial}: the file cannot be written", str(error), "check the folder"
                ) from error
            if stack.enter_context(locked(self._partial, wait=False)) is False:
                raise InputError(
                    f"{path}: another process is writing this file",
                    f"it has locked {self._partial.name}",
                    "wait until it has finished, or choose another output",
                )
            check_output(path, begin)  # another process may have finished the file before this process locked it
            size = self._continue() if begin == "resume" and self._journal.exists() else 0
            self._file: BinaryIO = self._partial.open("r+b" if size else "wb")
            self._lock = stack.pop_all()
        if size:
            self._file.seek(size)
            self._file.truncate()
        else:
            self._begin()

    def __enter__(self) -> _VectorFile:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if not self._file.closed:
                # On a full disk, each attempt to write the rest fails again. The journal has the number of whole rows.
                with suppress(OSError):
                    self._sync()
                with suppress(OSError):
                    self._file.close()

    def _continue(self) -> int:
        """Read the journal; return the size of the durable part of the file."""
        text = file_text(self._journal, InputError, InputError)
        journal = json_object(text or "{}", self._journal, InputError)
        ours, theirs = self._settings, journal.get("settings")
        if theirs != ours:
            differing = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]]
            raise InputError(
                f"{self.path}: the interrupted run had other settings ({', '.join(differing) or 'unknown'})",
                "vectors of different settings cannot be compared",
                "repeat the command with the same settings, or use --force to begin again",
            )
        count, size, digest = journal.get("count"), journal.get("bytes"), journal.get("digest")
        if not isinstance(count, int) or not isinstance(size, int) or not isinstance(digest, str):
            raise InputError(
                f"{self._journal}: the file is damaged", "a field is missing", "use --force to begin again"
            )
        if not self._partial.exists() or self._partial.stat().st_size < size:
            raise InputError(
                f"{self._partial}: the file is shorter than {self._journal.name} says",
                "it was changed after the run",
                "use --force to begin again",
            )
        self.count, self._expected = count, digest
        return size

    def skip(self, lines: Iterator[Line]) -> int:
        """Skip the lines that the file already contains; return their size in the input."""
        size = 0
        for line in islice(lines, self.count):
            self._digest.update(line.content + b"\n")
            size += line.size
        if self._expected and self._digest.hexdigest() != self._expected:
            raise InputError(
                "the input differs from that of the interrupted run",
                f"its first {self.count:,} lines have other contents",
                "restore the input, or use --force to begin again",
            )
        return size

    def append(self, lines: Sequence[Line], ids: Sequence[Any], vectors: Floats) -> None:
        """Write the vectors of lines."""
        try:
            self._file.write(self._content(self.count, ids, vectors))
            for line in lines:
                self._digest.update(line.content + b"\n")
            self.count += len(lines)
            if time.monotonic() - self._synced > _SECONDS_BETWEEN_SYNCS:
                self._sync()
        except OSError as error:
            raise InputError(
                f"{self._partial}: the file cannot be written", str(error), "free some disk space, and use --resume"
            ) from error

    def _sync(self) -> None:
        """Make the rows durable, then record their number."""
        self._file.flush()
        os.fsync(self._file.fileno())
        journal = {
            "settings": self._settings,
            "count": self.count,
            "bytes": self._file.tell(),
            "digest": self._digest.hexdigest(),
        }
        write_whole(self._journal, json.dumps(journal).encode())
        self._synced = time.monotonic()

    def finish(self) -> None:
        """Replace the output with the complete file."""
        try:
            self._complete()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._publish()
        except OSError as error:
            raise InputError(
                f"{self.path}: the file cannot be written", str(error), "free some disk space, and use --resume"
            ) from error
        self._journal.unlink(missing_ok=True)

    def _begin(self) -> None:  # noqa: B027 - optional
        """Write what precedes the first vector."""

    @abstractmethod
    def _content(self, first: int, ids: Sequence[Any], vectors: Floats) -> bytes:
        """Return the bytes of vectors, the first of which has the index `first`."""

    def _complete(self) -> None:  # noqa: B027 - optional
        """Write what the number of vectors determines."""

    def _publish(self) -> None:
        self._partial.replace(self.path)


class _NumpyFile(_VectorFile):
    """An .npy file: float32 [texts, dimensions]."""

    def _begin(self) -> None:
        self._file.write(bytes(_HEADER_BYTES))

    def _content(self, first: int, ids: Sequence[Any], vectors: Floats) -> bytes:
        return np.ascontiguousarray(vectors, "<f4").tobytes()

    def _complete(self) -> None:
        self._sync()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (self.count, self._dimensions)}
        text = repr(shape).encode("latin1")
        header = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
        self._file.seek(0)
        self._file.write(header + text.ljust(_HEADER_BYTES - 11) + b"\n")


class _ParquetFile(_NumpyFile):
    """A Parquet file with the columns index and embedding, converted from a complete .npy file."""

    def _publish(self) -> None:
        arrow, parquet = import_parquet("vectors cannot be written")
        rows = np.load(self._partial, mmap_mode="r")
        schema = arrow.schema([("index", arrow.int64()), ("embedding", arrow.list_(arrow.float32(), self._dimensions))])
        temporary = self.path.with_name(f"{self.path.name}.partial.parquet")
        try:
            with parquet.ParquetWriter(temporary, schema) as writer:
                for first in range(0, len(rows), 65536):
                    part = np.asarray(rows[first : first + 65536])
                    vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(part.reshape(-1)), self._dimensions)
                    indices = arrow.array(np.arange(first, first + len(part)))
                    writer.write_table(arrow.Table.from_arrays([indices, vectors], schema=schema))
            temporary.replace(self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)  # on a full disk, the rest of the file would take the last space
            raise
        self._partial.unlink()


class _JsonFile(_VectorFile):
    """JSON with one object per line: index, the line's id if it has one, and embedding."""

    def _content(self, first: int, ids: Sequence[Any], vectors: Floats) -> bytes:
        lines = []
        for index, (id_, vector) in enumerate(zip(ids, vectors, strict=True), first):
            named = {} if id_ is None else {"id": id_}
            # The shortest decimal numbers that are read back as the same float32.
            numbers = ", ".join(map(str, vector))
            lines.append(json.dumps({"index": index, **named})[:-1] + f', "embedding": [{numbers}]}}\n')
        return "".join(lines).encode()
