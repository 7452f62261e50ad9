"""Ctrl-C at every point of waiting: nothing hangs afterwards, and only KeyboardInterrupt is raised."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import genai
from genai.common.interrupts import InterruptsDeferred, Task, start
from genai.compat.onnxruntime_genai.generator import Generator, GeneratorParams
from genai.llm.streaming import CompletionStream, wait_for

Interrupted = Callable[[Callable[[], object], int], bool]


class _Generation:
    """The parts of a generation that a stream or a call needs."""

    sink: Any
    cancelled = False
    prompt_progress = (0, 0)

    def __init__(self) -> None:
        self.samples = [self]

    def completion(self) -> Any:
        return self


class _Worker:
    """Delivers three pieces and the end, immediately or from another thread."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once

    def submit(self, generations: list[_Generation]) -> None:
        def deliver() -> None:
            for piece in "abc":
                generations[0].sink.text(generations[0], piece)
            generations[0].sink.finished(generations[0], None)

        if self.at_once:
            deliver()
        else:
            start(threading.Timer(0.001, deliver))

    def wake(self) -> None:
        pass

    def check_usable(self) -> None:
        pass


def ends(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5.0)
    return not thread.is_alive()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stream_ends_after_an_interrupt_anywhere(interrupted: Interrupted, at_once: bool) -> None:
    """Also right after the end marker was taken from the queue."""
    for place in range(1, 300):
        stream = CompletionStream([_Generation()], _Worker(at_once=at_once))  # type: ignore[arg-type, list-item]
        came = interrupted(lambda stream=stream: list(stream), place)  # type: ignore[misc]
        assert ends(stream.close), f"interrupted at place {place}"
        assert next(stream, None) is None
        if not came:
            break
    assert 10 < place < 299


def test_a_call_that_is_interrupted_anywhere_raises_nothing_else(interrupted: Interrupted) -> None:
    def call() -> None:
        assert len(wait_for([_Generation()], _Worker(at_once=False))) == 1  # type: ignore[arg-type, list-item]

    for place in range(1, 300):
        if not interrupted(call, place):
            break
    assert 10 < place < 299


def test_a_task_that_is_interrupted_anywhere_leaves_no_lock(interrupted: Interrupted) -> None:
    for place in range(1, 300):
        if not interrupted(lambda: Task(lambda: 1, "test-task").result(), place):
            break
    assert 10 < place < 299
    with pytest.raises(ZeroDivisionError):
        Task(lambda: 1 // 0, "test-task").result()


def test_deferred_interrupts_come_at_the_end(interrupted: Interrupted) -> None:
    reached: list[str] = []

    def call() -> None:
        with InterruptsDeferred(lambda: reached.append("told")):
            reached.append("inside")
            reached.append("end")
        reached.append("behind")

    outcomes = set()
    for place in range(1, 50):
        reached.clear()
        came = interrupted(call, place)
        outcomes.add((came, *reached))
        if not came:
            break
    assert outcomes == {
        (True,),
        (True, "told", "inside", "end"),
        (True, "inside", "told", "end"),
        (True, "inside", "end", "told"),
        (True, "inside", "end"),
        (True, "inside", "end", "behind"),
        (False, "inside", "end", "behind"),
    }


@pytest.mark.parametrize("between", [61, pytest.param(1, marks=pytest.mark.fuzz)])
def test_an_interrupt_anywhere_gives_all_blocks_back(
    bundled: genai.Model, interrupted: Interrupted, between: int
) -> None:
    """A Generator works on the caller's thread: an interrupt at any point leaves its sequence unchanged."""
    pool = bundled.decoder.pool  # type: ignore[attr-defined]
    made: list[Generator] = []  # dropped without an interrupt: what is raised then is lost

    def work() -> None:
        made.append(generator := Generator(bundled, GeneratorParams(bundled)))
        generator.append_tokens(list(range(3, 43)))
        generator.generate_next_token()
        generator.rewind_to(10)

    work()
    made.clear()
    gc.collect()
    gc.freeze()  # the collections below go through what is new, not through all modules
    try:
        for place in range(1, 5000, between):
            came = interrupted(work, place)
            made.clear()
            gc.collect()  # the exception's frames
            assert pool.num_free == pool.num_blocks, f"interrupted at place {place}"
            assert not any(map(pool.references, range(pool.num_blocks)))
            assert not bundled.decoder._running  # type: ignore[attr-defined]
            if not came:
                break
    finally:
        gc.unfreeze()
    assert 500 < place < 4999
    every = pool.allocate(pool.num_blocks)
    assert sorted(every) == list(range(pool.num_blocks))  # each once
    pool.release(every)
