"""Paged attention and cache writes against the NumPy references, in ragged batches of decode and prefill rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.attention import CHUNK_TOKENS, paged_attention
from genai.kernels.cpu.kv import write_kv
from genai.kernels.formats import PagedLayer
from genai.kernels.reference import paged as reference

Normal = Callable[..., np.ndarray]

both_types = pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])


@dataclass(frozen=True)
class Batch:
    """Sequences with the tokens that they bring in this step, and the pages that hold their past."""

    q: np.ndarray
    layer: PagedLayer
    step: dict[str, np.ndarray]

    def run(self, **options: Any) -> np.ndarray:
        return paged_attention(self.q, self.layer, **self.step, **options)

    def assert_equals_reference(self, tolerance: float = 2e-6, **options: Any) -> None:
        out = self.run(**options)
        expected = reference.paged_attention(self.q.astype(np.float64), self.layer, **self.step, **options)
        np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max())))

    def row(self, index: int) -> Batch:
        """The same row as a step of its own."""
        sequence = int(np.searchsorted(self.step["query_start"], index, side="right")) - 1
        position = self.step["positions"][index : index + 1]
        step = {
            "query_start": np.array([0, 1], np.int32),
            "context_lengths": (position + 1).astype(np.int32),
            "positions": position,
            "block_tables": self.step["block_tables"][sequence : sequence + 1],
        }
        return replace(self, q=self.q[index : index + 1], step=step)


def make_batch(
    rng: np.random.Generator,
    sequences: list[tuple[int, int]],
    *,
    dtype: Any = np.float32,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    v_head_size: int | None = None,
    block_size: int = 16,
) -> Batch:
    """sequences: (new tokens, context length including them). Pages are scattered over the cache at random."""
    blocks = [-(-length // block_size) for _, length in sequences]
    ids = rng.permutation(sum(blocks) + 3).astype(np.int32)
    tables = np.full((len(sequences), max(blocks) + 1), -1, np.int32)
    for row, count, start in zip(tables, blocks, np.cumsum([0, *blocks]), strict=False):
        row[:count] = ids[start : start + count]
    new = [count for count, _ in sequences]
    shape = (len(ids), kv_heads, block_size)
    layer = PagedLayer(
        rng.standard_normal((*shape, head_size)).astype(dtype),
        rng.standard_normal((*shape, v_head_size or head_size)).astype(dtype),
    )
    step = {
        "query_start": np.cumsum([0, *new]).astype(np.int32),
        "context_lengths": np.array([length for _, length in sequences], np.int32),
        "positions": np.concatenate([np.arange(length - count, length) for count, length in sequences]).astype(
            np.int64
        ),
        "block_tables": tables,
    }
    return Batch(rng.standard_normal((sum(new), heads, head_size)).astype(np.float32), layer, step)


# A decode row, a first prompt, a later chunk of a prompt, an idle sequence, contexts around the chunk boundary.
RAGGED = [(1, 1), (1, 70), (23, 23), (5, 130), (0, 9), (1, CHUNK_TOKENS), (2, CHUNK_TOKENS + 1)]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.05},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "window across chunks": {"window": 65},
    "softcap": {"softcap": 1.5},
    "smooth softmax": {"smooth_softmax": True},
    "sinks": {"sinks": np.array([-3, 0, 2, 30], np.float32)},
    "all": {"scale": 0.3, "window": 20, "softcap": 5.0, "sinks": np.array([1, 2, -1, 0], np.float32)},
}


@both_types
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_reference(rng: np.random.Generator, dtype: Any, variant: str) -> None:
    make_batch(rng, RAGGED, dtype=dtype).assert_equals_reference(**VARIANTS[variant])


@both_types
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "v_head_size"),
    [(1, 1, 1, 1), (4, 4, 64, 64), (8, 1, 80, 80), (6, 2, 20, 50), (7, 7, 33, 31), (4, 2, 256, 128), (28, 4, 128, 128)],
)
def test_any_head_shape(
    rng: np.random.Generator, dtype: Any, heads: int, kv_heads: int, head_size: int, v_head_size: int
) -> None:
    make_batch(
        rng,
        [(1, 40), (3, 3)],
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        v_head_size=v_head_size,
    ).assert_equals_reference()


def test_no_rows(rng: np.random.Generator) -> None:
    assert make_batch(rng, [(0, 5)]).run().shape == (0, 4, 32)


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 64, 100, 256])
def test_any_block_size(rng: np.random.Generator, block_size: int) -> None:
    make_batch(rng, [(3, 150), (1, 64)], block_size=block_size).assert_equals_reference()


@both_types
def test_large_scores(rng: np.random.Generator, dtype: Any) -> None:
    """Scores in the hundreds: softmax must not overflow, and nearly picks one key."""
    batch = make_batch(rng, [(4, 100)], dtype=dtype)
    replace(batch, q=batch.q * 100).assert_equals_reference(1e-4)


def test_rising_and_falling_scores(rng: np.random.Generator) -> None:
    """The running maximum changes in every chunk, or never."""
    for direction in (1, -1):
        batch = make_batch(rng, [(1, 400)], heads=1, kv_heads=1, block_size=400)
        batch.layer.keys[..., 0] = direction * np.arange(400) / 4
        batch.q[..., 0] = 5
        batch.assert_equals_reference(1e-5)


@both_types
def test_a_row_alone_equals_the_row_in_a_batch(rng: np.random.Generator, dtype: Any) -> None:
    """Bit for bit, decode against prefill too: a row does not know what it was computed with."""
    batch = make_batch(rng, RAGGED, dtype=dtype)
    for options in ({}, VARIANTS["all"]):
        together = batch.run(**options)
        alone = np.concatenate([batch.row(i).run(**options) for i in range(len(batch.q))])
        np.testing.assert_array_equal(together, alone)


@both_types
def test_threads_do_not_change_a_bit(rng: np.random.Generator, dtype: Any, team: Any) -> None:
    batch = make_batch(rng, RAGGED, dtype=dtype)
    np.testing.assert_array_equal(batch.run(team=team), batch.run())


def test_pages_before_the_window_may_be_gone(rng: np.random.Generator) -> None:
    batch = make_batch(rng, [(2, 100)])
    expected = batch.run(window=20)
    batch.step["block_tables"][0, :4] = -1  # positions 0 to 63; the window starts at 79
    np.testing.assert_array_equal(batch.run(window=20), expected)


def test_query_may_be_a_slice_of_packed_qkv(rng: np.random.Generator) -> None:
    batch = make_batch(rng, RAGGED)
    packed = rng.standard_normal((len(batch.q), 8, 32)).astype(np.float32)
    packed[:, :4] = batch.q
    out = np.empty_like(batch.q)
    assert replace(batch, q=packed[:, :4]).run(out=out) is out
    np.testing.assert_array_equal(out, batch.run())


@both_types
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nans_reach_the_rows_that_see_them(rng: np.random.Generator, dtype: Any, bad: float) -> None:
    batch = make_batch(rng, [(6, 6), (2, 4)], dtype=dtype, kv_heads=1)
    clean = batch.run()
    block = batch.step["block_tables"][0, 0]
    batch.layer.values[block, 0, 3] = bad
    out = batch.run()
    np.testing.assert_array_equal(out[[0, 1, 2, 6, 7]], clean[[0, 1, 2, 6, 7]])
    assert not np.isfinite(out[3:6]).any()
    batch.layer.values[block, 0, 3] = 0
    batch.layer.keys[block, 0, 3] = np.nan
    assert np.isnan(batch.run()[3:6]).all()


def test_keys_with_a_score_of_minus_infinity_count_for_nothing(rng: np.random.Generator) -> None:
    batch = make_batch(rng, [(1, 70)], heads=1, kv_heads=1, head_size=1)
    batch.q[:] = 1
    batch.layer.keys[batch.step["block_tables"][0, :4]] = -np.inf  # the whole first chunk
    batch.assert_equals_reference()
    assert np.isfinite(batch.run()).all()


@both_types
def test_write_kv_equals_reference(rng: np.random.Generator, dtype: Any, team: Any) -> None:
    shape = (6, 3, 8)
    pages = [PagedLayer(np.zeros((*shape, 20), dtype), np.zeros((*shape, 37), dtype)) for _ in range(2)]
    k, v = rng.standard_normal((9, 3, 20)).astype(np.float32), rng.standard_normal((9, 3, 37)).astype(np.float32)
    k[0, 0, :6] = [1e-8, 6e-8, 65519.0, 1.0009765625, -0.0, 1e-5]  # denormal halves, ties, the largest half
    slots = rng.permutation(48)[:9].astype(np.int64)
    write_kv(pages[0], k, v, slots, team=team)
    reference.write_kv(pages[1], k, v, slots)
    np.testing.assert_array_equal(pages[0].keys, pages[1].keys)
    np.testing.assert_array_equal(pages[0].values, pages[1].values)


def test_write_kv_from_packed_qkv(rng: np.random.Generator) -> None:
    packed = rng.standard_normal((4, 8, 16)).astype(np.float32)
    layer = PagedLayer(np.zeros((2, 2, 4, 16), np.float32), np.zeros((2, 2, 4, 16), np.float32))
    write_kv(layer, packed[:, 4:6], packed[:, 6:], np.arange(4))
    np.testing.assert_array_equal(layer.keys[0], packed[:, 4:6].swapaxes(0, 1))
    np.testing.assert_array_equal(layer.values[0], packed[:, 6:].swapaxes(0, 1))


@both_types
@pytest.mark.parametrize("slot", [-1, 8])
def test_write_kv_refuses_slots_outside_the_cache(dtype: Any, slot: int) -> None:
    layer = PagedLayer(np.zeros((2, 1, 4, 8), dtype), np.zeros((2, 1, 4, 8), dtype))
    with pytest.raises(IndexError, match="slot outside the cache"):
        write_kv(layer, np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32), np.array([slot]))
    assert not layer.keys.any()


@pytest.mark.parametrize(
    ("k", "v", "slots"),
    [
        (np.zeros((2, 2, 8), np.float32), np.zeros((2, 1, 8), np.float32), np.zeros(2, np.int64)),
        (np.zeros((2, 1, 8), np.float32), np.zeros((1, 1, 8), np.float32), np.zeros(2, np.int64)),
        (np.zeros((2, 1, 8), np.float32), np.zeros((2, 1, 8)), np.zeros(2, np.int64)),
        (np.zeros((2, 1, 8), np.float32), np.zeros((2, 1, 8), np.float32), np.zeros(2, np.int32)),
        (np.zeros((2, 1, 16), np.float32)[:, :, ::2], np.zeros((2, 1, 8), np.float32), np.zeros(2, np.int64)),
    ],
)
def test_write_kv_refuses(k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> None:
    layer = PagedLayer(np.zeros((2, 1, 4, 8), np.float32), np.zeros((2, 1, 4, 8), np.float32))
    with pytest.raises(ValueError, match="expected"):
        write_kv(layer, k, v, slots)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((1, 3, 32), np.float32)}, ValueError, "q has 3 heads, expected a multiple"),
        ({"q": np.zeros((1, 4, 16), np.float32)}, ValueError, "q is float32"),
        ({"q": np.zeros((1, 4, 64), np.float32)[:, :, ::2]}, ValueError, "q is float32"),
        ({"query_start": np.array([0, 2], np.int32)}, ValueError, "query_start runs from 0 to 2"),
        ({"query_start": np.array([0, 1], np.int64)}, ValueError, "query_start is int64"),
        ({"positions": np.array([0, 1])}, ValueError, "positions is int64"),
        ({"block_tables": np.zeros((2, 1), np.int32)}, ValueError, "block_tables is int32"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"window": -2}, ValueError, "window is -2"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks is float32"),
        ({"out": np.zeros((1, 4, 31), np.float32)}, ValueError, "out is float32"),
        ({"positions": np.array([3])}, IndexError, "position outside its sequence"),
        ({"positions": np.array([-1])}, IndexError, "position outside its sequence"),
        ({"block_tables": np.array([[9]], np.int32)}, IndexError, "block table entry outside the cache"),
        ({"block_tables": np.array([[-1]], np.int32)}, IndexError, "block table entry outside the cache"),
        ({"block_tables": np.zeros((1, 0), np.int32)}, IndexError, "context longer than its block table"),
    ],
)
def test_refuses(rng: np.random.Generator, change: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = make_batch(rng, [(1, 3)])
    arguments = {"q": batch.q, "layer": batch.layer, **batch.step, **change}
    with pytest.raises(error, match=message):
        paged_attention(**arguments)
