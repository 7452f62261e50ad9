"""The logger `genai`, with one child per module: what the library says goes there, and to no stream.

No handler or level is set here, until a program calls `to_stderr`.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack

from . import progress
from .progress_line import ProgressLine, is_terminal, tell

_ROOT = logging.getLogger("genai")
_ROOT.addHandler(logging.NullHandler())  # without any, Python would write warnings to stderr


def logger(name: str) -> logging.Logger:
    """The logger of a module, by its `__name__`. Inside `progress.quietly` it takes warnings and errors only."""
    found = logging.getLogger(name)
    found.addFilter(_unless_quiet)
    return found


def to_stderr() -> ExitStack:
    """Show what the `genai` command shows on stderr: log records as lines, and on a terminal how far long work is.

    It lasts; of `with to_stderr():` until the block ends. Where stderr is closed, full or absent, nothing is shown.
    """
    undo = ExitStack()
    if _ON_STDERR not in _ROOT.handlers:
        _ROOT.addHandler(_ON_STDERR)
        undo.callback(_ROOT.removeHandler, _ON_STDERR)
        undo.callback(_ROOT.setLevel, _ROOT.level)
        _ROOT.setLevel(min(_ROOT.getEffectiveLevel(), logging.INFO))
        undo.callback(progress.render_with, progress.render_with(ProgressLine))
    return undo


def _unless_quiet(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or not progress.is_quiet()


class _Lines(logging.Handler):
    """A line per record, on what is stderr at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, progress.BEGINS_TASK):
            tell(f"genai: {self.format(record)}")
        elif not is_terminal(sys.stderr):  # where the task is drawn instead
            tell(self.format(record))


_ON_STDERR = _Lines(logging.INFO)
