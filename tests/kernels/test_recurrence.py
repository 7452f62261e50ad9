"""Linear recurrences and attention in chunks against plain loops in float64, and steps that lead outside the states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS, PagedLayer, StateLayer
from genai.kernels.checks import FormatError
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.device import PageTables, StateSlots, StepContext, StepError, UnsupportedOp
from genai.kernels.ir import Attention, LinearRecurrence
from genai.kernels.reference.executor import ReferenceExecutor

from .cuda.devices import IS_THERE, open_device
from .cuda.programs import MadeUpConstants, program

SIZE, SLOTS = 4100, 8  # more than one piece of a row
# Rows of each sequence, and the slot that it begins from.
SEQUENCES = ((3, -1), (1, 2), (5, 6), (1, -1))
# Rows whose state is kept, and where: the last one of each sequence, and some between.
WRITES = {0: 0, 2: 1, 3: 3, 6: 4, 8: 5, 9: 7}


def step(**changes: Any) -> StepContext:
    counts = [count for count, _ in SEQUENCES]
    total = sum(counts)
    writes = np.full(total, -1, np.int32)
    writes[list(WRITES)] = list(WRITES.values())
    slots = StateSlots(np.array([slot for _, slot in SEQUENCES], np.int32), writes)
    for name, value in changes.items():
        getattr(slots, name)[-1] = value
    return StepContext(
        tokens=np.zeros(total, np.int64),
        positions=np.arange(total),
        cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(counts, np.int32),
        groups=(slots,),
        num_decode_sequences=4,
        logits_indices=np.zeros(0, np.int64),
        rope_table=np.zeros(4, np.int32),
    )


def executor_of(device: str) -> Any:
    if device == "cuda":
        if not IS_THERE:
            pytest.skip("kernels run on Linux through g++")
        return CudaExecutor(open_device(), 1)
    return CpuExecutor(2) if device == "cpu" else ReferenceExecutor()


DEVICES = pytest.mark.parametrize("device", ["reference", "cpu", "cuda"])


def run(device: str, states: np.ndarray, given: dict[str, np.ndarray], context: StepContext) -> np.ndarray:
    """The rows; states change in place."""
    executor = executor_of(device)
    held = executor.driver.upload(states) if device == "cuda" else states
    op = LinearRecurrence("x", "decay", "out", 0)
    compiled = executor.compile(
        program([op], dict.fromkeys(("x", "decay", "out"), SIZE), MadeUpConstants(), ["out"]), [StateLayer(held)]
    )
    out = np.array(executor.host(compiled.run(context, given)["out"])).reshape(-1, SIZE)
    if device == "cuda":
        states[:] = executor.driver.download(held)
    return out


@DEVICES
def test_a_recurrence_is_a_loop_over_rows(device: str) -> None:
    rng = np.random.default_rng(0)
    total = sum(count for count, _ in SEQUENCES)
    given = {
        "x": rng.standard_normal((total, SIZE)).astype(np.float32),
        "decay": rng.uniform(0.3, 1, (total, SIZE)).astype(np.float32),
    }
    states = rng.standard_normal((SLOTS, SIZE)).astype(np.float32)
    expected_states, expected, row = states.astype(np.float64), np.zeros((total, SIZE)), 0
    for count, slot in SEQUENCES:
        state = expected_states[slot].copy() if slot >= 0 else np.zeros(SIZE)
        for _ in range(count):
            state = given["decay"][row] * state + given["x"][row]
            expected[row] = state
            if row in WRITES:
                expected_states[WRITES[row]] = state
            row += 1
    found = run(device, states, given, step())
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(states - expected_states).max() < 1e-5


@DEVICES
@pytest.mark.parametrize("change", [{"reads": SLOTS}, {"reads": -2}, {"writes": SLOTS}, {"writes": -2}], ids=str)
def test_slots_outside_the_states_are_refused(device: str, change: dict[str, int]) -> None:
    states, total = np.zeros((SLOTS, SIZE), np.float32), sum(count for count, _ in SEQUENCES)
    given = {name: np.ones((total, SIZE), np.float32) for name in ("x", "decay")}
    with pytest.raises(StepError, match="slot outside"):
        run(device, states, given, step(**change))


def test_states_of_another_form_are_refused() -> None:
    for states in (np.zeros((2, 3)), np.zeros((2, 3, 4), np.float32), np.zeros((3, 2), np.float32).T):
        with pytest.raises(FormatError, match="states must be a float32 array"):
            StateLayer(states)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("prefill", [False, True])
def test_attention_in_chunks(device: str, prefill: bool) -> None:
    rng, chunk, length, first = np.random.default_rng(1), 24, 100, 40
    op = Attention("q", "k", "v", "out", 0, heads=4, kv_heads=2, head_size=16, v_head_size=16, chunk=chunk)
    pages = 4
    keys, values = (rng.standard_normal((length, 2, 16)).astype(np.float32) for _ in range(2))
    layer = PagedLayer(
        np.zeros((pages, 2, 16, PAGE_TOKENS), np.float32), np.zeros((pages, 2, PAGE_TOKENS, 16), np.float32)
    )
    for token in range(first):
        layer.keys[token // 32, :, :, token % 32] = keys[token]
        layer.values[token // 32, :, token % 32] = values[token]
    # What no row sees.
    layer.keys[0, :, :, :24] = layer.values[0, :, :24] = np.nan
    count = length - first
    given = {
        "q": rng.standard_normal((count, 64)).astype(np.float32),
        "k": keys[first:].reshape(count, -1),
        "v": values[first:].reshape(count, -1),
    }
    where = np.arange(first, length)
    context = StepContext(
        tokens=np.zeros(count, np.int64),
        positions=where,
        cu_seqlens_q=np.array([0, count], np.int32),
        context_lens=np.array([length], np.int32),
        groups=(PageTables(np.arange(pages, dtype=np.int32)[None], where),),
        num_decode_sequences=int(not prefill),
        logits_indices=np.zeros(0, np.int64),
        rope_table=np.zeros(1, np.int32),
    )
    widths = {"q": 64, "k": 32, "v": 32, "out": 64}
    compiled = executor_of(device).compile(program([op], widths, MadeUpConstants(), ["out"]), [layer])
    out = np.array(compiled.run(context, given)["out"]).reshape(count, 4, 16)
    for row, position in enumerate(where):
        seen = slice(position // chunk * chunk, position + 1)
        for head in range(4):
            scores = keys[seen, head // 2].astype(np.float64) @ given["q"][row].reshape(4, 16)[head] / 4
            weights = np.exp(scores - scores.max())
            expected = weights @ values[seen, head // 2] / weights.sum()
            assert np.abs(out[row, head] - expected).max() < 1e-4


def test_cuda_needs_pages_of_values() -> None:
    """Latent rows are stored twice on a GPU (`Executor.reads_values_from_keys`)."""
    op = Attention("q", "k", "v", "out", 0, heads=1, kv_heads=1, head_size=8, v_head_size=8)
    executor, layer = executor_of("cuda"), PagedLayer(np.zeros((1, 1, 8, 32), np.float32), None)
    assert not executor.reads_values_from_keys
    with pytest.raises(UnsupportedOp, match="values of latent attention"):
        executor.compile(program([op], dict.fromkeys(("q", "k", "v", "out"), 8), MadeUpConstants(), ["out"]), [layer])


@pytest.mark.parametrize("options", [{"chunk": -1}, {"chunk": 4, "window": 4}])
def test_chunks_that_make_no_sense(options: dict[str, int]) -> None:
    op = Attention("q", "k", "v", "out", 0, heads=1, kv_heads=1, head_size=8, v_head_size=8, **options)
    layer = PagedLayer(np.zeros((1, 1, 8, 32), np.float32), np.zeros((1, 1, 32, 8), np.float32))
    with pytest.raises(ValueError, match="chunk is"):
        CpuExecutor(1).compile(
            program([op], dict.fromkeys(("q", "k", "v", "out"), 8), MadeUpConstants(), ["out"]), [layer]
        )
