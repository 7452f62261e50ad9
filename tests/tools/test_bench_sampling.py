"""The tool that measures sampling runs, and prints a row per set of options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_on_a_tiny_model() -> None:
    result = subprocess.run(
        [sys.executable, "tools/bench_sampling.py", "--batch=2", "--vocab=2000", "--layers=1", "--repeat=1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "decode step of 2 rows" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| greedy | ") and len(rows) > 10 and all(row.count(" ms, ") == 2 for row in rows[1:])
