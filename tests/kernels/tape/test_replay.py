"""Replays: holes filled per run, several threads at once, errors, memory of a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from genai.kernels.cpu.jit import native_op
from genai.kernels.cpu.memory import word, write_int64
from genai.kernels.cpu.tape.program import Call, Hole, Items
from genai.kernels.cpu.tape.replay import Crew, Replay
from genai.kernels.cpu.tape.walkers import StepError


@native_op
def write_numbers(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """out[i] = i + added; refuses to add 13."""
    if word(arguments, 1) == 13:
        return 7
    for item in range(begin, end):
        write_int64(word(arguments, 0) + 8 * item, item + word(arguments, 1))
    return 0


@pytest.fixture(params=[1, 2, 3])
def crew(request):
    made = Crew(request.param)
    yield made
    made.close()


def replay(count: int, work: float = 1e9) -> Replay:
    return Replay([[Call(write_numbers, (Hole("out", 8), Hole("added")), Items(factor=count), scratch=64)]], work)


@pytest.mark.parametrize("work", [0.0, 1e9])
def test_holes_are_filled_at_each_run(crew, work):
    made = replay(1000, work)
    for added in (0, 5, -3):
        out = np.zeros(1001, np.int64)
        crew.run(made, {"out": out.ctypes.data, "added": added})
        np.testing.assert_array_equal(out[1:], np.arange(1000) + added)
        assert out[0] == 0


def test_several_threads_at_once(crew):
    made = replay(500)

    def run(added):
        out = np.zeros(501, np.int64)
        for _ in range(20):
            crew.run(made, {"out": out.ctypes.data, "added": added})
        return bool((out[1:] == np.arange(500) + added).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(100, 108)))


def test_an_operator_that_refuses(crew):
    out = np.zeros(11, np.int64)
    with pytest.raises(StepError, match="code 7"):
        crew.run(replay(10), {"out": out.ctypes.data, "added": 13})
    with pytest.raises(StepError, match="code 7"):
        crew.run(replay(10, 0.0), {"out": out.ctypes.data, "added": 13})


def test_memory_is_kept_and_belongs_to_a_thread(crew):
    mine = crew.buffer("a", 1000)
    assert crew.buffer("a", 500) == mine
    assert crew.buffer("b", 1000) != mine
    assert crew.memory("a", 5000).nbytes >= 5000
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(crew.buffer, "b", 1000).result() != crew.buffer("b", 1000)


def test_no_threads():
    with pytest.raises(ValueError, match="threads is 0"):
        Crew(0)
