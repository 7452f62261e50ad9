"""Files of vectors: formats, continuing, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.embed import files
from genai.embed.files import EmbedReport, embed_file, vectors_of_lines
from genai.llm.batch.lines import open_lines

WIDTH = 5


def vector_of(text: str) -> np.ndarray:
    return np.random.default_rng(abs(hash(text)) % 2**32).standard_normal(WIDTH).astype(np.float32)


def embed(texts: Sequence[str]) -> Any:
    return np.stack([vector_of(text) for text in texts])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [
        {"id": f"r{index}", "text": f"text {index}"} if index % 2 else {"text": f"text {index}"} for index in range(50)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LINES_AT_A_TIME", 7)
    monkeypatch.setattr(files, "_SECONDS_BETWEEN_SYNCS", -1.0)


def write(source: Path, output: Path, made: Callable[..., Any] = embed, **options: Any) -> EmbedReport:
    options = {"settings": {"model": "m"}, **options}
    return embed_file(open_lines(source), output, made, WIDTH, **options)


def read(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["index"] for row in rows] == list(range(len(rows)))
        assert [row.get("id") for row in rows[:3]] == [None, "r1", None]
        return np.array([row["embedding"] for row in rows], np.float32)
    table = pytest.importorskip("pyarrow.parquet").read_table(path)
    assert table.column("index").to_pylist() == list(range(table.num_rows))
    return np.array(table.column("embedding").to_pylist(), np.float32)


EXPECTED = np.stack([vector_of(f"text {index}") for index in range(50)])
endings = pytest.mark.parametrize("ending", [".npy", ".jsonl", ".parquet"])


@endings
def test_formats(lines: Path, tmp_path: Path, ending: str) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    output, seen = tmp_path / f"out{ending}", []
    report = write(lines, output, progress=seen.append)
    assert (report.texts, report.kept) == (50, 0)
    np.testing.assert_array_equal(read(output), EXPECTED)
    assert [one.texts for one in seen] == [0, 7, 14, 21, 28, 35, 42, 49, 50]
    assert seen[-1].done == seen[-1].total == lines.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", output.name]


@endings
@pytest.mark.parametrize("torn", [0, 3, 1000])
def test_an_interrupted_run_continues(lines: Path, tmp_path: Path, ending: str, torn: int) -> None:
    """Also if rows were written whose number was not recorded yet."""
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    output, calls = tmp_path / f"out{ending}", []

    def failing(texts: Sequence[str]) -> Any:
        calls.extend(texts)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return embed(texts)

    with pytest.raises(KeyboardInterrupt):
        write(lines, output, failing)
    assert not output.exists()
    partial = tmp_path / f"{output.name}.partial"
    with partial.open("ab") as file:
        file.write(b"x" * torn)
    again: list[str] = []

    def counting(texts: Sequence[str]) -> Any:
        again.extend(texts)
        return embed(texts)

    report = write(lines, output, counting, begin="resume")
    assert (report.texts, report.kept) == (50, 14) and again == [f"text {index}" for index in range(14, 50)]
    np.testing.assert_array_equal(read(output), EXPECTED)
    assert not list(tmp_path.glob("*.partial*"))


def test_what_exists_is_not_overwritten(lines: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npy"

    def interrupted(texts: Sequence[str]) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(lines, output, interrupted)
    with pytest.raises(genai.OptionError, match="an interrupted run has written") as caught:
        write(lines, output)
    assert "--resume" in caught.value.fix and "--force" in caught.value.fix
    write(lines, output, begin="force")
    for begin in ("new", "resume"):
        with pytest.raises(genai.OptionError, match="already exists"):
            write(lines, output, begin=begin)
    write(lines, output, begin="force")
    other = tmp_path / "other.npy"
    write(lines, other, begin="resume")  # nothing to continue: a new run
    np.testing.assert_array_equal(read(other), EXPECTED)


def test_a_parquet_file_on_a_full_disk(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pytest.importorskip("pyarrow.parquet").ParquetWriter
    output = tmp_path / "out.parquet"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_table", full)
        with pytest.raises(genai.InputError, match="cannot be written") as caught:
            write(lines, output)
    assert "--resume" in caught.value.fix
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet.partial", "out.parquet.partial.json"]
    assert write(lines, output, begin="resume").kept == 50
    np.testing.assert_array_equal(read(output), EXPECTED)


def test_two_writers_of_a_file(lines: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    output, refused = tmp_path / "out.npy", []

    def meanwhile(texts: Sequence[str]) -> Any:
        for begin in ("new", "force"):
            with pytest.raises(genai.GenaiError) as caught:
                write(lines, output, begin=begin)
            refused.append(caught.value.what)
        return embed(texts)

    write(lines, output, meanwhile)
    assert refused[:2] == [f"{output}: another process is writing this file"] * 2
    np.testing.assert_array_equal(read(output), EXPECTED)


@pytest.mark.parametrize("change", ["settings", "input", "shorter", "damaged", "not json"])
def test_what_cannot_be_continued(lines: Path, tmp_path: Path, change: str) -> None:
    output, calls = tmp_path / "out.npy", []

    def failing(texts: Sequence[str]) -> Any:
        calls.extend(texts)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return embed(texts)

    with pytest.raises(KeyboardInterrupt):
        write(lines, output, failing)
    options: dict[str, Any] = {"begin": "resume"}
    journal = tmp_path / "out.npy.partial.json"
    message = {
        "settings": r"had other settings \(model\)",
        "input": "first 14 lines have other contents",
        "shorter": "is shorter than",
        "damaged": "a field is missing",
        "not json": "not JSON",
    }[change]
    match change:
        case "settings":
            options["settings"] = {"model": "another"}
        case "input":
            lines.write_text(lines.read_text().replace("text 3", "text three"))
        case "shorter":
            (tmp_path / "out.npy.partial").write_bytes(b"x")
        case "damaged":
            journal.write_text(json.dumps({"settings": json.loads(journal.read_text())["settings"]}))
        case "not json":
            journal.write_text("{")
    with pytest.raises(genai.InputError, match=message) as caught:
        write(lines, output, **options)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "line 3: the field 'text' is missing"),
        ({"text": 7}, "line 3: the field 'text' is not a text"),
        ([1], "line 3: the JSON value is"),
    ],
)
def test_lines_without_a_text(tmp_path: Path, row: Any, message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n\n' + json.dumps(row) + "\n")
    with pytest.raises(genai.InputError, match=message):
        write(source, tmp_path / "out.npy")


def test_a_text_that_cannot_be_embedded_is_named(lines: Path, tmp_path: Path) -> None:
    def choosy(texts: Sequence[str]) -> Any:
        if "text 9" in texts:
            raise genai.InputError(f"text {texts.index('text 9')} is odd", "a trial", "none")
        return embed(texts)

    with pytest.raises(genai.InputError, match="line 10: the text is odd"):
        write(lines, tmp_path / "out.npy", choosy)
    assert write(lines, tmp_path / "out.npy", begin="resume").kept == 7
    with pytest.raises(genai.InputError, match="line 10: the text is odd"):
        list(vectors_of_lines(open_lines(lines), choosy))
    np.testing.assert_array_equal(list(vectors_of_lines(open_lines(lines), embed)), EXPECTED)


def test_endings(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(genai.OptionError, match=r"written as \.npy, \.jsonl, \.parquet"):
        write(lines, tmp_path / "out.csv")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(genai.MissingPackageError, match="pyarrow"):
        write(lines, tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def test_texts_on_stdin_that_are_not_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is refused before the model is loaded; a later line that is not JSON is named."""
    for texts, said in (
        (b"a dog\n", "stdin is not JSON Lines: it begins with 'a dog'"),
        (b'{"text": "a dog"}\na cat\n', "line 2: the text is not JSON"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(texts))))
        with pytest.raises(genai.InputError, match=said) as caught:
            write(Path("-"), tmp_path / "out.npy")
        assert "for one text per line, add --format text" in caught.value.fix
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"\n" + texts))))
        assert len([*open_lines(Path("-"), "text")]) == texts.count(b"\n")


def test_the_first_parts_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model writes its first vectors early; a fast model computes more and more texts at a time."""
    source, sizes, shown = tmp_path / "in.txt", [], []
    source.write_text("text\n" * 400)
    monkeypatch.setattr(files, "_LINES_AT_A_TIME", 128)

    def counted(texts: Sequence[str]) -> Any:
        sizes.append(len(texts))
        return embed(texts)

    for seconds, expected in ((1e9, [32, 64, 128, 128, 48]), (-1.0, [32, *[16, 8, 4, 2], *[1] * 338])):
        monkeypatch.setattr(files, "_SECONDS_PER_PART", seconds)
        sizes.clear()
        write(source, tmp_path / "out.npy", counted, begin="force", progress=lambda now: shown.append(now.texts))
        assert sizes == expected
    assert shown[:3] == [0, 32, 96]


def test_an_empty_input(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("\n\n")
    assert write(source, tmp_path / "out.npy").texts == 0
    assert np.load(tmp_path / "out.npy").shape == (0, WIDTH)


def test_a_folder_that_cannot_be_written(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(genai.InputError, match="cannot be written"):
        write(lines, tmp_path / "nowhere" / "out.npy")
