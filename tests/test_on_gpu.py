"""`pytest -m gpu` on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .on_gpu import VARIABLE, asks_for_a_gpu, expression_of

TESTS = "tests/kernels/cuda/test_norms.py"
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("expression", "asks"),
    [("gpu", True), ("gpu and not slow", True), ("not slow and not gpu", False), ("not slow and not fuzz", False)],
)
def test_expressions(expression: str, asks: bool) -> None:
    assert asks_for_a_gpu(expression) == asks


@pytest.mark.parametrize("arguments", [["-q", "-m", "gpu", "x.py"], ["-mgpu", "-n", "3"]])
def test_arguments(arguments: list[str]) -> None:
    assert expression_of(arguments) == "gpu"


def test_no_arguments() -> None:
    assert expression_of(["-n", "3", "--maxfail=1"]) == ""


def test_tests_of_a_gpu_say_why_they_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError")
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE and "XDIST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", TESTS],
        cwd=ROOT, env=environment | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "no GPU can be used: CuPy" in done.stdout and "passed" not in done.stdout and done.returncode == 0


@pytest.mark.parametrize("said", ["x", "-1", "0,1", "9" * 5000])
@pytest.mark.parametrize("arguments", [["-m", "gpu"], ["-n", "2"]])
def test_what_is_no_number_of_a_gpu(said: str, arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name} | {VARIABLE: said}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *arguments, TESTS],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "INTERNALERROR" not in done.stdout + done.stderr
    assert re.match(f"ERROR: {VARIABLE} = '.*: the number of a GPU is expected, such as 0; ", done.stderr)
