"""A GPU for the tests that else run on a host: what they ask for besides is noted, or means nothing there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.cupy_driver import CupyDriver, open_driver
from genai.kernels.cuda.driver import Grid
from genai.kernels.cuda.sources import CudaKernel


class GpuDriver(CupyDriver):
    """See `HostDriver`: `launched` is the same; the order of threads is the GPU's."""

    order = 0

    def __init__(self, index: int) -> None:
        self.__dict__.update(open_driver(index).__dict__)
        self.launched: list[str] = []

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        self.launched.append(kernel.name)
        super().launch(function, kernel, grid, arguments)

    def check(self) -> None:
        """Errors of kernels show when they are waited for."""
        self.synchronize()
