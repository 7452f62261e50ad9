"""Packed pages: what is stored, and attention over it, against NumPy that reads the layout number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS, PackedPages, PagedLayer
from genai.kernels.cpu.attention.prefill import uses_tiles
from genai.kernels.reference.pages import hadamard, read_pages, write_pages
from tests.instructions import other_instructions

from .conftest import packed_layer, scales_of

MakeStep, MakeRope = Callable[..., Any], Callable[..., Any]
both_bits = pytest.mark.parametrize("dtype", ["int8", "int4"])


def sylvester(size: int) -> np.ndarray:
    """The normalised Hadamard matrix, from its definition."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix / np.sqrt(size)


def stored_key(layer: PagedLayer, block: int, head: int, token: int) -> np.ndarray:
    """A token as it is stored (transformed with 4 bits), read byte by byte."""
    packed, page = layer.packed, layer.keys[block, head]
    assert packed is not None
    scales = page[PAGE_TOKENS * packed.key_columns :].view(np.float16).astype(np.float64).reshape(-1, PAGE_TOKENS)
    numbers = []
    for column in range(packed.head_size):
        if packed.bits == 8:
            byte = page[column // 4 * 4 * PAGE_TOKENS + 4 * token + column % 4]
            numbers.append(float(byte.astype(np.int8)) * scales[0, token])
        else:
            place = column // 32 * 16 + column % 16
            byte = int(page[place // 4 * 4 * PAGE_TOKENS + 4 * token + place % 4])
            nibble = byte >> 4 if column % 32 >= 16 else byte & 15
            numbers.append((nibble - 7.5) * scales[column // 32, token])
    return np.array(numbers)


def stored_value(layer: PagedLayer, block: int, head: int, token: int) -> np.ndarray:
    packed, page = layer.packed, layer.values[block, head]
    assert packed is not None
    columns = packed.value_columns
    scales = page[PAGE_TOKENS * columns :].view(np.float16).astype(np.float64).reshape(-1, PAGE_TOKENS)
    numbers = []
    for column in range(packed.v_head_size):
        place = column if packed.bits == 8 else column // 32 * 16 + column % 16
        byte = page[(token // 4 * columns + place) * 4 + token % 4]
        if packed.bits == 8:
            numbers.append(float(byte.astype(np.int8)) * scales[0, token])
        else:
            nibble = int(byte) >> 4 if column % 32 >= 16 else int(byte) & 15
            numbers.append((nibble - 7.5) * scales[column // 32, token])
    return np.array(numbers)


def as_it_was(layer: PagedLayer, x: np.ndarray) -> np.ndarray:
    return x @ sylvester(x.shape[-1]) if layer.kind == "int4" else x


def context_of(step: Any, sequence: int, head: int, read: Callable[..., np.ndarray]) -> np.ndarray:
    """All keys or values of a sequence, as stored, [tokens, size]."""
    table = step.block_tables[sequence]
    length = range(step.context_lengths[sequence])
    return np.array([read(step.layer, table[t // PAGE_TOKENS], head, t % PAGE_TOKENS) for t in length])


def softmax_weights(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@both_bits
@pytest.mark.parametrize("sequence", [(1, 1), (3, 40), (40, 70)], ids=["one", "decode", "prefill"])
def test_attention_is_that_of_the_numbers_in_the_pages(
    make_step: MakeStep, dtype: str, sequence: tuple[int, int]
) -> None:
    step = make_step([sequence], dtype=dtype, heads=2, kv_heads=1, head_size=64, v_head_size=32)
    out, is_decode = step.run(), step.decode_rows > 0
    keys = as_it_was(step.layer, context_of(step, 0, 0, stored_key))
    values = as_it_was(step.layer, context_of(step, 0, 0, stored_value))
    for row, position in enumerate(step.positions):
        for head in range(2):
            scores = keys[: position + 1] @ step.query[row, head].astype(np.float64) / 8
            expected = softmax_weights(scores) @ values[: position + 1]
            tolerance = 3e-2 if is_decode or uses_tiles(dtype) else 2e-6
            np.testing.assert_allclose(out[row, head], expected, rtol=0, atol=tolerance * np.abs(expected).max())


@both_bits
def test_decode_rows_round_as_the_definition_says(make_step: MakeStep, dtype: str) -> None:
    """Queries round to 8 bits of a head's largest number; weights times value scales to 8 bits of a page's largest."""
    step = make_step([(1, 200), (1, 33)], dtype=dtype, heads=4, kv_heads=2, head_size=64)
    out = step.run()
    errors = []
    for row in range(2):
        for head in range(4):
            keys, values = (context_of(step, row, head // 2, read) for read in (stored_key, stored_value))
            q = step.query[row, head].astype(np.float64)
            q = q @ sylvester(64) if dtype == "int4" else q
            factor = np.abs(q).max() / 127
            weights = softmax_weights(keys @ (np.rint(q / factor) * factor) / 8)
            table = step.block_tables[row]
            result = np.zeros(64)
            for first in range(0, len(keys), PAGE_TOKENS):
                page = slice(first, min(first + PAGE_TOKENS, len(keys)))
                scales = scales_of(step.layer)[1][table[first // PAGE_TOKENS], head // 2].astype(np.float64)
                for group, scale in enumerate(scales):
                    columns = slice(0, 64) if dtype == "int8" else slice(32 * group, 32 * group + 32)
                    scale = scale[: page.stop - first]
                    shares = weights[page] * scale
                    shares = np.rint(shares / shares.max() * 255) * shares.max() / 255
                    result[columns] += shares @ (values[page, columns] / scale[:, None])
            errors.append(np.abs(out[row, head] - as_it_was(step.layer, result)) / np.abs(result).max())
    # A number half-way between two integers may round to either in float32.
    assert np.mean(np.array(errors) < 2e-5) > 0.8
    assert np.max(errors) < 1e-2


@both_bits
@pytest.mark.parametrize("bits_of_numbers", [-12.0, 0.0, 6.0])
def test_what_is_stored(make_step: MakeStep, make_rope: MakeRope, rng: Any, dtype: str, bits_of_numbers: float) -> None:
    step = make_step([(5, 40), (40, 64)], dtype=dtype, head_size=64)
    step.key *= np.float32(2**bits_of_numbers)
    step.value *= np.float32(2**bits_of_numbers)
    options = {"rope": make_rope(64), "k_norm": rng.standard_normal(64).astype(np.float32), "epsilon": 1e-3}
    step.run(**options)
    keys = step.rotated(step.key, options["k_norm"], options)
    steps, columns = (127, 64) if dtype == "int8" else (7.5, 32)
    for read, given in ((stored_key, keys), (stored_value, step.value.astype(np.float64))):
        given = given @ sylvester(64) if dtype == "int4" else given
        for row in (0, 4, 5, 44):
            block, token = divmod(int(step.slot_mapping[row]), PAGE_TOKENS)
            for head in range(2):
                found = read(step.layer, block, head, token).reshape(-1, columns)
                wanted = given[row, head].reshape(-1, columns)
                half_a_step = np.abs(wanted).max(axis=1, keepdims=True) / steps / 2
                # The scale is rounded to float16, and for small ones that is coarse.
                assert (np.abs(found - wanted) <= half_a_step * 1.01 + 2.0**-25 * steps).all()


@both_bits
def test_the_kernel_stores_what_the_reference_stores(make_step: MakeStep, dtype: str) -> None:
    step = make_step([(7, 90), (64, 64)], dtype=dtype, head_size=32, v_head_size=64)
    own = PagedLayer(step.layer.keys.copy(), step.layer.values.copy(), step.layer.packed)
    write_pages(own, step.slot_mapping, step.key, step.value)
    step.run()
    for mine, theirs in ((own.keys, step.layer.keys), (own.values, step.layer.values)):
        assert np.mean(mine != theirs) < 1e-3  # numbers half-way between two integers in float32
    for mine, theirs in zip(scales_of(own), scales_of(step.layer), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3)


@pytest.mark.parametrize("packed", [PackedPages(8, 33, 14), PackedPages(8, 64, 64), PackedPages(4, 32, 128)])
def test_the_reference_reads_the_layout(rng: Any, packed: PackedPages) -> None:
    layer = packed_layer(rng, packed, 3, 2)
    keys, values = read_pages(layer, np.array([2, 0], np.int32))
    for token in (0, 5, 31, 32, 63):
        block = (2, 0)[token // 32]
        for head in range(2):
            np.testing.assert_allclose(
                keys[token, head], as_it_was(layer, stored_key(layer, block, head, token % 32)), rtol=1e-12, atol=1e-12
            )
            np.testing.assert_allclose(
                values[token, head], as_it_was(layer, stored_value(layer, block, head, token % 32)), rtol=1e-12,
                atol=1e-12,
            )  # fmt: skip


@pytest.mark.parametrize("size", [32, 64, 256])
def test_turning_is_its_own_inverse_and_the_definition(rng: Any, size: int) -> None:
    x = rng.standard_normal((3, size))
    np.testing.assert_allclose(hadamard(x), x @ sylvester(size), atol=1e-12)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=1e-12)


@both_bits
def test_zeros_stay_zeros(make_step: MakeStep, dtype: str) -> None:
    step = make_step([(1, 1), (40, 40)], dtype=dtype)
    step.key[:] = step.value[:] = 0
    np.testing.assert_array_equal(step.run(), 0)


@both_bits
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nans_reach_the_rows_that_see_them(make_step: MakeStep, dtype: str, bad: float) -> None:
    step = make_step([(6, 6), (2, 4), (70, 70)], dtype=dtype, kv_heads=1)
    clean = step.run()
    sees = np.zeros(len(clean), bool)
    sees[[3, 4, 5]] = sees[8 + 40 :] = True
    for given in (step.value, step.key):
        before = given.copy()
        given[3, 0, 1] = given[8 + 40, 0, 1] = bad
        out = step.run()
        np.testing.assert_array_equal(out[~sees], clean[~sees])
        assert not np.isfinite(out[sees]).any(axis=(1, 2)).any()
        given[:] = before


@both_bits
def test_bad_queries_are_nan_in_their_own_heads_alone(make_step: MakeStep, dtype: str) -> None:
    step = make_step([(2, 40)], dtype=dtype)
    clean = step.run()
    step.query[1, 2, 5] = np.nan
    out = step.run()
    assert np.isnan(out[1, 2]).all()
    out[1, 2] = clean[1, 2]
    np.testing.assert_array_equal(out, clean)


@both_bits
def test_large_numbers_that_float16_cannot_hold(make_step: MakeStep, dtype: str) -> None:
    step = make_step([(3, 3), (40, 40)], dtype=dtype)
    step.key *= 1e-3
    step.value *= 1e5
    out = step.run()
    assert np.isfinite(out).all() and np.abs(out).max() > 7e4


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again in a process that uses another instruction set."""
    with_instructions(name, __file__)
