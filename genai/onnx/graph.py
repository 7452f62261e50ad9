"""A graph: nodes, constants and typed values, with the edits that rewrites are made of.

The graph keeps an index of who makes and who uses each value. The rule: its methods keep the index right; after
editing by hand, call `update(node)` for a node whose names or subgraphs changed, and `invalidate()` for anything else
(`nodes`, `inputs`, `initializers`). Lookups cost O(1); each structural edit costs one fast pass over the node list at
most, so pass several nodes to one call where you can.
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
    """A named value and what is known of its type (None: nothing)."""

    name: str
    type: Type | None = None
    doc_string: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class QuantizationAnnotation(Changeable):
    """Names of the tensors (such as SCALE_TENSOR, ZERO_POINT_TENSOR) that quantise one value."""

    tensor_name: str
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Graph(Changeable):
    """One graph: the model's main one, a function's body, or the body of an If, Loop or Scan.

    Attributes:
        nodes: in topological order, once read by `read_model`.
        initializers: constants by name; one that is also in `inputs` is only that input's default.
        values: types of values between nodes (ONNX `value_info`).
        overridable_initializers: False where the model is of an IR version before 4: there every initializer had to
            be listed as an input, and is a constant all the same.
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

    # Lookups

    def producer(self, name: str) -> Node | None:
        """The node of this graph that makes a value; None for inputs, initializers and values of outer graphs."""
        return self._uses().producer(name)

    def consumers(self, name: str) -> list[Node]:
        """The nodes of this graph that use a value, each once; for a use inside a subgraph, the node that holds it."""
        return self._uses().consumers(name)

    def is_input(self, name: str) -> bool:
        """Whether a value is an input of this graph."""
        return any(value.name == name for value in self.inputs)

    def is_output(self, name: str) -> bool:
        """Whether a value is an output of this graph."""
        return any(value.name == name for value in self.outputs)

    def is_used(self, name: str) -> bool:
        """Whether any node uses a value or the graph gives it out."""
        return bool(self.consumers(name)) or self.is_output(name)

    def defines(self, name: str) -> bool:
        """Whether this graph itself has a value of that name (and does not take it from an outer one)."""
        if name in self.initializers or name in self.sparse_initializers:
            return True
        return self.producer(name) is not None or self.is_input(name)

    def constant_tensor(self, name: str) -> OnnxTensor | None:
        """The constant behind a name, or None: an initializer that no caller can override, or what a Constant node
        makes, in this graph or (for a name that it captures) in an outer one."""
        tensor = self.initializers.get(name)
        if tensor is not None:
            return None if self.overridable_initializers and self.is_input(name) else tensor
        producer = self.producer(name)
        if producer is not None:
            return constant_tensor(producer)
        outer = self.outer
        return None if outer is None or not name or self.defines(name) else outer.constant_tensor(name)

    def constant(self, name: str) -> NDArray[Any] | None:
        """The value of `constant_tensor(name)` as a read-only array, or None."""
        tensor = self.constant_tensor(name)
        return None if tensor is None else tensor.array()

    def type_of(self, name: str) -> Type | None:
        """What is known of a value's type, here or in the outer graph that it comes from."""
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
        """The graph whose node holds this one, once that graph has been read or looked at."""
        return None if self._owner is None else self._owner[0]()

    def nested(self) -> Iterator[Graph]:
        """This graph and all in its nodes, outer ones first."""
        self._uses()
        yield self
        for node in [node for node in self.nodes if node.attributes]:
            for subgraph in node.subgraphs():
                yield from subgraph.nested()

    # Edits

    def append(self, *nodes: Node) -> None:
        """Add nodes at the end."""
        self._insert(len(self.nodes), nodes)

    def insert_before(self, anchor: Node, *nodes: Node) -> None:
        """Add nodes before one of this graph, in the order given."""
        self._insert(self._position(anchor), nodes)

    def remove_nodes(self, nodes: Iterable[Node]) -> None:
        """Take nodes out. Uses of their outputs are the caller's to replace, before or after."""
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
        """Put nodes in the place of one."""
        self.insert_before(node, *replacements)
        self.remove_nodes([node])

    def replace_uses(self, old: str, new: str, *, include_outputs: bool = False) -> int:
        """Let every user of one value use another: nodes, and what their subgraphs capture.

        Args:
            include_outputs: also let the graph give out `new` where it gave out `old`. This renames the output, which
                callers of a main graph see.

        Returns:
            How many nodes and outputs changed.

        Raises:
            GraphError: if a subgraph that captures `old` has its own value `new`.
        """
        users = self.consumers(old)
        for node in users:
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
        """Give a value of this graph another name everywhere: where it is made, used, typed and given out."""
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
        """Add a constant under a fresh name, which is returned."""
        name = self.fresh_name(prefix)
        self.add_initializer(OnnxTensor.from_array(name, array))
        return name

    def remove_initializer(self, name: str) -> None:
        """Take a constant out, dense or sparse, if there is one."""
        self.initializers.pop(name, None)
        self.sparse_initializers.pop(name, None)
        self._touch()

    def fresh_name(self, prefix: str) -> str:
        """A name that no value or node here, in an inner or in an outer graph has; it is then taken."""
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
        """Order the nodes so that each comes after those it needs, moving as few as possible."""
        self.nodes[:] = topological_order(self.nodes)

    # The index

    def update(self, node: Node) -> None:
        """Record that a node's inputs, outputs or subgraphs changed."""
        if self._index is not None and node in self._index:
            self._index.update(node)
            self._adopt(node)
        self._touch()

    def invalidate(self) -> None:
        """Forget the index; it is built again when next needed."""
        self._index = None
        self._root()._names = None
        self._touch()

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.nodes)} nodes, {len(self.initializers)} initializers)"

    def _uses(self) -> UseIndex:
        # A changed length shows the commonest hand edit: graph.nodes.append(...).
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
        """Let a node's subgraphs know where they are, at any depth, so that their edits reach this graph's index."""
        for subgraph in node.subgraphs():
            subgraph._owner = (weakref.ref(self), weakref.ref(node))
            subgraph._uses()

    def _touch(self) -> None:
        """This graph changed, so what it captures may have: the holders' entries are stale, up to the root."""
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
                "that subgraph has a value of its own by the new name",
                "take the new name from graph.fresh_name()",
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
        "look for it with graph.producer() or graph.consumers(), or in a subgraph",
    )
