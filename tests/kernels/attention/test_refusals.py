"""Refusals of attention: wrong shapes when the program is made, and indices outside its memory when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.attention.phases import attention_phases
from genai.kernels.cpu.program.calls import Rows
from genai.kernels.cpu.program.step_table import ErrorCode
from genai.kernels.device import StepError

MakeStep = Callable[..., Any]

both_numerics = pytest.mark.parametrize("sequence", [(1, 40), (33, 40)], ids=["decode", "prefill"])


REASONS = {
    ErrorCode.SLOT: "slot outside the cache",
    ErrorCode.POSITION: "position outside its sequence",
    ErrorCode.PAGE: "context longer than its block table, or block table entry outside the cache",
    ErrorCode.ROTARY_POSITION: "position outside the rotary tables",
    ErrorCode.BIAS_POSITION: "position outside the attention bias",
}


def assert_refused(step: Any, code: ErrorCode, **options: Any) -> None:
    with pytest.raises(StepError, match=f"{REASONS[code]} .code {int(code)}"):
        step.run(**options)


@pytest.mark.parametrize("slot", [-1, 5 * 32])
def test_slots_outside_the_cache(make_step: MakeStep, slot: int) -> None:
    step = make_step([(1, 40)])
    assert step.layer.num_blocks == 5
    before = step.layer.keys.copy()
    step.slot_mapping[0] = slot
    assert_refused(step, ErrorCode.SLOT)
    np.testing.assert_array_equal(step.layer.keys, before)


@both_numerics
def test_positions_outside_their_sequence(make_step: MakeStep, sequence: tuple[int, int]) -> None:
    for change in (1, -41):
        step = make_step([sequence])
        step.positions[:] += change
        assert_refused(step, ErrorCode.POSITION)


def test_positions_that_do_not_follow_each_other(make_step: MakeStep) -> None:
    step = make_step([(33, 40)])
    step.positions[5:] -= 1
    assert_refused(step, ErrorCode.POSITION)


@both_numerics
@pytest.mark.parametrize("block", [-1, 5])
def test_blocks_outside_the_cache(make_step: MakeStep, sequence: tuple[int, int], block: int) -> None:
    step = make_step([sequence])
    step.block_tables[0, 0] = block
    assert_refused(step, ErrorCode.PAGE)


@both_numerics
def test_tables_shorter_than_the_context(make_step: MakeStep, sequence: tuple[int, int]) -> None:
    step = make_step([sequence])
    step.block_tables = step.block_tables[:, :1].copy()
    assert_refused(step, ErrorCode.PAGE)


@both_numerics
def test_positions_outside_the_rotary_tables(make_step: MakeStep, sequence: tuple[int, int]) -> None:
    step, table = make_step([sequence]), np.ones((39, 8), np.float32)
    assert_refused(step, ErrorCode.ROTARY_POSITION, rope={"cos": table, "sin": table})
    longer = np.ones((40, 8), np.float32)
    rope = {"cos": longer, "sin": longer, "long_cos": table, "long_sin": table}
    step.run(rope=rope)
    step.rope_table[:] = 1
    assert_refused(step, ErrorCode.ROTARY_POSITION, rope=rope)


def _rows(width: int) -> Rows:
    return Rows.of(np.zeros((1, width), np.float32))


def _table(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _tables(*widths: int) -> dict[str, np.ndarray]:
    names = ("cos", "sin", "long_cos", "long_sin")
    return {name: _table(9, width) for name, width in zip(names, widths, strict=False)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "query heads is 3, expected a multiple of the number of KV heads, 2"),
        ({"query": _rows(31)}, "query has rows of 31 numbers, expected 32"),
        ({"key": _rows(32)}, "key has rows of 32 numbers, expected 16"),
        ({"value": _rows(10)}, "value has rows of 10 numbers, expected 8"),
        ({"out": _rows(32)}, "out has rows of 32 numbers, expected 16"),
        ({"window": 0}, "window is 0"),
        ({"window": -2}, "window is -2"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"sinks": _table(3)}, "sinks is float32"),
        ({"q_norm": _table(4)}, "q_norm is float32"),
        ({"k_norm": _table(8).astype(np.float64)}, "k_norm is float64"),
        ({"rope": _tables(5, 5)}, "cos has 5 columns, expected at most half of the head size 8"),
        ({"rope": _tables(4, 3)}, "sin is float32"),
        ({"rope": _tables(4, 4, 4)}, "given together"),
        ({"rope": _tables(4, 4, 3, 3)}, "long_cos is float32"),
    ],
)
def test_what_does_not_fit(make_step: MakeStep, change: dict[str, Any], message: str) -> None:
    widths = {"query": 32, "key": 16, "value": 8, "out": 16}
    *rows, out = (change.get(name, _rows(width)) for name, width in widths.items())
    step = make_step([(1, 1)], head_size=8, v_head_size=4)
    op, constant = step.op({name: value for name, value in change.items() if name not in widths})
    with pytest.raises(ValueError, match=message):
        attention_phases(op, rows, out, step.layer, constant)
