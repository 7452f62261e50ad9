"""A GPU for the tests that else run on a host: what they ask for besides is noted, or means nothing there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.cupy_driver import CupyDriver, open_driver
from genai.kernels.cuda.driver import Grid
from genai.kernels.cuda.sources import CudaKernel


class GpuDriver(CupyDriver):
    """See `HostDriver`, whose attributes it has; the order of threads is the GPU's."""

    order = 0
    room: int | None = None
    graphs_launched = 0
    allocated = 0

    def __init__(self) -> None:
        self.__dict__.update(open_driver(int(os.environ["GENAI_CUDA_DEVICE"])).__dict__)
        self.launched: list[str] = []
        self._noting: list[str] | None = None
        self._noted: dict[int, list[str]] = {}

    def zeros(self, nbytes: int) -> Any:
        self.allocated += nbytes
        if self.room is not None and nbytes > self.room:
            raise MemoryError(f"{nbytes} bytes are not there")
        return super().zeros(nbytes)

    def launch(self, function: Any, kernel: CudaKernel, grid: Grid, arguments: NDArray[np.void]) -> None:
        (self.launched if self._noting is None else self._noting).append(kernel.name)
        super().launch(function, kernel, grid, arguments)

    def capture(self, work: Any) -> Any:
        self._noting = names = []
        try:
            graph = super().capture(work)
        finally:
            self._noting = None
        self._noted[id(graph)] = names
        return graph

    def launch_graph(self, captured: Any) -> None:
        self.graphs_launched += 1
        self.launched += self._noted.get(id(captured), [])
        super().launch_graph(captured)

    def check(self) -> None:
        """Errors of kernels show when they are waited for."""
        self.synchronize()
