"""Kernels on a host that emulates a GPU; without a C++ compiler for it there is nothing to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .host_driver import COMPILER, HostDriver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the compiler where there is none."""
    if COMPILER is not None and sys.platform.startswith("linux"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and "driver" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="kernels run on Linux through g++, which is not there"))


@pytest.fixture
def driver() -> HostDriver:
    """A host that emulates a GPU."""
    return HostDriver()
