"""Poolings and the modules after them: rows of tokens to one vector per text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from genai.ops.elementwise import exact_erf

Floats = NDArray[np.float32]


def _mean(rows: Floats) -> Floats:
    total: Floats = rows.sum(axis=0)
    return total / np.float32(len(rows))


def _root_mean(rows: Floats) -> Floats:
    total: Floats = rows.sum(axis=0)
    return total / np.float32(math.sqrt(len(rows)))


POOLINGS: dict[str, Callable[[Floats, int], Floats]] = {
    "cls": lambda rows, first: rows[0],
    "max": lambda rows, first: rows.max(axis=0),
    "mean": lambda rows, first: _mean(rows),
    "mean_sqrt_len_tokens": lambda rows, first: _root_mean(rows),
    "weightedmean": lambda rows, first: _weighted_mean(rows, first),
    "lasttoken": lambda rows, first: rows[-1],
}
"""Poolings by the names of sentence-transformers: functions of rows [tokens, width] and the first row's position."""


def _weighted_mean(rows: Floats, first: int) -> Floats:
    """Return the mean with each row weighted by its position, counted from 1."""
    weights = np.arange(first + 1, first + len(rows) + 1, dtype=np.float32)
    result: Floats = weights @ rows / weights.sum()
    return result


def pooled(rows: Floats, poolings: Sequence[str], excluded: int = 0) -> Floats:
    """Return the poolings of a text's rows, concatenated.

    Args:
        rows: float32 [tokens, width].
        poolings: keys of POOLINGS.
        excluded: number of rows at the beginning to leave out (a prompt); at least one row remains.
    """
    first = min(excluded, len(rows) - 1)
    parts = [POOLINGS[name](rows[first:], first) for name in poolings]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class VectorModule(Protocol):
    """A module after the pooling."""

    def __call__(self, vectors: Floats) -> Floats:
        """Return the module's result for vectors [texts, width]."""

    def check(self, width: int) -> int:
        """Return the width of the result for vectors of `width` numbers. Raises ValueError if it does not fit."""


def _gelu(x: Floats) -> Floats:
    result: Floats = np.float32(0.5) * x * (1 + exact_erf(x / np.float32(math.sqrt(2))))
    return result


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "GELU": _gelu,
    "SiLU": lambda x: x / (1 + np.exp(-x)),
}
"""Activation functions by the names of torch.nn."""


@dataclass(frozen=True)
class DenseModule:
    """activation(x @ weight.T + bias) plus a residual.

    Attributes:
        weight: float32 [outputs, inputs].
        bias: float32 [outputs] or None.
        activation: a key of ACTIVATIONS.
        has_residual: True if a residual is added.
        residual: float32 [outputs, inputs], by which x is multiplied for the residual; None if the residual is x.
    """

    weight: Floats
    bias: Floats | None
    activation: str
    has_residual: bool = False
    residual: Floats | None = None

    def __call__(self, vectors: Floats) -> Floats:
        result = vectors @ self.weight.T
        if self.bias is not None:
            result = result + self.bias
        found: Floats = ACTIVATIONS[self.activation](result)
        if self.has_residual:
            found = found + (vectors if self.residual is None else vectors @ self.residual.T)
        return found

    def check(self, width: int) -> int:
        if width != self.weight.shape[1]:
            raise ValueError(f"a Dense module has {self.weight.shape[1]} inputs, but vectors have {width} numbers")
        return int(self.weight.shape[0])


@dataclass(frozen=True)
class LayerNormModule:
    """A layer norm: weight [width], bias [width]."""

    weight: Floats
    bias: Floats

    def __call__(self, vectors: Floats) -> Floats:
        centred = vectors - vectors.mean(axis=1, keepdims=True)
        variance = np.mean(centred * centred, axis=1, keepdims=True)
        result: Floats = centred / np.sqrt(variance + np.float32(1e-5)) * self.weight + self.bias
        return result

    def check(self, width: int) -> int:
        if width != len(self.weight):
            raise ValueError(f"a LayerNorm module has {len(self.weight)} numbers, but vectors have {width}")
        return width


@dataclass(frozen=True)
class NormalizeModule:
    """Division of each vector by its length."""

    def __call__(self, vectors: Floats) -> Floats:
        return normalized(vectors)

    def check(self, width: int) -> int:
        return width


def normalized(vectors: Floats) -> Floats:
    """Return vectors [texts, width] of length 1. A vector of zeros is unchanged."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
    return result
