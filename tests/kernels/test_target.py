"""The processor that kernels are compiled for: what Numba says, without Numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genai.kernels.cpu.jit.isa import processor


@pytest.mark.parametrize(
    "variables",
    [{}, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2"}, {"NUMBA_ENABLE_AVX": "0"}],
)
def test_it_is_the_one_that_numba_compiles_for(variables: dict[str, str]) -> None:
    source = "from numba.core.registry import cpu_target; print(*cpu_target.target_context.codegen().magic_tuple())"
    given = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")} | variables
    said = subprocess.run([sys.executable, "-c", source], env=given, capture_output=True, text=True, check=True)
    found = processor(given)
    assert said.stdout.split() == [found.triple, found.name, found.features]


def test_features() -> None:
    found = processor({"NUMBA_CPU_FEATURES": "+avx2,-avx512f"})
    assert "avx2" in found.feature_set
    assert "avx512f" not in found.feature_set
    assert "avx" not in found.feature_set


def test_a_kernel_on_disk_runs_without_numba(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        f"""
import sys
from pathlib import Path
import numpy as np
from genai.kernels.cpu.jit.native import Library
from genai.kernels.cpu.jit.memory import write_int64

library = Library(Path({str(tmp_path)!r}))

@library.kernel
def fill(x, value, count):
    for i in range(count):
        write_int64(x + 8 * i, value)
    return 0

x = np.zeros(3, np.int64)
fill(x.ctypes.data, 5, 2)
print(x.tolist(), "numba" in sys.modules)
"""
    )
    environment = os.environ | {"GENAI_CACHE_DIR": str(tmp_path / "cache")}
    said = [
        subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert said == ["[5, 5, 0] True\n", "[5, 5, 0] False\n"]
