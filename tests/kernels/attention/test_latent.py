"""Latent attention: rows that are stored once, as keys, give the bits of rows that are stored as keys and as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS, PackedPages, PagedLayer
from genai.kernels.checks import FormatError
from genai.kernels.reference.pages import read_pages, write_pages
from tests.instructions import other_instructions

MakeStep = Callable[..., Any]
# A row that was never written, a context of two splits, a context inside a page, and prompts with and without a past.
SEQUENCES = [(1, 1), (1, 530), (3, 70), (40, 140), (33, 33)]


def with_values(layer: PagedLayer) -> PagedLayer:
    """The same rows as keys and as values, moved number by number."""
    if (packed := layer.packed) is None:
        return PagedLayer(layer.keys.copy(), np.ascontiguousarray(layer.keys.swapaxes(2, 3)))
    blocks, heads, _ = layer.keys.shape
    values, columns = np.zeros((blocks, heads, packed.value_bytes), np.uint8), packed.key_columns
    bytes_of = layer.keys[..., : PAGE_TOKENS * columns].reshape(blocks, heads, columns // 4, PAGE_TOKENS, 4)
    rows = bytes_of.swapaxes(2, 3).reshape(blocks, heads, PAGE_TOKENS // 4, 4, columns)
    whole = values[..., : PAGE_TOKENS * packed.value_columns].reshape(blocks, heads, PAGE_TOKENS // 4, -1, 4)
    whole[..., :columns, :] = rows.swapaxes(3, 4)
    values[..., PAGE_TOKENS * packed.value_columns :] = layer.keys[..., PAGE_TOKENS * columns :]
    return PagedLayer(layer.keys.copy(), values, packed)


@pytest.mark.parametrize(("dtype", "size"), [(np.float32, 48), (np.float16, 40), ("int8", 20), ("int4", 64)])
def test_rows_stored_once(make_step: MakeStep, dtype: Any, size: int) -> None:
    step = make_step(SEQUENCES, dtype=dtype, heads=3, kv_heads=1, head_size=size)
    once = replace(step, layer=PagedLayer(step.layer.keys, None, step.layer.packed), value=step.key)
    twice = replace(once, layer=with_values(once.layer))
    assert once.layer.v_head_size == size and once.layer.token_bytes < twice.layer.token_bytes
    found, expected = once.run(threads=2), twice.run(threads=2)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(once.layer.keys, twice.layer.keys)
    np.testing.assert_array_equal(once.expected(), twice.expected())
    assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", [np.float16, "int8", "int4"])
def test_the_reference_stores_and_reads_only_keys(make_step: MakeStep, dtype: Any) -> None:
    step = make_step([(3, 70)], dtype=dtype, heads=1, kv_heads=1, head_size=32)
    layer = PagedLayer(step.layer.keys, None, step.layer.packed)
    both = with_values(layer)
    for one in (layer, both):
        write_pages(one, step.slot_mapping, step.key, step.key)
    keys, values = read_pages(layer, step.block_tables[0, :3])
    np.testing.assert_array_equal(keys, values)
    np.testing.assert_array_equal(read_pages(both, step.block_tables[0, :3])[1], values)


def test_keys_of_another_size_cannot_be_values() -> None:
    packed = PackedPages(8, 32, 48)
    with pytest.raises(FormatError, match="keys cannot be the values"):
        PagedLayer(np.zeros((1, 1, packed.key_bytes), np.uint8), None, packed)


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again in a process that uses another instruction set."""
    with_instructions(name, __file__)
