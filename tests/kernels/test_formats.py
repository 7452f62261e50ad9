"""Pages of keys and values: their axes, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.formats import FormatError, PagedLayer


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_paged_layer_names_its_axes(dtype: Any) -> None:
    layer = PagedLayer(np.zeros((5, 2, 8, 32), dtype), np.zeros((5, 2, 32, 4), dtype))
    assert (layer.num_blocks, layer.kv_heads) == (5, 2)
    assert (layer.head_size, layer.v_head_size) == (8, 4)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (np.zeros((5, 2, 8, 32)), np.zeros((5, 2, 32, 8))),
        (np.zeros((5, 2, 32), np.float32), np.zeros((5, 2, 32), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 1, 32, 8), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 2, 32, 8), np.float16)),
        (np.zeros((5, 2, 8, 16), np.float32), np.zeros((5, 2, 16, 8), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 2, 16, 8), np.float32)),
        (np.zeros((5, 2, 16, 32), np.float32)[:, :, ::2], np.zeros((5, 2, 32, 8), np.float32)),
    ],
)
def test_paged_layer_refuses(keys: np.ndarray, values: np.ndarray) -> None:
    with pytest.raises(FormatError):
        PagedLayer(keys, values)
