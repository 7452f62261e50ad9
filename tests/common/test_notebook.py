"""Progress in notebooks: one output per cell, with escaped names and without terminal sequences."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from genai.common import notebook, progress, shown_tasks
from genai.common.html_parts import escaped, figures, folded, note, passage, table
from genai.common.log import to_stderr
from genai.common.notebook import CellOutput, NotebookTask, is_here
from genai.common.progress import Task, quietly, task
from genai.common.progress_line import ProgressLine
from tests.html_text import HtmlText


class Notebook:
    """The outputs of cells, in the order in which they were made; a display that is updated keeps its place."""

    def __init__(self, kernel: object = True) -> None:
        self.shell = SimpleNamespace(execution_count=1, **({"kernel": kernel} if kernel else {}))
        self.outputs: dict[str, list[dict[str, str]]] = {}
        self.module: Any = ModuleType("IPython")
        self.module.get_ipython = lambda: self.shell
        self.module.display = SimpleNamespace(publish_display_data=self._publish)

    def _publish(self, data: dict[str, str], *, transient: dict[str, str], update: bool) -> None:
        name = transient["display_id"]
        assert update == (name in self.outputs), "an update of an output that is not there would be lost"
        self.outputs.setdefault(name, []).append(data)

    @property
    def shown(self) -> list[str]:
        """The text of each output."""
        return [HtmlText.of(versions[-1]["text/html"]) for versions in self.outputs.values()]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    found = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", found.module)
    monkeypatch.setattr(notebook, "_output", CellOutput(animated=False))
    monkeypatch.setattr(shown_tasks, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(shown_tasks, "SECONDS_BETWEEN", 0.0)
    yield found


def test_nested_tasks_are_one_output_that_empties(room: Notebook) -> None:
    with task("Loading pebble"):
        assert room.shown == ["Loading pebble"]
        with task("Compiling", 4) as bar:
            bar.show(1, 4)
            (output,) = room.outputs.values()
            assert output[-1]["text/plain"].splitlines()[1].startswith("Compiling [######-----")
            assert '<progress value="0.250">' in output[-1]["text/html"]
            assert room.shown == ["Loading pebble Compiling 1 of 4"] or "left" in room.shown[0]
        assert room.shown == ["Loading pebble"]
    assert room.shown == [""]
    with task("Loading the tokenizer"):
        assert room.shown == ["Loading the tokenizer"], "the same cell, the same output"
    room.shell.execution_count += 1
    with task("Compiling"):
        assert room.shown == ["", "Compiling"]
    assert room.shown == ["", ""]
    for versions in room.outputs.values():
        assert not any({"\r", "\x1b"} & set("".join(data.values())) for data in versions)


def test_what_did_not_change_is_not_sent_again(room: Notebook) -> None:
    with task("Loading"):
        output = notebook._output
        assert output is not None
        for _ in range(5):
            output.draw()
    (versions,) = room.outputs.values()
    assert len(versions) == 2


def test_names_are_escaped(room: Notebook) -> None:
    with task("Loading <script>alert(1)</script>\x1b[2J"):
        assert room.shown == ["Loading <script>alert(1)</script>?[2J"]


def test_quietly(room: Notebook) -> None:
    with quietly(), task("Loading"):
        pass
    assert not room.outputs


def test_the_thread_redraws(room: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_output", CellOutput())
    monkeypatch.setattr(shown_tasks, "SHOWN_AFTER", 0.2)
    monkeypatch.setattr(shown_tasks, "SECONDS_BETWEEN", 0.05)
    deadline = time.monotonic() + 60
    with task("Loading"):
        assert not room.outputs
        while not room.outputs:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert room.shown == [""]


def test_to_stderr_shows_the_same(room: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    with to_stderr(), task("Loading", log=progress_log()) as loading:
        assert isinstance(loading, NotebookTask) and room.shown == ["Loading"]
    assert capsys.readouterr().err == "", "the output replaces the line in the log"


def progress_log() -> Any:
    from genai.common.log import logger

    return logger("genai.tests.notebook")


@pytest.mark.parametrize("kernel", [None, "no IPython"])
def test_elsewhere_there_is_none(kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython in a terminal, a module that is being imported, and no IPython at all."""
    if kernel is None:
        monkeypatch.setitem(sys.modules, "IPython", Notebook(None).module)
    else:
        monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert not is_here() and type(task("Loading")) is Task
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_here() and type(task("Loading")) is Task
    with to_stderr():
        assert isinstance(task("Loading"), ProgressLine)
    assert progress._renderer is None


def test_parts_of_pages() -> None:
    hostile = "<img src=x onerror=alert(1)> & \"'\x1b[31m\u202ereversed\n\tend\x00"
    shown = "<img src=x onerror=alert(1)> & \"'\\x1b[31m\\u202ereversed\n\tend\\x00"
    for part in (
        escaped(hostile), passage(hostile), note([hostile]), folded(hostile, ""), table([hostile], []),
        table(["head"], [[hostile]]), figures([(hostile, 1)]), figures([("name", hostile)]),
    ):  # fmt: skip
        assert shown in HtmlText.of(part, keep_space=True)
    assert HtmlText.tags(table(["a", "b"], [[1, 2], [3, 4]])) == {"table": 1, "tr": 3, "th": 2, "td": 4}
