"""Which matrices of a checkpoint are applied together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """Matrices that are applied together, one below the other, and what they are called in the graph.

    Attributes:
        path: of the layer in the graph, such as "/model/layers.0/attn/qkv_proj".
        weights: Hugging Face names of the matrices, without ".weight".
        rows: outputs of each. columns: inputs, the same for all.
        biases: Hugging Face names of the biases, without ".bias"; None means those of the matrices.
    """

    path: str
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    biases: tuple[str, ...] | None = None

    @property
    def outputs(self) -> int:
        return sum(self.rows)

    @property
    def weight_name(self) -> str:
        """Name of the initialiser, before the suffixes of quantised ones."""
        return self.path[1:].replace("/", ".") + ".MatMul.weight"
