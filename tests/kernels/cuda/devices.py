"""The device that kernels are tested on: a host that emulates a GPU, or GPU number GENAI_CUDA_DEVICE.

Where GENAI_CUDA_RACES is set the host looks for races meanwhile, which takes ten times as long.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from genai.kernels.cuda.cupy_driver import open_driver
from genai.kernels.cuda.driver import NoDevice

from .host_driver import COMPILER, HostDriver
from .race_driver import RaceDriver

GPU = os.environ.get("GENAI_CUDA_DEVICE", "")
IS_THERE = bool(GPU) or (COMPILER is not None and sys.platform.startswith("linux"))

if TYPE_CHECKING:
    Device = HostDriver
elif not GPU:
    Device = RaceDriver if os.environ.get("GENAI_CUDA_RACES") else HostDriver
else:
    from .gpu_driver import GpuDriver as Device
"""The class of its drivers. Tests that count calls to a driver derive from it."""


def open_device() -> Any:
    """A driver of its own."""
    return Device()


@cache
def why_not() -> str:
    """Why GPU number GENAI_CUDA_DEVICE cannot be used; "" = it can."""
    try:
        open_driver(int(GPU))
    except NoDevice as error:
        return str(error)
    return ""
