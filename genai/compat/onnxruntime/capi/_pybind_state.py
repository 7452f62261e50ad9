"""Another name of `onnxruntime_pybind11_state`, which most programs import."""

from __future__ import annotations

from typing import Any

from . import onnxruntime_pybind11_state as _state


def __getattr__(name: str) -> Any:
    return getattr(_state, name)


def __dir__() -> list[str]:
    return dir(_state)
