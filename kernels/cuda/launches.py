"""A kernel with its arguments, ready to be started with as many rows as a step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..ir import Per
from .driver import Driver, Grid
from .sources import CudaKernel

# What grids depend on in a step: "tokens", of which the first "decode_rows" have decode numerics; "logits_rows";
# "splits" of its longest sequence, "decode_splits" of the longest one whose rows have those; "tiles_N" of N rows;
# "apart": whether every row is the only one of its sequence.
Counts = Mapping[str, int]
# What counts the rows of values.
COUNTED = {Per.TOKEN: "tokens", Per.LOGITS: "logits_rows"}
# What a driver launches, by kernel.
Functions = Mapping[CudaKernel, Any]


class Start(Protocol):
    """Something that every step starts."""

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """Those that it needs."""

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Start them for a step."""


@dataclass(frozen=True)
class Launch:
    """One start of a kernel in every step.

    Attributes:
        arguments: its struct, written once but for what `counted` names.
        counted: fields that every step writes: the name of a count each.
        grid: from the counts of a step. Nothing is started where one of its sizes is 0.
    """

    kernel: CudaKernel
    arguments: NDArray[np.void]
    counted: Mapping[str, str]
    grid: Callable[[Counts], Grid]

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """The one."""
        return (self.kernel,)

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Start it once."""
        for field, count in self.counted.items():
            self.arguments[field] = counts[count]
        grid = self.grid(counts)
        if all(grid):
            driver.launch(functions[self.kernel], self.kernel, grid, self.arguments)


def bind(kernel: CudaKernel, **given: Any) -> NDArray[np.void]:
    """The struct of a kernel with every field written; dicts are structs inside it.

    Raises:
        TypeError: a field that is missing, or unknown.
    """
    arguments = np.zeros((), kernel.layout)
    named = {
        f"{name}.{inner}" if isinstance(value, Mapping) else name
        for name, value in given.items()
        for inner in (value if isinstance(value, Mapping) else [""])
    }
    if named != set(kernel.is_pointer):
        wrong = sorted(named ^ set(kernel.is_pointer))
        raise TypeError(f"{kernel.name}: fields of {kernel.arguments} are missing or unknown: {', '.join(wrong)}")
    for name, value in given.items():
        if isinstance(value, Mapping):
            for inner, number in value.items():
                arguments[name][inner] = number
        else:
            arguments[name] = value
    return arguments
