"""What attention refuses: shapes when it is planned, and places outside its memory when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.paged.phases import Rope, attention_phases
from genai.kernels.cpu.tape.context import ErrorCode
from genai.kernels.cpu.tape.program import Rows
from genai.kernels.cpu.tape.walkers import StepError
from genai.kernels.formats import PagedLayer

MakeStep = Callable[..., Any]

few_and_many = pytest.mark.parametrize("sequence", [(1, 40), (33, 40)], ids=["few", "many"])


def assert_refused(step: Any, code: ErrorCode, **options: Any) -> None:
    with pytest.raises(StepError) as error:
        step.run(**options)
    assert error.value.code == code


@pytest.mark.parametrize("slot", [-1, 5 * 32])
def test_slots_outside_the_cache(make_step: MakeStep, slot: int) -> None:
    step = make_step([(1, 40)])
    assert step.layer.num_blocks == 5
    before = step.layer.keys.copy()
    step.slots[0] = slot
    assert_refused(step, ErrorCode.SLOT)
    np.testing.assert_array_equal(step.layer.keys, before)


@few_and_many
def test_positions_outside_their_sequence(make_step: MakeStep, sequence: tuple[int, int]) -> None:
    for change in (1, -41):
        step = make_step([sequence])
        step.positions[:] += change
        assert_refused(step, ErrorCode.POSITION)


def test_positions_that_do_not_follow_each_other(make_step: MakeStep) -> None:
    step = make_step([(33, 40)])
    step.positions[5:] -= 1
    assert_refused(step, ErrorCode.POSITION)


@few_and_many
@pytest.mark.parametrize("block", [-1, 5])
def test_blocks_outside_the_cache(make_step: MakeStep, sequence: tuple[int, int], block: int) -> None:
    step = make_step([sequence])
    step.block_tables[0, 0] = block
    assert_refused(step, ErrorCode.PAGE)


@few_and_many
def test_tables_shorter_than_the_context(make_step: MakeStep, sequence: tuple[int, int]) -> None:
    step = make_step([sequence])
    step.block_tables = step.block_tables[:, :1].copy()
    assert_refused(step, ErrorCode.PAGE)


@few_and_many
def test_positions_outside_the_rotary_tables(make_step: MakeStep, sequence: tuple[int, int]) -> None:
    step, table = make_step([sequence]), np.ones((39, 8), np.float32)
    assert_refused(step, ErrorCode.ROTARY_POSITION, rope=Rope(table, table))
    longer = np.ones((40, 8), np.float32)
    step.run(rope=Rope(longer, longer, table, table))
    step.rope_table[:] = 1
    assert_refused(step, ErrorCode.ROTARY_POSITION, rope=Rope(longer, longer, table, table))


def _rows(width: int) -> Rows:
    return Rows.of(np.zeros((1, width), np.float32))


def _table(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "3 query heads, expected a multiple of the cache's 2"),
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
        ({"rope": Rope(_table(9, 5), _table(9, 5))}, "cos has 5 columns, expected at most half of the head size 8"),
        ({"rope": Rope(_table(9, 4), _table(9, 3))}, "sin is float32"),
        ({"rope": Rope(_table(9, 4), _table(9, 4), _table(9, 4))}, "given together"),
        ({"rope": Rope(_table(9, 4), _table(9, 4), _table(9, 3), _table(9, 3))}, "long_cos is float32"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    layer = PagedLayer(np.zeros((2, 2, 8, 32), np.float16), np.zeros((2, 2, 32, 4), np.float16))
    given: dict[str, Any] = {"query": _rows(32), "key": _rows(16), "value": _rows(8), "out": _rows(16), "heads": 4}
    with pytest.raises(ValueError, match=message):
        attention_phases(**{**given, "layer": layer, **change})
