"""Simulated machines: a file system root with the parts of /proc and /sys that checks read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str, object], Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty root, with neither /proc nor /sys."""
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def write(root: Path) -> Write:
    """Return a function write(name, text) that makes a file below the root."""

    def write_file(name: str, text: object) -> Path:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        return path

    return write_file


@pytest.fixture
def nothing_known() -> Callable[[str], str]:
    """Simulate a sysctl that knows no names, as on Linux."""
    return lambda name: ""
