"""What a GPU does at most: the kernels run, and nothing is said of what no kernel measures."""

from __future__ import annotations

import pytest

from genai.kernels.cuda import speeds
from genai.kernels.cuda.executor import CudaExecutor

from .host_driver import HostDriver


@pytest.mark.parametrize("name", ["bandwidth", "mma bf16", "mma int8", "fp32"])
def test_a_speed(driver: HostDriver, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, value in (("_BLOCKS", 2), ("_ROUNDS", 2), ("_BUFFER_BYTES", 1 << 16), ("_REPEATS", 1)):
        monkeypatch.setattr(speeds, number, value)
    found = CudaExecutor(driver, 1).ceiling(name)
    assert found is not None and found > 0
    assert driver.launched == [speeds.speed_kernel(name).name] * 2


def test_what_nobody_measures(driver: HostDriver) -> None:
    assert CudaExecutor(driver, 1).ceiling("dp4a int8") is None
    assert not driver.launched
