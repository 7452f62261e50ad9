"""Kernels on a host that emulates a GPU; without a C++ compiler for it there is nothing to run.

Where GENAI_CUDA_DEVICE is the number of a GPU they run there instead; what only the host can tell is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import genai
from genai import devices
from genai.models import loading

from .devices import GPU, IS_THERE, open_device
from .host_driver import HostDriver
from .programs import Load, opener


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the compiler where there is none."""
    if GPU:
        for item in items:
            if Path(__file__).parent in item.path.parents and item.get_closest_marker("gpu") is None:
                item.add_marker(pytest.mark.skip(reason="it is about the host that emulates a GPU"))
    for item in () if IS_THERE else items:
        if Path(__file__).parent in item.path.parents and "driver" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="kernels run on Linux through g++, which is not there"))


@pytest.fixture(autouse=True)
def gpus_that_were_opened_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up ones must not be found by others."""
    monkeypatch.setattr(devices, "_gpus", {})


@pytest.fixture
def driver() -> Any:
    """A host that emulates a GPU, or a GPU."""
    return open_device()


@pytest.fixture
def load(driver: HostDriver, bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a model on that device, the bundled one if none is named; the reference stays another one."""
    monkeypatch.setattr(loading, "open_executor", opener(driver))

    def loaded(folder: Path = bundled_folder, **options: object) -> genai.Model:
        sizes = {"context_size": 256, "cache_bytes": 4 << 20}
        return genai.Model(folder, quiet=True, **sizes | options)  # type: ignore[arg-type]

    return loaded
