"""Convolutions and linear attention with states, against plain loops in float64 and against themselves in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import StateLayer
from genai.kernels.device import StateSlots, StepContext, StepError
from genai.kernels.ir import CausalConv, LinearAttention, Op

from .cuda.programs import MadeUpConstants, program
from .test_recurrence import DEVICES, executor_of

SLOTS = 8
# Rows of each sequence, and the slot that it begins from.
SEQUENCES = ((3, -1), (1, 2), (7, 6), (1, -1))
# Rows whose state is kept, and where: the last one of each sequence, and one between.
WRITES = {1: 7, 2: 0, 3: 1, 10: 4, 11: 5}


def step(sequences: Any = SEQUENCES, writes: dict[int, int] | None = None) -> StepContext:
    counts = [count for count, _ in sequences]
    targets = np.full(sum(counts), -1, np.int32)
    for row, slot in (WRITES if writes is None else writes).items():
        targets[row] = slot
    return StepContext(
        tokens=np.zeros(sum(counts), np.int64),
        positions=np.arange(sum(counts)),
        cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(counts, np.int32),
        groups=(StateSlots(np.array([slot for _, slot in sequences], np.int32), targets),),
        num_decode_sequences=len(counts),
        logits_indices=np.zeros(0, np.int64),
        rope_table=np.zeros(len(counts), np.int32),
    )


def run(
    device: str, op: Op, constants: MadeUpConstants, widths: dict[str, int], states: np.ndarray,
    given: dict[str, np.ndarray], context: StepContext,
) -> np.ndarray:  # fmt: skip
    """The rows; states change in place."""
    executor = executor_of(device)
    held = executor.driver.upload(states) if device == "cuda" else states
    compiled = executor.compile(program([op], widths, constants, ["out"]), [StateLayer(held)])
    out = np.array(executor.host(compiled.run(context, given)["out"])).reshape(-1, widths["out"])
    if device == "cuda":
        states[:] = executor.driver.download(held)
    return out


def conv_case(channels: int, taps: int, dilation: int, bias: bool) -> tuple[Op, MadeUpConstants, dict[str, int], int]:
    rng, constants = np.random.default_rng(channels), MadeUpConstants()
    constants.arrays["weight"] = rng.standard_normal((channels, 1, taps)).astype(np.float32)
    if bias:
        constants.arrays["bias"] = rng.standard_normal(channels).astype(np.float32)
    op = CausalConv("x", "weight", "out", 0, "bias" if bias else "", dilation)
    return op, constants, {"x": channels, "out": channels}, channels * (taps - 1) * dilation


def expected_conv(op: CausalConv, constants: MadeUpConstants, states: np.ndarray, x: np.ndarray) -> np.ndarray:
    channels, weight = x.shape[1], constants.arrays["weight"][:, 0].astype(np.float64)
    out, row = np.zeros(x.shape), 0
    before = states.astype(np.float64)
    for count, slot in SEQUENCES:
        history = before[slot] if slot >= 0 else np.zeros(states.shape[1])
        seen = [*history.reshape(-1, channels), *x[row : row + count].astype(np.float64)]
        start = len(seen) - count
        for index in range(count):
            for tap in range(weight.shape[1]):
                back = (weight.shape[1] - 1 - tap) * op.dilation
                out[row + index] += weight[:, tap] * seen[start + index - back]
            if row + index in WRITES:
                states[WRITES[row + index]] = np.ravel(seen[index + 1 : index + 1 + start])
        row += count
    return out + constants.arrays.get("bias", 0.0)


@DEVICES
@pytest.mark.parametrize("shape", [(70, 4, 1, True), (4100, 3, 1, False), (33, 2, 3, True)], ids=str)
def test_convolutions(device: str, shape: Any) -> None:
    op, constants, widths, size = conv_case(*shape)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, shape[0])).astype(np.float32)
    states = rng.standard_normal((SLOTS, size)).astype(np.float32)
    wanted_states = states.copy()
    wanted = expected_conv(op, constants, wanted_states, x)
    found = run(device, op, constants, widths, states, {"x": x}, step())
    assert np.abs(found - wanted).max() < 1e-5
    assert np.array_equal(states, wanted_states)


# heads, key heads, value heads, size, size of values, decays per head, betas per row (0 = no delta rule)
ATTENTION = [
    (2, 2, 4, 16, 24, 1, 4),
    (4, 4, 4, 32, 64, 1, 4),
    (4, 2, 2, 20, 70, 20, 1),
    (2, 2, 2, 8, 16, 0, 0),
    (3, 1, 3, 128, 128, 1, 3),
    (2, 2, 2, 16, 130, 16, 0),
    (2, 2, 2, 16, 16, 0, 2),
    (1, 1, 150, 16, 1, 16, 0),
    (1, 1, 3, 21, 1, 21, 0),
]


def attention_case(shape: Any) -> tuple[LinearAttention, dict[str, int], int]:
    heads, keys, values, size, v_size, decays, betas = shape
    op = LinearAttention(
        "q", "k", "v", "out", 0, heads, keys, values, size, v_size, 0.7, "g" if decays else "", "b" if betas else ""
    )
    widths = {"q": heads * size, "k": keys * size, "v": values * v_size, "out": op.out_heads * v_size}
    widths |= {"g": values * decays} if decays else {}
    widths |= {"b": betas} if betas else {}
    return op, widths, values * size * v_size


def attention_inputs(widths: dict[str, int], rows: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    given = {name: rng.standard_normal((rows, width)).astype(np.float32) for name, width in widths.items()}
    del given["out"]
    given["k"] /= np.float32(size**0.5)
    given |= {"g": -np.abs(given["g"])} if "g" in given else {}
    given |= {"b": 1 / (1 + np.exp(-given["b"]))} if "b" in given else {}
    return given


def expected_attention(op: LinearAttention, states: np.ndarray, given: dict[str, np.ndarray]) -> np.ndarray:
    wide = {name: rows.astype(np.float64) for name, rows in given.items()}
    shape = op.value_heads, op.head_size, op.v_head_size
    out, row = np.zeros((len(wide["q"]), op.out_heads, op.v_head_size)), 0
    before = states.astype(np.float64)
    for count, slot in SEQUENCES:
        state = before[slot].reshape(shape).copy() if slot >= 0 else np.zeros(shape)
        for _ in range(count):
            for head in range(op.value_heads):
                key = wide["k"][row].reshape(op.key_heads, -1)[head * op.key_heads // op.value_heads]
                value = wide["v"][row].reshape(op.value_heads, -1)[head]
                if op.decay:
                    decay = np.exp(wide["g"][row].reshape(op.value_heads, -1)[head])
                    state[head] *= decay[:, None]
                if op.beta:
                    value = np.broadcast_to(wide["b"][row], op.value_heads)[head] * (value - key @ state[head])
                state[head] += np.outer(key, value)
            for head in range(op.out_heads):
                query = wide["q"][row].reshape(op.heads, -1)[head * op.heads // op.out_heads]
                out[row, head] = op.scale * (query @ state[head * op.value_heads // op.out_heads])
            if row in WRITES:
                states[WRITES[row]] = state.reshape(-1)
            row += 1
    return out.reshape(len(out), -1)


@DEVICES
@pytest.mark.parametrize("shape", ATTENTION, ids=str)
def test_linear_attention(device: str, shape: Any) -> None:
    op, widths, size = attention_case(shape)
    given = attention_inputs(widths, 12, op.head_size)
    states = np.random.default_rng(2).standard_normal((SLOTS, size)).astype(np.float32)
    wanted_states = states.copy()
    wanted = expected_attention(op, wanted_states, given)
    found = run(device, op, MadeUpConstants(), widths, states, given, step())
    assert np.abs(found - wanted).max() < 2e-5
    assert np.abs(states - wanted_states).max() < 2e-5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["convolution", "attention"])
def test_bits_do_not_depend_on_the_division_into_steps(device: str, kind: str) -> None:
    if kind == "convolution":
        op, constants, widths, size = conv_case(70, 4, 1, True)
        given = {"x": np.random.default_rng(0).standard_normal((9, 70)).astype(np.float32)}
    else:
        (op, widths, size), constants = attention_case(ATTENTION[0]), MadeUpConstants()
        given = attention_inputs(widths, 9, 16)
    states = np.zeros((SLOTS, size), np.float32)
    whole = run(device, op, constants, widths, states, given, step([(9, -1)], {8: 0}))
    parts, slot = [], -1
    for first, last, target in ((0, 4, 1), (4, 5, 2), (5, 9, 3)):
        some = {name: rows[first:last] for name, rows in given.items()}
        context = step([(last - first, slot)], {last - first - 1: target})
        parts.append(run(device, op, constants, widths, states, some, context))
        slot = target
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert states[3].tobytes() == states[0].tobytes()


@DEVICES
@pytest.mark.parametrize("change", [{"reads": SLOTS}, {"reads": -2}, {"writes": SLOTS}, {"writes": -2}], ids=str)
@pytest.mark.parametrize("kind", ["convolution", "attention"])
def test_slots_outside_the_states_are_refused(device: str, kind: str, change: dict[str, int]) -> None:
    if kind == "convolution":
        op, constants, widths, size = conv_case(70, 4, 1, True)
    else:
        (op, widths, size), constants = attention_case(ATTENTION[0]), MadeUpConstants()
    given = {name: np.ones((12, width), np.float32) for name, width in widths.items() if name != "out"}
    context = step()
    for name, value in change.items():
        getattr(context.groups[0], name)[-1] = value
    with pytest.raises(StepError, match="slot outside"):
        run(device, op, constants, widths, np.zeros((SLOTS, size), np.float32), given, context)


@pytest.mark.parametrize(
    "change", [{"v_head_size": 3}, {"key_heads": 3}, {"heads": 3}, {"head_size": 8}, {"value_heads": 2}], ids=str
)
def test_sizes_that_contradict_each_other(change: dict[str, int]) -> None:
    op, widths, size = attention_case(ATTENTION[0])
    given = {name: np.ones((12, width), np.float32) for name, width in widths.items() if name != "out"}
    states = np.zeros((SLOTS, size), np.float32)
    with pytest.raises(ValueError, match=r"expected|evenly"):
        run("cpu", replace(op, **change), MadeUpConstants(), widths, states, given, step())
