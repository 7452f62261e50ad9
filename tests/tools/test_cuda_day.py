"""The program for the first day with a GPU: without one, and on a made-up CuPy."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.kernels.cuda import cupy_driver
from genai.kernels.cuda.executor import CudaExecutor
from genai.model import loading
from tests.kernels.cuda.host_driver import COMPILER, HostDriver
from tests.kernels.cuda.test_cupy_driver import fake_cupy
from tools import cuda_day, cuda_steps


class Event:
    """The host's clock."""

    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass


def timed_cupy() -> Any:
    cupy = fake_cupy()
    cupy.cuda.Event, cupy.cuda.get_elapsed_time = Event, lambda begin, end: (end.at - begin.at) * 1e3 + 1e-6
    cupy.cuda.runtime.driverGetVersion = cupy.cuda.runtime.runtimeGetVersion = lambda: 13000
    return cupy


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cuda_day.main(["-o", str(tmp_path / "day")]) == 2
    assert capsys.readouterr().err == "cuda_day: no GPU can be used: CuPy is not installed\n"
    assert not (tmp_path / "day").exists()


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="kernels run on Linux through g++")
def test_the_stages_that_need_no_other_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", timed_cupy())
    monkeypatch.setattr(cupy_driver, "_KERNELS_OF_A_MODULE", 1000)  # the host's compiler takes seconds for each
    stages = (cuda_day.facts, cuda_day.products, cuda_day.experts, cuda_day.attention, cuda_day.adapters)
    monkeypatch.setattr(cuda_day, "STAGES", stages)
    assert cuda_day.main(["-o", str(tmp_path), "--small"]) == 0
    found = json.loads((tmp_path / "cuda_day.json").read_text())
    assert list(found) == ["facts", "products", "experts", "attention", "adapters"]
    assert [row["rows"] for row in found["products"]] == [1, 32, *[1, 1, 32] * 3]
    assert [row["rows"] for row in found["experts"]] == [1, 32]
    assert all(row["us"] > 0 for stage in stages[1:] for row in found[stage.__name__])
    page = (tmp_path / "cuda_day.md").read_text()
    assert page.startswith("# a made-up GPU") and "below its floor" in page and "FAILED" not in page


def test_a_stage_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(day: Any) -> Any:
        yield {"what": "begun", "value": 1}
        raise RuntimeError("a device is lost")

    day = cuda_day.Day(SimpleNamespace(name="a GPU"), None, cuda_day.SMALL, tmp_path, [], 0)
    monkeypatch.setattr(cuda_day, "STAGES", (broken,))
    assert cuda_day.run(day, 1) == 1
    assert (
        json.loads((tmp_path / "cuda_day.json").read_text())["broken"][1]["value"] == "RuntimeError: a device is lost"
    )
    assert cuda_day.run(day, -1) == 0
    assert day.stages["broken"][0]["what"] == "not begun"


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="kernels run on Linux through g++")
def test_what_a_step_is_made_of(monkeypatch: pytest.MonkeyPatch, bundled_folder: Path) -> None:
    """Kernels by name, and all of them as one graph, on a host that emulates a GPU."""
    driver = HostDriver()
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(driver, threads))
    monkeypatch.setattr(cuda_steps, "_WARM_STEPS", 1)
    monkeypatch.setattr(cuda_steps, "_STEPS", 1)

    def seconds(of: Any, work: Any) -> float:
        before = len(driver.launched)
        work()
        return float(len(driver.launched) - before)

    rows = list(cuda_steps.measured_steps(bundled_folder, "cuda", seconds, batches=(1,), context=4))
    whole, kinds = rows[0], rows[1:]
    assert whole["us of its graph"] == whole["kernels"] * 1e6 == sum(row["us"] for row in kinds)
    assert {"us", "kernels", "us each"} <= kinds[0].keys() and any("decode_few" in row["what"] for row in kinds)
