"""What a session says about its model: inputs, outputs and the header, under onnxruntime's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph.ir import Model, Value
from ..graph.types import ArrayTypes

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
        known = value.type
        shape = list(known.shape or ()) if isinstance(known, ArrayTypes) else []
        return cls(value.name, "" if known is None else str(known), shape)

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
    def of(cls, model: Model) -> ModelMetadata:
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
