"""Operators that no op describes, as functions of arrays on the host between kernels. A step waits for each: what
they read is copied to the host, and what kernels read of their results is copied back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..device import StepContext
from ..ir import HostNode, Ids, Op, OpProgram, RowsType
from .driver import Driver
from .launches import COUNTED, Counts, Functions
from .memory import DeviceRows, Values, as_float32
from .sources import CudaKernel


@dataclass(frozen=True)
class HostPart:
    """Host nodes that follow each other.

    Attributes:
        inputs: values that kernels made, and they read. outputs: those that they make, and kernels read.
    """

    nodes: tuple[HostNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def lower(self, values: Values, known: dict[str, Any]) -> HostStart:
        """What runs them in a step; `known` has what host nodes know by name."""
        reads = {name: (values[name], values.types[name]) for name in self.inputs}
        return HostStart(self.nodes, reads, {name: values.make(name) for name in self.outputs}, known)


@dataclass(frozen=True)
class HostStart:
    """See `launches.Start`."""

    nodes: tuple[HostNode, ...]
    reads: Mapping[str, tuple[DeviceRows, RowsType]]
    writes: Mapping[str, DeviceRows]
    known: dict[str, Any]

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """None."""
        return ()

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Run them, when everything is done that was started before."""
        for name, (rows, type_) in self.reads.items():
            self.known[name] = driver.download(rows.view(counts[COUNTED[type_.per]])).reshape(type_.shape)
        for node in self.nodes:
            self.known.update(node.call(self.known))
        for name, rows in self.writes.items():
            numbers = as_float32(np.asarray(self.known[name]).reshape(-1, rows.width))
            driver.write(rows.view(len(numbers)), numbers)


def parts_of(program: OpProgram) -> Iterator[Op | HostPart]:
    """The parts of a program in order, host nodes that follow each other as one."""
    made = {name for op in program.ops for name in op.outputs}
    read = {name for op in program.ops for name in op.inputs}
    for is_host, group in groupby(program.parts, lambda part: isinstance(part, HostNode)):
        parts: Sequence[Any] = list(group)
        if not is_host:
            yield from parts
            continue
        inputs = dict.fromkeys(name for node in parts for name in node.inputs if name in made)
        outputs = dict.fromkeys(name for node in parts for name in node.outputs if name in read)
        yield HostPart(tuple(parts), tuple(inputs), tuple(outputs))


def known_of(program: OpProgram, step: StepContext, given: Mapping[str, Any]) -> dict[str, Any]:
    """What host nodes know before a step."""
    integers = {Ids.TOKENS: step.tokens, Ids.POSITIONS: step.positions}
    return {**given, **{name: integers[ids][None].astype(dtype) for name, (ids, dtype) in program.ids.items()}}
