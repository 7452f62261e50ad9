"""The graph IR: everything that an ONNX model can say, as plain Python objects that may be changed in place.

This module is the front door: tensors, attributes and nodes come from their own files, graphs and models from here.
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
"""(domain for lookups, name, overload)."""


@dataclass(eq=False)
class Function(Changeable):
    """An operator that the model itself defines by a body of other operators.

    Attributes:
        attributes: names of the attributes without a default.
        attribute_defaults: those with one.
        opset_imports: what the body's nodes refer to.
        body: inputs, outputs, nodes and value types. Initializers that a rewrite puts there are written as Constant
            nodes, since ONNX functions have none.
        known: whether it is ours to the letter (see `own_functions`): nodes that call it have kernels.
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
        """What nodes call this function by."""
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
    """How a model was meant to be trained. Kept so that it survives; nothing here runs it."""

    initialization: Graph | None = None
    algorithm: Graph | None = None
    initialization_binding: list[tuple[str, str]] = field(default_factory=list)
    update_binding: list[tuple[str, str]] = field(default_factory=list)


@dataclass(eq=False)
class OnnxModel(Changeable):
    """A whole ONNX model.

    Attributes:
        opset_imports: operator set version per domain, domains as the model spells them; see `opset_version`.
        device_configurations: devices that it may be spread over; kept as they were read, not used.
        folder: where the model was read from (external data lies there), or None.
        files: those that its tensors are views of.
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
        """The version of an operator set that this model uses, or None if it does not import it."""
        canonical = canonical_domain(domain)
        for name, version in self.opset_imports.items():
            if canonical_domain(name) == canonical:
                return version
        return 1 if canonical == "" and self.ir_version < 3 else None

    def function(self, node: Node) -> Function | None:
        """The model's own function that a node calls, or None, also where it is known."""
        if not self.functions:
            return None
        function = self.functions.get((*node.key, node.overload))
        return None if function is None or function.known else function

    def graphs(self, *, functions: bool = False) -> Iterator[Graph]:
        """The main graph and every subgraph, outer ones first; with `functions`, their bodies too."""
        yield from self.graph.nested()
        if functions:
            for function in self.functions.values():
                yield from function.body.nested()

    def link_subgraphs(self) -> None:
        """Let every subgraph know the graph around it, so that it finds the constants and types that it captures."""
        for _ in self.graphs(functions=True):
            pass

    def copy(self) -> Self:
        """See Changeable.copy; subgraphs know where they are."""
        model = super().copy()
        model.link_subgraphs()
        return model
