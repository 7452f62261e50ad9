"""Parts of a plan that run as tapes.

While a plan is built, nodes that have a row rule gather in a segment; the first that has none ends it and runs by its
Python kernel. A decoder of known operators is one segment, so Python is entered once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.tape.context import Word
from genai.kernels.cpu.tape.program import Rows, Tape
from genai.kernels.cpu.tape.walkers import StepCancelled, Walkers
from genai.kernels.registry import NodeSpec
from genai.kernels.row_ops.base import IdType, RowNode, RowType, ValueType, find_rule
from genai.kernels.row_ops.fusion import fuse
from genai.kernels.row_ops.products import Product
from genai.kernels.row_ops.writer import Writer
from genai.kernels.step import StepContext

from ..errors import StepInterrupted
from ..graph.ir import Graph, Node
from ..graph.types import TensorType

# Rows that a tape is first made for.
_FIRST_CAPACITY = {Word.TOKENS: 16, Word.WANTED: 4}
# Rough speeds of one thread, for guessing how long a step takes: bytes of weights, and products.
_BYTES_PER_SECOND, _PRODUCTS_PER_SECOND = 1e10, 5e11


class Segments:
    """Gathers the row nodes of a graph while a plan is built.

    Args:
        graph: whose nodes come in order.
        walkers: who will walk the tapes.
        ids: graph inputs that every step has.
    """

    def __init__(self, graph: Graph, walkers: Walkers, ids: Mapping[str, Word]) -> None:
        self._graph, self._walkers = graph, walkers
        self._types: dict[str, ValueType] = {name: IdType(word) for name, word in ids.items()}
        self._nodes: list[RowNode] = []
        self._op_types: list[str] = []
        self._sources: set[Node] = set()

    def take(self, node: Node, spec: NodeSpec) -> bool:
        """Take a node into the open segment, if a rule serves it."""
        rule = find_rule(spec.domain, spec.op_type)
        if rule is None or spec.subgraphs:
            return False
        made = rule(spec, [self._types.get(name) for name in spec.inputs])
        if made is None:
            return False
        self._nodes.append(made)
        self._op_types.append(node.op_type)
        self._sources.add(node)
        self._types.update(made.outputs)
        return True

    def passed(self, node: Node) -> None:
        """A node runs by its Python kernel: note which of its outputs later row nodes can read."""
        counted = {type_.counted for name in node.inputs if isinstance(type_ := self._types.get(name), RowType)}
        for name in node.outputs:
            if name and len(counted) == 1:
                self._types[name] = _row_type(self._graph, name, next(iter(counted)))

    def close(self) -> TapeStep | None:
        """End the open segment; None if it is empty."""
        if not self._nodes:
            return None
        made = {name: type_ for node in self._nodes for name, type_ in node.outputs.items()}
        keep = {name: type_ for name, type_ in made.items() if self._is_read_outside(name)}
        nodes = fuse(self._nodes, keep)
        given = {name: self._types[name] for node in nodes for name in node.inputs if name not in made}
        rows = {name: type_ for name, type_ in given.items() if isinstance(type_, RowType)}
        outputs = {value.name for value in self._graph.outputs}
        single = tuple(zip(self._op_types, self._nodes, strict=True))
        step = TapeStep(nodes, rows, keep, self._walkers, copied=outputs, single=single)
        self._nodes, self._op_types, self._sources = [], [], set()
        return step

    def _is_read_outside(self, name: str) -> bool:
        return self._graph.is_output(name) or any(node not in self._sources for node in self._graph.consumers(name))


class TapeStep:
    """The kernel of a plan's step that walks a tape, which is made for as many rows as have been needed so far.

    Args:
        nodes: in order. given: rows that they read and do not make. made: rows that are read outside.
        copied: names of those that the next step must not overwrite.
        single: the nodes before any were fused, and what the graph calls them.
    """

    def __init__(
        self,
        nodes: Sequence[RowNode],
        given: Mapping[str, RowType],
        made: Mapping[str, RowType],
        walkers: Walkers,
        copied: Collection[str],
        single: Sequence[tuple[str, RowNode]] = (),
    ) -> None:
        self.nodes, self.given, self.made = nodes, dict(given), dict(made)
        self._single = single
        self._walkers = walkers
        self._copied = copied
        self._capacity = dict.fromkeys(_FIRST_CAPACITY, 0)
        self._tape: Tape | None = None
        self._places: dict[str, Rows] = {}
        self.products = [node for node in nodes if isinstance(node, Product)]
        self._bytes = sum(product.weight_bytes for product in self.products)
        self._weights = sum(product.num_weights for product in self.products)

    @property
    def partial_floats(self) -> int:
        """Numbers per piece of context that its attention needs room for."""
        return max((getattr(node, "partial_floats", 0) for node in self.nodes), default=0)

    def __call__(self, context: StepContext, inputs: Sequence[Any]) -> tuple[Any, ...]:
        counts = _counts(context)
        tape = self._tape_for(context.layers, counts)
        for (name, type_), array in zip(self.given.items(), inputs, strict=True):
            self._view(name, type_, counts)[...] = np.asarray(array).reshape(-1, type_.width)
        self._walk(tape, context, counts)
        return tuple(self._result(name, type_, counts) for name, type_ in self.made.items())

    def walk(self, context: StepContext) -> None:
        """Walk the tape over what is in its memory: for measuring how long that takes."""
        counts = _counts(context)
        self._walk(self._tape_for(context.layers, counts), context, counts)

    def _walk(self, tape: Tape, context: StepContext, counts: Mapping[Word, int]) -> None:
        seconds = self._bytes / _BYTES_PER_SECOND + self._weights * counts[Word.TOKENS] / _PRODUCTS_PER_SECOND
        try:
            self._walkers.walk(tape, context.table, seconds=seconds / self._walkers.threads)
        except StepCancelled:
            raise StepInterrupted("the step was given up", "its sequences were cancelled", "ask again") from None

    def apart(self) -> list[tuple[str, TapeStep]]:
        """The same work with a tape per node, so that every value can be seen; with the nodes' types in the graph."""
        types = {**self.given, **{name: type_ for _, node in self._single for name, type_ in node.outputs.items()}}
        return [
            (op_type, TapeStep([node], {name: types[name] for name in node.inputs}, node.outputs, self._walkers, ()))
            for op_type, node in self._single
        ]

    def prepare(self, layers: Sequence[Any]) -> None:
        """Make the tape for some rows, and its kernels, so that the first step does not wait.

        Args:
            layers: as in StepContext.
        """
        self._tape_for(layers, _FIRST_CAPACITY)

    def _tape_for(self, layers: Sequence[Any], counts: Mapping[Word, int]) -> Tape:
        if self._tape is None or any(count > self._capacity[word] for word, count in counts.items()):
            for word, count in counts.items():
                while self._capacity[word] < count:
                    self._capacity[word] = max(_FIRST_CAPACITY[word], 2 * self._capacity[word])
            self._tape, self._places = None, {}  # give the memory back first
            writer = Writer(self._capacity, layers)
            self._tape = writer.write(self.nodes, self.made, self.given)
            self._places = writer.places
        return self._tape

    def _view(self, name: str, type_: RowType, counts: Mapping[Word, int]) -> NDArray[np.float32]:
        rows, count = self._places[name], counts[type_.counted]
        memory: NDArray[np.uint8] = rows.held
        first = rows.address - memory.ctypes.data
        return np.ndarray((count, type_.width), np.float32, memory, first, (rows.stride, 4))

    def _result(self, name: str, type_: RowType, counts: Mapping[Word, int]) -> NDArray[np.float32]:
        view = self._view(name, type_, counts)
        return (view.copy() if name in self._copied else view).reshape(type_.shape)


def _counts(context: StepContext) -> dict[Word, int]:
    return {Word.TOKENS: len(context.positions), Word.WANTED: len(context.wanted_rows)}


def _row_type(graph: Graph, name: str, counted: Word) -> RowType | None:
    """What is known of a value that a Python kernel makes: rows, if it is [1, rows, features]."""
    found = graph.type_of(name)
    shape = found.shape if isinstance(found, TensorType) else None
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int) or isinstance(shape[1], int):
        return None
    return RowType((1, -1, shape[2]), shape[2], counted)
