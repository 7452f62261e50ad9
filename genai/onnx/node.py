"""Nodes, their attributes, and the constants that Constant nodes define."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx

from ..errors import GraphError, malformed
from .tensor import OnnxTensor, SparseTensor
from .types import AttributeType, DataType, Type

if TYPE_CHECKING:  # attributes contain graphs, and graphs contain nodes
    from .ir import Graph  # as above

STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
"""Both names of ONNX's own operator domain."""

MS, ML, OURS = "com.microsoft", "ai.onnx.ml", "genai"
"""Other domains: onnxruntime's, ONNX's domain for classical machine learning, and this toolkit's."""

NEW_EACH_TIME = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
"""Operators whose results differ at each call, so that two equal nodes must not be merged."""


_GRAPH, _GRAPHS = AttributeType.GRAPH, AttributeType.GRAPHS

_TERM = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")
"""The syntax of an Einsum equation."""


def canonical_domain(domain: str) -> str:
    """Return the domain for look-ups: "" for ONNX's own operators, even if a model spells it "ai.onnx"."""
    return "" if domain in STANDARD_DOMAINS else domain


@cache
def onnx_schema(domain: str, op_type: str, version: int) -> Any:
    """Return ONNX's definition of an operator, an onnx.defs.OpSchema, or None if ONNX has none."""
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def canonical_imports(imports: Mapping[str, int]) -> dict[str, int]:
    """Return operator set versions, keyed by domain for look-ups."""
    return {canonical_domain(name): version for name, version in imports.items()}


@dataclass(eq=False)
class Changeable:
    """The base of graph parts that can be changed in place."""

    def copy(self) -> Self:
        """Return a copy with separate lists, dictionaries, nodes and subgraphs; tensors and types are shared."""
        return replace(self, **{field.name: _copied(getattr(self, field.name)) for field in fields(self)})


def _copied(value: Any) -> Any:
    if isinstance(value, Changeable):
        return value.copy()
    if isinstance(value, list):
        return [_copied(item) if isinstance(item, Changeable) else item for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass(eq=False)
class Attribute(Changeable):
    """A named constant of a node.

    Attributes:
        value: float, int, bytes (STRING), Tensor, Graph, SparseTensor, a Type, a list of values of one of these types,
            or None if `ref_attr_name` is set.
        ref_attr_name: in a function's body, the function attribute that provides the value.
    """

    name: str
    type: AttributeType
    value: Any = None
    ref_attr_name: str = ""
    doc_string: str = ""

    @classmethod
    def of(cls, name: str, value: Any, type: AttributeType | None = None) -> Attribute:
        """Return an attribute for a Python value; str is stored as bytes.

        Args:
            type: attribute type, required only for empty lists.

        Raises:
            GraphError: no attribute type can hold the value.
        """
        if isinstance(value, list | tuple):
            value = [_stored(item) for item in value]
        else:
            value = _stored(value)
        return cls(name, type or _type_of(name, value), value)

    @property
    def text(self) -> str:
        """The value of a STRING attribute as str; bytes that are not UTF-8 become lone surrogates."""
        if self.type is not AttributeType.STRING or not isinstance(self.value, bytes):
            raise GraphError(
                f"attribute {self.name!r} is {self.type.name}, not a STRING",
                "only STRING attributes have text",
                "use the property `value`",
            )
        return _decoded(self.value)

    @property
    def python_value(self) -> Any:
        """The value with strings decoded."""
        if self.type is AttributeType.STRING and self.value is not None:
            return _decoded(self.value)
        if self.type is AttributeType.STRINGS and self.value is not None:
            # The modes of a tree ensemble are a hundred thousand strings of a few values.
            texts = {item: _decoded(item) for item in set(self.value)}
            return [texts[item] for item in self.value]
        return self.value

    def copy(self) -> Attribute:
        """See `Changeable.copy`. Rewrites copy many nodes, so the fields are listed."""
        return Attribute(self.name, self.type, _copied(self.value), self.ref_attr_name, self.doc_string)

    def graphs(self) -> Sequence[Graph]:
        """Return the subgraphs in this attribute."""
        if self.value is None:
            return ()
        if self.type is AttributeType.GRAPH:
            return (self.value,)
        return self.value if self.type is AttributeType.GRAPHS else ()


@dataclass(eq=False)
class Node(Changeable):
    """One operator of a graph.

    A graph indexes its nodes: after changing `inputs`, `outputs` or a subgraph attribute of a node in a graph, call
    `graph.update(node)`.

    Attributes:
        domain: domain as the model spells it; compare `key` instead.
        inputs: value names; "" = absent.
        outputs: value names; "" = unused.
        device_configurations: device configurations; preserved but not used.
    """

    op_type: str
    inputs: list[str]
    outputs: list[str]
    domain: str = ""
    name: str = ""
    attributes: dict[str, Attribute] = field(default_factory=dict)
    overload: str = ""
    doc_string: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    device_configurations: list[onnx.NodeDeviceConfigurationProto] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """(domain, op_type) for look-ups, with ONNX's own domain as ""."""
        return "" if self.domain in STANDARD_DOMAINS else self.domain, self.op_type

    def copy(self) -> Node:
        """See `Changeable.copy`. Rewrites copy many nodes, so the fields are listed."""
        return Node(
            self.op_type,
            list(self.inputs),
            list(self.outputs),
            self.domain,
            self.name,
            {name: attribute.copy() for name, attribute in self.attributes.items()},
            self.overload,
            self.doc_string,
            dict(self.metadata),
            list(self.device_configurations),
        )

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value in Python form (strings decoded), or `default` if the attribute is absent."""
        attribute = self.attributes.get(name)
        return default if attribute is None else attribute.python_value

    def attribute_values(self) -> dict[str, Any]:
        """Return all attributes in Python form, tensors as arrays."""
        values = {name: attribute.python_value for name, attribute in self.attributes.items()}
        return {name: value.array() if isinstance(value, OnnxTensor) else value for name, value in values.items()}

    def integer(self, name: str, default: int) -> int:
        """Return an INT attribute, or `default` if the attribute is absent.

        Raises:
            GraphError: the attribute has another type.
        """
        value = self.attribute(name, default)
        if isinstance(value, int):
            return value
        raise malformed(f"attribute {name!r} of {self!r:.120} is not an integer", f"{self.op_type} requires an integer")

    def set_attribute(self, name: str, value: Any, type: AttributeType | None = None) -> None:
        """Add or replace an attribute; see `Attribute.of`."""
        self.attributes[name] = Attribute.of(name, value, type)

    def input(self, index: int) -> str:
        """Return the name of input `index`, or "" if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int) -> str:
        """Return the name of output `index`, or "" if it is unused."""
        return self.outputs[index] if index < len(self.outputs) else ""

    def subgraphs(self) -> Sequence[Graph]:
        """Return the graphs in this node's attributes, without graphs nested more deeply."""
        # This method is called often, and most nodes have no graphs, so they cost only a comparison per attribute.
        found: Sequence[Graph] = ()
        for attribute in self.attributes.values():
            if attribute.type is _GRAPH or attribute.type is _GRAPHS:
                found = [*found, *attribute.graphs()]
        return found

    def __repr__(self) -> str:
        domain, op_type = self.key
        return f"Node({domain + '::' if domain else ''}{op_type}, {self.inputs} -> {self.outputs})"


def make_node(
    op_type: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", name: str = "", **attributes: Any
) -> Node:
    """Create a node with attributes from Python values; attributes that are None are omitted."""
    node_attributes = {key: Attribute.of(key, value) for key, value in attributes.items() if value is not None}
    return Node(op_type, list(inputs), list(outputs), domain, name, node_attributes)


def _decoded(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _stored(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return int(value) if isinstance(value, bool) else value


def _type_of(name: str, value: Any) -> AttributeType:
    from .ir import Graph  # as above

    kinds: dict[Any, str] = {
        int: "INT", float: "FLOAT", bytes: "STRING", OnnxTensor: "TENSOR", Graph: "GRAPH",
        SparseTensor: "SPARSE_TENSOR", Type: "TYPE_PROTO", int | float: "FLOAT",
    }  # fmt: skip
    for kind, element in kinds.items():
        if isinstance(value, kind):
            return AttributeType[element]
        if isinstance(value, list) and value and all(isinstance(item, kind) for item in value):
            return AttributeType[f"{element}S"]
    raise GraphError(
        f"attribute {name!r} cannot hold {value!r}",
        "attributes hold numbers, strings, tensors, graphs, types, or non-empty lists of values of one of these kinds",
        "pass `type` for an empty list, and Python numbers instead of NumPy numbers",
    )


_PLAIN_VALUES = {
    f"value_{kind}{plural}": dtype
    for kind, dtype in (("float", DataType.FLOAT), ("int", DataType.INT64), ("string", DataType.STRING))
    for plural in ("", "s")
}


def constant_tensor(node: Node) -> OnnxTensor | None:
    """Return a Constant node's tensor, named after its output; None for other nodes and sparse constants."""
    if node.key != ("", "Constant") or not node.outputs:
        return None
    for name, attribute in node.attributes.items():
        if attribute.value is None:
            continue
        if name == "value" and isinstance(attribute.value, OnnxTensor):
            return attribute.value.renamed(node.outputs[0])
        if name in _PLAIN_VALUES:
            dtype = _PLAIN_VALUES[name]
            return OnnxTensor.from_array(node.outputs[0], np.asarray(attribute.value, dtype=dtype.numpy_dtype), dtype)
    return None
