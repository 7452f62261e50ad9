"""Paths in the user's home folder."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """A path with the home folder for `~`; as it is where that user is not known, so that it is called missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for a user who is not known
