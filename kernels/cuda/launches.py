"""A kernel with its arguments, ready to be launched over the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..ir import Per
from .driver import Driver, Grid
from .sources import CudaKernel

# The counts of a step that grids depend on. "tokens" is the number of tokens, of which the first "decode_rows" have
# decode numerics; "logits_rows" is the number of rows of logits. "splits" is the number of splits of the longest
# sequence, and "decode_splits" that of the longest sequence that has rows with decode numerics. "tiles_N" is the number
# of tiles of N rows. "apart" is 1 if every row is the only row of its sequence.
Counts = Mapping[str, int]
# The names of the values' row counts.
COUNTED = {Per.TOKEN: "tokens", Per.LOGITS: "logits_rows"}
# Loaded kernels, in the form that a driver launches.
Functions = Mapping[CudaKernel, Any]


class Start(Protocol):
    """A piece of work that every step starts."""

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """The kernels that the work needs."""

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Start the work for a step."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel in every step.

    Attributes:
        kernel: the kernel.
        arguments: struct of the kernel, written only once except for the fields in `counted`.
        counted: names of the fields that every step writes, with the name of the count for each field.
        grid: function that computes the grid from the counts of a step. If a dimension of the grid is 0, nothing is
            launched.
    """

    kernel: CudaKernel
    arguments: NDArray[np.void]
    counted: Mapping[str, str]
    grid: Callable[[Counts], Grid]

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """The kernel, as a tuple."""
        return (self.kernel,)

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Launch the kernel."""
        for field, count in self.counted.items():
            self.arguments[field] = counts[count]
        grid = self.grid(counts)
        if all(grid):
            driver.launch(functions[self.kernel], self.kernel, grid, self.arguments)


def bind(kernel: CudaKernel, **given: Any) -> NDArray[np.void]:
    """Return the struct of a kernel with every field written; mappings are nested structs.

    Raises:
        TypeError: if a field is missing or unknown.
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
