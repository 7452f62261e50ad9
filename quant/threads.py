"""How many threads quantisation uses."""

from __future__ import annotations

import os


def worker_count() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
