"""The logger `genai`, with one child per module. The library writes to this logger, and not to streams.

Until a program calls `to_stderr`, the logger has no level and only a NullHandler.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack

from . import progress
from .notebook import NotebookTask, is_here
from .progress_line import ProgressLine, is_terminal, tell

_ROOT = logging.getLogger("genai")
_ROOT.addHandler(logging.NullHandler())  # without a handler, Python would write warnings to stderr


def logger(name: str) -> logging.Logger:
    """Return the logger of a module, by its `__name__`. Inside `progress.quietly`, it drops records below warnings."""
    found = logging.getLogger(name)
    found.addFilter(_unless_quiet)
    return found


def to_stderr() -> ExitStack:
    """Show the same output as the `genai` command: log records as lines on stderr, and progress.

    Progress is shown on a terminal and in a notebook. The effect is permanent, or ends with the block of a
    `with to_stderr():` statement. If stderr is closed, full or absent, nothing is shown.
    """
    undo = ExitStack()
    if _ON_STDERR not in _ROOT.handlers:
        _ROOT.addHandler(_ON_STDERR)
        undo.callback(_ROOT.removeHandler, _ON_STDERR)
        undo.callback(_ROOT.setLevel, _ROOT.level)
        _ROOT.setLevel(min(_ROOT.getEffectiveLevel(), logging.INFO))
        undo.callback(progress.render_with, progress.render_with(NotebookTask if is_here() else ProgressLine))
    return undo


def _unless_quiet(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or not progress.is_quiet()


class _Lines(logging.Handler):
    """A handler that writes one line per record to the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, progress.BEGINS_TASK):
            tell(f"genai: {self.format(record)}")
        elif not (is_terminal(sys.stderr) or is_here()):  # a terminal and a notebook show the task instead
            tell(self.format(record))


_ON_STDERR = _Lines(logging.INFO)
