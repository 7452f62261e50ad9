"""Progress in notebooks: the current tasks in the output of the cell, without terminal sequences.

IPython is not a requirement. If a program runs in a notebook, IPython is loaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from .shown_tasks import ShownTask, TaskDisplay

_COLUMNS = 100


def is_here() -> bool:
    """Return True in a notebook, or in another client of an IPython kernel."""
    return getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_shell is None else get_shell()


class CellOutput(TaskDisplay):
    """One output of a cell, which shows all current tasks below each other. It is empty when the tasks are over."""

    def __init__(self, *, animated: bool = True) -> None:
        super().__init__(animated=animated)
        self._cell: object = None  # the cell that has the output
        self._name = ""
        self._shown = ("", "")

    def draw(self) -> None:
        """Show the current tasks; if there are none, empty the output."""
        if not self.tasks:
            self.erase()
            return
        self.drawn = time.monotonic()
        self._publish("".join(map(_row, self.tasks)), "\n".join(task.text(_COLUMNS) for task in self.tasks))
        self.visible = True

    def erase(self) -> None:
        """Empty the output."""
        if self.visible:
            self._publish("", "")
            self.visible = False

    def _publish(self, html: str, text: str) -> None:
        """Change the output; if another cell runs now, add an output to that cell."""
        from IPython import display

        cell = getattr(_shell(), "execution_count", None)
        is_new = not self.visible and (not self._name or cell != self._cell)
        if is_new:
            self._name, self._cell = uuid4().hex, cell
        elif (html, text) == self._shown:
            return
        self._shown = (html, text)
        data = {"text/html": html, "text/plain": text}
        display.publish_display_data(data, transient={"display_id": self._name}, update=not is_new)


def _row(task: ShownTask) -> str:
    from html import escape  # here, because it loads all named characters, and most processes show no notebook

    counted, seconds = task.facts()
    value = "" if task.share is None else f' value="{task.share:.3f}"'
    facts = escape(", ".join(filter(None, (counted, seconds))))
    return f"<div>{escape(task.label)} <progress{value}></progress> <small>{facts}</small></div>"


_output: CellOutput | None = None


class NotebookTask(ShownTask):
    """A task in the output of the cell that runs; see `ShownTask`."""

    def __init__(
        self, label: str, total: float = 0, *, amount: Callable[[float], str] | None = None, until_output: bool = False
    ) -> None:
        global _output
        _output = _output or CellOutput()
        super().__init__(label, total, _output, amount=amount, until_output=until_output)
