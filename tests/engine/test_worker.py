"""The engine's thread receives every notification, even if an interrupt occurs during it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from genai.engine.worker import Worker
from genai.errors import StateError

Interrupted = Callable[[Callable[[], object], int], bool]


class _Engine:
    """An engine that takes requests and never has work."""

    has_work = False

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def submit(self, request: Any) -> None:
        self.requests.append(request)

    def interrupt(self, *, everything: bool) -> None:
        pass

    def step(self) -> None:
        raise AssertionError("there is no work")

    def abandon(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


def _worker(engine: _Engine) -> Worker:
    worker = Worker(lambda: engine)  # type: ignore[arg-type, return-value]
    worker.submit(["first"])  # type: ignore[list-item]
    _eventually(lambda: engine.requests == ["first"])
    return worker


def _eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def _ends(worker: Worker) -> bool:
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(5.0)
    return not closing.is_alive()


@pytest.mark.parametrize("what", ["wake", "submit"])
def test_an_interrupt_anywhere_loses_no_later_call(what: str, interrupted: Interrupted) -> None:
    for place in range(1, 100):
        engine = _Engine()
        worker = _worker(engine)
        time.sleep(0.001)  # the thread sleeps
        call: Callable[[], object] = worker.wake if what == "wake" else partial(worker.submit, ["second"])  # type: ignore[list-item]
        came = interrupted(call, place)
        time.sleep(0.001)
        assert _ends(worker), f"interrupted at place {place}"
        if not came:
            break
    assert 2 < place < 99


def test_an_interrupt_anywhere_in_the_first_call_leaves_one_thread_that_works(interrupted: Interrupted) -> None:
    def threads() -> int:
        return sum(thread.name == "genai-worker" for thread in threading.enumerate())

    before = threads()
    for place in range(1, 200):
        engine = _Engine()
        worker = Worker(lambda engine=engine: engine)  # type: ignore[misc]
        came = interrupted(partial(worker.submit, ["first"]), place)  # type: ignore[list-item]
        worker.submit(["second"])  # type: ignore[list-item]
        _eventually(lambda engine=engine: engine.requests in (["second"], ["first", "second"]))  # type: ignore[misc]
        assert threads() == before + 1, f"interrupted at place {place}"
        assert _ends(worker), f"interrupted at place {place}"
        if not came:
            break
    assert 20 < place < 199


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker(_Engine)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StateError, match="cannot be started") as error:
            worker.submit([])
    assert "ulimit" in error.value.fix
    worker.submit([])
    assert _ends(worker)


def test_close_ends_a_thread_that_sleeps() -> None:
    worker = _worker(_Engine())
    assert _ends(worker)
    worker.close()
