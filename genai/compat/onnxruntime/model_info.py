"""What a session says of its model: NodeArg and ModelMetadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...onnx.ir import OnnxModel, Value
from ...session.arguments import shape_of

_NO_VERSION = 2**63 - 1


@dataclass(frozen=True)
class NodeArg:
    """An input or output.

    Attributes:
        name: as in the graph.
        type: such as "tensor(float)", "seq(tensor(int64))" or "" where the model does not say.
        shape: extents, symbols, or None where unknown; empty for a scalar and where the rank is unknown.
    """

    name: str
    type: str
    shape: list[int | str | None] = field(default_factory=list)

    @classmethod
    def of(cls, value: Value) -> NodeArg:
        """From a value of a graph."""
        return cls(value.name, str(value.type or ""), shape_of(value))

    def __str__(self) -> str:
        return f"NodeArg(name='{self.name}', type='{self.type}', shape={self.shape})"


@dataclass(frozen=True)
class ModelMetadata:
    """The model's header."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]

    @classmethod
    def of(cls, model: OnnxModel) -> ModelMetadata:
        """From a model."""
        return cls(
            model.producer_name,
            model.graph.name,
            model.domain,
            model.doc_string,
            model.graph.doc_string,
            model.model_version or _NO_VERSION,
            dict(model.metadata),
        )
