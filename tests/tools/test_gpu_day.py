"""The tool for a first session on a GPU: without a GPU, and on a simulated CuPy."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genai
from genai.kernels.cuda import cupy_driver
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading
from tests.kernels.cuda.host_driver import COMPILER, HostDriver
from tests.kernels.cuda.test_cupy_driver import fake_cupy
from tools import cuda_steps, gpu_day


class Event:
    """The host's clock."""

    done = True

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
    assert gpu_day.main(["-o", str(tmp_path / "day")]) == 2
    assert capsys.readouterr().err == "gpu_day: no GPU can be used: CuPy is not installed\n"
    assert not (tmp_path / "day").exists()


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="kernels run on Linux through g++")
def test_the_stages_that_need_no_other_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", timed_cupy())
    monkeypatch.setattr(cupy_driver, "_KERNELS_OF_A_MODULE", 1000)  # the host's compiler takes seconds for each
    stages = (gpu_day.facts, gpu_day.products, gpu_day.experts, gpu_day.attention, gpu_day.adapters)
    monkeypatch.setattr(gpu_day, "STAGES", stages)
    assert gpu_day.main(["-o", str(tmp_path), "--small"]) == 0
    found = json.loads((tmp_path / "gpu_day.json").read_text())
    assert list(found) == ["facts", "products", "experts", "attention", "adapters"]
    assert [row["rows"] for row in found["products"]] == [1, 32, *[1, 1, 32] * 3]
    assert [row["rows"] for row in found["experts"]] == [1, 32]
    assert all(row["us"] > 0 for stage in stages[1:] for row in found[stage.__name__])
    page = (tmp_path / "gpu_day.md").read_text()
    assert page.startswith("# a made-up GPU") and "below its floor" in page and "FAILED" not in page


def test_a_stage_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(day: Any) -> Any:
        yield {"what": "begun", "value": 1}
        raise RuntimeError("a device is lost")

    day = gpu_day.Day(SimpleNamespace(name="a GPU"), None, gpu_day.SMALL, tmp_path, [], 0)
    monkeypatch.setattr(gpu_day, "STAGES", (broken,))
    assert gpu_day.run(day, 1) == 1
    assert json.loads((tmp_path / "gpu_day.json").read_text())["broken"][1]["value"] == "RuntimeError: a device is lost"
    assert gpu_day.run(day, -1) == 0
    assert day.stages["broken"][0]["what"] == "not started"


def a_day(folder: Path) -> Any:
    return gpu_day.Day(SimpleNamespace(name="a GPU"), None, gpu_day.SMALL, folder, [], 0)


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '1000'])"
    begin = time.monotonic()
    code, said = gpu_day._run([sys.executable, "-c", child], 2, {})
    assert code is None and said.startswith("begun\n") and "KeyboardInterrupt" in said
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {child}"
    monkeypatch.setattr(gpu_day, "_LAST_WORDS", 0.5)
    assert gpu_day._run([sys.executable, "-c", deaf], 2, {}) == (None, "begun\n")
    assert gpu_day._run(["sh", "-c", "echo $WORD; exit 3"], 10, {"WORD": "a word"}) == (3, "a word\n")
    assert time.monotonic() - begin < 100


@pytest.mark.parametrize(
    ("said", "failed"),
    [("ERROR SUMMARY: 0 errors", False), ("ERROR SUMMARY: 2 errors", True), ("Device not supported", True)],
)
def test_checks_of_the_sanitizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, failed: bool) -> None:
    """A simulated sanitizer prints the summary."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '========= {said}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    day = a_day(tmp_path)
    monkeypatch.setattr(gpu_day, "STAGES", (gpu_day.sanitized,))
    monkeypatch.setattr(gpu_day.sys, "executable", "true")  # replaces the checked program
    assert gpu_day.run(day, 1, ["sanitized"]) == failed
    assert [row["what"] for row in day.stages["sanitized"]] == [*gpu_day._CHECKS, *["FAILED"] * failed]
    assert said in (tmp_path / "memcheck.txt").read_text()


def test_what_the_sanitizer_is_to_see_must_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_day.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu_day, "_run", lambda *_: (1, "no such GPU"))
    with pytest.raises(RuntimeError, match="ended with 1: no such GPU"):
        list(gpu_day.sanitized(a_day(tmp_path)))


def test_without_a_sanitizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(gpu_day.sanitized(a_day(tmp_path))) == [{"what": "compute-sanitizer", "value": "not installed"}]


def test_pytorch_s_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter([(0, 'a warning\n{"what": "PyTorch", "us": 3.0}\n'), (None, "")])
    monkeypatch.setattr(gpu_day, "_run", lambda *_: next(answers))
    rows = list(gpu_day.pytorch(a_day(tmp_path)))
    assert rows[0] == {"what": "PyTorch", "us": 3.0} and "not finished after" in rows[1]["value"] and len(rows) == 2


@pytest.mark.parametrize(("code", "value", "failed"), [(0, "passed", 0), (1, "FAILED", 1), (None, "not finished", 0)])
def test_tests_that_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int | None, value: str, failed: int
) -> None:
    monkeypatch.setattr(gpu_day, "_run", lambda *_: (code, "..F\n1 failed, 2 passed\n"))
    monkeypatch.setattr(gpu_day, "STAGES", (gpu_day.checked,))
    day = a_day(tmp_path)
    assert gpu_day.run(day, 1, ["checked"]) == failed
    assert day.stages["checked"][0]["value"].startswith(value)
    assert (tmp_path / "tests.txt").read_text().endswith("2 passed\n")


def test_models_are_built_beside_other_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_day, "SHAPES", ("tiny",))
    monkeypatch.setattr(gpu_day, "STAGES", (gpu_day.built,))
    day = a_day(tmp_path)
    assert gpu_day.run(day, 1) == 0
    assert day.models == [tmp_path / "models" / "tiny"] and day.stages["built"][0]["value"] == "done"
    with genai.Model(day.models[0], quiet=True, context_size=64) as model:
        assert model.config.model.decoder.num_hidden_layers == 4


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

    rows = list(cuda_steps.measured_steps(bundled_folder, "cuda", seconds, batches=(1,), context=4, prompts=(3, 5)))
    whole, kinds, prompts = rows[0], rows[1:-2], rows[-2:]
    assert [row["what"] for row in prompts] == ["a prompt of 3", "a prompt of 5"]
    assert all(row["tok/s"] > 0 for row in prompts)
    assert whole["us of its graph"] == whole["kernels"] * 1e6 == sum(row["us"] for row in kinds)
    assert {"us", "kernels", "us each"} <= kinds[0].keys() and any("decode_few" in row["what"] for row in kinds)
