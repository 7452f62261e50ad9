"""The output of a batch as a table (CSV, TSV or Parquet), which is written from the journal when the run is complete.

A table cannot be continued after a crash: a Parquet file has its index at its end. Replies are therefore stored in a
journal beside the table while the run lasts, as in the output of a run without a table.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ...common.atomic_files import replacing
from ...common.parquet import import_parquet
from ...errors import InputError, OptionError
from .journal import check_output

# The endings of an output. A name without an ending is JSON lines.
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
# The columns of a table, and their Arrow types.
_COLUMNS = {
    "line": "int64",
    "custom_id": "string",
    "choice": "int64",
    "reply": "string",
    "reasoning": "string",
    "tool_calls": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "uint64",
    "error": "string",
}
_ROWS_AT_A_TIME = 1024


def output_format(path: Path) -> str:
    """Return the format that the ending of an output indicates: "jsonl", "csv", "tsv" or "parquet".

    Raises:
        OptionError: the ending is unknown.
        MissingPackageError: the output is a Parquet file, but pyarrow is not installed.
    """
    format = ENDINGS.get(path.suffix.lower(), "" if path.suffix else "jsonl")
    if not format:
        raise OptionError(
            f"the output {path} ends in {path.suffix}",
            f"the ending determines the format; allowed: {', '.join(ENDINGS)}",
            "choose one of these endings",
        )
    if format == "parquet":
        _pyarrow(path)
    return format


def is_table(path: Path) -> bool:
    """Return True if the output is a table, which has a journal beside it."""
    return output_format(path) != "jsonl"


def journal_path(path: Path) -> Path:
    """Return the file that stores replies while a run lasts: the output itself, or a file beside a table."""
    return path.with_name(f"{path.name}.jsonl") if is_table(path) else path


def check_batch_output(path: Path, begin: str) -> None:
    """Raise an error if a run with this output could not start with the given value of `begin`.

    Raises:
        InputError: the output or its journal exists, or cannot be written.
        OptionError, MissingPackageError: see output_format.
    """
    journal = journal_path(path)
    check_output(path, begin)
    if journal == path:
        return
    check_output(journal, begin)
    if begin != "force" and path.exists() and not journal.exists():
        raise InputError(
            f"{path}: the output cannot be resumed",
            f"its journal {journal.name}, which identifies the finished lines, does not exist",
            "choose another output, or start over with --force",
        )


def write_table(journal: Path, path: Path) -> None:
    """Write a table with the replies in a journal, one row per choice, in the order of the journal.

    Raises:
        InputError: the table cannot be written.
    """
    write = _write_parquet if output_format(path) == "parquet" else _write_csv
    try:
        with journal.open(encoding="utf-8") as lines, replacing(path, private=False) as file:
            write((row for line in lines for row in _rows(json.loads(line))), file, path)
    except OSError as error:
        raise InputError(
            f"{path}: the file cannot be written",
            error.strerror or str(error),
            f"free space, or check permissions; then continue with --resume ({journal.name} has all replies)",
        ) from error


def _rows(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each choice of a response. The first row also has the numbers of tokens."""
    row = {"line": int(answer["id"].split("_")[3]), "custom_id": _text(answer["custom_id"])}
    if (error := answer["error"]) is not None:
        yield row | {"error": _text(f"{error['code']}: {error['message']}: {error['why']}")}
        return
    body = answer["response"]["body"]
    usage: dict[str, Any] = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    for choice in body["choices"]:
        message = choice.get("message", {"content": choice.get("text")})
        calls = message.get("tool_calls")
        yield (
            row
            | usage
            | {
                "choice": choice["index"],
                "reply": _text(message["content"]),
                "reasoning": _text(message.get("reasoning_content")),
                "tool_calls": _text(json.dumps(calls, ensure_ascii=False)) if calls else None,
                "finish_reason": choice["finish_reason"],
                "seed": body["seed"],
            }
        )
        usage = {}


def _text(value: str | None) -> str | None:
    """Return text that UTF-8 can encode. Half of a surrogate pair is escaped, as in the journal."""
    return None if value is None else value.encode("utf-8", "backslashreplace").decode("utf-8")


def _write_csv(rows: Iterable[dict[str, Any]], file: BinaryIO, path: Path) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    delimiter = "\t" if output_format(path) == "tsv" else ","
    table = csv.DictWriter(text, _COLUMNS, delimiter=delimiter, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    text.flush()
    text.detach()


def _write_parquet(rows: Iterable[dict[str, Any]], file: BinaryIO, path: Path) -> None:
    arrow, parquet = _pyarrow(path)
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in _COLUMNS.items()])
    left = iter(rows)
    with parquet.ParquetWriter(file, schema) as writer:
        while part := list(islice(left, _ROWS_AT_A_TIME)):
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))


def _pyarrow(path: Path) -> tuple[Any, Any]:
    return import_parquet(f"{path}: the file cannot be written", ", or write a .csv or .jsonl file")
