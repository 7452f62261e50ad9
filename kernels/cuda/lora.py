"""Launches of LoRA adapters.

Before the matmuls that read a value, hidden = weight * (x @ A.T) is computed for the targets of all these matmuls.
After the matmuls, hidden @ B.T is added to the results, for several matmuls in one launch. A launch has the same
arguments in every step. The step's tables contain the adapters that each row uses, and omit rows without adapters; see
lora.cuh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device import UnsupportedOp
from ..ir import LoraDelta, LoraShrink, Per
from .adapters import last_tile
from .driver import Driver
from .launches import Counts, Functions, bind
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel

# Maximum number of targets of one launch: MOST_PARTS.
_MOST_PARTS = 4
_SHRINK_THREADS, _EXPAND_THREADS = 256, 128
# Number of columns of a block of the expand kernels.
_EXPAND_COLUMNS = 256
_NOWHERE = np.iinfo(np.int32).max


def shrink_kernels() -> tuple[CudaKernel, CudaKernel]:
    """Return the kernels that run before matmuls: one for tiles of few rows, and one for tiles of many rows."""
    decode, prefill = (
        CudaKernel("lora_shrink.cu", name, "ShrinkArguments", _SHRINK_THREADS) for name in ("shrink_few", "shrink_many")
    )
    return decode, prefill


def expand_kernels() -> tuple[CudaKernel, CudaKernel]:
    """Return the kernels that run after matmuls: one for tiles of few rows, and one for tiles of many rows."""
    decode, prefill = (
        CudaKernel("lora_expand.cu", name, "ExpandArguments", _EXPAND_THREADS) for name in ("expand_few", "expand_many")
    )
    return decode, prefill


def _start(
    kernels: tuple[CudaKernel, CudaKernel], grids: Any, arguments: NDArray[np.void], driver: Driver,
    functions: Functions,
) -> None:  # fmt: skip
    for kernel, grid in zip(kernels, grids, strict=True):
        if all(grid):
            driver.launch(functions[kernel], kernel, grid, arguments)


@dataclass(eq=False)
class ShrinkLaunch:
    """The launch that computes the hidden values of targets that read the same value.

    Attributes:
        x: name of the value.
        arguments: the struct.
        parts: number of targets.
    """

    x: str
    arguments: NDArray[np.void]
    parts: int = 0
    kernels: tuple[CudaKernel, CudaKernel] = field(default_factory=shrink_kernels)

    def add(self, target: int, hidden: int) -> None:
        """Add a target with hidden values at an address."""
        self.arguments["targets"][self.parts], self.arguments["hidden"][self.parts] = target, hidden
        self.parts += 1

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Launch the kernels for the tiles of a step."""
        grids = [(counts[f"{kind}_ranks"], counts[f"{kind}_tiles"], self.parts) for kind in ("few", "many")]
        _start(self.kernels, grids, self.arguments, driver, functions)


@dataclass(eq=False)
class ExpandLaunch:
    """The launch that adds the results of adapters to the results of matmuls.

    Attributes:
        arguments: the struct.
        parts: number of matmuls.
        blocks: total number of column blocks in all parts.
    """

    arguments: NDArray[np.void]
    parts: int = 0
    blocks: int = 0
    kernels: tuple[CudaKernel, CudaKernel] = field(default_factory=expand_kernels)

    def add(self, target: int, hidden: int, out: DeviceRows) -> None:
        """Add a matmul."""
        given = {"targets": target, "hidden": hidden, "out": out.address, "out_stride": out.stride}
        for name, value in (given | {"outputs": out.width, "first_block": self.blocks}).items():
            self.arguments[name][self.parts] = value
        self.parts, self.blocks = self.parts + 1, self.blocks + -(-out.width // _EXPAND_COLUMNS)

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Launch the kernels for the tiles of a step."""
        grids = [(self.blocks, counts[f"{kind}_tiles"], 1) for kind in ("few", "many")]
        _start(self.kernels, grids, self.arguments, driver, functions)


def shrink(at: CudaLowering, op: LoraShrink) -> None:
    """Add a target to the preceding launch if that launch reads the same value and has room; otherwise add a launch.

    Raises:
        UnsupportedOp: if the rows are not rows of tokens.
    """
    x, last = at.values[op.x], at.starts[-1] if at.starts else None
    if x.per is not Per.TOKEN:
        raise UnsupportedOp("CUDA has no kernels for adapters of rows of logits")
    if not isinstance(last, ShrinkLaunch) or last.x != op.x or last.parts == _MOST_PARTS:
        empty = [0] * _MOST_PARTS
        arguments = bind(
            shrink_kernels()[0], x=x.address, step=at.table.address("adapters"), hidden=empty, x_stride=x.stride,
            targets=empty, columns=x.width, aligned=int(x.address % 16 == 0 and x.stride % 4 == 0),
            last_tile=last_tile(at.capacity.adapter_numbers),
        )  # fmt: skip
        last = ShrinkLaunch(op.x, arguments)
        at.starts.append(last)
    last.add(op.target, at.driver.address(_hidden(at, op.out)))


def _hidden(at: CudaLowering, name: str) -> Any:
    """Return the memory of a target's hidden values, which live until its matmul has been computed."""
    return at.values.derived(name, "hidden", 4 * at.capacity.hidden, lambda memory: None)


@dataclass(eq=False)
class Deltas:
    """Adapter results that are still to be added to matmul results that no op has read yet; one launch adds several."""

    _launch: ExpandLaunch | None = None
    _outs: list[DeviceRows] = field(default_factory=list)
    _held: list[Hashable] = field(default_factory=list)

    def add(self, at: CudaLowering, delta: LoraDelta, out: DeviceRows) -> None:
        """Record that a matmul was lowered, so that the results of its adapters are added later."""
        if self._launch is None:
            empty = [0] * _MOST_PARTS
            arguments = bind(
                expand_kernels()[0], step=at.table.address("adapters"), hidden=empty, out=empty, out_stride=empty,
                targets=empty, outputs=empty, first_block=[_NOWHERE] * _MOST_PARTS,
                last_tile=last_tile(at.capacity.adapter_numbers),
            )  # fmt: skip
            self._launch = ExpandLaunch(arguments)
        hidden = _hidden(at, delta.hidden)
        self._launch.add(delta.target, at.driver.address(hidden), out)
        self._outs.append(out)
        # The op that computed both memories may release them before the launch is added.
        self._held += [at.values.hold(hidden), at.values.hold(out.memory)]
        if self._launch.parts == _MOST_PARTS:
            self.settle(at)

    def before(self, at: CudaLowering, names: Iterable[str]) -> None:
        """Add the pending results if one of these values, which are about to be read, needs the results."""
        read = [at.values.buffers[name].memory for name in names if name in at.values.buffers]
        if any(out.memory is memory for out in self._outs for memory in read):
            self.settle(at)

    def settle(self, at: CudaLowering) -> None:
        """Add the launch of all pending results now."""
        if self._launch is not None:
            at.starts.append(self._launch)
        for key in self._held:
            at.values.release(key)
        self._launch, self._outs, self._held = None, [], []
