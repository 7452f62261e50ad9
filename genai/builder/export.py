"""What every part of a decoder is written with."""

from __future__ import annotations

from dataclasses import dataclass

from .graph_writer import Dims, GraphWriter
from .options import ExportOptions
from .spec import DecoderSpec
from .weights import Weights


@dataclass(frozen=True)
class Export:
    """One decoder being written: the graph so far, its architecture, the options, and the weights to read from."""

    graph: GraphWriter
    spec: DecoderSpec
    options: ExportOptions
    weights: Weights

    @property
    def needs_positions(self) -> bool:
        """Whether the graph takes the tokens' positions as an input."""
        return takes_positions(self.spec, self.options)


def takes_positions(spec: DecoderSpec, options: ExportOptions) -> bool:
    """Positions are looked up in a table, or queries and keys rotated outside the attention operator."""
    rotates = any(spec.rotated(layer) for layer in range(spec.num_layers))
    return spec.position_embeddings or (rotates and not options.fused_rope)


def hidden_dims(width: int, *, sequence: int | str = "sequence_length") -> Dims:
    """Dimensions of a value with one vector per token."""
    return ["batch_size", sequence, width]
