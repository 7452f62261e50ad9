"""The graph IR: the contents of an ONNX model as plain Python objects that can be changed in place.

This module defines models and functions and re-exports the other types; tensors, attributes, nodes and graphs have
separate files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

import onnx

from .external_data import MappedFile
from .graph import Graph as Graph, QuantizationAnnotation as QuantizationAnnotation, Value as Value
from .node import (
    Attribute as Attribute,
    Changeable,
    Node as Node,
    canonical_domain as canonical_domain,
    make_node as make_node,
)
from .tensor import OnnxTensor as OnnxTensor, SparseTensor as SparseTensor
from .types import AttributeType as AttributeType, DataType as DataType

FunctionKey: TypeAlias = tuple[str, str, str]
"""The key of a function: (domain for look-ups, name, overload)."""


@dataclass(eq=False)
class Function(Changeable):
    """An operator that the model defines by a body of other operators.

    Attributes:
        attributes: names of the attributes without a default.
        attribute_defaults: attributes with a default.
        opset_imports: operator set versions of the body's nodes.
        body: inputs, outputs, nodes and value types. Initializers that a rewrite adds are written as Constant nodes,
            because ONNX functions have no initializers.
        known: True if the function is the same as one of `own_functions`, so that kernels exist for the nodes that call
            it.
    """

    name: str
    body: Graph
    domain: str = ""
    overload: str = ""
    attributes: list[str] = field(default_factory=list)
    attribute_defaults: dict[str, Attribute] = field(default_factory=dict)
    opset_imports: dict[str, int] = field(default_factory=dict)
    doc_string: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    known: bool = False

    @property
    def key(self) -> FunctionKey:
        """The key with which nodes call this function."""
        return canonical_domain(self.domain), self.name, self.overload

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return [value.name for value in self.body.inputs]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [value.name for value in self.body.outputs]


@dataclass(eq=False)
class TrainingInfo(Changeable):
    """Training information of a model. It is preserved, but nothing in this package runs it."""

    initialization: Graph | None = None
    algorithm: Graph | None = None
    initialization_binding: list[tuple[str, str]] = field(default_factory=list)
    update_binding: list[tuple[str, str]] = field(default_factory=list)


@dataclass(eq=False)
class OnnxModel(Changeable):
    """A complete ONNX model.

    Attributes:
        opset_imports: operator set version per domain, with the model's spelling of domains; see `opset_version`.
        device_configurations: device configurations; preserved but not used.
        folder: the folder that the model was read from and that contains its external data, or None.
        files: the mapped files that back its tensors.
    """

    graph: Graph
    ir_version: int
    opset_imports: dict[str, int]
    producer_name: str = ""
    producer_version: str = ""
    domain: str = ""
    model_version: int = 0
    doc_string: str = ""
    functions: dict[FunctionKey, Function] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    training_info: list[TrainingInfo] = field(default_factory=list)
    device_configurations: list[onnx.DeviceConfigurationProto] = field(default_factory=list)
    folder: Path | None = None
    files: Sequence[MappedFile] = ()

    def opset_version(self, domain: str = "") -> int | None:
        """Return the version of an operator set that this model imports, or None."""
        canonical = canonical_domain(domain)
        for name, version in self.opset_imports.items():
            if canonical_domain(name) == canonical:
                return version
        return 1 if canonical == "" and self.ir_version < 3 else None

    def function(self, node: Node) -> Function | None:
        """Return the model's function that a node calls, or None if there is no such function or it is known."""
        if not self.functions:
            return None
        function = self.functions.get((*node.key, node.overload))
        return None if function is None or function.known else function

    def graphs(self, *, functions: bool = False) -> Iterator[Graph]:
        """Yield the main graph and every subgraph, outer graphs first; with `functions`, also the functions' graphs."""
        yield from self.graph.nested()
        if functions:
            for function in self.functions.values():
                yield from function.body.nested()

    def link_subgraphs(self) -> None:
        """Link every subgraph to its outer graph, so that it finds the constants and types that it captures."""
        for _ in self.graphs(functions=True):
            pass

    def copy(self) -> Self:
        """See Changeable.copy; subgraphs are linked to their outer graphs."""
        model = super().copy()
        model.link_subgraphs()
        return model
