"""Programs that are run many times: bound at each run, by several callers at once, and freed with their memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from genai.kernels.cpu.jit.arguments import Address, Arguments, Binding
from genai.kernels.cpu.jit.memory import write_int64
from genai.kernels.cpu.jit.native import native_op
from genai.kernels.cpu.program.calls import Call, Items, Program, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads, own_memory, rows_context
from genai.kernels.device import StepError


class NumbersArguments(Arguments):
    out: Address
    added: int


@native_op(NumbersArguments)
def write_numbers(arguments: NumbersArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """out[i] = i + added; refuses to add 13."""
    if arguments.added == 13:
        return 7
    for item in range(begin, end):
        write_int64(arguments.out + 8 * item, item + arguments.added)
    return 0


def numbers(count: int) -> Program:
    """Writes into an array from its second number on."""
    arguments = NumbersArguments(out=Binding("out") + 8, added=Binding("added"))
    return program_of([[Call(write_numbers, arguments, Items(factor=count), scratch=64)]])


@pytest.mark.parametrize("nanoseconds", [0.0, 1e6])
def test_bound_at_each_run(threads: Threads, nanoseconds: float) -> None:
    program = numbers(1000)
    for added in (0, 5, -3):
        out = np.zeros(1001, np.int64)
        threads.run(program.bound({"out": out.ctypes.data, "added": added}), nanoseconds=nanoseconds)
        np.testing.assert_array_equal(out[1:], np.arange(1000) + added)
        assert out[0] == 0


def test_several_callers_at_once(threads: Threads) -> None:
    program = numbers(500)

    def run(added: int) -> bool:
        out = np.zeros(501, np.int64)
        for _ in range(20):
            threads.run(program.bound({"out": out.ctypes.data, "added": added}), nanoseconds=1e6)
        return bool((out[1:] == np.arange(500) + added).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(100, 108)))


def test_an_operator_that_refuses(threads: Threads) -> None:
    out = np.zeros(11, np.int64)
    for nanoseconds in (0.0, 1e6):
        with pytest.raises(StepError, match="code 7"):
            threads.run(numbers(10).bound({"out": out.ctypes.data, "added": 13}), nanoseconds=nanoseconds)
    assert not out.any()


def test_a_name_that_nothing_is_bound_to() -> None:
    with pytest.raises(KeyError, match="added"):
        numbers(10).bound({"out": 0})


def test_memory_is_kept_and_belongs_to_a_thread() -> None:
    mine = own_memory("a", 1000)
    assert own_memory("a", 500) is mine
    assert own_memory("b", 1000) is not mine
    assert own_memory("a", 5000).nbytes >= 5000
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(own_memory, "b", 1000).result() is not own_memory("b", 1000)


def test_a_step_of_nothing_but_rows_counts_until_the_next_one() -> None:
    context = rows_context(7)
    context.count(StepField.CANCEL, 1)
    assert rows_context(3) is context
    assert (context.values[StepField.TOKENS], context.values[StepField.CANCEL], context.values[StepField.ONE]) == (
        3,
        0,
        1,
    )
    with ThreadPoolExecutor(1) as pool:
        other: ContextTable = pool.submit(rows_context, 5).result()
    assert other is not context and context.values[StepField.TOKENS] == 3
