"""Warnings that point to the line of the caller's program."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_caller(message: str) -> None:
    """Issue a warning for the line outside this package from which the call came."""
    frame, level = sys._getframe(1).f_back, 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)
