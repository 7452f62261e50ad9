"""Whether there is a GPU, found in the files of its driver: no library is loaded, so nothing can hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Gpus:
    """What was found.

    Attributes:
        names: models of the NVIDIA GPUs that the driver sees.
        driver: version of NVIDIA's driver; empty if it is not loaded.
        cupy: whether cupy is installed.
        hints: why there may be none, or other GPUs seen.
    """

    names: tuple[str, ...]
    driver: str
    cupy: bool
    hints: tuple[str, ...]


def find_gpus(root: Path = Path("/"), *, find_module: Callable[[str], Any] = find_spec) -> Gpus:
    """Look below `root` for drivers, and among the installed packages for cupy."""
    driver = _driver_version(root / "proc/driver/nvidia/version")
    names = tuple(map(_model, sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))))
    hints = []
    if not driver:
        hints.append("no NVIDIA driver is loaded")
    elif not names and not (root / "dev/nvidia0").exists():
        hints.append("the NVIDIA driver shows no GPU to this process")
    if (root / "dev/kfd").exists():
        hints.append("an AMD GPU is there, which is not supported")
    if (root / "dev/dxg").exists():
        hints.append("this is WSL: the GPU's driver belongs to Windows")
    return Gpus(names, driver, _installed(find_module, "cupy"), tuple(hints))


def _driver_version(path: Path) -> str:
    """Such as 550.54: the first word of the first line that looks like a version."""
    words = _text(path).partition("\n")[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown" if words else "")


def _model(path: Path) -> str:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return "unknown model"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _installed(find_module: Callable[[str], Any], name: str) -> bool:
    try:
        return find_module(name) is not None
    except (ImportError, ValueError):
        return False
