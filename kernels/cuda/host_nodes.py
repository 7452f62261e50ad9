"""Operators without an op, as functions of host arrays that run between kernels.

A step waits for each of these operators: the inputs are copied to the host, and the results that kernels read are
copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..device import StepContext
from ..ir import HostNode, Op, OpProgram, RowsType
from .driver import Driver
from .launches import COUNTED, Counts, Functions
from .memory import DeviceRows, Values, as_float32
from .sources import CudaKernel


@dataclass(frozen=True)
class HostPart:
    """Consecutive host nodes.

    Attributes:
        nodes: the nodes.
        inputs: names of values that kernels compute and these nodes read.
        outputs: names of values that these nodes compute and kernels read.
    """

    nodes: tuple[HostNode, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def lower(self, values: Values, known: dict[str, Any]) -> HostStart:
        """Return a start that runs the nodes in a step; `known` holds the values of host nodes by name."""
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
        """An empty tuple, because host nodes launch no kernels."""
        return ()

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Run the nodes after all work that was started earlier is done."""
        for name, (rows, type_) in self.reads.items():
            self.known[name] = driver.download(rows.view(counts[COUNTED[type_.per]])).reshape(type_.shape)
        for node in self.nodes:
            self.known.update(node.call(self.known))
        for name, rows in self.writes.items():
            numbers = as_float32(np.asarray(self.known[name]).reshape(-1, rows.width))
            driver.write(rows.view(len(numbers)), numbers)


def parts_of(program: OpProgram) -> Iterator[Op | HostPart]:
    """Yield the parts of a program in order, with consecutive host nodes as one part."""
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
    """Return the values that are known to host nodes before a step."""
    return {**given, **{name: step.integers(ids)[None].astype(dtype) for name, (ids, dtype) in program.ids.items()}}
