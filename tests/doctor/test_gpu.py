"""GPUs found through their drivers' files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai.doctor.processor import find_gpus

Write = Callable[[str, object], Path]


def absent(name: str) -> None:
    return None


def present(name: str) -> str:
    return name


def broken(name: str) -> Any:
    raise ImportError(name)


def test_no_driver(root: Path) -> None:
    found = find_gpus(root, find_module=absent)
    assert found.names == ()
    assert not found.cupy
    assert found.hints == ("no NVIDIA driver is loaded",)


def test_two_gpus(root: Path, write: Write) -> None:
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12")
    for place in ("0000:01:00.0", "0000:02:00.0"):
        write(f"proc/driver/nvidia/gpus/{place}/information", "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 5")
    found = find_gpus(root, find_module=present)
    assert found.names == ("NVIDIA H100 80GB HBM3",) * 2
    assert found.driver == "550.54.15"
    assert found.cupy
    assert found.hints == ()


def test_a_driver_without_gpus(root: Path, write: Write) -> None:
    write("proc/driver/nvidia/version", "something without a number")
    found = find_gpus(root, find_module=absent)
    assert found.driver == "unknown"
    assert "shows no GPU" in found.hints[0]


@pytest.mark.parametrize(("device", "hint"), [("dev/kfd", "AMD"), ("dev/dxg", "WSL")])
def test_other_devices(root: Path, write: Write, device: str, hint: str) -> None:
    write(device, "")
    assert any(hint in text for text in find_gpus(root, find_module=absent).hints)


def test_a_broken_cupy_counts_as_absent(root: Path) -> None:
    assert not find_gpus(root, find_module=broken).cupy
