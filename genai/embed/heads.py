"""Heads of BGE-M3 that compute more than one number or vector per text: a weight per token, and a vector per token.

The heads are linear layers in files beside the checkpoint: `sparse_linear` and `colbert_linear`, as .safetensors or as
.pt (Chen et al. 2024, "BGE M3-Embedding").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..weight_files.safetensors import read_safetensors
from ..weight_files.torch_file import read_torch
from .pooling import Floats, normalized

SPARSE, MULTI = "sparse_linear", "colbert_linear"


@dataclass(frozen=True)
class TokenHead:
    """A linear layer over rows of tokens: weight [outputs, width], bias [outputs]."""

    weight: Floats
    bias: Floats

    def __call__(self, rows: Floats) -> Floats:
        result: Floats = rows @ self.weight.T + self.bias
        return result


def read_head(folder: Path, name: str, width: int) -> TokenHead | None:
    """Read a head for rows of `width` numbers; return None if the folder has no such head.

    Raises:
        InputError: the file is malformed.
        ConfigError: the file does not contain a linear layer for such rows.
    """
    readers = ((f"{name}.safetensors", read_safetensors), (f"{name}.pt", read_torch))
    for file, read in readers:
        if (folder / file).is_file():
            return _head(folder / file, read(folder / file), width)
    return None


def _head(path: Path, tensors: Mapping[str, NDArray[Any]], width: int) -> TokenHead:
    weight, bias = tensors.get("weight"), tensors.get("bias")
    is_layer = weight is not None and bias is not None and weight.ndim == 2 and bias.shape == weight.shape[:1]
    if not is_layer or weight.shape[1] != width:  # type: ignore[union-attr]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in tensors.items())
        raise ConfigError(
            f"{path}: the tensors are {shapes:.200}",
            f"weight [outputs, {width}] and bias [outputs] are expected",
            "copy the file again",
        )
    return TokenHead(np.array(weight, np.float32), np.array(bias, np.float32))


def token_weights(head: TokenHead, rows: Floats, ids: NDArray[np.int64], special: frozenset[int]) -> dict[int, float]:
    """Return the weight of each token of a text that is not special: the largest of its occurrences, if positive."""
    found: dict[int, float] = {}
    for id_, weight in zip(ids.tolist(), head(rows)[:, 0].tolist(), strict=True):
        if weight > 0 and id_ not in special:
            found[id_] = max(weight, found.get(id_, 0.0))
    return found


def token_vectors(head: TokenHead, rows: Floats) -> Floats:
    """Return vectors of length 1 for all tokens but the first, which is the special token of the pooling."""
    return normalized(head(rows[1:]))


def sparse_score(query: Mapping[int, float], document: Mapping[int, float]) -> float:
    """Return the sum of the products of the weights of the tokens that two texts share."""
    return float(sum(weight * document[id_] for id_, weight in query.items() if id_ in document))


def multi_vector_score(query: Floats, document: Floats) -> float:
    """Return the mean over the query's vectors of the largest dot product with a vector of the document.

    This is late interaction (Khattab and Zaharia 2020), divided by the number of vectors of the query.

    Args:
        query, document: float32 [tokens, dimensions].
    """
    if not len(query) or not len(document):
        return 0.0
    return float((query @ document.T).max(axis=1).mean())
