"""A session's description of its model: NodeArg and ModelMetadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...onnx.ir import OnnxModel, Value
from ...session.arguments import shape_of

_NO_VERSION = 2**63 - 1


@dataclass(frozen=True)
class NodeArg:
    """An input or output.

    Attributes:
        name: name in the graph.
        type: ONNX type, such as "tensor(float)" or "seq(tensor(int64))"; "" if the model does not declare it.
        shape: extents, symbols, or None if unknown; [] for a scalar or an unknown rank.
    """

    name: str
    type: str
    shape: list[int | str | None] = field(default_factory=list)

    @classmethod
    def of(cls, value: Value) -> NodeArg:
        """Create a NodeArg from a value of a graph."""
        return cls(value.name, str(value.type or ""), shape_of(value))

    def __str__(self) -> str:
        return f"NodeArg(name='{self.name}', type='{self.type}', shape={self.shape})"


@dataclass(frozen=True)
class ModelMetadata:
    """The model's metadata."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]

    @classmethod
    def of(cls, model: OnnxModel) -> ModelMetadata:
        """Create the metadata from a model."""
        return cls(
            model.producer_name,
            model.graph.name,
            model.domain,
            model.doc_string,
            model.graph.doc_string,
            model.model_version or _NO_VERSION,
            dict(model.metadata),
        )
