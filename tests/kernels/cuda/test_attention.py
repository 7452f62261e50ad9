"""Attention over pages gives what the reference gives, and a row's bits depend on its own sequence only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PagedLayer
from genai.kernels.cuda.attention import divides, heads_together
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.step import row_tiles
from genai.kernels.device import PageTables, StepContext, StepError
from genai.kernels.float_bits import read_floats, stored_floats
from genai.kernels.ir import Attention, Rope
from genai.kernels.reference.attention import attend_pages, rotated, rotations
from genai.kernels.reference.executor import ReferenceExecutor
from genai.kernels.reference.pages import read_pages

from .device_array import DeviceArray
from .host_driver import HostDriver
from .programs import MadeUpConstants, layer_of, packed_layer_of, program, relative_error, step_of

pytestmark = pytest.mark.gpu

BLOCKS = 32


def attention(**options: Any) -> Attention:
    shape = {"heads": 4, "kv_heads": 2, "head_size": 64, "v_head_size": 64, "layer": 0}
    return Attention(query="q", key="k", value="v", out="out", **{**shape, **options})


def constants_for(op: Attention, rng: np.random.Generator) -> MadeUpConstants:
    arrays = {}
    if op.rope is not None:
        pairs = 12 if op.head_size == 64 else op.head_size // 2  # part of a head is rotated, or all of it
        for name in ("cos", "sin", "long cos", "long sin"):
            arrays[name] = np.cos(rng.uniform(0, 6, (1000, pairs))).astype(np.float32)
    for name, size in (("norm", op.head_size), ("sinks", op.heads)):
        arrays[name] = rng.standard_normal(size).astype(np.float32)
    return MadeUpConstants(arrays)


def rows_for(op: Attention, tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    heads = {"q": op.heads, "k": op.kv_heads, "v": op.kv_heads}
    sizes = {"q": op.head_size, "k": op.head_size, "v": op.v_head_size}
    return {name: rng.standard_normal((tokens, heads[name] * sizes[name])).astype(np.float32) for name in heads}


def run(
    executor: Any, op: Attention, constants: MadeUpConstants, layer: PagedLayer, step: StepContext,
    rows: dict[str, np.ndarray],
) -> np.ndarray:  # fmt: skip
    widths = {name: array.shape[1] for name, array in rows.items()} | {"out": op.heads * op.v_head_size}
    whole = program([op], widths, constants, ["out"])
    pages = layer
    if isinstance(executor, CudaExecutor):  # where the device is the host there is more between blocks
        device: Any = DeviceArray if isinstance(executor.driver, HostDriver) else executor.driver.upload
        pages = PagedLayer(device(layer.keys), device(layer.values), layer.packed)
    found: np.ndarray = executor.compile(whole, [pages]).run(step, rows)["out"]
    if isinstance(executor, CudaExecutor) and not isinstance(executor.driver, HostDriver):  # a GPU's are copies
        layer.keys[...], layer.values[...] = (executor.host(array) for array in (pages.keys, pages.values))
    return found.reshape(-1, widths["out"])


def without_kind(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name != "kind"}


ROPE = Rope("cos", "sin")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "half precision": {"kind": "float16", "rope": ROPE},
    "rotated by neighbours": {"rope": Rope("cos", "sin", "long cos", "long sin", interleaved=True)},
    "rotated by halves, two tables": {"rope": Rope("cos", "sin", "long cos", "long sin"), "kind": "float16"},
    "normed": {"rope": ROPE, "q_norm": "norm", "k_norm": "norm", "epsilon": 1e-5, "scale": 0.2},
    "window and softcap": {"window": 40, "softcap": 3.0, "rope": ROPE},
    "window of one": {"window": 1},
    "chunks": {"chunk": 24, "rope": ROPE},
    "chunks of one": {"chunk": 1},
    "sinks": {"sinks": "sinks", "heads": 16, "kv_heads": 1, "head_size": 32, "v_head_size": 32},
    "a sink of zero": {"smooth_softmax": True, "kv_heads": 4},
    "no multiple of eight": {"head_size": 10, "v_head_size": 14, "heads": 6, "kv_heads": 2, "rope": Rope("cos", "sin")},
    "half precision, no multiple of eight": {
        "kind": "float16",
        "head_size": 100,
        "v_head_size": 84,
        "window": 40,
        "softcap": 3.0,
        "sinks": "sinks",
    },
    "chunks, no multiple of eight": {"head_size": 10, "v_head_size": 14, "heads": 6, "chunk": 40},
    "odd sizes": {"head_size": 24, "v_head_size": 40, "heads": 6, "kv_heads": 2, "rope": ROPE},
    "values wider than a warp, and not whole": {"head_size": 80, "v_head_size": 80, "rope": ROPE, "kind": "float16"},
    "half precision, window, softcap, sinks": {"kind": "float16", "window": 45, "softcap": 2.0, "sinks": "sinks"},
    "half precision, chunks and softcap": {"kind": "float16", "chunk": 20, "softcap": 3.0, "sinks": "sinks"},
    "half precision, window of one": {"kind": "float16", "window": 1, "smooth_softmax": True},
    "half precision, seven together": {"kind": "float16", "heads": 14},
    "half precision, odd sizes": {"kind": "float16", "head_size": 24, "v_head_size": 40, "heads": 6, "rope": ROPE},
    "half precision, narrower values": {"kind": "float16", "head_size": 96, "v_head_size": 64, "kv_heads": 4},
    "half precision, wide": {"kind": "float16", "head_size": 256, "v_head_size": 256, "heads": 2, "kv_heads": 1},
    "half precision, in halves that differ": {"kind": "float16", "head_size": 168, "v_head_size": 168, "kv_heads": 4},
    "bytes": {"kind": "int8", "rope": ROPE},
    "bytes, eight together": {"kind": "int8", "head_size": 128, "v_head_size": 128, "heads": 8, "kv_heads": 1},
    "bytes, odd sizes": {"kind": "int8", "head_size": 24, "v_head_size": 40, "heads": 6, "sinks": "sinks"},
    "bytes, chunks": {"kind": "int8", "heads": 8, "chunk": 45},
    "nibbles, chunks": {"kind": "int4", "chunk": 128},
    "bfloat16, chunks": {"kind": "bfloat16", "chunk": 33},
    "bytes, wide": {"kind": "int8", "head_size": 256, "v_head_size": 256, "kv_heads": 4, "window": 50},
    "nibbles": {"kind": "int4", "rope": ROPE},
    "nibbles, window and softcap": {"kind": "int4", "window": 40, "softcap": 3.0, "head_size": 128, "v_head_size": 32},
    "nibbles, wide": {"kind": "int4", "head_size": 256, "v_head_size": 256, "heads": 2, "kv_heads": 1},
    "bfloat16": {"kind": "bfloat16", "rope": ROPE, "window": 60, "sinks": "sinks"},
    "float8": {"kind": "float8", "rope": ROPE, "window": 60, "sinks": "sinks"},
    "bfloat16, odd sizes": {"kind": "bfloat16", "head_size": 24, "v_head_size": 40, "heads": 6, "softcap": 2.0},
    "bfloat16, wide": {"kind": "bfloat16", "head_size": 256, "v_head_size": 256, "heads": 2, "kv_heads": 1},
    "bfloat16, no multiple of eight": {"kind": "bfloat16", "head_size": 10, "v_head_size": 14, "rope": ROPE},
    "float8, odd sizes": {"kind": "float8", "head_size": 24, "v_head_size": 40, "heads": 6, "softcap": 2.0},
    "float8, eight together": {"kind": "float8", "head_size": 128, "v_head_size": 128, "heads": 8, "kv_heads": 1},
    "float8, in halves that differ": {"kind": "float8", "head_size": 168, "v_head_size": 168, "kv_heads": 4},
    "float8, wide": {"kind": "float8", "head_size": 256, "v_head_size": 256, "heads": 2, "kv_heads": 1},
    "float8, no multiple of eight": {"kind": "float8", "head_size": 10, "v_head_size": 14, "rope": ROPE},
}
# Those that a run computes; of the others it computes some.
CORE = [name for name in CASES if not name.startswith(("bfloat16,", "float8,"))]
SWEEP = [name if name in CORE else pytest.param(name, marks=pytest.mark.drawn(4)) for name in CASES]
# What is lost against the reference, which computes in float64 over the same pages: by single rows in float32, and by
# tiles, whose products take float16, or bfloat16.
ROWS_LOSE, TILES_LOSE, BFLOAT_TILES_LOSE = 3e-6, 5e-4, 4e-3


def made_layer(op: Attention, kind: str, rng: np.random.Generator) -> PagedLayer:
    sizes = BLOCKS, op.kv_heads, op.head_size, op.v_head_size
    if kind.startswith("int"):
        return packed_layer_of(rng, *sizes, int(kind.removeprefix("int")))
    return layer_of(rng, *sizes, kind)


def copy_of(layer: PagedLayer) -> PagedLayer:
    return PagedLayer(layer.keys.copy(), layer.values.copy(), layer.packed)


def check_pages(op: Attention, mine: PagedLayer, wanted: PagedLayer) -> None:
    """What was stored is what the reference has stored, but for numbers on the edge between two."""
    ours, theirs = (read_pages(layer, np.arange(layer.num_blocks)) for layer in (mine, wanted))
    limit = {"float32": 1e-6, "float16": 1e-4, "bfloat16": 1e-3, "float8": 1e-2, "int8": 1e-3, "int4": 1e-2}[mine.kind]
    for found, expected in zip(ours, theirs, strict=True):
        assert relative_error(found, expected) < limit
    if mine.keys.dtype.kind == "u":
        assert np.mean(mine.keys != wanted.keys) < 1e-3 and np.mean(mine.values != wanted.values) < 1e-3


def attended(
    op: Attention, constants: MadeUpConstants, layer: PagedLayer, step: StepContext, rows: dict[str, np.ndarray]
) -> np.ndarray:
    """What the reference gives over pages that hold the step's own keys and values."""

    def constant(name: str) -> Any:
        return constants.arrays[name] if name else None

    query = rows["q"].reshape(-1, op.heads, op.head_size)
    query = rotated(query, constant(op.q_norm), op.epsilon, rotations(op.rope, step, constant))
    found = attend_pages(op, query, layer, step, constant(op.sinks))
    return found.reshape(len(found), -1)


def rows_of(tables: PageTables, sequences: slice, rows: slice) -> PageTables:
    """Those of some sequences of a step, and of some of its tokens."""
    return PageTables(tables.block_tables[sequences], tables.slot_mapping[rows])


@pytest.mark.parametrize("case", SWEEP)
def test_against_the_reference(driver: HostDriver, case: str) -> None:
    options = dict(CASES[case])
    kind = options.pop("kind", "float32")
    op, rng = attention(**options), np.random.default_rng(len(case))
    driver.order = len(case) % 3
    constants = constants_for(op, rng)
    layer = made_layer(op, kind, rng)
    other = copy_of(layer)
    step = step_of([5, 300, 33, 70], [5, 3, 1, 2], num_blocks=BLOCKS, rng=rng)
    step = replace(step, rope_table=np.array([0, 1, 1, 0], np.int32))
    rows = rows_for(op, 11, rng)
    ours = run(CudaExecutor(driver, 1), op, constants, layer, step, rows)
    theirs = run(ReferenceExecutor(), op, constants, other, step, rows)
    check_pages(op, layer, other)
    if layer.keys.dtype.kind == "u":  # where a number was on the edge between two, it may be the other one
        theirs = attended(op, constants, layer, step, rows)
    assert relative_error(ours, theirs) < (1e-5 if layer.packed else ROWS_LOSE)


@pytest.mark.parametrize("case", SWEEP)
def test_prompts_against_the_reference(driver: HostDriver, case: str) -> None:
    """Beside rows with decode numerics."""
    options = dict(CASES[case])
    kind = options.pop("kind", "float32")
    op, rng = attention(**options), np.random.default_rng(len(case))
    driver.order = len(case) % 3
    constants, layer = constants_for(op, rng), made_layer(op, kind, rng)
    other = copy_of(layer)
    step = step_of([33, 70, 200, 37, 90], [1, 2, 35, 37, 20], num_blocks=BLOCKS, rng=rng, prefill=3)
    step = replace(step, rope_table=np.array([0, 1, 1, 0, 1], np.int32))
    rows = rows_for(op, len(step.tokens), rng)
    ours = run(CudaExecutor(driver, 1), op, constants, layer, step, rows)
    theirs = run(ReferenceExecutor(), op, constants, other, step, rows)
    check_pages(op, layer, other)
    if layer.keys.dtype.kind == "u":
        theirs = attended(op, constants, layer, step, rows)
    tiles = any("attend_tile" in name for name in driver.launched)
    assert tiles == (kind != "float32" and divides(op))
    assert relative_error(ours[:3], theirs[:3]) < (1e-5 if layer.packed else ROWS_LOSE)
    lost = BFLOAT_TILES_LOSE if kind == "bfloat16" else TILES_LOSE
    assert relative_error(ours[3:], theirs[3:]) < (lost if tiles else ROWS_LOSE)


def test_bits_depend_on_the_own_sequence_only(driver: HostDriver) -> None:
    op, rng = attention(rope=ROPE), np.random.default_rng(0)
    constants = constants_for(op, rng)
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float16")
    step = step_of([300, 40, 520], [1, 2, 1], num_blocks=BLOCKS, rng=rng)
    rows, executor = rows_for(op, 4, rng), CudaExecutor(driver, 1)
    together = run(executor, op, constants, layer, step, rows)
    for sequence, (first, end) in enumerate(((0, 1), (1, 3), (3, 4))):
        part = replace(
            step, tokens=step.tokens[first:end], positions=step.positions[first:end],
            cu_seqlens_q=np.array([0, end - first], np.int32), context_lens=step.context_lens[sequence : sequence + 1],
            groups=(rows_of(step.groups[0], slice(sequence, sequence + 1), slice(first, end)),),
            logits_indices=np.zeros(0, np.int64), num_decode_sequences=1, rope_table=step.rope_table[:1],
        )  # fmt: skip
        alone = run(executor, op, constants, layer, part, {name: array[first:end] for name, array in rows.items()})
        assert np.array_equal(alone, together[first:end])


def test_what_is_not_visible_may_hold_anything(driver: HostDriver) -> None:
    op, rng = attention(window=20), np.random.default_rng(1)
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float32")
    step = step_of([70], [1], num_blocks=BLOCKS, rng=rng)
    rows, constants = rows_for(op, 1, rng), MadeUpConstants()
    expected = run(CudaExecutor(driver, 1), op, constants, layer, step, rows)
    used = step.groups[0].block_tables[0]
    for block in set(range(BLOCKS)) - set(used.tolist()):
        layer.keys[block], layer.values[block] = np.nan, np.inf
    layer.values[used[2], :, 6:], layer.keys[used[2], :, :, 6:] = np.nan, np.nan  # behind the row
    layer.values[used[1], :, :17], layer.values[used[0]] = np.inf, np.nan  # before its window
    assert np.array_equal(run(CudaExecutor(driver, 1), op, constants, layer, step, rows), expected)


def part_of(step: StepContext, sequence: int, first: int, end: int, *, prefill: bool) -> StepContext:
    """A step of some rows of a sequence: those before them have been computed."""
    rows = slice(step.cu_seqlens_q[sequence] + first, step.cu_seqlens_q[sequence] + end)
    one = slice(sequence, sequence + 1)
    return replace(
        step, tokens=step.tokens[rows], positions=step.positions[rows],
        cu_seqlens_q=np.array([0, end - first], np.int32), rope_table=step.rope_table[one],
        context_lens=(step.positions[rows][-1:] + 1).astype(np.int32), groups=(rows_of(step.groups[0], one, rows),),
        logits_indices=np.zeros(0, np.int64), num_decode_sequences=1 - prefill,
    )  # fmt: skip


NARROW = ["float16", pytest.param("bfloat16", marks=pytest.mark.drawn(2)), "float8", "int8", "int4"]


@pytest.mark.parametrize("limit", [{"window": 50}, {"chunk": 45}], ids=["window", "chunk"])
@pytest.mark.parametrize("kind", NARROW)
def test_how_a_prompt_is_cut_changes_no_bit(driver: HostDriver, kind: str, limit: dict[str, int]) -> None:
    """With others in the step, alone, and in parts."""
    op, rng = attention(rope=ROPE, sinks="sinks", **limit), np.random.default_rng(3)
    constants = constants_for(op, rng)
    before = made_layer(op, kind, rng)
    step = step_of([40, 60, 110], [1, 60, 100], num_blocks=BLOCKS, rng=rng, prefill=2)
    rows, executor = rows_for(op, 161, rng), CudaExecutor(driver, 1)
    together = run(executor, op, constants, copy_of(before), step, rows)
    for ends in ([100], [33, 100], [1, 7, 64, 100]):
        layer, found, first = copy_of(before), [], 0
        for end in ends:
            own = {name: array[61 + first : 61 + end] for name, array in rows.items()}
            found.append(run(executor, op, constants, layer, part_of(step, 2, first, end, prefill=True), own))
            first = end
        assert np.array_equal(np.concatenate(found), together[61:])


@pytest.mark.parametrize(("limit", "last"), [({"window": 20}, 30), ({"chunk": 22}, 26)], ids=["window", "chunk"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8", "int8", "int4"])
def test_what_a_row_of_a_prompt_does_not_see_may_hold_anything(
    driver: HostDriver, kind: str, limit: dict[str, int], last: int
) -> None:
    op, rng = attention(head_size=32, v_head_size=32, **limit), np.random.default_rng(1)
    layer = made_layer(op, kind, rng)
    step = step_of([70], [30], num_blocks=BLOCKS, rng=rng, prefill=1)
    rows, constants = rows_for(op, 30, rng), MadeUpConstants()
    expected = run(CudaExecutor(driver, 1), op, constants, copy_of(layer), step, rows)
    used = step.groups[0].block_tables[0]
    for block in set(range(BLOCKS)) - set(used.tolist()):
        layer.keys[block], layer.values[block] = NO_NUMBERS.get(kind, (255, 255))
    poison(layer, int(used[2]), slice(6, None))  # behind the last row
    poison(layer, int(used[0]), slice(0, 21))  # before the first one's window or chunk
    assert np.array_equal(run(CudaExecutor(driver, 1), op, constants, layer, step, rows), expected)
    # A row in the middle is the first whose value is no number: others do not see it, or all that do are none either.
    rows["v"][15] = np.nan
    found = run(CudaExecutor(driver, 1), op, constants, layer, step, rows)
    assert np.array_equal(found[:15], expected[:15]) and np.array_equal(found[last:], expected[last:])
    assert np.isnan(found[15:last]).all()


# What keys and values may be that nobody sees, as pages hold it.
NO_NUMBERS = {"float16": (np.nan, np.inf), "bfloat16": (0xFFFF, 0x7F80)}


def poison(layer: PagedLayer, block: int, tokens: slice) -> None:
    """Tokens of a page become NaN."""
    if layer.packed is None:
        nan = stored_floats(np.array(np.nan), layer.kind)
        layer.keys[block, :, :, tokens], layer.values[block, :, tokens] = nan, nan
        return
    for pages, groups in ((layer.keys, layer.packed.key_groups), (layer.values, layer.packed.value_groups)):
        scales = pages[block][:, -64 * groups :].view(np.float16).reshape(len(pages[block]), groups, 32)
        assert np.shares_memory(scales, pages)
        scales[..., tokens] = np.nan


def test_one_value_that_is_infinite_reaches_its_own_column_only(driver: HostDriver) -> None:
    op, rng = attention(head_size=32, v_head_size=40, heads=2, kv_heads=1), np.random.default_rng(1)
    layer = made_layer(op, "float16", rng)
    step = step_of([70], [60], num_blocks=BLOCKS, rng=rng, prefill=1)
    rows = rows_for(op, 60, rng)
    expected = run(CudaExecutor(driver, 1), op, MadeUpConstants(), copy_of(layer), step, rows)
    rows["v"][50, 7] = np.inf
    found = run(CudaExecutor(driver, 1), op, MadeUpConstants(), layer, step, rows).reshape(60, 2, 40)
    hit = np.zeros(found.shape, bool)
    hit[50:, :, 7] = True
    assert (found[hit] == np.inf).all() and np.array_equal(found[~hit], expected.reshape(found.shape)[~hit])


@pytest.mark.parametrize(("kind", "size"), [("float16", 64), ("float16", 128), ("bfloat16", 64), ("float8", 64)])
def test_tiles_lose_no_more_than_pages_have_lost(driver: HostDriver, kind: str, size: int) -> None:
    """Both against float64 with keys and values as they were."""
    op = attention(head_size=size, v_head_size=size, scale=2 / size**0.5)
    rng = np.random.default_rng(5)
    exact = made_layer(op, "float32", rng)
    half = PagedLayer(stored_floats(exact.keys, kind), stored_floats(exact.values, kind))
    step = step_of([150], [80], num_blocks=BLOCKS, rng=rng, prefill=1)
    rows = rows_for(op, 80, rng)
    wanted = run(ReferenceExecutor(), op, MadeUpConstants(), exact, step, rows)
    rounded = run(ReferenceExecutor(), op, MadeUpConstants(), copy_of(half), step, rows)
    ours = run(CudaExecutor(driver, 1), op, MadeUpConstants(), half, step, rows)
    assert relative_error(ours, rounded) < 1.2 * relative_error(rounded, wanted)


# Floats around everything that rounding treats on its own: zeros, the least numbers, ties, the largest ones.
EDGES = [0.0, -0.0, 2.0**-10, 3 * 2.0**-10, 2.0**-7, 2.0**-6 - 2.0**-10, 447.0, 448.0, 463.9, 464.0, 480.0, 1e30]
EDGES += [1.0625, 1.1875, 1.0 + 2.0**-9, 1.0 + 3 * 2.0**-9, 3.38e38, 3.4e38, np.inf, np.nan, 1e-30]


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float8"])
def test_numbers_are_rounded_as_elsewhere(driver: HostDriver, kind: str, prefill: bool) -> None:
    """One token alone is what attention gives: its value, as the page holds it."""
    op, rng = attention(heads=1, kv_heads=1, head_size=32, v_head_size=64), np.random.default_rng(2)
    codes = np.arange(256, dtype=np.uint8) if kind == "float8" else np.arange(0, 65536, 251, dtype=np.uint16)
    numbers = np.concatenate([
        read_floats(codes, kind), EDGES, np.negative(EDGES), read_floats(codes, kind)[:100] * (1 + 2.0**-5),
        rng.standard_normal(500) * 2.0 ** rng.uniform(-12, 10, 500),
    ])  # fmt: skip
    values = np.resize(numbers.astype(np.float32), (-(-len(numbers) // 64), 64))
    count = len(values)
    step = step_of([1] * count, [1] * count, num_blocks=BLOCKS, rng=rng, prefill=count if prefill else 0)
    layer = layer_of(rng, BLOCKS, 1, 32, 64, kind)
    rows = {"q": np.ones((count, 32), np.float32), "k": np.ones((count, 32), np.float32), "v": values}
    found = run(CudaExecutor(driver, 1), op, MadeUpConstants(), layer, step, rows)
    slots = step.groups[0].slot_mapping
    stored = layer.values[slots // 32, 0, slots % 32]
    wanted = stored_floats(values, kind)
    kept = read_floats(wanted, kind)
    is_nan = np.isnan(kept)
    assert np.array_equal(np.isnan(read_floats(stored, kind)), is_nan) and is_nan.sum() >= 2
    assert np.array_equal(stored[~is_nan], wanted[~is_nan])
    ordinary = (np.abs(kept) > 1e-37) | (kept == 0)  # a GPU takes smaller ones for 0
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found[ordinary & ~is_nan], kept[ordinary & ~is_nan])


def test_bfloat16_has_what_float16_has_not(driver: HostDriver) -> None:
    """Prompts too; the largest number of float8 is 448."""
    op, rng = attention(scale=1.0), np.random.default_rng(8)
    step = step_of([70], [40], num_blocks=BLOCKS, rng=rng, prefill=1)
    rows = rows_for(op, 40, rng)
    rows = {"q": rows["q"] * np.float32(1e-9), "k": rows["k"] * np.float32(1e8), "v": rows["v"] * np.float32(1e20)}
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "bfloat16")
    found = run(CudaExecutor(driver, 1), op, MadeUpConstants(), layer, step, rows)
    wanted = attended(op, MadeUpConstants(), layer, step, rows)
    assert np.abs(wanted).max() > 1e18 and relative_error(found, wanted) < BFLOAT_TILES_LOSE
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float8")
    run(CudaExecutor(driver, 1), op, MadeUpConstants(), layer, step, rows)
    assert np.abs(read_floats(layer.keys, "float8")).max() == 448.0


def test_queries_of_any_size_fit_into_float16(driver: HostDriver) -> None:
    """They are brought near 1 by a power of two each; one of zeros stays as it is."""
    op, rng = attention(scale=1.0), np.random.default_rng(7)
    layer = made_layer(op, "float16", rng)
    step = step_of([40], [20], num_blocks=BLOCKS, rng=rng, prefill=1)
    rows = rows_for(op, 20, rng)
    for factor in (0.0, 1e-9, 1e9):
        scaled = rows | {"q": rows["q"] * np.float32(factor)}
        small = replace(op, scale=1 / factor if factor else 1.0)
        ours = run(CudaExecutor(driver, 1), small, MadeUpConstants(), copy_of(layer), step, scaled)
        theirs = run(ReferenceExecutor(), small, MadeUpConstants(), copy_of(layer), step, scaled)
        assert relative_error(ours, theirs) < 2e-3


def test_tiles_hold_rows_of_one_sequence_and_the_longest_come_first() -> None:
    step = step_of([9, 5, 40, 100], [1, 2, 40, 33], prefill=2)
    assert row_tiles(step, 16).tolist() == [
        [3, 75, 1], [3, 59, 16], [3, 43, 16], [2, 35, 8], [2, 19, 16], [2, 3, 16],
    ]  # fmt: skip
    assert row_tiles(step_of([9, 5], [1, 2]), 16).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"positions": np.array([6])}, "position outside its sequence: 6 is not in the range 0 to 4"),
        ({"slot_mapping": np.array([BLOCKS * 32])}, "slot outside the cache"),
        ({"block_tables": np.array([[BLOCKS]], np.int32)}, "block table entry outside the cache"),
        ({"context_lens": np.array([40], np.int32)}, "context longer than its block table"),
        ({"logits_indices": np.array([1])}, "row of logits outside the step"),
    ],
)
def test_a_step_that_leads_outside_is_refused(driver: HostDriver, change: dict[str, Any], text: str) -> None:
    op, rng = attention(), np.random.default_rng(1)
    layer = layer_of(rng, BLOCKS, 2, 64, 64, "float32")
    step = step_of([5], [1], num_blocks=BLOCKS)
    step = replace(step, **({"groups": (replace(step.groups[0], **change),)} if not hasattr(step, *change) else change))
    with pytest.raises(StepError, match=text):
        run(CudaExecutor(driver, 1), op, MadeUpConstants(), layer, step, rows_for(op, 1, rng))
    assert not driver.launched


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if divides(attention(**without_kind(case)))])
def test_heads_apart_give_the_same_bits(driver: HostDriver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Few of them have blocks of their own, which put keys and values into pages, too."""
    case = CASES[name]
    op, rng = attention(**without_kind(case)), np.random.default_rng(0)
    constants, layer = constants_for(op, rng), made_layer(op, case.get("kind", "float32"), rng)
    step = step_of([1, 130, 300, 33], [1, 1, 1, 1], num_blocks=BLOCKS, rng=rng)
    rows, found, layers = rows_for(op, 4, rng), [], []
    together = heads_together(op.heads, op.kv_heads)
    # Two blocks on each of them; there are four rows of four splits (a power of two).
    some, enough = -(-4 * 4 * op.heads // together // 2), 1000
    for multiprocessors, order in ((0, 0), (some, 3), (enough, 0), (enough, 5)):  # counts of blocks are zero again
        monkeypatch.setattr(driver, "multiprocessors", multiprocessors)
        driver.order = order
        del driver.launched[:]
        layers.append(copy_of(layer))
        found.append(run(CudaExecutor(driver, 1), op, constants, layers[-1], step, rows))
        names = [one.removeprefix("attention_") for one in driver.launched]
        kinds = [one.split("_")[1] for one in names if "hadamard_back" not in one]
        assert kinds == (["attend"] if multiprocessors else ["store", "attend"]), names
        (of_split,) = [one for one in names if "attend_split" in one]
        of_block = 1 if multiprocessors == enough else together
        assert of_split.endswith(f"_{of_block}_{str(multiprocessors > 0).lower()}")
    driver.check()
    for other in (1, 2, 3):
        assert np.array_equal(found[0], found[other])
        assert np.array_equal(layers[0].keys, layers[other].keys)
        assert np.array_equal(layers[0].values, layers[other].values)


def test_short_sequences_after_one_that_was_long(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for splits is there for as few rows then as the long one leaves, and more of them are started at once."""
    op, rng = attention(heads=2, kv_heads=1, head_size=8, v_head_size=8), np.random.default_rng(0)
    monkeypatch.setattr(driver, "multiprocessors", 132)
    blocks, layer = 64, layer_of(rng, 64, 1, 8, 8, "float16")
    whole = program([op], {"q": 16, "k": 8, "v": 8, "out": 16}, MadeUpConstants(), ["out"])
    pages = PagedLayer(driver.upload(layer.keys), driver.upload(layer.values))
    compiled = CudaExecutor(driver, 1).compile(whole, [pages])
    long = step_of([100], [1], num_blocks=blocks, rng=rng)
    tables = np.zeros((1, 8192), np.int32)  # of 256 Ki tokens
    (pages_of,) = long.groups
    tables[:, : pages_of.block_tables.shape[1]] = pages_of.block_tables
    compiled.run(replace(long, groups=(replace(pages_of, block_tables=tables),)), rows_for(op, 1, rng))
    for count in (1, 6, 40):
        step, rows = step_of([20] * count, [1] * count, num_blocks=blocks, rng=rng), rows_for(op, count, rng)
        before = PagedLayer(driver.download(pages.keys), driver.download(pages.values))
        ours = compiled.run(step, rows)["out"].reshape(count, -1)
        theirs = run(ReferenceExecutor(), op, MadeUpConstants(), before, step, rows)
        assert relative_error(ours, theirs) < 3e-3
    driver.check()


@pytest.mark.parametrize(("new", "prefill"), [([3, 1], 0), ([1, 1], 1)])
def test_rows_that_see_each_other_s_keys_find_them_in_pages(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch, new: list[int], prefill: int
) -> None:
    """Guessed tokens, and prompts of one token, which other kernels compute."""
    op, rng = attention(heads=4, kv_heads=2, head_size=32), np.random.default_rng(0)
    constants, layer = constants_for(op, rng), made_layer(op, "float16", rng)
    monkeypatch.setattr(driver, "multiprocessors", 1000)
    step = step_of([130, 40], new, num_blocks=BLOCKS, rng=rng, prefill=prefill)
    rows, copies = rows_for(op, sum(new), rng), [copy_of(layer) for _ in range(2)]
    ours = run(CudaExecutor(driver, 1), op, constants, copies[0], step, rows)
    assert any("store_heads" in name for name in driver.launched)
    theirs = run(ReferenceExecutor(1), op, constants, copies[1], step, rows)
    assert relative_error(ours, theirs) < 3e-3
    assert np.array_equal(copies[0].values, copies[1].values)
