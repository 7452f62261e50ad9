"""What is made to do harm: model folders, files and requests that explode, hang or crash.

    python -m tools.bombs                    # 264 of them, from seed 0 on
    python -m tools.bombs --first 500 --count 20

Each is used twice in a process of its own: to its end, which must come in time, within memory, and as an answer or a
typed error; and with Ctrl-C a moment after the start, which must end it soon.
"""

from .trying import KINDS as KINDS, workshop as workshop
