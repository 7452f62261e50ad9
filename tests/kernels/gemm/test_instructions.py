"""The tests of this folder again, with the kernels of other instruction sets (where the machine has them)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from genai.kernels.cpu.isa import ISAS, isa


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ISAS if name != isa()])
def test_other_instruction_sets(name: str) -> None:
    environment = {**os.environ, "GENAI_CPU_ISA": name}
    folder = Path(__file__).parent
    files = [str(path) for path in folder.glob("test_*.py") if path.name != Path(__file__).name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *files]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "this machine does not have it" in run.stdout:
        pytest.skip(f"this machine has no {name}")
    assert run.returncode == 0, run.stdout[-3000:]
