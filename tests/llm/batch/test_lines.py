"""Inputs: lines of text, JSON, CSV and Parquet, and files that change."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from genai.errors import InputError, MissingPackageError, OptionError
from genai.llm.batch import input_file, lines as lines_module
from genai.llm.batch.lines import Lines, open_lines
from genai.llm.batch.requests import PromptFormat, PromptTemplate


def fields(lines: Lines) -> list[Any]:
    """Return the number and the fields of each line, or its error."""
    found: list[Any] = []
    for line in lines:
        try:
            found.append((line.number, lines.fields(line)))
        except InputError as error:
            found.append((line.number, error))
    return found


def test_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffOnce\r\n\n  \nzwölf\nlast".encode())
    lines = open_lines(file)
    assert lines.total == file.stat().st_size == sum(line.size for line in lines)
    assert fields(lines) == [(1, {"text": "Once"}), (4, {"text": "zwölf"}), (5, {"text": "last"})]


def test_lines_that_are_wrong_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (input_file, lines_module):
        monkeypatch.setattr(module, "MOST_LINE_BYTES", 2**10)
    file = tmp_path / "in.jsonl"
    long = json.dumps({"prompt": "x" * 5000})
    file.write_bytes(b'{"prompt": "a"}\nnot json\n[1]\n\xff\xfe\n' + long.encode() + b'\n{"prompt": "b"}')
    found = fields(open_lines(file))
    assert [found[0][1], found[5][1]] == [{"prompt": "a"}, {"prompt": "b"}] and len(found) == 6
    for (number, error), word in zip(found[1:5], ("JSON", "list", "UTF-8", "longer than"), strict=True):
        assert isinstance(error, InputError) and word in str(error) and f"line {number}" in str(error)
        assert error.why and error.fix
    assert sum(line.size for line in open_lines(file)) == file.stat().st_size


def test_a_long_line_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "MOST_LINE_BYTES", 2**10)
    (line, size), _ = input_file.bounded_lines(io.BytesIO(b"x" * 10**6 + b"\ny"))
    assert (len(line), size) == (2**10 + 1, 10**6 + 1)


def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "MOST_LINE_BYTES", 2**10)
    monkeypatch.setattr(input_file, "_LONGEST_SKIPPED", 2**20)
    with Path("/dev/zero").open("rb") as endless:
        lines = input_file.bounded_lines(endless)
        with pytest.raises(InputError, match=r"line 1 is longer than 1 MiB") as caught:
            next(lines)
    assert caught.value.why and caught.value.fix


@given(
    st.lists(
        st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=2, max_size=2),
        max_size=9,
    )
)
def test_csv_as_the_library_writes_it(rows: list[list[str]]) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["a", "b"], *rows])
    stream = io.BytesIO(out.getvalue().encode())
    found = fields(lines_module._opened("csv", "test", None, stream))
    assert [list(one.values()) for _, one in found] == rows


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text('a,b\n1,"x, ""y""\nz"\n\n2\n3,4,5\n6,7\n')
    lines = open_lines(file)
    assert lines.are_cells and sum(line.size for line in lines) == file.stat().st_size
    found = fields(lines)
    assert found[0] == (1, {"a": "1", "b": 'x, "y"\nz'}) and found[3] == (4, {"a": "6", "b": "7"})
    assert all(isinstance(error, InputError) and "cells" in str(error) for _, error in found[1:3])
    tabs = tmp_path / "table.tsv"
    tabs.write_text("a\tb\n1,2\t3\n")
    assert fields(open_lines(tabs)) == [(1, {"a": "1,2", "b": "3"})]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('a,b\n1,"open\n2,3\n', "line 2"),
        ("a,a\n1,2\n", "the first row"),
        ("a,\n1,2\n", "the first row"),
        ("a\n\xff\n", "UTF-8"),
    ],
)
def test_csv_that_is_none(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=word) as caught:
        list(open_lines(file))
    assert caught.value.why and caught.value.fix


def test_a_quote_that_is_never_closed_is_said_soon(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(b'a\nfine\n"' + b"x\n" * 2**20)
    with pytest.raises(InputError, match=r"(?s)begins in line 3 .*65,536 lines"):
        list(open_lines(file))


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "table.parquet"
    rows = [{"prompt": f"What is {n}?", "max_tokens": n, "more": {"n": [n]}} for n in range(700)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=300)
    lines = open_lines(file)
    assert lines.total == 700 == sum(line.size for line in lines)
    assert fields(open_lines(file)) == list(enumerate(rows, 1))
    whole = file.read_bytes()
    for damaged in (whole[:-9], b"PAR1" + whole[300:], b"", whole[:4] + bytes(len(whole) - 300) + whole[-296:]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="Parquet"):
            list(open_lines(file))


def parquet_rows(path: Path, columns: dict[str, Any]) -> Lines:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return open_lines(path)


def test_cells_of_parquet_are_what_json_has(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from datetime import date, datetime
    from decimal import Decimal

    deep = pa.struct({"l": pa.list_(pa.map_(pa.string(), pa.list_(pa.binary())))})
    columns = {
        "bytes": pa.array([b"z\xc3\xb6lf", None], pa.binary()),
        "map": pa.array([[("a", b"1")], []], pa.map_(pa.string(), pa.binary())),
        "twice": pa.array([[("a", 1), ("a", 2)], [("b", 3)]], pa.map_(pa.string(), pa.int64())),
        "numbers": pa.array([[(1, "x")], []], pa.map_(pa.int32(), pa.string())),
        "deep": pa.array([{"l": [[("k", [b"x"])]]}, None], deep),
        "time": pa.array([datetime(2020, 1, 2, 3), None]),
        "day": pa.array([date(2020, 1, 2), None]),
        "exact": pa.array([Decimal("1.50"), None]),
        "nothing": pa.nulls(2),
        "word": pa.array(["a", "b"]).dictionary_encode(),
    }  # fmt: skip
    (_, first), (_, second) = fields(parquet_rows(tmp_path / "t.parquet", columns))
    assert first == {
        "bytes": "zölf", "map": {"a": "1"}, "twice": [["a", 1], ["a", 2]], "numbers": [[1, "x"]],
        "deep": {"l": [{"k": ["x"]}]}, "time": "2020-01-02 03:00:00", "day": "2020-01-02", "exact": "1.50",
        "nothing": None, "word": "a",
    }  # fmt: skip
    assert second["map"] == {} and second["twice"] == {"b": 3} and second["deep"] is None and second["word"] == "b"


def test_cells_of_parquet_that_cannot_be_read_are_errors_of_the_lines_that_need_them(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {
        "text": pa.array(["a", "b", "c"]),
        "image": pa.array([b"\xff\xd8", b"fine", b"\xff"], pa.binary()),
        "far": pa.array([2**62, 0, -(2**62)], pa.timestamp("us")),
        "exact": pa.array([1, 0, 2**40], pa.timestamp("ns")),
    }
    lines = parquet_rows(tmp_path / "t.parquet", columns)
    by_template = PromptFormat(PromptTemplate("{text} {exact}"))
    found = [row for _, row in fields(lines)]
    assert [len(str(by_template.item(row)[0]["prompt"])) > 20 for row in found] == [True] * 3
    assert found[1]["image"] == "fine" and found[1]["far"].startswith("1970-01-01")
    for row, number in ((found[0], 1), (found[2], 3)):
        with pytest.raises(InputError, match=rf"row {number}: 'image' cannot be read") as caught:
            PromptFormat(PromptTemplate("{image}")).item(row)
        assert "utf-8" in caught.value.why and caught.value.fix
        with pytest.raises(InputError, match="cannot be read"):
            PromptFormat().item(row)
        assert PromptFormat().custom_id(row, number) == f"line-{number}" and list(row) == list(columns)
    assert [line.content for line in lines] == [line.content for line in open_lines(tmp_path / "t.parquet")]


def test_a_row_of_parquet_has_no_more_than_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MOST_LINE_BYTES", 2**10)
    (_, first), (_, second) = fields(parquet_rows(tmp_path / "t.parquet", {"text": ["x" * 2000, "x"]}))
    assert isinstance(first, InputError) and "row 1 is longer than" in str(first) and second == {"text": "x"}


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingPackageError, match="pyarrow") as caught:
        open_lines(tmp_path / "t.parquet")
    assert "pip install pyarrow" in caught.value.fix


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    for form, text, expected in (
        (None, b'{"prompt": "a"}\n', {"prompt": "a"}),
        ("text", b"a\n", {"text": "a"}),
        ("csv", b"x\na\n", {"x": "a"}),
    ):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        lines = open_lines(Path("-"), form)
        assert lines.total is None and not lines.can_be_read_again
        assert fields(lines) == [(1, expected)]
    with pytest.raises(InputError, match="Parquet"):
        open_lines(Path("-"), "parquet")


def test_what_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the file does not exist"):
        open_lines(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="not a file"):
        open_lines(tmp_path)
    with pytest.raises(OptionError, match="jsonl, text, csv"):
        open_lines(tmp_path / "x", "xml")


@pytest.mark.parametrize("change", ["append", "touch", "replace", "remove", "cut"])
def test_a_file_that_changes_is_noticed(tmp_path: Path, change: str) -> None:
    file = tmp_path / "in.txt"
    file.write_text("".join(f"line {n}\n" for n in range(10_000)))
    lines = iter(open_lines(file))
    for _ in range(5_000):
        next(lines)
    if change == "append":
        with file.open("a") as more:
            more.write("one more\n")
    elif change == "touch":
        os.utime(file, ns=(1, 1))
    elif change == "replace":
        (tmp_path / "new").write_text(file.read_text())
        (tmp_path / "new").replace(file)
    elif change == "remove":
        file.unlink()
    else:
        os.truncate(file, 60_000)
    with pytest.raises(InputError, match="changed while it was read") as caught:
        next(lines)
    assert "--resume" in caught.value.fix
