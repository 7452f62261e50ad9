"""What the micro-kernels have in common: a loop of steps along the columns, in which tiles of weights meet rows."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from ..emit import Emitter


@dataclass(frozen=True)
class Step:
    """Values of one step of a micro-kernel's loop.

    Attributes:
        index: its number. part: its number within the record.
        records: addresses of the record in each tile.
        rows: addresses of the activations' rows; scales and corrections begin at these offsets in a row.
    """

    index: Any
    part: Any
    records: list[Any]
    rows: list[Any]
    scales: Any
    corrections: Any


class Kind(Hashable, Protocol):
    """What a weight and an activation are, and how a step along the columns of a tile meets a row."""

    @property
    def name(self) -> str: ...

    @property
    def steps_per_record(self) -> int: ...

    @property
    def record_bytes(self) -> int: ...

    def step(self, e: Emitter, step: Step, sums: list[Any]) -> list[Any]:
        """Add the products of a step to sums [row][tile]."""
