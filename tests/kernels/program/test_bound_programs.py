"""Cached programs: found by their key, dropped if there are too many, and run with other addresses."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.byte_functions import ByteTableArguments, look_up_bytes
from genai.kernels.cpu.jit.arguments import Binding
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.bound_program import BoundPrograms, NodeProgram
from genai.kernels.cpu.program.calls import Call, Rows
from genai.kernels.cpu.program.step_table import StepField
from genai.kernels.cpu.program.thread_pool import Threads, rows_context
from genai.kernels.cpu.rowwise.gather import embedding
from genai.kernels.device import StepError


def test_the_last_few_are_kept():
    made = []

    def make(*key: int) -> tuple[int, ...]:
        made.append(key)
        return key

    kept: BoundPrograms[tuple[int, ...]] = BoundPrograms(2)
    assert [kept.get(make, 1, 2), kept.get(make, 3), kept.get(make, 1, 2)] == [(1, 2), (3,), (1, 2)]
    assert made == [(1, 2), (3,)]
    kept.get(make, 4)
    kept.get(make, 1, 2)
    assert made == [(1, 2), (3,), (4,), (1, 2)]


@pytest.mark.parametrize("threads", [None, Threads(1), Threads(2)])
def test_one_program_for_all_addresses(monkeypatch, threads):
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    table = np.arange(256, dtype=np.uint8)[::-1].copy()
    arguments = ByteTableArguments(x=Binding("x"), table=table, out=Binding("out", 1), count=5)
    program = NodeProgram([[Call(look_up_bytes, arguments)]], 1.0)
    for value in (3, 200):
        x, out = np.full(5, value, np.uint8), np.zeros(7, np.uint8)
        program.run(threads, x=x, out=out)
        assert out.tolist() == [0, *[255 - value] * 5, 0]


@pytest.mark.parametrize("least_shared", [0.0, 40_000.0])
def test_short_programs_of_one_call(monkeypatch, least_shared):
    """A short run calls the operator directly. Its results and its errors equal those of other runs."""
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", least_shared)
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    program = NodeProgram([[embedding(table, Rows(Binding("out"), 16, 4))]], 1.0)
    assert program._program.only_call is not None
    out = np.zeros((2, 4), np.float32)
    rows_context(2).array(StepField.TOKEN_IDS, np.array([2, 0]))
    program.run(Threads(2), 2, out=out)
    assert out.tolist() == table[[2, 0]].tolist()
    rows_context(2).array(StepField.TOKEN_IDS, np.array([2, 3]))
    with pytest.raises(StepError, match="index outside its table"):
        program.run(Threads(2), 2, out=out)


def test_arrays_that_are_not_in_one_piece_are_not_bound():
    """An operator would read the memory between their elements."""
    table = np.arange(256, dtype=np.uint8)
    arguments = ByteTableArguments(x=Binding("x"), table=table, out=Binding("out"), count=3)
    program = NodeProgram([[Call(look_up_bytes, arguments)]], 1.0)
    with pytest.raises(ValueError, match=r"x has strides \(2,\) for shape \(3,\)"):
        program.run(None, x=np.zeros(6, np.uint8)[::2], out=np.zeros(3, np.uint8))
