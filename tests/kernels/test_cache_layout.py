"""Pages of keys and values: their axes, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PackedPages, PagedLayer
from genai.kernels.checks import FormatError


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(np.float32, "float32"), (np.float16, "float16"), (np.uint16, "bfloat16"), (np.uint8, "float8")],
)
def test_paged_layer_names_its_axes(dtype: Any, kind: str) -> None:
    layer = PagedLayer(np.zeros((5, 2, 8, 32), dtype), np.zeros((5, 2, 32, 4), dtype))
    assert (layer.kind, layer.num_blocks, layer.kv_heads) == (kind, 5, 2)
    assert (layer.head_size, layer.v_head_size) == (8, 4)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (np.zeros((5, 2, 8, 32)), np.zeros((5, 2, 32, 8))),
        (np.zeros((5, 2, 32), np.float32), np.zeros((5, 2, 32), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 1, 32, 8), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 2, 32, 8), np.float16)),
        (np.zeros((5, 2, 8, 32), np.int8), np.zeros((5, 2, 32, 8), np.int8)),
        (np.zeros((5, 2, 8, 16), np.float32), np.zeros((5, 2, 16, 8), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 2, 16, 8), np.float32)),
        (np.zeros((5, 2, 16, 32), np.float32)[:, :, ::2], np.zeros((5, 2, 32, 8), np.float32)),
    ],
)
def test_paged_layer_refuses(keys: np.ndarray, values: np.ndarray) -> None:
    with pytest.raises(FormatError):
        PagedLayer(keys, values)


@pytest.mark.parametrize(
    ("bits", "sizes", "bytes_"),
    [(8, (64, 64), (66, 66)), (8, (33, 14), (38, 18)), (4, (64, 128), (36, 72)), (4, (32, 32), (18, 18))],
)
def test_packed_pages(bits: int, sizes: tuple[int, int], bytes_: tuple[int, int]) -> None:
    """Bytes of a token's key and value: integers filled up, and two for each scale."""
    packed = PackedPages(bits, *sizes)
    assert (packed.key_bytes, packed.value_bytes) == (32 * bytes_[0], 32 * bytes_[1])
    keys, values = (np.zeros((5, 2, size), np.uint8) for size in (packed.key_bytes, packed.value_bytes))
    layer = PagedLayer(keys, values, packed)
    assert (layer.kind, layer.num_blocks, layer.kv_heads) == (f"int{bits}", 5, 2)
    assert (layer.head_size, layer.v_head_size) == sizes
    for wrong in (keys[:, :, :-64].copy(), keys.astype(np.int8), keys[0]):
        with pytest.raises(FormatError):
            PagedLayer(wrong, values, packed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3, 64, 64), "bits is 3"),
        ((8, 0, 64), "head_size is 0"),
        ((8, 64, 2000), "v_head_size is 2000, expected 1 to 1024"),
        ((4, 80, 64), "head_size is 80, expected a power of two"),
        ((4, 64, 16), "v_head_size is 16, expected a power of two of at least 32"),
    ],
)
def test_packed_pages_refuse(given: tuple[int, int, int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        PackedPages(*given)
