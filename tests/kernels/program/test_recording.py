"""Joined programs: in order, with every share of threads, with inner memory that moves, and with errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from genai.common.host_memory import LEAST_RECYCLED
from genai.kernels.cpu.jit.arguments import Address, Arguments, Binding
from genai.kernels.cpu.jit.memory import read_int64, write_int64
from genai.kernels.cpu.jit.native import native_op
from genai.kernels.cpu.program.bound_program import NodeProgram, first_element
from genai.kernels.cpu.program.calls import Call, Items
from genai.kernels.cpu.program.recording import JoinedProgram, recorded
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.device import StepError

# Nanoseconds: for one thread, for threads that already run, and for which threads are started.
ALONE, DIVIDED, SHARED = 1_000.0, 10_000.0, 100_000.0
COUNT = 64


class SumArguments(Arguments):
    source: Address
    out: Address


class LimitArguments(Arguments):
    source: Address
    limit: int


@native_op(SumArguments)
def add_all(arguments: SumArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """out[item] = item + sum(source) % 1000, which is wrong if another thread is still writing the source."""
    total = 0
    for i in range(COUNT):
        total += read_int64(arguments.source + 8 * i)
    for item in range(begin, end):
        write_int64(arguments.out + 8 * item, item + total % 1000)
    return 0


@native_op(LimitArguments)
def refuse_large(arguments: LimitArguments, context: int, begin: int, end: int, scratch: int) -> int:
    for item in range(begin, end):
        if read_int64(arguments.source + 8 * item) > arguments.limit:
            return 7
    return 0


def _expected(x, steps):
    for _ in range(steps):
        x = np.arange(COUNT) + x.sum() % 1000
    return x


def _joined(times, threads, *, limit=None, inner_bytes=COUNT * 8):
    """Return a program of a chain of sums; each but the last is in memory for inner values, in two places in turns."""
    items = Items(factor=COUNT)
    arguments = SumArguments(source=Binding("x"), out=Binding("out"))
    arrays = [np.zeros(COUNT, np.int64) for _ in range(len(times) + 1)]
    with recorded() as recorder:
        for number, nanoseconds in enumerate(times):
            program = NodeProgram([[Call(add_all, arguments, items)]], nanoseconds)
            program.run(threads, x=arrays[number], out=arrays[number + 1])
            if limit is not None:
                check = LimitArguments(source=Binding("x"), limit=limit)
                NodeProgram([[Call(refuse_large, check, items)]], nanoseconds).run(threads, x=arrays[number])
    assert recorder.can_join
    addresses = [first_element(array) for array in arrays]

    def place(_, address):
        number = addresses.index(address)
        if number in (0, len(times)):
            return min(number, 1), 0
        return -1, number % 2 * inner_bytes

    return JoinedProgram(recorder.runs, place, 2 * inner_bytes)


TIMES = {
    "alone": [ALONE] * 6,
    "shared": [SHARED] * 6,
    "divided beside shared": [SHARED, DIVIDED, DIVIDED, SHARED, DIVIDED],
    "alone beside divided": [ALONE, DIVIDED, ALONE, ALONE, SHARED, ALONE, DIVIDED, DIVIDED, ALONE, ALONE],
    "one": [SHARED],
}


@pytest.mark.parametrize("inner_bytes", [COUNT * 8, LEAST_RECYCLED])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_every_run_sees_the_results_of_the_runs_before(times, threads, inner_bytes):
    program = _joined(times, Threads(threads), inner_bytes=inner_bytes)
    taken = []
    for number in range(20):
        x, out = np.arange(COUNT) * number, np.zeros(COUNT, np.int64)
        program.run([first_element(x), first_element(out)], poison=number % 2 == 0)
        np.testing.assert_array_equal(out, _expected(x, len(times)))
        taken.append(np.ones(LEAST_RECYCLED + number, np.uint8))  # so that recycled memory may move


@pytest.mark.parametrize("threads", [1, 3])
def test_several_callers_at_once(threads):
    times = TIMES["alone beside divided"]
    program = _joined(times, Threads(threads), inner_bytes=LEAST_RECYCLED)

    def run(number):
        x, out = np.arange(COUNT) * number, np.zeros(COUNT, np.int64)
        program.run([first_element(x), first_element(out)])
        return np.array_equal(out, _expected(x, len(times)))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_an_operator_that_refuses_its_input(times, threads):
    program = _joined(times, Threads(threads), limit=5000)
    out = np.zeros(COUNT, np.int64)
    for x in (np.zeros(COUNT, np.int64), np.arange(COUNT) + 4990, np.zeros(COUNT, np.int64)):
        if x.max() > 5000:
            with pytest.raises(StepError, match="unknown reason"):
                program.run([first_element(x), first_element(out)])
        else:
            program.run([first_element(x), first_element(out)])
            np.testing.assert_array_equal(out, _expected(x, len(times)))


@pytest.mark.parametrize(
    ("times", "threads", "can_join"),
    [
        ([400_000.0] * 49, 1, True),
        ([2_400_000.0], 1, False),  # a single run that takes long
        ([2_400_000.0], 2, True),
        ([400_000.0] * 51, 1, False),  # together, the runs take too long for an interrupt
        ([400_000.0] * 51, 2, True),
    ],
)
def test_long_runs_are_not_joined(times, threads, can_join):
    arguments = SumArguments(source=Binding("x"), out=Binding("out"))
    x, out = np.zeros(COUNT, np.int64), np.zeros(COUNT, np.int64)
    with recorded() as recorder:
        for nanoseconds in times:
            NodeProgram([[Call(add_all, arguments)]], nanoseconds).run(Threads(threads), x=x, out=out)
    assert recorder.can_join == can_join
    assert recorder.can_follow(0.0) or not can_join
    assert not recorder.can_follow(20e6 * threads - 1.0)
