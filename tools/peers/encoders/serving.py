"""What the workers share: they read jobs from stdin, and answer with seconds.

A job is one line, {"texts": [...], "ids": [[...], ...]}: the same texts as strings and as token ids. The answer is one
line, {"seconds": seconds per run, "runs": number of runs, "vectors": the first vectors}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# Short runs are repeated for this time, and the figure is the median of the runs.
_SECONDS, _MOST = 0.3, 50
_VECTORS = 3
Embed = Callable[[list[str], list[list[int]]], Any]


def serve(load: Callable[[str, int], tuple[Embed, dict[str, str]]]) -> None:
    """Load the model of the command line, say so, and time each job.

    Args:
        load: function of the path of a model and the number of threads, which returns the function to time (of texts
            and their token ids, returning one vector per text) and the versions of the engine's packages.
    """
    path, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    embed, versions = load(path, threads)
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        times: list[float] = []
        while not times or (sum(times) < _SECONDS and len(times) < _MOST):
            began = time.perf_counter()
            vectors = embed(job["texts"], job["ids"])
            times.append(time.perf_counter() - began)
        first = np.asarray(vectors[:_VECTORS], np.float64).tolist()
        print(
            json.dumps({"seconds": float(np.median(times)), "runs": len(times), "vectors": first}),
            file=answers, flush=True,
        )  # fmt: skip
