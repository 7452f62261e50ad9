"""Paths in the user's home folder."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Expand `~` in a path. If the user is unknown, the path stays unchanged and is later reported as missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises if the user is unknown
