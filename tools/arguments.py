"""Argument types that the tools share; argparse reports invalid values in one line instead of a traceback."""

from __future__ import annotations

import argparse
import math
from pathlib import Path


def positive(text: str) -> int:
    """Parse an integer that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def microseconds(text: str) -> float:
    """Parse a finite number that is at least 0."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of microseconds")
    return number


def folder(text: str) -> Path:
    """Parse the path of an existing folder."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path
