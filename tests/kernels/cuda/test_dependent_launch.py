"""Launches that begin while the one before ends: what the driver's library is asked for, with a made-up library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.dependent_launch import DependentLaunches, open_dependent_launches
from genai.kernels.cuda.driver import CudaError


def library(asked: list[dict[str, Any]], code: int = 0) -> Any:
    def launch(config: Any, function: ctypes.c_void_p, parameters: Any, extra: object) -> int:
        given = config._obj
        attribute = given.attributes[0]
        asked.append(
            {
                "grid": list(given.grid), "block": list(given.block), "shared": given.shared, "stream": given.stream,
                "attributes": (given.count, attribute.id, attribute.value), "function": function.value,
                "bytes": ctypes.string_at(parameters[0], 8), "extra": extra,
            }
        )  # fmt: skip
        return code

    def describe(number: int, text: Any) -> int:
        text._obj.value = f"number {number}".encode()
        return 0

    return SimpleNamespace(cuLaunchKernelEx=launch, cuGetErrorString=describe)


def test_what_is_asked_for() -> None:
    asked: list[dict[str, Any]] = []
    launches = DependentLaunches(library(asked), 4711)
    arguments = np.zeros((), np.dtype([("a", "i4"), ("b", "f4")]))
    arguments["a"], arguments["b"] = 7, 1.5
    launches.launch(99, (2, 3, 4), 128, arguments, 1024)
    assert asked == [
        {
            "grid": [2, 3, 4], "block": [128, 1, 1], "shared": 1024, "stream": 4711, "attributes": (1, 6, 1),
            "function": 99, "bytes": arguments.tobytes(), "extra": None,
        }
    ]  # fmt: skip


def test_a_kernel_that_does_not_start() -> None:
    with pytest.raises(CudaError, match=r"a kernel cannot be launched: number 701 \(701\)"):
        DependentLaunches(library([], 701), 1).launch(1, (1, 1, 1), 32, np.zeros((), np.dtype([("a", "i4")])))


def test_older_gpus_and_drivers_launch_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library([]))
    assert open_dependent_launches(80, 1) is None
    assert open_dependent_launches(90, 1) is not None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # without the call
    assert open_dependent_launches(90, 1) is None


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert open_dependent_launches(90, 1) is None
