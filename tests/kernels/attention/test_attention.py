"""Attention over pages against the float64 reference, in ragged steps of decode and prefill rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import can_rotate
from genai.kernels.cpu.attention.decode import SPLIT_TOKENS
from genai.kernels.cpu.attention.panels import BLOCK_TOKENS, CHUNK_TOKENS
from genai.kernels.cpu.attention.prefill import uses_tiles
from tests.instructions import other_instructions

MakeStep, MakeRope = Callable[..., Any], Callable[..., Any]

both_types = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
all_types = pytest.mark.parametrize("dtype", [np.float32, np.float16, "int8", "int4"], ids=["fp32", "fp16", "8", "4"])

FLOAT32_ERROR = 2e-6
# Of tiles of bfloat16 (8 bits of mantissa): root mean square of the error over that of the result, and its greatest
# single error over the greatest result. Measured: 2.5e-3 and 1.2e-2.
TILE_RMS, TILE_WORST = 4e-3, 3e-2
# Of decode rows over packed pages, whose queries and weights are rounded too; test_packed.py has what they must be.
PACKED_RMS, PACKED_WORST = 1e-2, 3e-2

# DECODE: a decode row, a context of several splits, a first prompt, a later chunk, contexts around the edges of splits.
DECODE = [(1, 1), (1, 1300), (23, 23), (5, 130), (1, SPLIT_TOKENS), (2, SPLIT_TOKENS + 1), (0, 9)]
# PREFILL: the shortest, one that ends inside a block and a chunk, one with a past, one that begins inside a chunk.
PREFILL = [(32, 32), (BLOCK_TOKENS + 5, BLOCK_TOKENS + 5), (33, 400), (3 * CHUNK_TOKENS, 3 * CHUNK_TOKENS + 50)]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.05},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "window across chunks": {"window": CHUNK_TOKENS + 1},
    "softcap": {"softcap": 1.5},
    "smooth softmax": {"smooth_softmax": True},
    "sinks": {"sinks": np.array([-3, 0, 2, 30], np.float32)},
    "all": {"scale": 0.3, "window": 200, "softcap": 5.0, "sinks": np.array([1, 2, -1, 0], np.float32)},
}


def assert_close(step: Any, out: np.ndarray, expected: np.ndarray, tolerance: float = FLOAT32_ERROR) -> None:
    rounded = np.zeros(len(out), bool)
    rounded[step.decode_rows :] = uses_tiles(step.layer.kind)
    packed = np.zeros(len(out), bool)
    packed[: step.decode_rows] = step.layer.packed is not None
    largest, exact = max(1.0, float(np.abs(expected).max(initial=0))), ~(rounded | packed)
    np.testing.assert_allclose(out[exact], expected[exact], rtol=0, atol=tolerance * largest)
    for rows, rms, worst in ((rounded, TILE_RMS, TILE_WORST), (packed, PACKED_RMS, PACKED_WORST)):
        if rows.any():
            error, size = out[rows] - expected[rows], expected[rows]
            assert np.sqrt(np.mean(error**2)) <= rms * np.sqrt(np.mean(size**2))
            assert np.abs(error).max() <= worst * np.abs(size).max()


@all_types
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_reference(make_step: MakeStep, dtype: Any, variant: str) -> None:
    step = make_step(DECODE + PREFILL, dtype=dtype)
    assert_close(step, step.run(**VARIANTS[variant]), step.expected(**VARIANTS[variant]))


SHAPES = [
    (1, 1, 1, 1),
    (4, 4, 64, 64),
    (8, 1, 80, 80),
    (6, 2, 10, 50),
    (7, 7, 33, 31),
    (18, 2, 96, 14),
    (4, 2, 256, 128),
    (14, 2, 64, 64),
    (9, 1, 128, 32),
]


@all_types
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "v_head_size"), SHAPES)
def test_any_head_shape(
    make_step: MakeStep, dtype: Any, heads: int, kv_heads: int, head_size: int, v_head_size: int
) -> None:
    if dtype == "int4" and not (can_rotate(head_size) and can_rotate(v_head_size)):
        pytest.skip("heads of this size cannot be turned")
    shape = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "v_head_size": v_head_size}
    step = make_step([(1, 40), (3, 3), (40, 140)], dtype=dtype, **shape)
    assert_close(step, step.run(), step.expected())


@both_types
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(32, 32), (80, 32), (34, 18), (64, 40)])
def test_queries_and_keys_are_normed_and_rotated(
    make_step: MakeStep, make_rope: MakeRope, rng: Any, dtype: Any, interleaved: bool, head_size: int, rotary_dim: int
) -> None:
    step = make_step([(1, 100), (4, 70), (50, 90), (32, 40)], dtype=dtype, head_size=head_size)
    options = {
        "rope": make_rope(rotary_dim, interleaved=interleaved, long=True),
        "q_norm": rng.standard_normal(head_size).astype(np.float32),
        "k_norm": rng.standard_normal(head_size).astype(np.float32),
        "epsilon": 1e-3,
    }
    out = step.run(**options)
    blocks, offsets = np.divmod(step.slot_mapping, 32)
    keys = step.rotated(step.key, options["k_norm"], options)
    stored = step.layer.keys[blocks, :, :, offsets]
    ulp = 1e-3 if dtype == np.float16 else 1e-6
    np.testing.assert_allclose(stored, keys, rtol=ulp, atol=ulp)
    np.testing.assert_array_equal(step.layer.values[blocks, :, offsets], step.value.astype(dtype))
    # Queries may be an ulp apart, and scores are large here.
    assert_close(step, out, step.expected(**options), tolerance=1e-5)


@both_types
def test_large_scores(make_step: MakeStep, dtype: Any) -> None:
    """Scores in the hundreds: softmax must not overflow, and nearly picks one key."""
    step = make_step([(4, 100), (40, 100)], dtype=dtype)
    step.query *= 100
    out, expected = step.run(), step.expected()
    np.testing.assert_allclose(out[:4], expected[:4], rtol=0, atol=1e-4 * np.abs(expected).max())
    assert np.isfinite(out).all()


@both_types
def test_rising_and_falling_scores(make_step: MakeStep, dtype: Any) -> None:
    """The running maximum changes in every chunk, or never."""
    for direction in (1, -1):
        step = make_step([(1, 1400), (32, 900)], dtype=dtype, heads=1, kv_heads=1)
        step.key[:] = 0
        for table in step.block_tables:
            for index, block in enumerate(table[table >= 0]):
                step.layer.keys[block, 0] = 0
                step.layer.keys[block, 0, 0] = direction * index / 2
        step.query[..., 0] = 16
        assert_close(step, step.run(), step.expected(), 1e-5)


@all_types
@pytest.mark.parametrize("variant", ["plain", "window", "all"])
def test_a_sequence_alone_equals_the_sequence_in_a_step(make_step: MakeStep, dtype: Any, variant: str) -> None:
    """The results are equal bit for bit."""
    step = make_step([s for s in DECODE if s[0]] + PREFILL, dtype=dtype)
    together = step.run(**VARIANTS[variant])
    alone = np.concatenate([step.alone(i).run(**VARIANTS[variant]) for i in range(len(step.counts))])
    np.testing.assert_array_equal(together, alone)


@all_types
@pytest.mark.parametrize("variant", ["plain", "window across chunks", "all"])
def test_decode_rows_do_not_depend_on_the_cut(make_step: MakeStep, dtype: Any, variant: str) -> None:
    step = make_step([(7, 1100)], dtype=dtype)
    whole = step.run(**VARIANTS[variant])
    cut = np.concatenate([step.part(0, a, b).run(**VARIANTS[variant]) for a, b in ((0, 1), (1, 5), (5, 7))])
    np.testing.assert_array_equal(whole, cut)


@all_types
@pytest.mark.parametrize("variant", ["plain", "window across chunks", "all"])
def test_prefill_rows_do_not_depend_on_the_cut(make_step: MakeStep, dtype: Any, variant: str) -> None:
    step = make_step([(300, 420)], dtype=dtype)
    whole = step.run(**VARIANTS[variant])
    for cuts in ((0, 32, 150, 300), (0, 67, 268, 300)):
        parts = [step.part(0, a, b).run(**VARIANTS[variant]) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(whole, np.concatenate(parts))


@all_types
def test_threads_do_not_change_a_bit(make_step: MakeStep, dtype: Any) -> None:
    step = make_step(DECODE + PREFILL, dtype=dtype)
    np.testing.assert_array_equal(step.run(threads=1, **VARIANTS["all"]), step.run(threads=2, **VARIANTS["all"]))


def test_no_rows(make_step: MakeStep) -> None:
    assert make_step([(0, 5)]).run().shape == (0, 4, 32)


def test_pages_before_the_window_may_be_gone(make_step: MakeStep) -> None:
    step = make_step([(2, 1200), (40, 300)])
    expected = step.run(window=100)
    step.block_tables[0, :34] = -1  # positions 0 to 1087; the first row's window starts at 1099
    step.block_tables[1, :5] = -1  # positions 0 to 159; the first row's window starts at 161
    np.testing.assert_array_equal(step.run(window=100), expected)


@both_types
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nans_reach_the_rows_that_see_them(make_step: MakeStep, dtype: Any, bad: float) -> None:
    step = make_step([(6, 6), (2, 4), (70, 70)], dtype=dtype, kv_heads=1)
    clean = step.run()
    sees = np.zeros(len(clean), bool)
    sees[[3, 4, 5]] = sees[8 + 40 :] = True
    step.value[3, 0] = step.value[8 + 40, 0] = bad
    out = step.run()
    np.testing.assert_array_equal(out[~sees], clean[~sees])
    assert not np.isfinite(out[sees]).any()
    np.testing.assert_array_equal(out[8:], step.alone(2).run())
    step.value[3, 0] = step.value[8 + 40, 0] = 0
    step.key[3, 0] = step.key[8 + 40, 0] = np.nan
    out = step.run()
    assert np.isnan(out[sees]).all() and np.isfinite(out[~sees]).all()


@both_types
def test_keys_with_a_score_of_minus_infinity_count_for_nothing(make_step: MakeStep, dtype: Any) -> None:
    step = make_step([(1, 1100), (32, 300)], dtype=dtype, heads=1, kv_heads=1, head_size=1)
    step.query[:] = 1
    for table in step.block_tables:
        step.layer.keys[table[:4]] = -np.inf  # the whole first chunk
    step.layer.keys[step.block_tables[0, :16]] = -np.inf  # the whole first split
    out, expected = step.run(), step.expected()
    # Of weights and values that are rounded to bfloat16.
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3 if uses_tiles(step.layer.kind) else FLOAT32_ERROR)


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again in a process that uses another instruction set."""
    with_instructions(name, __file__)
