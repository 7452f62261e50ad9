"""The lines of an input, each with its number and, when it is asked for, its fields."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...common.reading import json_object
from ...common.renamed import renamed_arguments
from ...errors import InputError, MissingPackageError, OptionError
from .input_file import MOST_LINE_BYTES, InputFile, bounded_lines

FORMATS = ("jsonl", "text", "csv", "tsv", "parquet")
_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
_ROWS_AT_A_TIME = 256
# Lines of one row of a table; more of them follow a quote that is never closed.
_MOST_LINES_OF_A_ROW = 2**16


@dataclass(frozen=True)
class Line:
    """A line, or a row of a table.

    Attributes:
        number: from 1; blank lines count, and are left out.
        content: what it says, as bytes: the same bytes are the same question.
        size: what it is of the input's `total`.
    """

    number: int
    content: bytes
    size: int


class Lines(ABC):
    """An input.

    Attributes:
        name: for messages. total: its size, in bytes or rows; None where nobody knows.
        most_lines: no line has a larger number; None where nobody knows.
        can_be_read_again: whether another look at it finds the same.
        are_cells: whether all values are texts.
    """

    name: str
    total: int | None = None
    can_be_read_again = True
    are_cells = False

    @abstractmethod
    def __iter__(self) -> Iterator[Line]:
        """The lines in order, from the first. Raises InputError: the input cannot be read, or changes meanwhile."""

    @abstractmethod
    def fields(self, line: Line) -> Mapping[str, Any]:
        """Names and values of one of them. Raises InputError: it has none."""


class _ByLine(Lines):
    """Lines of bytes, of a file or a stream."""

    def __init__(self, name: str, file: InputFile | None, stream: BinaryIO | None = None) -> None:
        self.name, self._file, self._stream = name, file, stream
        self.total = file.size if file is not None else None
        self.can_be_read_again = file is not None

    def _raw(self) -> Iterator[tuple[bytes, int]]:
        if self._file is not None:
            yield from self._file
        elif self._stream is not None:
            yield from bounded_lines(self._stream)

    def whole(self) -> Iterator[Line]:
        """All lines, with their ends; without the mark that says that a text is UTF-8."""
        for number, (content, size) in enumerate(self._raw(), 1):
            yield Line(number, content.removeprefix(codecs.BOM_UTF8) if number == 1 else content, size)

    def __iter__(self) -> Iterator[Line]:
        skipped = 0
        for line in self.whole():
            text = line.content.rstrip(b"\r\n")
            if text.strip():
                yield Line(line.number, text, line.size + skipped)
                skipped = 0
            else:
                skipped += line.size

    def text(self, line: Line) -> str:
        """What a line says. Raises InputError: it is too long, or not UTF-8."""
        if len(line.content) > MOST_LINE_BYTES:
            raise InputError(
                f"line {line.number} has more than {MOST_LINE_BYTES >> 20} MiB", "no line may", "shorten it"
            )
        try:
            return line.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {line.number} is not UTF-8 text", str(error), "write it as UTF-8") from error


class TextLines(_ByLine):
    """Plain text: each line is the field "text"."""

    def fields(self, line: Line) -> Mapping[str, Any]:
        return {"text": self.text(line)}


class JsonLines(_ByLine):
    """An object per line."""

    def fields(self, line: Line) -> Mapping[str, Any]:
        return json_object(self.text(line), f"line {line.number}", InputError)


class _Table(Lines):
    """Rows; their content is written as JSON."""

    def fields(self, line: Line) -> Mapping[str, Any]:
        row = json.loads(line.content)
        if isinstance(row, dict):
            return row
        raise InputError(
            f"row {line.number} has {len(row)} cells",
            "it has not as many as the first row, which names the columns",
            "put cells that hold commas, quotes or line ends into quotes",
        )


class CsvRows(_Table):
    """Rows of cells, parted by commas (CSV) or tabs (TSV); the first row names the columns."""

    are_cells = True

    def __init__(self, lines: TextLines, delimiter: str) -> None:
        self.name, self._lines, self._delimiter = lines.name, lines, delimiter
        self.total, self.can_be_read_again = lines.total, lines.can_be_read_again

    def __iter__(self) -> Iterator[Line]:
        # A limit of the whole process, of which only a larger one is of use to anybody.
        csv.field_size_limit(max(csv.field_size_limit(), MOST_LINE_BYTES))
        read = _Counted(self.name)
        rows = csv.reader(read.texts(self._lines), delimiter=self._delimiter, strict=True)
        names: list[str] | None = None
        number, before = 0, 0
        while True:
            read.first = read.lines + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise read.refused(f"it is not CSV: {error}") from error
            if not row:
                continue
            if names is None:
                names = _column_names(self.name, row)
                continue
            number += 1
            fields = dict(zip(names, row, strict=True)) if len(row) == len(names) else row
            size, before = read.bytes - before, read.bytes
            yield Line(number, json.dumps(fields, ensure_ascii=False).encode(), size)


@dataclass
class _Counted:
    """How much csv.reader, which joins lines inside quotes by itself, has read.

    Attributes:
        first: the line in which the row begins that is read now.
    """

    name: str
    lines: int = 0
    bytes: int = 0
    first: int = 1

    def refused(self, why: str) -> InputError:
        """The error about the row that is read now."""
        return InputError(
            f"{self.name}: the row that begins in line {self.first} cannot be read",
            why,
            "put cells with quotes, commas or line ends into quotes, and double the quotes inside",
        )

    def texts(self, lines: TextLines) -> Iterator[str]:
        for line in lines.whole():
            if line.number - self.first >= _MOST_LINES_OF_A_ROW:
                raise self.refused(f"it goes on for {_MOST_LINES_OF_A_ROW:,} lines: is a quote never closed?")
            self.lines, self.bytes = line.number, self.bytes + line.size
            yield lines.text(line)


def _column_names(name: str, row: list[str]) -> list[str]:
    names = [cell.strip() for cell in row]
    if "" in names or len(set(names)) < len(names):
        raise InputError(
            f"{name}: the first row is {', '.join(map(repr, row)):.200}",
            "it names the columns, each by a name of its own",
            "begin the file with such a row",
        )
    return names


# What pyarrow raises where a value has no form in Python: a time before the year 1, text that is no UTF-8, names that
# come twice.
_NO_VALUE = (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class _PartlyRead(Mapping[str, Any]):
    """A row with cells that cannot be read, which are errors where they are asked for: a template may need others."""

    def __init__(self, cells: Mapping[str, Any], unreadable: Mapping[str, str], number: int) -> None:
        self._cells, self._unreadable, self._number = cells, unreadable, number

    def __getitem__(self, name: str) -> Any:
        if name in self._unreadable:
            raise InputError(
                f"row {self._number}: {name!r} cannot be read",
                self._unreadable[name],
                "write that column as text or numbers, or leave it out",
            )
        return self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class ParquetRows(_Table):
    """Rows of a Parquet file, read by pyarrow a part of a row group at a time.

    The content of a row is the object of its cells, or a list of that object and of why some cells cannot be read.
    """

    def __init__(self, name: str, file: InputFile) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingPackageError(
                f"{name}: cannot be read", "Parquet files are read by pyarrow, which is not installed",
                "pip install 'onnx-genai-toolkit[parquet]'",
            ) from None  # fmt: skip
        self.name, self._file = name, file
        self._open, self._refused = pyarrow.parquet.ParquetFile, (pyarrow.ArrowException, OSError)
        try:
            with self._open(file.path) as table:
                _column_names(name, table.schema_arrow.names)
                self.total = table.metadata.num_rows
        except self._refused as error:
            raise self._not_parquet(error) from error

    def _not_parquet(self, error: Exception) -> InputError:
        return InputError(f"{self.name}: is not a Parquet file that can be read", f"{error}"[:500], "write it again")

    def __iter__(self) -> Iterator[Line]:
        number = 0
        try:
            with self._open(self._file.path) as table:
                for batch in table.iter_batches(batch_size=_ROWS_AT_A_TIME):
                    self._file.check_unchanged()
                    names = batch.schema.names
                    columns = [_cells(column) for column in batch.columns]
                    for cells in zip(*columns, strict=True):
                        number += 1
                        yield Line(number, _row_content(dict(zip(names, cells, strict=True))), 1)
        except self._refused as error:
            self._file.check_unchanged()  # that would be why
            raise self._not_parquet(error) from error

    def fields(self, line: Line) -> Mapping[str, Any]:
        if len(line.content) > MOST_LINE_BYTES:
            raise InputError(
                f"row {line.number} has more than {MOST_LINE_BYTES >> 20} MiB", "no row may", "shorten its cells"
            )
        row = json.loads(line.content)
        if isinstance(row, dict):
            return row
        cells, unreadable = row
        return _PartlyRead(cells, unreadable, line.number)


def _row_content(row: dict[str, Any]) -> bytes:
    unreadable = {name: cell.why for name, cell in row.items() if isinstance(cell, _Unreadable)}
    cells = {name: None if name in unreadable else cell for name, cell in row.items()}
    try:
        return json.dumps([cells, unreadable] if unreadable else cells, ensure_ascii=False).encode()
    except RecursionError:
        return json.dumps([dict.fromkeys(row), dict.fromkeys(row, "it, or another cell, has too many levels")]).encode()


@dataclass(frozen=True)
class _Unreadable:
    """In place of a cell: why it has no value."""

    why: str


def _cells(column: Any) -> Sequence[Any]:
    """The values of a pyarrow.Array as JSON has them."""
    try:
        return [_as_json(value, column.type) for value in column.to_pylist()]
    except _NO_VALUE:
        return [_cell(scalar) for scalar in column]  # one of them; the others are what they are


def _cell(scalar: Any) -> Any:
    try:
        return _as_json(scalar.as_py(), scalar.type)
    except _NO_VALUE as error:
        try:
            return str(scalar.cast("string").as_py())  # a time that Python has no class for
        except _NO_VALUE:
            return _Unreadable(f"{error}"[:300] or type(error).__name__)


def _as_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type. Bytes are text, as old writers store it; a map with texts as keys is an object.

    Raises:
        UnicodeDecodeError: bytes that are no text.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {name: _as_json(item, kind.field(name).type) for name, item in value.items()}
    if isinstance(value, list) and hasattr(kind, "item_type"):
        pairs = [(_as_json(key, kind.key_type), _as_json(item, kind.item_type)) for key, item in value]
        whole = dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else {}
        return whole if len(whole) == len(pairs) else pairs
    if isinstance(value, list):
        return [_as_json(item, kind.value_type) for item in value]
    return str(value)


@renamed_arguments(form="format")
def open_lines(path: Path, format: str | None = None) -> Lines:
    """An input by its path; "-" is stdin.

    Args:
        format: one of FORMATS; None = what the name's ending says: text lines where it says nothing, JSON lines of
            stdin.

    Raises:
        InputError: there is no such file, it cannot be read, or not in this format.
        OptionError: another format.
        MissingPackageError: a Parquet file without pyarrow.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(
            f"format = {format!r}", f"allowed: {', '.join(FORMATS)}", "choose one of them, or leave it out"
        )
    if str(path) == "-":
        format = format or "jsonl"
        if format == "parquet":
            raise InputError("stdin cannot be read as Parquet", "its index stands at its end", "give a file")
        return _opened(format, "stdin", None, sys.stdin.buffer)
    format = format or _BY_SUFFIX.get(path.suffix.lower(), "text")
    return _opened(format, str(path), InputFile(path), None)


def _opened(format: str, name: str, file: InputFile | None, stream: BinaryIO | None) -> Lines:
    if format == "parquet" and file is not None:
        return ParquetRows(name, file)
    if format in ("csv", "tsv"):
        return CsvRows(TextLines(name, file, stream), "," if format == "csv" else "\t")
    return (JsonLines if format == "jsonl" else TextLines)(name, file, stream)
