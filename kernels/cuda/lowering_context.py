"""The state of lowering: the launches of a step so far, and the memory, weights and tables that they use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..cache_layout import CacheLayer
from ..ir import Constants, Per
from .driver import Driver, Grid
from .launches import COUNTED, Counts, Launch, Start, bind
from .memory import Values
from .sources import CudaKernel
from .step import Capacity, StepTable
from .weights import DeviceWeights

if TYPE_CHECKING:  # lora.py imports this module
    from .lora import Deltas

NO_FIELDS: Mapping[str, str] = {}


@dataclass
class CudaLowering:
    """Collects the launches of ops, in order.

    Attributes:
        driver: the GPU.
        values: memory of values.
        constants: the program's constants.
        weights: the weights in device memory.
        layers: the pages in device memory, per cache layer.
        table: the step's numbers in device memory.
        capacity: the largest step.
        grouped: names of the values that are read as int8; see grouped.py.
        deltas: the adapter results that are still to be added.
        left_norms: the norms that matmuls compute themselves, by the names of the norms' results; see norms.py.
        normed: the fields of `NormedRows` of these norms.
        starts: the launches.
        held: memory that is held in addition to the memory of values.
    """

    driver: Driver
    values: Values
    constants: Constants
    weights: DeviceWeights
    layers: Sequence[CacheLayer | None]
    table: StepTable
    capacity: Capacity
    grouped: Collection[str]
    deltas: Deltas
    left_norms: Collection[str] = ()
    normed: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    _workspace: Any = None

    def launch(
        self, kernel: CudaKernel, per: Per, grid: Any, *, first: str = "", more: Mapping[str, str] = NO_FIELDS,
        **given: Any,
    ) -> None:  # fmt: skip
        """Add a launch of a kernel over the rows of a step.

        Args:
            kernel: the kernel.
            per: the unit in which rows are counted.
            grid: function that computes the grid from the number of rows.
            first: name of the count of rows before the first row, for kernels that can start at a later row.
            more: names of further fields that every step writes, with the names of their counts.
            given: other fields.
        """
        counted = COUNTED[per]
        fields = {"rows": counted, **more}
        if "first_row" in kernel.is_pointer:
            given["first_row"] = 0
            fields |= {"first_row": first} if first else {}

        def of(counts: Counts) -> Grid:
            found: Grid = grid(counts[counted] - counts.get(first, 0))
            return found

        arguments = bind(kernel, **dict.fromkeys(fields, 0) | given)
        self.starts.append(Launch(kernel, arguments, fields, of))

    def workspace(self, nbytes: int) -> Any:
        """Return memory that each launch may use while it runs."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            self._workspace = self.driver.zeros(nbytes)
            self.held.append(self._workspace)
        return self._workspace

    def vector(self, name: str) -> int:
        """Return the address of a constant as float32; 0 for ""."""
        return self.weights.address(self.constants, name)
