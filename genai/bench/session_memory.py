"""The peak memory of a process that runs one model: `python session_memory.py RUNTIME MODEL INPUTS THREADS`.

The program is started by its path and imports nothing but the runtime, so that the memory is that of the runtime.
INPUTS is a pickled dictionary of arrays. The output is a JSON object: the milliseconds to create the first session of
the process, and the peak memory in bytes.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

RUNS = 5


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    # getrusage is not used on Linux, because a process inherits the maximum from its parent.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def main(runtime: str, model: str, inputs: str, threads: str) -> None:
    """Create a session and run it several times; print the figures."""
    with Path(inputs).open("rb") as file:
        feed: dict[str, Any] = pickle.load(file)  # a file that the caller has just written
    if runtime == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, int(threads)
        began = time.perf_counter()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    else:
        import genai

        chosen = genai.SessionOptions()
        chosen.intra_op_num_threads = int(threads)
        began = time.perf_counter()
        session = genai.InferenceSession(model, chosen)
    first = (time.perf_counter() - began) * 1e3
    for _ in range(RUNS):
        session.run(None, feed)
    print(json.dumps({"first_ms": first, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
