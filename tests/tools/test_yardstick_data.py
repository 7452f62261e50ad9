"""The yardstick's text: three parts without a common file, and equal texts for equal seeds."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.bundled_model.tokenizer import PAD_ID, load_tokenizer  # noqa: E402
from tools.yardstick import data, parts, sources  # noqa: E402
from tools.yardstick.parts import EXCERPT, excerpt, part_of, sample_text  # noqa: E402
from tools.yardstick.sources import END_OF_TEXT, Document  # noqa: E402


@pytest.fixture(scope="module")
def conversations() -> list[Document]:
    return list(sources.conversations(0, 60))


@pytest.fixture(scope="module")
def folder(conversations: list[Document], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    data.prepare(folder, conversations, vocab_size=512)
    return folder


def test_no_document_is_in_two_parts(conversations: list[Document], folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    lists = [manifest[part]["files"] for part in ("train", "calibration", "evaluation")]
    assert all(lists)
    assert sorted(name for names in lists for name in names) == [document.name for document in conversations]
    texts = {document.name: document.text for document in conversations}
    train = data.encode(load_tokenizer(folder / "tokenizer"), [Document(name, texts[name]) for name in lists[0]])
    np.testing.assert_array_equal(np.load(folder / "train.npy"), train[0])
    for part, names in zip(("calibration", "evaluation"), lists[1:], strict=True):
        pieces = [excerpt(texts[name]) + END_OF_TEXT for name in names]
        text = (folder / f"{part}.txt").read_text(encoding="utf-8")
        assert len(text) == len("".join(pieces)) and all(piece in text for piece in pieces)


def test_the_part_depends_on_the_name_alone_and_is_small_for_what_is_held_out() -> None:
    names = [f"library/file{number}.py" for number in range(5000)]
    found = [part_of(name) for name in names]
    assert found == [part_of(name) for name in names]
    for part in ("calibration", "evaluation"):
        assert 0.03 < found.count(part) / len(found) < 0.05


def test_the_same_seed_gives_the_same_conversations(conversations: list[Document]) -> None:
    assert list(sources.conversations(0, 3)) == conversations[:3]
    assert list(sources.conversations(1, 3)) != conversations[:3]


def test_library_files_are_utf8_python_of_the_library_alone(tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "other").mkdir(parents=True)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "decoder.py").write_text("import re\n")
    (tmp_path / "site-packages" / "other" / "code.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"# \xff\n")
    assert list(sources.library_files(tmp_path)) == [Document("library/json/decoder.py", "import re\n")]


def test_equal_and_empty_texts_are_taken_once_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Document("b", "same"), Document("a", "same"), Document("c", " \n"), Document("d", "other")]
    monkeypatch.setattr(sources, "library_files", lambda: files)
    monkeypatch.setattr(sources, "docstrings", list)
    monkeypatch.setattr(sources, "topics", list)
    assert [document.name for document in sources.documents(0, 0)] == ["a", "d"]


def test_docstrings_tell_names_and_signatures_and_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.sys, "stdlib_module_names", {"math", "posix", "json"})
    found = {document.name: document.text for document in sources.docstrings()}
    assert found.keys() == {"docstrings/math", "docstrings/posix"}  # json has a source
    assert "math.acosh(x, /)\nReturn the inverse hyperbolic cosine of x." in found["docstrings/math"]
    assert "environ = " not in found["docstrings/posix"]


def test_an_excerpt_is_whole_lines_and_no_longer_than_allowed() -> None:
    text = "".join(f"line {number}\n" for number in range(2000))
    assert excerpt(text).endswith("\n") and text.startswith(excerpt(text))
    assert EXCERPT - 20 < len(excerpt(text)) <= EXCERPT
    assert len(excerpt("x" * 20_000)) == EXCERPT
    assert excerpt("short") == "short"
    assert sorted(sample_text([Document("a", "1\n"), Document("b", "2\n")]).split(END_OF_TEXT)) == ["", "1\n", "2\n"]


def test_every_document_ends_with_its_mark(folder: Path) -> None:
    tokens, starts = np.load(folder / "train.npy"), np.load(folder / "train_starts.npy")
    assert tokens.dtype == np.uint16 and starts[0] == 0 and starts[-1] == len(tokens)
    assert (tokens[starts[1:] - 1] == PAD_ID).all()
    assert parts.part_of("conversations/0000") in ("train", "calibration", "evaluation")
