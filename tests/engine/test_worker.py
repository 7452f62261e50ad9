"""The engine's thread hears of everything, also after an interrupt in the middle of telling it."""

from __future__ import annotations

import dis
import gc
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from genai.engine.worker import Worker


class _Engine:
    """Takes jobs and has nothing to do with them."""

    has_work = False

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def submit(self, job: Any) -> None:
        self.jobs.append(job)

    def interrupt(self, *, everything: bool) -> None:
        pass

    def step(self) -> None:
        raise AssertionError("there is no work")

    def abandon(self, error: BaseException) -> None:
        raise error

    def cancel_all(self) -> None:
        pass


def _worker(engine: _Engine) -> Worker:
    worker = Worker(lambda: engine)  # type: ignore[arg-type, return-value]
    worker.submit(["first"])  # type: ignore[list-item]
    _eventually(lambda: engine.jobs == ["first"])
    return worker


def _eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def _interrupted(call: Callable[[], object], place: int) -> bool:
    """Call with a KeyboardInterrupt at the given place; False if it came to its end before.

    Places are where CPython looks for signals: behind calls. Those of a garbage collection in between do not count:
    what its callbacks raise is dropped.
    """
    count = 0
    before: dict[Any, int] = {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode":
            previous = before.get(frame)
            before[frame] = frame.f_lasti
            if previous is not None and dis.opname[frame.f_code.co_code[previous]].startswith("CALL"):
                count += 1
                if count == place:
                    raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
        gc.enable()
    return False


def _ends(worker: Worker) -> bool:
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(5.0)
    return not closing.is_alive()


@pytest.mark.parametrize("what", ["wake", "submit"])
def test_an_interrupt_anywhere_loses_no_later_call(what: str) -> None:
    for place in range(1, 100):
        engine = _Engine()
        worker = _worker(engine)
        time.sleep(0.001)  # the thread sleeps
        call: Callable[[], object] = worker.wake if what == "wake" else partial(worker.submit, ["second"])  # type: ignore[list-item]
        interrupted = _interrupted(call, place)
        time.sleep(0.001)
        assert _ends(worker), f"interrupted at place {place}"
        if not interrupted:
            break
    assert 2 < place < 99


def test_close_ends_a_thread_that_sleeps() -> None:
    worker = _worker(_Engine())
    assert _ends(worker)
    worker.close()
