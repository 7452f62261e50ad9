"""Rotating keys in their pages equals rotating their values, rounded once."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS
from genai.kernels.host_memory import HostMemory
from genai.kernels.reference.attention import rotate
from genai.kernels.reference.pages import read_pages, write_pages
from genai.kvcache.rotation import rotate_back
from genai.kvcache.storage import CacheLayout, LayerShape, PagedStorage

# Per kind of pages: how far turned keys may be from exact ones, in parts of the largest.
NEAR = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4e-3, "float8": 0.07, "int8": 6e-3}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", NEAR)
def test_turned_pages(kind: str, interleaved: bool) -> None:
    rng, angles = np.random.default_rng(1), np.arange(50)[:, None] / np.array([1.0, 5.0, 20.0, 90.0])
    storage = PagedStorage(CacheLayout((LayerShape(2, 16, 8, dtype=kind),), PAGE_TOKENS), 5)
    (layer,) = storage.layers
    slots = np.arange(5 * PAGE_TOKENS)
    write_pages(layer, slots, rng.standard_normal((len(slots), 2, 16)), rng.standard_normal((len(slots), 2, 8)))
    before = [pages.copy() for pages in (layer.keys, layer.values)]
    turn = rotate_back(np.cos(angles), np.sin(angles), interleaved, 7)
    keys, _ = read_pages(layer, np.array([3, 1]))
    wanted = rotate(keys.astype(np.float64), turn.cosine, turn.sine, interleaved)
    HostMemory().rotate_keys([3, 1], [(layer, turn)])
    found, _ = read_pages(layer, np.array([3, 1]))
    assert np.abs(found - wanted).max() <= NEAR[kind] * np.abs(wanted).max()
    assert np.abs(keys - wanted).max() > 0.1
    for block in (0, 2, 4):
        assert np.array_equal(layer.keys[block], before[0][block])
    assert np.array_equal(layer.values, before[1])
    storage.close()
