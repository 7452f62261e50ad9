"""Attention over pages gives what the reference gives, and a row's bits depend on its own sequence only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.executor import StepContext, StepError
from genai.kernels.formats import PagedLayer
from genai.kernels.records import Attention, Rope
from genai.kernels.reference.executor import ReferenceExecutor

from .host_driver import HostDriver
from .programs import MadeUpConstants, layer_of, program, relative_error, step_of

BLOCKS = 32


def attention(**options: Any) -> Attention:
    shape = {"heads": 4, "kv_heads": 2, "head_size": 64, "v_head_size": 64, "layer": 0}
    return Attention(query="q", key="k", value="v", out="out", **{**shape, **options})


def constants_for(record: Attention, rng: np.random.Generator) -> MadeUpConstants:
    arrays = {}
    if record.rope is not None:
        pairs = 12 if record.head_size == 64 else record.head_size // 2  # part of a head is rotated, or all of it
        for name in ("cos", "sin", "long cos", "long sin"):
            arrays[name] = np.cos(rng.uniform(0, 6, (1000, pairs))).astype(np.float32)
    for name, size in (("norm", record.head_size), ("sinks", record.heads)):
        arrays[name] = rng.standard_normal(size).astype(np.float32)
    return MadeUpConstants(arrays)


def rows_for(record: Attention, tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    heads = {"q": record.heads, "k": record.kv_heads, "v": record.kv_heads}
    sizes = {"q": record.head_size, "k": record.head_size, "v": record.v_head_size}
    return {name: rng.standard_normal((tokens, heads[name] * sizes[name])).astype(np.float32) for name in heads}


def run(
    executor: Any, record: Attention, constants: MadeUpConstants, layer: PagedLayer, step: StepContext,
    rows: dict[str, np.ndarray],
) -> np.ndarray:  # fmt: skip
    widths = {name: array.shape[1] for name, array in rows.items()} | {"out": record.heads * record.v_head_size}
    whole = program([record], widths, constants, ["out"])
    pages = layer
    if isinstance(executor, CudaExecutor) and not isinstance(executor.driver, HostDriver):
        pages = PagedLayer(*(executor.driver.upload(array) for array in (layer.keys, layer.values)))
    found: np.ndarray = executor.compile(whole, [pages]).run(step, rows)["out"]
    if pages is not layer:  # a GPU's are copies
        layer.keys[...], layer.values[...] = (executor.host(array) for array in (pages.keys, pages.values))
    return found.reshape(-1, widths["out"])


ROPE = Rope("cos", "sin")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "half precision": {"dtype": "float16", "rope": ROPE},
    "rotated by neighbours": {"rope": Rope("cos", "sin", "long cos", "long sin", interleaved=True)},
    "rotated by halves, two tables": {"rope": Rope("cos", "sin", "long cos", "long sin"), "dtype": "float16"},
    "normed": {"rope": ROPE, "q_norm": "norm", "k_norm": "norm", "epsilon": 1e-5, "scale": 0.2},
    "window and softcap": {"window": 40, "softcap": 3.0, "rope": ROPE},
    "window of one": {"window": 1},
    "sinks": {"sinks": "sinks", "heads": 16, "kv_heads": 1, "head_size": 32, "v_head_size": 32},
    "a sink of zero": {"smooth_softmax": True, "kv_heads": 4},
    "odd sizes": {"head_size": 24, "v_head_size": 40, "heads": 6, "kv_heads": 2, "rope": ROPE},
    "values wider than a warp, and not whole": {"head_size": 80, "v_head_size": 80, "rope": ROPE, "dtype": "float16"},
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(driver: HostDriver, case: str) -> None:
    options = dict(CASES[case])
    dtype = options.pop("dtype", "float32")
    record, rng = attention(**options), np.random.default_rng(len(case))
    driver.order = len(case) % 3
    constants = constants_for(record, rng)
    layer = layer_of(rng, BLOCKS, record.kv_heads, record.head_size, record.v_head_size, dtype)
    other = PagedLayer(*(array.copy() for array in (layer.keys, layer.values)))
    step = step_of([5, 300, 33, 70], [5, 3, 1, 2], num_blocks=BLOCKS, rng=rng)
    step = replace(step, rope_table=np.array([0, 1, 1, 0], np.int32))
    rows = rows_for(record, 11, rng)
    ours = run(CudaExecutor(driver, 1), record, constants, layer, step, rows)
    theirs = run(ReferenceExecutor(), record, constants, other, step, rows)
    assert relative_error(ours, theirs) < 3e-6
    for mine, wanted in ((layer.keys, other.keys), (layer.values, other.values)):
        assert relative_error(mine, wanted) < (1e-4 if dtype == "float16" else 1e-6)


def test_bits_depend_on_the_own_sequence_only(driver: HostDriver) -> None:
    record, rng = attention(rope=ROPE), np.random.default_rng(0)
    constants = constants_for(record, rng)
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float16")
    step = step_of([300, 40, 520], [1, 2, 1], num_blocks=BLOCKS, rng=rng)
    rows, executor = rows_for(record, 4, rng), CudaExecutor(driver, 1)
    together = run(executor, record, constants, layer, step, rows)
    for sequence, (first, end) in enumerate(((0, 1), (1, 3), (3, 4))):
        part = replace(
            step, tokens=step.tokens[first:end], positions=step.positions[first:end],
            cu_seqlens_q=np.array([0, end - first], np.int32), context_lens=step.context_lens[sequence : sequence + 1],
            block_tables=step.block_tables[sequence : sequence + 1], slot_mapping=step.slot_mapping[first:end],
            logits_indices=np.zeros(0, np.int64), num_decode_sequences=1, rope_table=step.rope_table[:1],
        )  # fmt: skip
        alone = run(executor, record, constants, layer, part, {name: array[first:end] for name, array in rows.items()})
        assert np.array_equal(alone, together[first:end])


def test_what_is_not_visible_may_hold_anything(driver: HostDriver) -> None:
    record, rng = attention(window=20), np.random.default_rng(1)
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float32")
    step = step_of([70], [1], num_blocks=BLOCKS, rng=rng)
    rows, constants = rows_for(record, 1, rng), MadeUpConstants()
    expected = run(CudaExecutor(driver, 1), record, constants, layer, step, rows)
    used = step.block_tables[0]
    for block in set(range(BLOCKS)) - set(used.tolist()):
        layer.keys[block], layer.values[block] = np.nan, np.inf
    layer.values[used[2], :, 6:], layer.keys[used[2], :, :, 6:] = np.nan, np.nan  # behind the row
    layer.values[used[1], :, :17], layer.values[used[0]] = np.inf, np.nan  # before its window
    assert np.array_equal(run(CudaExecutor(driver, 1), record, constants, layer, step, rows), expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"positions": np.array([6])}, "position outside its sequence: 6 is not 0 to 4"),
        ({"slot_mapping": np.array([BLOCKS * 32])}, "slot outside the cache"),
        ({"block_tables": np.array([[BLOCKS]], np.int32)}, "block table entry outside the cache"),
        ({"context_lens": np.array([40], np.int32)}, "context longer than its block table"),
        ({"logits_indices": np.array([1])}, "row of logits outside the step"),
    ],
)
def test_a_step_that_leads_outside_is_refused(driver: HostDriver, change: dict[str, Any], text: str) -> None:
    record, rng = attention(), np.random.default_rng(1)
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float32")
    step = replace(step_of([5], [1], num_blocks=BLOCKS), **change)
    with pytest.raises(StepError, match=text):
        run(CudaExecutor(driver, 1), record, MadeUpConstants(), layer, step, rows_for(record, 1, rng))
    assert not driver.launched
