"""What is timed has been done: a device goes on by itself when it was asked for something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import genai
from genai.bench import attention, lora
from genai.bench.kernels import bench_kernels
from genai.bench.speed import prefill_seconds
from genai.kernels.cuda.executor import CudaExecutor

from .late_driver import LateDriver
from .programs import Load


@pytest.fixture
def driver() -> LateDriver:
    """Here it does nothing before it is waited for."""
    return LateDriver()


@pytest.fixture
def model(load: Load, driver: LateDriver) -> Iterator[genai.Model]:
    with load() as loaded:
        yield loaded


def test_a_prompt(model: genai.Model, driver: LateDriver) -> None:
    assert prefill_seconds(model, 5) > 0
    assert driver.ahead and not driver.pending


def test_steps_and_prompts_beside_adapters(
    model: genai.Model, driver: LateDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    clock = time.perf_counter
    monkeypatch.setattr(lora.time, "perf_counter", lambda: left.append(driver.pending) or clock())
    assert lora._decode(model, [None, None], 3, 2) > 0 and lora._prefill(model, None, 4) > 0
    assert driver.ahead and len(left) == 4 and not any(left)


def test_kernels(model: genai.Model, driver: LateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device's clock, which begins when rows are there."""
    timed: list[int] = []

    def seconds(work: Any) -> float:
        begin = driver.asked
        work()
        timed.append(driver.asked - begin)
        driver.synchronize()
        return 1.0

    monkeypatch.setattr(driver, "seconds", seconds)
    monkeypatch.setattr(CudaExecutor, "ceiling", lambda self, what: None)  # which takes a GPU
    monkeypatch.setattr(attention, "kv_types_on", lambda device: ("fp16",))
    rows = [*bench_kernels(model, rows=[1], repeat=2), *attention.bench_attention(model, context=40, repeat=2)]
    assert len(timed) >= 2 * len(rows) and all(timed)
    assert all(row["ms"] > 0 for row in rows)
