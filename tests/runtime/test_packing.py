"""Packing weights: what is shown meanwhile, and that pages of the model's files are given back."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.graph.tensor import Tensor
from genai.runtime import packing_progress
from genai.runtime.packing_progress import PackingProgress
from genai.runtime.weights import WeightStore


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_bar_after_a_second_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    terminal = Terminal()
    progress = PackingProgress(200, terminal)
    progress.add(50)
    assert terminal.getvalue() == ""
    now[0] = 1.5
    progress.add(50)
    assert terminal.getvalue() == "\rPacking weights [████████████            ]  50 %"
    progress.add(100)
    assert terminal.getvalue().endswith("100 %")
    progress.close()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_where_nobody_looks_or_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = PackingProgress(10, stream)
        progress.add(10)
        progress.close()
        assert stream.getvalue() == ""
    monkeypatch.setattr(packing_progress, "_QUIET_SECONDS", -1.0)
    file = io.StringIO()
    PackingProgress(10, file).add(5)
    assert file.getvalue() == ""


def test_each_weight_is_packed_once_counted_and_its_pages_released(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    released: list[str] = []
    weight, other = np.ones((4, 8), np.uint8), np.ones(3, np.float32)
    store = WeightStore({"w": weight, "view": weight.reshape(8, 4), "s": other}, counted.append)

    class Mapped:
        is_external = True

        def raw(self) -> Any:
            return weight

        def release_pages(self) -> None:
            released.append("w")

    tensors: list[Any] = [Mapped()]
    store.add_tensors(tensors)
    made = [store.packed((name, "", "s"), "tiles", lambda: object()) for name in ("w", "view", "w")]
    assert made[0] is made[1] is made[2]
    assert counted == [32 + 12]
    assert released == ["w"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads how much of a mapping is resident (Linux)")
def test_a_loaded_model_keeps_few_pages_of_what_it_packed(bundled_folder: Path) -> None:
    """Of the file with the weights, little stays resident."""
    code = f"""
import genai
with genai.Model({str(bundled_folder)!r}) as model:
    lines = open("/proc/self/smaps").read().splitlines()
    resident, inside = 0, False
    for line in lines:
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = line.endswith(".data")
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1])
print(resident)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(result.stdout) < 0.2 * (bundled_folder / "model.onnx.data").stat().st_size / 1024


def test_tensors_tell_whether_they_lie_in_a_file() -> None:
    assert not Tensor.from_array("x", np.ones(3, np.float32)).is_external
