"""The lines of an input, each with its number and, on request, its fields."""

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

from ...common.parquet import import_parquet
from ...common.reading import json_object
from ...common.renamed import renamed_arguments
from ...errors import InputError, OptionError, did_you_mean
from .input_file import MOST_LINE_BYTES, InputFile, bounded_lines

FORMATS = ("jsonl", "text", "csv", "tsv", "parquet")
_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
_ROWS_AT_A_TIME = 256
# The maximum number of lines per table row. A longer row means that a closing quote is missing.
_MOST_LINES_OF_A_ROW = 2**16


@dataclass(frozen=True)
class Line:
    """A line, or a row of a table.

    Attributes:
        number: line number, starting at 1; blank lines are counted but skipped.
        content: the contents as bytes; equal bytes mean equal requests.
        size: the number that the line adds towards the input's `total`.
    """

    number: int
    content: bytes
    size: int


class Lines(ABC):
    """The lines of an input.

    Attributes:
        name: the name of the input in messages.
        total: size in bytes or rows; None if the size is unknown.
        most_lines: highest possible line number; None if the maximum is unknown.
        can_be_read_again: True if a second iteration yields the same lines.
        are_cells: True if all values are text.
        is_table: True if all lines have the same fields, so that null stands for a missing field.
        has_unique_ids: True if the custom_ids were checked and differ; see `check_custom_ids`.
    """

    name: str
    total: int | None = None
    can_be_read_again = True
    are_cells = False
    is_table = False
    has_unique_ids = False

    def columns(self) -> tuple[str, ...] | None:
        """Return the names of the fields that every line has; None if the lines can differ.

        Raises:
            InputError: the input cannot be read.
        """
        return None

    def check_column(self, name: str, needed_by: str, *, is_default: bool = False) -> None:
        """Raise InputError if all lines lack a field.

        Args:
            name: the field.
            needed_by: the option that names the field.
            is_default: True if the field is the default of the option.
        """
        columns = self.columns()
        if columns is not None and name not in columns:
            default = (
                f"the texts come from the column {name!r} unless {needed_by} names another; " if is_default else ""
            )
            raise InputError(
                f"{self.name}: there is no column {name!r}" + (f", which {needed_by} names" if not is_default else ""),
                f"{default}the columns are {', '.join(columns)}"[:500],
                did_you_mean(name, columns, f"name one of these columns in {needed_by}"),
            )

    @abstractmethod
    def __iter__(self) -> Iterator[Line]:
        """Yield the lines in order. Raise InputError if the input cannot be read, or changes during iteration."""

    @abstractmethod
    def fields(self, line: Line) -> Mapping[str, Any]:
        """Return the names and values of a line's fields. Raise InputError if the line has no fields."""


class _ByLine(Lines):
    """Lines of bytes, from a file or a stream."""

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
        """Yield all lines with their line ends, without a UTF-8 byte order mark."""
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
        """Return the text of a line. Raise InputError if it is too long, or not UTF-8."""
        if len(line.content) > MOST_LINE_BYTES:
            raise InputError(
                f"line {line.number} is longer than {MOST_LINE_BYTES >> 20} MiB",
                "a line cannot exceed this limit",
                "shorten the line",
            )
        try:
            return line.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"line {line.number} is not UTF-8 text", str(error), "save the file as UTF-8") from error


class TextLines(_ByLine):
    """Plain text; each line is the value of the field "text"."""

    def columns(self) -> tuple[str, ...]:
        return ("text",)

    def fields(self, line: Line) -> Mapping[str, Any]:
        return {"text": self.text(line)}


class JsonLines(_ByLine):
    """JSON with one object per line."""

    def fields(self, line: Line) -> Mapping[str, Any]:
        try:
            return json_object(self.text(line), f"line {line.number}", InputError)
        except InputError as error:
            if self._stream is not None and not self.text(line).startswith(("{", "[")):
                error.fix = "pass one JSON object per line; for one text per line, add --format text"
            raise


class _Table(Lines):
    """Rows of a table, whose contents are stored as JSON."""

    is_table = True

    def fields(self, line: Line) -> Mapping[str, Any]:
        row = json.loads(line.content)
        if isinstance(row, dict):
            return row
        raise InputError(
            f"row {line.number} has {len(row)} cells",
            "this differs from the number of columns in the first row",
            "quote cells that contain commas, quotes or line breaks",
        )


class CsvRows(_Table):
    """Rows of cells, separated by commas (CSV) or tabs (TSV). The first row has the column names."""

    are_cells = True

    def __init__(self, lines: TextLines, delimiter: str) -> None:
        self.name, self._lines, self._delimiter = lines.name, lines, delimiter
        self.total, self.can_be_read_again = lines.total, lines.can_be_read_again
        self._columns: tuple[str, ...] | None = None
        self._begun: tuple[_Counted, Iterator[list[str]]] | None = None

    def columns(self) -> tuple[str, ...]:
        if self._columns is None:
            read = _Counted(self.name)
            rows = self._rows(read)
            self._columns = tuple(next(rows, ()))
            if not self.can_be_read_again:
                self._begun = read, rows  # the rows that follow can only be read here
        return self._columns

    def __iter__(self) -> Iterator[Line]:
        names, before = self.columns(), 0
        read = _Counted(self.name)
        read, rows = self._begun or (read, self._rows(read))
        if self._begun is None:
            next(rows, None)
        for number, row in enumerate(rows, 1):
            fields = dict(zip(names, row, strict=True)) if len(row) == len(names) else row
            size, before = read.bytes - before, read.bytes
            yield Line(number, json.dumps(fields, ensure_ascii=False).encode(), size)

    def _rows(self, read: _Counted) -> Iterator[list[str]]:
        """Yield the names of the columns, and then the cells of each row."""
        # The limit on the size of a field is global to the process, so it is only ever raised.
        csv.field_size_limit(max(csv.field_size_limit(), MOST_LINE_BYTES))
        rows = csv.reader(read.texts(self._lines), delimiter=self._delimiter, strict=True)
        is_first = True
        while True:
            read.first = read.lines + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise read.refused(f"it is not valid CSV: {error}") from error
            if row:
                yield _column_names(self.name, row) if is_first else row
                is_first = False


@dataclass
class _Counted:
    """Counts the lines that csv.reader has read, because csv.reader itself joins lines inside quotes.

    Attributes:
        first: number of the first line of the current row.
    """

    name: str
    lines: int = 0
    bytes: int = 0
    first: int = 1

    def refused(self, why: str) -> InputError:
        """Return the error about the current row."""
        return InputError(
            f"{self.name}: the row that begins in line {self.first} cannot be read",
            why,
            "quote cells that contain quotes, commas or line breaks, and double the quotes inside",
        )

    def texts(self, lines: TextLines) -> Iterator[str]:
        for line in lines.whole():
            if line.number - self.first >= _MOST_LINES_OF_A_ROW:
                raise self.refused(f"it has more than {_MOST_LINES_OF_A_ROW:,} lines: a closing quote may be missing")
            self.lines, self.bytes = line.number, self.bytes + line.size
            yield lines.text(line)


def _column_names(name: str, row: list[str]) -> list[str]:
    names = [cell.strip() for cell in row]
    if "" in names or len(set(names)) < len(names):
        raise InputError(
            f"{name}: the first row is {', '.join(map(repr, row)):.200}",
            "the first row must contain the column names, and each name must be unique",
            "add a row with the column names",
        )
    return names


# Exceptions that pyarrow raises for a value without a Python equivalent, such as a time before the year 1, text that is
# not UTF-8, or duplicate names.
_NO_VALUE = (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class _PartlyRead(Mapping[str, Any]):
    """A row with unreadable cells. Only access to such a cell raises an error, because a template may not need it."""

    def __init__(self, cells: Mapping[str, Any], unreadable: Mapping[str, str], number: int) -> None:
        self._cells, self._unreadable, self._number = cells, unreadable, number

    def __getitem__(self, name: str) -> Any:
        if name in self._unreadable:
            raise InputError(
                f"row {self._number}: {name!r} cannot be read",
                self._unreadable[name],
                "save the column as text or numbers, or remove it",
            )
        return self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class ParquetRows(_Table):
    """Rows of a Parquet file. pyarrow reads part of a row group at a time.

    The content of a row is an object with its cells, or a list of that object and the reasons for unreadable cells.
    """

    def __init__(self, name: str, file: InputFile) -> None:
        arrow, parquet = import_parquet(f"{name}: the file cannot be read")
        self.name, self._file = name, file
        self._open, self._refused = parquet.ParquetFile, (arrow.ArrowException, OSError)
        try:
            with self._open(file.path) as table:
                self._columns = tuple(_column_names(name, table.schema_arrow.names))
                self.total = table.metadata.num_rows
        except self._refused as error:
            raise self._not_parquet(error) from error

    def columns(self) -> tuple[str, ...]:
        return self._columns

    def _not_parquet(self, error: Exception) -> InputError:
        return InputError(
            f"{self.name}: the file is not a readable Parquet file", f"{error}"[:500], "write the file again"
        )

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
            self._file.check_unchanged()  # if the file was changed, that is the actual cause
            raise self._not_parquet(error) from error

    def fields(self, line: Line) -> Mapping[str, Any]:
        if len(line.content) > MOST_LINE_BYTES:
            raise InputError(
                f"row {line.number} is longer than {MOST_LINE_BYTES >> 20} MiB",
                "a row cannot exceed this limit",
                "shorten a cell of the row",
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
        return json.dumps([dict.fromkeys(row), dict.fromkeys(row, "a cell of this row is nested too deeply")]).encode()


@dataclass(frozen=True)
class _Unreadable:
    """A placeholder for an unreadable cell, with the reason."""

    why: str


def _cells(column: Any) -> Sequence[Any]:
    """Return the values of a pyarrow.Array as JSON values."""
    try:
        return [_as_json(value, column.type) for value in column.to_pylist()]
    except _NO_VALUE:
        return [_cell(scalar) for scalar in column]  # at least one value is unreadable; convert the others one by one


def _cell(scalar: Any) -> Any:
    try:
        return _as_json(scalar.as_py(), scalar.type)
    except _NO_VALUE as error:
        try:
            return str(scalar.cast("string").as_py())  # for example, a time that no Python class can represent
        except _NO_VALUE:
            return _Unreadable(f"{error}"[:300] or type(error).__name__)


def _as_json(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as JSON.

    Bytes are decoded as UTF-8, because old writers store text as bytes. A map with text keys becomes an object.

    Raises:
        UnicodeDecodeError: bytes are not text.
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
    """Open an input by its path; "-" is stdin.

    Args:
        path: the file, or "-".
        format: one of FORMATS; None = the format that the file name's suffix indicates. Without a suffix, the format
            is text; for stdin, it is jsonl.

    Raises:
        InputError: the file does not exist, cannot be read, or has another format.
        OptionError: the format or the suffix is unknown.
        MissingPackageError: the file is a Parquet file, but pyarrow is not installed.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(
            f"format = {format!r}", f"allowed: {', '.join(FORMATS)}", "choose one of these formats, or leave format out"
        )
    if str(path) == "-":
        if format == "parquet":
            raise InputError(
                "stdin cannot be read as Parquet",
                "the index of a Parquet file is at its end",
                "pass the path of the file",
            )
        if format is None:
            _check_begins_as_json(sys.stdin.buffer)
            format = "jsonl"
        return _opened(format, "stdin", None, sys.stdin.buffer)
    format = format or _BY_SUFFIX.get(path.suffix.lower(), "" if path.suffix else "text")
    file = InputFile(path)
    if not format:
        raise OptionError(
            f"the input {path} ends in {path.suffix}",
            f"the ending determines the format; known endings: {', '.join(_BY_SUFFIX)}",
            f"specify the format ({', '.join(FORMATS)}), or rename the file",
        )
    return _opened(format, str(path), file, None)


def _check_begins_as_json(stream: BinaryIO) -> None:
    """Raise InputError if a stream begins with another text than JSON. Nothing is taken from the stream."""
    peek = getattr(stream, "peek", None)  # absent from streams without a buffer
    start = peek(1).removeprefix(codecs.BOM_UTF8).lstrip() if peek is not None else b""
    if start and not start.startswith((b"{", b"[")):
        shown = start.splitlines()[0].decode("utf-8", "replace")
        raise InputError(
            f"stdin is not JSON Lines: it begins with {shown!r:.60}",
            "stdin is read as JSON Lines unless a format is set",
            "for one text per line, add --format text; for JSON Lines, pass one JSON object per line",
        )


def _opened(format: str, name: str, file: InputFile | None, stream: BinaryIO | None) -> Lines:
    if format == "parquet" and file is not None:
        return ParquetRows(name, file)
    if format in ("csv", "tsv"):
        return CsvRows(TextLines(name, file, stream), "," if format == "csv" else "\t")
    return (JsonLines if format == "jsonl" else TextLines)(name, file, stream)
