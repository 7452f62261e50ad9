"""Sparse constants as values. No standard operator reads them sparse, so they become dense when a plan is built."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GraphError
from ..graph.ir import SparseTensor

MAX_DENSE_BYTES = 1 << 31


def sparse_value(sparse: SparseTensor) -> NDArray[Any]:
    """The dense array of a sparse constant.

    Raises:
        GraphError: an index lies outside the shape, or the dense form would take more than 2 GiB.
    """
    values, indices = sparse.values.array(), sparse.indices.array()
    if math.prod(sparse.shape) * values.dtype.itemsize > MAX_DENSE_BYTES:
        raise GraphError(
            f"sparse constant {sparse.name!r} of shape {list(sparse.shape)} is too large to be made dense",
            f"more than {MAX_DENSE_BYTES} bytes",
            "export the model without sparse constants",
        )
    dense = np.zeros(math.prod(sparse.shape), values.dtype)
    try:
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), sparse.shape)
        dense[indices] = values.reshape(-1)
    except (ValueError, IndexError, TypeError) as error:
        raise GraphError(
            f"sparse constant {sparse.name!r} has indices that do not fit its shape {list(sparse.shape)}",
            str(error),
            "export the model again",
        ) from error
    return dense.reshape(sparse.shape)
