"""Progress of long work: the library reports it here, and nothing is drawn unless a program chooses a renderer.

`log.to_stderr` chooses the line of `progress_line`, as the command line does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import Logger
from types import TracebackType
from typing import Protocol, Self

BEGINS_TASK = "begins_task"
"""Attribute of a log record that says that a task begins: who draws the task need not show it."""

_quiet = ContextVar("_quiet", default=False)


class Task:
    """Long work, as whoever does it reports it. This class shows nothing; renderers override its methods."""

    def add(self, count: float) -> None:
        """Report that so much more of the total is done; at the total, the task is over."""

    def show(self, done: float, total: float, counted: str = "") -> None:
        """Report that so much of the total is done; `counted` says it in other words."""

    def close(self) -> None:
        """Report that the task is over."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Renderer(Protocol):
    """Makes the `Task` that draws a task; the arguments are those of `task`."""

    def __call__(
        self, label: str, total: float, *, amount: Callable[[float], str] | None, after: float
    ) -> Task: ...  # fmt: skip


_renderer: Renderer | None = None


def render_with(renderer: Renderer | None) -> Renderer | None:
    """Choose what draws the tasks of this process, None for nothing; returns what did before."""
    global _renderer
    before, _renderer = _renderer, renderer
    return before


def task(
    label: str, total: float = 0, *, amount: Callable[[float], str] | None = None, after: float = 0.0,
    log: Logger | None = None,
) -> Task:  # fmt: skip
    """Begin a task.

    Args:
        label: what is done.
        total: for `Task.add`, which counts by itself.
        amount: how a count is written; None = as a number.
        after: seconds before it is worth showing.
        log: logger of a record that says that it begins; None = there is none.
    """
    if is_quiet():
        return Task()
    if log is not None:
        log.info("%s ...", label, extra={BEGINS_TASK: True})
    return Task() if _renderer is None else _renderer(label, total, amount=amount, after=after)


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Show no tasks that this thread begins meanwhile, and log nothing below warnings, if `quiet`."""
    before = _quiet.set(quiet or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(before)


def is_quiet() -> bool:
    """Whether this is inside `quietly`."""
    return _quiet.get()
