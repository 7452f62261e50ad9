"""Print the table of docs/explanation/sessions.md: `python -m tools.session_speed FOLDER [PATTERN]`.

Measure each .onnx file in a folder (see tools/session_models.py) with `genai bench session --compare`, in separate
processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HEADER = (
    "| model | run: toolkit, median (min) | onnxruntime, median (min) | ratio "
    "| create: toolkit | onnxruntime | ratio |\n"
    "|---|---|---|---|---|---|---|"
)
DIMS = ("batch=1", "sequence=128")


def measure(path: Path) -> dict[str, Any]:
    """Return the result of `genai bench session`."""
    dims = [flag for dim in DIMS for flag in ("--dim", dim)]
    command = [sys.executable, "-m", "genai", "bench", "session", str(path), "--compare", "--json", "-r", "30", *dims]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """Return one row of the table."""

    def both(prefix: str) -> str:
        return f"{found[prefix + '_ms']:.3g} ({found[prefix + '_least_ms']:.3g})"

    return (
        f"| {name} | {both('run')} | {both('onnxruntime_run')} | {found['run_ratio']:.2f} "
        f"| {found['create_ms']:.3g} | {found['onnxruntime_create_ms']:.3g} | {found['create_ratio']:.2f} |"
    )


def main() -> None:
    """Print the table."""
    pattern = sys.argv[2] if len(sys.argv) > 2 else ""
    print(HEADER)
    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        if re.search(pattern, path.stem):
            print(row(path.stem, measure(path)), flush=True)


if __name__ == "__main__":
    main()
