"""Progress of long work. The library reports progress here, and a renderer draws it.

A program chooses the renderer: the command line calls `log.to_stderr`, which chooses `progress_line.ProgressLine` on a
terminal. In a notebook, `notebook.NotebookTask` is the default. Elsewhere, nothing is drawn by default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from logging import Logger
    from types import TracebackType

BEGINS_TASK = "begins_task"
"""The attribute of a log record that marks the start of a task. Code that draws the task can skip the record."""

_quiet = ContextVar("_quiet", default=False)


class Task:
    """Long work whose code reports its progress. This class shows nothing; renderers override its methods."""

    def add(self, count: float) -> None:
        """Report that `count` more of the total is done; when the total is reached, the task is over."""

    def show(self, done: float, total: float, counted: str = "") -> None:
        """Report that `done` of `total` is done; `counted` is the amount as text."""

    def count(self, counted: str) -> None:
        """Report an amount of work that has no known total."""

    def close(self) -> None:
        """Report that the task is over."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Renderer(Protocol):
    """A factory of the `Task` that draws a task; the arguments are the same as for `task`."""

    def __call__(
        self, label: str, total: float, *, amount: Callable[[float], str] | None, until_output: bool
    ) -> Task: ...  # fmt: skip


_renderer: Renderer | None = None


def render_with(renderer: Renderer | None) -> Renderer | None:
    """Set the renderer of this process's tasks (None = the default renderer), and return the previous renderer."""
    global _renderer
    before, _renderer = _renderer, renderer
    return before


def task(
    label: str, total: float = 0, *, amount: Callable[[float], str] | None = None, until_output: bool = False,
    log: Logger | None = None,
) -> Task:  # fmt: skip
    """Start a task and return it. The caller closes the task, also after an error.

    Args:
        label: description of the work, such as "Loading pebble".
        total: the amount that `Task.add` counts towards; 0 = unknown.
        amount: the function that formats a count; None = counts are shown as numbers.
        until_output: True if the command's first output ends the task; for commands only.
        log: the logger that records the start of the task; None = no record.
    """
    if is_quiet():
        return Task()
    if log is not None:
        log.info("%s ...", label, extra={BEGINS_TASK: True})
    renderer = _renderer or _default()
    return Task() if renderer is None else renderer(label, total, amount=amount, until_output=until_output)


def _default() -> Renderer | None:
    """Return the renderer for a notebook, which has no other way to show that it works; elsewhere None."""
    if "IPython" in sys.modules:  # IPython itself starts the kernels of notebooks
        from . import notebook  # also imports this module

        if notebook.is_here():
            return notebook.NotebookTask
    return None


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """If `quiet`, show no tasks that this thread starts inside the block, and log nothing below warnings."""
    before = _quiet.set(quiet or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(before)


def is_quiet() -> bool:
    """Return True inside `quietly`."""
    return _quiet.get()
