"""The device that kernels are tested on: a host that emulates a GPU, or GPU number GENAI_CUDA_DEVICE."""

from __future__ import annotations

import os
import sys
from typing import Any

from .host_driver import COMPILER, HostDriver

GPU = os.environ.get("GENAI_CUDA_DEVICE", "")
IS_THERE = bool(GPU) or (COMPILER is not None and sys.platform.startswith("linux"))


def open_device() -> Any:
    """A driver of its own."""
    if not GPU:
        return HostDriver()
    from .gpu_driver import GpuDriver

    return GpuDriver(int(GPU))
