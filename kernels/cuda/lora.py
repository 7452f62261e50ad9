"""Launches of low-rank adapters: before products that read a value, hidden = weight * (x @ A.T) at all their targets;
behind products hidden @ B.T, for several of them together.

A launch has the same arguments in every step. Which rows go through which adapters is read from the step's tables,
where rows without adapters are not named at all; see lora.cuh.
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

# Targets of one launch: MOST_PARTS.
_MOST_PARTS = 4
_SHRINK_THREADS, _EXPAND_THREADS = 256, 128
# Columns of a block of expanding.
_EXPAND_COLUMNS = 256
_NOWHERE = np.iinfo(np.int32).max


def shrink_kernels() -> tuple[CudaKernel, CudaKernel]:
    """The kernels before products, of tiles of few rows and of many."""
    decode, prefill = (
        CudaKernel("lora_shrink.cu", name, "ShrinkArguments", _SHRINK_THREADS) for name in ("shrink_few", "shrink_many")
    )
    return decode, prefill


def expand_kernels() -> tuple[CudaKernel, CudaKernel]:
    """The kernels behind products."""
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
    """Hidden numbers of targets that read the same value.

    Attributes:
        x: its name. parts: how many targets there are.
    """

    x: str
    arguments: NDArray[np.void]
    parts: int = 0
    kernels: tuple[CudaKernel, CudaKernel] = field(default_factory=shrink_kernels)

    def add(self, target: int, hidden: int) -> None:
        """One more target, whose hidden numbers begin at an address."""
        self.arguments["targets"][self.parts], self.arguments["hidden"][self.parts] = target, hidden
        self.parts += 1

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Start what the step has tiles for."""
        grids = [(counts[f"{kind}_ranks"], counts[f"{kind}_tiles"], self.parts) for kind in ("few", "many")]
        _start(self.kernels, grids, self.arguments, driver, functions)


@dataclass(eq=False)
class ExpandLaunch:
    """What adapters add to products.

    Attributes:
        blocks: of columns, of all parts.
    """

    arguments: NDArray[np.void]
    parts: int = 0
    blocks: int = 0
    kernels: tuple[CudaKernel, CudaKernel] = field(default_factory=expand_kernels)

    def add(self, target: int, hidden: int, out: DeviceRows) -> None:
        """One more product."""
        given = {"targets": target, "hidden": hidden, "out": out.address, "out_stride": out.stride}
        for name, value in (given | {"outputs": out.width, "first_block": self.blocks}).items():
            self.arguments[name][self.parts] = value
        self.parts, self.blocks = self.parts + 1, self.blocks + -(-out.width // _EXPAND_COLUMNS)

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Start what the step has tiles for."""
        grids = [(self.blocks, counts[f"{kind}_tiles"], 1) for kind in ("few", "many")]
        _start(self.kernels, grids, self.arguments, driver, functions)


def shrink(at: CudaLowering, op: LoraShrink) -> None:
    """Add a target to the launch before it, if that reads the same value and has room, else a launch.

    Raises:
        UnsupportedOp: rows of something else than tokens.
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
    """Memory of the hidden numbers of a target, until its product has been computed."""
    return at.values.derived(name, "hidden", 4 * at.capacity.hidden, lambda memory: None)


@dataclass(eq=False)
class Deltas:
    """What is to be added to products whose results nobody has read yet: one launch does it for several."""

    _launch: ExpandLaunch | None = None
    _outs: list[DeviceRows] = field(default_factory=list)
    _held: list[Hashable] = field(default_factory=list)

    def add(self, at: CudaLowering, delta: LoraDelta, out: DeviceRows) -> None:
        """The launches of a product have been added: so is what its adapters change, soon."""
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
        # The op that made it may be done with both before the launch is there.
        self._held += [at.values.hold(hidden), at.values.hold(out.memory)]
        if self._launch.parts == _MOST_PARTS:
            self.settle(at)

    def before(self, at: CudaLowering, names: Iterable[str]) -> None:
        """These values are about to be read."""
        read = [at.values.buffers[name].memory for name in names if name in at.values.buffers]
        if any(out.memory is memory for out in self._outs for memory in read):
            self.settle(at)

    def settle(self, at: CudaLowering) -> None:
        """Everything is added now."""
        if self._launch is not None:
            at.starts.append(self._launch)
        for key in self._held:
            at.values.release(key)
        self._launch, self._outs, self._held = None, [], []
