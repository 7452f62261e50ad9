"""Packing weights: that pages of the model's files are given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.onnx.tensor import OnnxTensor
from genai.session.packed_weights import WeightStore


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
    assert counted == [32, 12]
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
    assert not OnnxTensor.from_array("x", np.ones(3, np.float32)).is_external
