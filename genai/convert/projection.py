"""Matrices of a checkpoint that are applied together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """Matrices that are applied together, concatenated along their rows, and their names in the graph.

    Attributes:
        path: path of the layer in the graph, such as "/model/layers.0/attn/qkv_proj".
        weights: Hugging Face names of the matrices, without ".weight".
        rows: number of outputs of each matrix.
        columns: number of inputs, the same for all matrices.
        biases: Hugging Face names of the biases, without ".bias"; None means the names of the matrices.
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
        """The name of the initializer, without the suffixes for the parts of a quantised matrix."""
        return self.path[1:].replace("/", ".") + ".MatMul.weight"
