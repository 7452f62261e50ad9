"""From the start of a process to the first token, each time in a new process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import GenaiError

_TIMEOUT_SECONDS = 600.0
# Prints the seconds since the clock that the parent names: packages loaded, model loaded, first token chosen.
_WORKER = """
import json, sys, time
folder, tokens, threads, started = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
import genai
from genai.generator import Generator, GeneratorParams
from genai.model import Model
marks = [time.time() - started]
model = Model(folder, threads=threads or None)
marks.append(time.time() - started)
params = GeneratorParams(model)
params.set_search_options(do_sample=False, max_length=tokens + 2)
generator = Generator(model, params)
generator.append_tokens([[3 + i % 97 for i in range(tokens)]])
generator.generate_next_token()
marks.append(time.time() - started)
print(json.dumps(marks), flush=True)
"""


def bench_startup(
    folder: Path, *, tokens: int = 128, threads: int | None = None, cold: bool = False, repeat: int = 5
) -> dict[str, Any]:
    """Seconds from the start of a process until packages are loaded, the model is, and the first token is there.

    Args:
        tokens: length of the prompt.
        cold: begin every time with an empty kernel cache.

    Returns:
        The medians, and slowest and fastest of the last.

    Raises:
        GenaiError: a process failed; its own message is in it.
    """
    runs = [_run(folder, tokens, threads or 0, cold) for _ in range(repeat + (not cold))]
    counted = runs if cold else runs[1:]
    packages, loaded, first = (statistics.median(times) for times in zip(*counted, strict=True))
    last = [run[2] for run in counted]
    return {
        "prompt": tokens,
        "cold": cold,
        "packages s": packages,
        "model s": loaded,
        "first token s": first,
        "slowest s": max(last),
        "fastest s": min(last),
    }


def _run(folder: Path, tokens: int, threads: int, cold: bool) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="genai-bench-") as empty:
        environment = {**os.environ, **({"GENAI_CACHE_DIR": empty} if cold else {})}
        started = time.time()
        command = [sys.executable, "-c", _WORKER, str(folder), str(tokens), str(threads), repr(started)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if result.returncode:
        raise GenaiError(
            f"the model in {folder} could not be started in a process of its own",
            result.stderr.strip().splitlines()[-1] if result.stderr.strip() else f"exit status {result.returncode}",
            "try `genai generate` with it",
        )
    marks: list[float] = json.loads(result.stdout.splitlines()[-1])
    return marks
