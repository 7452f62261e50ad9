"""Measure the machine's ceilings, with one thread and with the number of threads on the command line.

usage: ceilings.py THREADS

Print {"threads": {"read": bytes per second, "products": {kind: operations per second}}} for 1 and THREADS.
"""

from __future__ import annotations

import json
import sys

from genai.doctor.speeds import measure_bandwidth, measure_products

# Larger than a last-level cache, which the cores of many virtual machines may share.
_BUFFER_BYTES = 2**30
_SECONDS = 0.5


def main() -> None:
    """Measure and print the ceilings."""
    found = {
        threads: {
            "read": measure_bandwidth(_BUFFER_BYTES, threads=threads, seconds=_SECONDS).bytes_per_second,
            "products": measure_products(threads=threads),
        }
        for threads in sorted({1, int(sys.argv[1])})
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
