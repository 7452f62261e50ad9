"""How weights that are read once are asked for before they are read: by processor, as measured. It changes no result.

A core can have only so many lines on their way into its first-level cache. Zen 4 can have more on their way into the
second: decoding 4-bit weights there is 17 to 40 % faster (two cores, 1B and 0.5B shapes). Zen 3 and Sapphire Rapids
gain nothing from it, Zen 5 loses 3 %.
"""

from __future__ import annotations

from typing import NamedTuple

from .isa import processor


class Prefetch(NamedTuple):
    """Into which cache lines are asked for, and how many bytes ahead."""

    level: int = 1
    distance: int = 2048


# By LLVM's name of the processor.
_MEASURED = {"znver4": Prefetch(2, 4096)}


def stream_prefetch(name: str | None = None) -> Prefetch:
    """What is best on a processor (default: the one that kernels are compiled for)."""
    return _MEASURED.get(name or processor().name, Prefetch())
