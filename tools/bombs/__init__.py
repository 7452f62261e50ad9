"""Malicious or malformed inputs ("bombs"): model folders, files and requests that could explode, hang or crash.

    python -m tools.bombs                    # 264 bombs, starting at seed 0
    python -m tools.bombs --first 500 --count 20

Each bomb is used twice, each time in a separate process. The first use must end in time, within a memory limit, and
with a result or a typed error. In the second use, Ctrl-C shortly after the start must end the process promptly.
"""

from .trying import KINDS as KINDS, workshop as workshop
