"""Random graphs of many operators with the CUDA provider, on a host that plays a GPU, against onnxruntime.

A first pass only notes which kernels the graphs need, so that they are compiled together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import pytest

from genai import devices
from genai.kernels.cuda.sources import CudaKernel
from tests.kernels.cuda.devices import IS_THERE, Device
from tools.graph_fuzz.checking import check_seed

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_THERE, reason="kernels run on Linux through g++"),
]
CUDA = "CUDAExecutionProvider"
# Whose graphs had something to teach: reductions over nothing, numbers without axes, what the host computes.
TEACHERS = (205, 280, 293, 439, 2025, 2036, 2055)


class Collecting(Device):
    """Notes kernels, and starts none of them until it is `ready`."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.started = False, 0
        self.known: dict[CudaKernel, Any] = {}

    def load(self, kernels: Collection[CudaKernel]) -> Mapping[CudaKernel, Any]:
        missing = [kernel for kernel in kernels if kernel not in self.known]
        if self.ready and missing:
            self.known.update(super().load(missing))
        self.known.update((kernel, None) for kernel in missing if not self.ready)
        return {kernel: self.known[kernel] for kernel in kernels}

    def launch(self, function: Any, kernel: CudaKernel, grid: Any, arguments: Any) -> None:
        if self.ready:
            super().launch(function, kernel, grid, arguments)
            self.started += 1

    def compile(self) -> None:
        self.ready, self.known = True, dict(super().load(self.known))


@pytest.mark.parametrize(("seeds", "order"), [(range(30), 0), (TEACHERS, 1), (range(1000, 1030), 3)])
def test_random_graphs(monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int], order: int) -> None:
    pytest.importorskip("onnxruntime")
    driver = Collecting()
    driver.order = order
    monkeypatch.setattr(devices, "_gpus", {0: driver})
    for seed in seeds:
        check_seed(seed, Counter(), CUDA)
    driver.compile()
    found = [
        f"seed {seed}: {finding.what}\n{onnx.printer.to_text(finding.model.graph)[:1000]}"
        for seed in seeds
        for finding in check_seed(seed, Counter(), CUDA)
        if not finding.reason
    ]
    assert not found, "\n".join(found)
    assert driver.started > 30
