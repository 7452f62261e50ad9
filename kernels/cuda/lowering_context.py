"""What an op is lowered into: the launches of a step so far, and the memory, weights and tables that they use."""

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

if TYPE_CHECKING:  # what adapters are still to add becomes launches, too
    from .lora import Deltas

NO_FIELDS: Mapping[str, str] = {}


@dataclass
class CudaLowering:
    """Collects the launches of ops, in order.

    Attributes:
        layers: per cache layer its pages, in device memory.
        grouped: names of the values that are read as bytes; see grouped.py.
        left_norms: of those that products norm themselves; normed: their fields of `NormedRows`. See norms.py.
        starts: the launches. held: memory besides that of values. deltas: what adapters are still to add.
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
        """Add a start of a kernel over the rows of a step.

        Args:
            grid: from the number of rows. first: what counts the rows before the first one, for kernels that can begin
                there. more: fields that steps write besides.
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
        """Memory that every launch may use for as long as it runs, one after another."""
        if self._workspace is None or self._workspace.nbytes < nbytes:
            self._workspace = self.driver.zeros(nbytes)
            self.held.append(self._workspace)
        return self._workspace

    def vector(self, name: str) -> int:
        """Where a constant begins as float32; 0 for ""."""
        return self.weights.address(self.constants, name)
