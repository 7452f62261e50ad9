"""The machine's ceilings, measured between the runs that are compared with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from genai.kernels.cpu.cores import default_threads

from ..machine.bandwidth import measure_bandwidth
from ..machine.products import measure_products

# More than a last-level cache of which other machines on the same host take their share.
_BUFFER_BYTES = 2**29
_SECONDS = 0.2


@dataclass
class Shares:
    """Collects speeds as shares of a ceiling that is measured right after each run.

    Attributes:
        unit: how much one unit of speed asks of the ceiling: bytes per token, operations per token.
        ceiling: measures it, per second.
    """

    unit: float
    ceiling: Callable[[], float]
    shares: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)

    def add(self, speed: float) -> None:
        """A run had this many units per second."""
        found = self.ceiling()
        self.ceilings.append(found)
        self.shares.append(speed * self.unit / found)

    def summary(self, name: str) -> dict[str, float]:
        """Median ceiling and median share."""
        return {name: statistics.median(self.ceilings), "share": statistics.median(self.shares)}


def bandwidth(threads: int | None) -> Callable[[], float]:
    """Bytes per second of reading memory with so many threads."""
    return lambda: measure_bandwidth(_BUFFER_BYTES, threads=threads, seconds=_SECONDS).bytes_per_second


def products(arithmetic: str, threads: int | None) -> Callable[[], float]:
    """Operations per second of registers alone, in one kind of arithmetic."""
    return lambda: measure_products(threads=threads or default_threads(), repeat=1, only=arithmetic)[arithmetic]
