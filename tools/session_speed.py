"""Print the tables of docs/explanation/sessions.md: `python -m tools.session_speed FOLDER [PATTERN] [--cpu]`.

Measure each .onnx file in a folder (see tools/session_models.py) with `genai bench session --compare`, in separate
processes. With --cpu, both runtimes use one thread, take turns, and are charged with the CPU time of that thread, so
that other programs on the machine change the ratios little.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from genai.errors import GenaiError

HEADER = (
    "| model | run: toolkit, median (min) | onnxruntime, median (min) | ratio "
    "| create: toolkit | onnxruntime | ratio |\n"
    "|---|---|---|---|---|---|---|"
)
CPU_HEADER = "| model | toolkit, CPU ms | onnxruntime, CPU ms | ratio |\n|---|---|---|---|"
# Number of measured runs.
REPEAT = 30
# Sizes of dimensions, for the models that have dimensions with these names.
DIMS = {"batch": 1, "sequence": 128}


def dims_of(path: Path) -> list[str]:
    """Return the values of --dim for a model: an image model has no dimension "sequence", for example."""
    inputs = onnx.load(path, load_external_data=False).graph.input
    names = {dim.dim_param for value in inputs for dim in value.type.tensor_type.shape.dim}
    return [f"{name}={size}" for name, size in DIMS.items() if name in names]


def measure(path: Path) -> dict[str, Any]:
    """Return the result of `genai bench session`."""
    dims = [flag for dim in dims_of(path) for flag in ("--dim", dim)]
    command = [sys.executable, "-m", "genai", "bench", "session", str(path), "--compare", "--json", *dims]
    command += ["-r", str(REPEAT)]
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


def cpu_row(path: Path) -> str:
    """Return one row of the table of CPU times: the minimum of the runs of each runtime."""
    from genai.session.arrays import Peer, random_feed
    from genai.session.config import SessionConfig
    from genai.session.session import Session

    session, peer = Session(path, SessionConfig(threads=1)), Peer(str(path), 1)
    sizes = {name: int(size) for name, size in (dim.split("=") for dim in dims_of(path))}
    feed = random_feed(session.inputs, sizes, tables=session.table_sizes)
    runs: tuple[Callable[[], object], ...] = (lambda: session.run(feed), lambda: peer.run(feed))
    for run in runs:
        run()
    ours, theirs = (min(times) for times in zip(*(map(_cpu_ms, runs) for _ in range(REPEAT)), strict=True))
    return f"| {path.stem} | {ours:.3g} | {theirs:.3g} | {ours / theirs:.2f} |"


def _cpu_ms(run: Callable[[], object]) -> float:
    begin = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - begin)


def main() -> None:
    """Print the table; models that cannot be measured are reported on stderr, and the exit code is then 1."""
    parser = argparse.ArgumentParser(prog="python -m tools.session_speed", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--cpu", action="store_true", help="compare the CPU time of one thread")
    arguments = parser.parse_args()
    print(CPU_HEADER if arguments.cpu else HEADER)
    failed = False
    for path in sorted(arguments.folder.glob("*.onnx")):
        if re.search(arguments.pattern, path.stem):
            try:
                print(cpu_row(path) if arguments.cpu else row(path.stem, measure(path)), flush=True)
            except (subprocess.CalledProcessError, DecodeError, GenaiError) as error:
                failed = True
                print(f"{path.stem}: {getattr(error, 'stderr', error)!s}".rstrip(), file=sys.stderr, flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
