"""A graph: nodes, constants and typed values, with the editing operations that rewrites use.

The graph maintains an index of the producer and consumers of each value. Its methods update the index. After a direct
edit, call `update(node)` if the names or subgraphs of a node changed, and `invalidate()` after any other change (to
`nodes`, `inputs` or `initializers`). Look-ups cost O(1). Each structural edit costs at most one fast pass over the node
list, so pass several nodes to one call where possible.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from ..errors import GraphError
from .node import Changeable, Node, constant_tensor
from .tensor import OnnxTensor, SparseTensor
from .types import Type
from .uses import UseIndex, topological_order


@dataclass(eq=False)
class Value(Changeable):
    """A named value and its type (None = unknown)."""

    name: str
    type: Type | None = None
    doc_string: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class QuantizationAnnotation(Changeable):
    """The names of the tensors (such as SCALE_TENSOR, ZERO_POINT_TENSOR) that quantise one value."""

    tensor_name: str
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Graph(Changeable):
    """A graph: the model's main graph, a function's body, or the body of an If, Loop or Scan.

    Attributes:
        nodes: nodes; `read_model` returns them in topological order.
        initializers: constants by name; a name that is also in `inputs` is only that input's default.
        values: types of values between nodes (ONNX `value_info`).
        overridable_initializers: False for IR versions before 4, in which every initializer had to be listed as an
            input even if it was a constant.
    """

    name: str = ""
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, OnnxTensor] = field(default_factory=dict)
    sparse_initializers: dict[str, SparseTensor] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    doc_string: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    quantization_annotation: list[QuantizationAnnotation] = field(default_factory=list)
    overridable_initializers: bool = True

    def __post_init__(self) -> None:
        self._index: UseIndex | None = None
        self._stale: dict[Node, None] = {}
        self._names: set[str] | None = None
        self._reserved: set[str] = set()
        self._next_number: dict[str, int] = {}
        self._owner: tuple[weakref.ref[Graph], weakref.ref[Node]] | None = None

    # Look-ups

    def producer(self, name: str) -> Node | None:
        """Return the node of this graph that computes a value; None for inputs, initializers and outer values."""
        return self._uses().producer(name)

    def consumers(self, name: str) -> list[Node]:
        """Return the nodes of this graph that use a value, without duplicates; for a subgraph, the enclosing node."""
        return self._uses().consumers(name)

    def is_input(self, name: str) -> bool:
        """Return True if a value is an input of this graph."""
        return name in [value.name for value in self.inputs]

    def is_output(self, name: str) -> bool:
        """Return True if a value is an output of this graph."""
        return name in [value.name for value in self.outputs]

    def is_used(self, name: str) -> bool:
        """Return True if a node uses a value, or the value is an output."""
        return bool(self.consumers(name)) or self.is_output(name)

    def defines(self, name: str) -> bool:
        """Return True if this graph itself defines a value; False if it captures the value from an outer graph."""
        if name in self.initializers or name in self.sparse_initializers:
            return True
        return self.producer(name) is not None or self.is_input(name)

    def constant_tensor(self, name: str) -> OnnxTensor | None:
        """Return the constant with the given name, or None.

        A constant is an initializer that callers cannot override, or the result of a Constant node, in this graph or
        (for a captured name) in an outer graph.
        """
        tensor = self.initializers.get(name)
        if tensor is not None:
            return None if self.overridable_initializers and self.is_input(name) else tensor
        producer = self.producer(name)
        if producer is not None:
            return constant_tensor(producer)
        outer = self.outer
        return None if outer is None or not name or self.defines(name) else outer.constant_tensor(name)

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return the value of `constant_tensor(name)` as a read-only array, or None."""
        tensor = self.constant_tensor(name)
        return None if tensor is None else tensor.array()

    def type_of(self, name: str) -> Type | None:
        """Return a value's type, declared here or in the outer graph that defines the value; None if unknown."""
        for value in self.inputs:
            if value.name == name:
                return value.type
        declared = self.values.get(name)
        if declared is not None and declared.type is not None:
            return declared.type
        for value in self.outputs:
            if value.name == name and value.type is not None:
                return value.type
        constant = self.initializers.get(name) or self.sparse_initializers.get(name)
        if constant is not None:
            return constant.type
        outer = self.outer
        return None if outer is None or not name or self.defines(name) else outer.type_of(name)

    @property
    def outer(self) -> Graph | None:
        """The graph that contains this graph, after it was read or traversed; None for a main graph."""
        return None if self._owner is None else self._owner[0]()

    def nested(self) -> Iterator[Graph]:
        """Yield this graph and all subgraphs of its nodes, outer graphs first."""
        self._uses()
        yield self
        if not self._uses().has_subgraphs():
            return
        for node in [node for node in self.nodes if node.attributes]:
            for subgraph in node.subgraphs():
                yield from subgraph.nested()

    # Edits

    def append(self, *nodes: Node) -> None:
        """Append nodes at the end."""
        self._insert(len(self.nodes), nodes)

    def insert_before(self, anchor: Node, *nodes: Node) -> None:
        """Insert nodes before a node of this graph, in the given order."""
        self._insert(self._position(anchor), nodes)

    def remove_nodes(self, nodes: Iterable[Node]) -> None:
        """Remove nodes. The caller must replace uses of their outputs, before or after."""
        removed = dict.fromkeys(nodes)
        if not removed:
            return
        index = self._uses()
        for node in removed:
            if node not in index:
                raise _not_here(node, self)
        if len(removed) == 1:
            del self.nodes[self._position(*removed)]
        else:
            self.nodes[:] = [node for node in self.nodes if node not in removed]
        for node in removed:
            index.remove(node)
            self._stale.pop(node, None)
        self._touch()

    def replace_node(self, node: Node, *replacements: Node) -> None:
        """Replace a node with other nodes."""
        self.insert_before(node, *replacements)
        self.remove_nodes([node])

    def replace_uses(self, old: str, new: str, *, include_outputs: bool = False) -> int:
        """Replace one value with another wherever it is used: by nodes, and by captures in their subgraphs.

        Args:
            include_outputs: True to also replace `old` in the graph's outputs. This renames the output, which
                is visible to callers of a main graph.

        Returns:
            The number of nodes and outputs that changed.

        Raises:
            GraphError: a subgraph that captures `old` defines its own value `new`.
        """
        users = self.consumers(old)
        for node in users:
            if old in node.inputs:
                node.inputs[:] = [new if name == old else name for name in node.inputs]
            for subgraph in node.subgraphs():
                subgraph._replace_captured(old, new)
            self.update(node)
        renamed = [value for value in self.outputs if value.name == old] if include_outputs else []
        for value in renamed:
            value.name = new
        if renamed:
            self._touch()
        return len(users) + len(renamed)

    def rename(self, old: str, new: str) -> None:
        """Rename a value of this graph everywhere: its definition, uses, type and output."""
        producer = self.producer(old)
        if producer is not None:
            producer.outputs[:] = [new if name == old else name for name in producer.outputs]
            self.update(producer)
        for value in self.inputs:
            if value.name == old:
                value.name = new
        if old in self.initializers:
            self.initializers[new] = self.initializers.pop(old).renamed(new)
        if old in self.sparse_initializers:
            sparse = self.sparse_initializers.pop(old)
            self.sparse_initializers[new] = replace(sparse, values=sparse.values.renamed(new))
        if old in self.values:
            self.values[new] = replace(self.values.pop(old), name=new)
        for annotation in self.quantization_annotation:
            if annotation.tensor_name == old:
                annotation.tensor_name = new
            annotation.parameters.update({key: new for key, name in annotation.parameters.items() if name == old})
        self.replace_uses(old, new, include_outputs=True)
        self._touch()

    def add_initializer(self, tensor: OnnxTensor) -> None:
        """Add or replace a constant, under its own name."""
        self.initializers[tensor.name] = tensor
        self._note_names({tensor.name})
        self._touch()

    def add_constant(self, prefix: str, array: NDArray[Any]) -> str:
        """Add a constant under a fresh name; return the name."""
        name = self.fresh_name(prefix)
        self.add_initializer(OnnxTensor.from_array(name, array))
        return name

    def remove_initializer(self, name: str) -> None:
        """Remove a constant, dense or sparse, if it exists."""
        self.initializers.pop(name, None)
        self.sparse_initializers.pop(name, None)
        self._touch()

    def fresh_name(self, prefix: str) -> str:
        """Return and reserve a name that no value or node of this graph, its inner graphs or its outer graphs uses."""
        root = self._root()
        if root._names is None:
            root._names = root._all_names()
        number, name = root._next_number.get(prefix, 0), prefix
        while not name or name in root._names or name in root._reserved:
            number += 1
            name = f"{prefix}_{number}"
        root._next_number[prefix] = number
        root._reserved.add(name)
        return name

    def topological_sort(self) -> None:
        """Order the nodes so that each node comes after the nodes that it needs; move as few nodes as possible."""
        self.nodes[:] = topological_order(self.nodes)

    # The index

    def update(self, node: Node) -> None:
        """Record that a node's inputs, outputs or subgraphs changed."""
        if self._index is not None and node in self._index:
            self._index.update(node)
            self._adopt(node)
        self._touch()

    def invalidate(self) -> None:
        """Discard the index; it is rebuilt at the next use."""
        self._index = None
        self._root()._names = None
        self._touch()

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.nodes)} nodes, {len(self.initializers)} initializers)"

    def _uses(self) -> UseIndex:
        # The most common direct edit, graph.nodes.append(...), is detected by the changed length.
        if self._index is None or len(self._index) != len(self.nodes):
            self._index = UseIndex(self.nodes)
            self._root()._names = None
            self._stale.clear()
            for node in self.nodes:
                self._adopt(node)
        while self._stale:
            self._index.update(self._stale.popitem()[0])
        return self._index

    def _adopt(self, node: Node) -> None:
        """Link a node's subgraphs, at any depth, to this graph, so that edits of the subgraphs update its index."""
        for subgraph in node.subgraphs():
            subgraph._owner = (weakref.ref(self), weakref.ref(node))
            subgraph._uses()

    def _touch(self) -> None:
        """Mark the enclosing nodes, up to the root, as stale, because a change may affect what this graph captures."""
        if self._owner is None:
            return
        outer, node = self._owner[0](), self._owner[1]()
        if outer is not None and node is not None and outer._index is not None and node in outer._index:
            outer._stale[node] = None
            outer._touch()

    def _insert(self, position: int, nodes: tuple[Node, ...]) -> None:
        index = self._uses()
        self.nodes[position:position] = nodes
        for node in nodes:
            index.add(node)
            self._adopt(node)
            self._note_names(_names_of(node))
        self._touch()

    def _position(self, anchor: Node) -> int:
        try:
            return self.nodes.index(anchor)
        except ValueError:
            raise _not_here(anchor, self) from None

    def _replace_captured(self, old: str, new: str) -> None:
        if self.defines(old):
            return
        if self.defines(new):
            raise GraphError(
                f"value {old!r} cannot be replaced by {new!r} inside subgraph {self.name!r}",
                "that subgraph defines its own value with the new name",
                "get the new name from graph.fresh_name()",
            )
        self.replace_uses(old, new, include_outputs=True)

    def _root(self) -> Graph:
        graph = self
        while (outer := graph.outer) is not None:
            graph = outer
        return graph

    def _all_names(self) -> set[str]:
        names = {value.name for value in (*self.inputs, *self.outputs)}
        names.update(self.initializers, self.sparse_initializers, self.values)
        for node in self.nodes:
            names |= _names_of(node)
        return names

    def _note_names(self, names: set[str]) -> None:
        root = self._root()
        if root._names is not None:
            root._names |= names


def _names_of(node: Node) -> set[str]:
    names = {node.name, *node.inputs, *node.outputs}
    for subgraph in node.subgraphs():
        names |= subgraph._all_names()
    return names


def _not_here(node: Node, graph: Graph) -> GraphError:
    return GraphError(
        f"{node!r} is not in graph {graph.name!r}",
        "only nodes of the graph itself can be moved or removed",
        "find the node with graph.producer() or graph.consumers(), or in a subgraph",
    )
