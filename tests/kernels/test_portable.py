"""The kernel tests again, compiled for lesser processors than this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ..drawing import Draw

PROCESSORS = {
    "SSE2 only": ("generic", ""),
    "AVX2": ("haswell", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"),
    "AVX2, float16 by integer arithmetic": ("haswell", "+avx,+avx2,+fma,+bmi,+bmi2"),
}
FILES = (
    "test_activations.py",
    "rowwise",
    "attention",
    "test_embedding.py",
    "test_matmul.py",
    "test_normalization.py",
    "test_vector.py",
)


def test_the_files_are_there() -> None:
    """The long test draws from them by the commit, so a name that is gone would go unnoticed for a while."""
    folder = Path(__file__).parent
    assert [file for file in FILES if not (folder / file).exists()] == []


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these are x86 processors")
@pytest.mark.drawn(3)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_on_another_processor(processor: str, draw: Draw) -> None:
    """Half of the files, drawn by the commit, in one process (-n 0): several would compile the same kernels."""
    name, features = PROCESSORS[processor]
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    folder = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *(f"{folder}/{file}" for file in sorted(draw.part(FILES, 2))),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
