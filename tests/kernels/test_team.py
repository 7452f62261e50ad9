"""Sharing a kernel's range among threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.team import Team, run


def eager(threads: int) -> Team:
    """A team that hands over even the smallest piece of work."""
    return Team(threads, min_work_per_part=1)


def mark(seen: list[Any], begin: int, end: int) -> None:
    seen.append((begin, end, threading.current_thread().name))


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("genai-kernels")]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_covers_the_range_once(threads: int, count: int) -> None:
    seen: list[Any] = []
    eager(threads).run(mark, (seen,), count, work=1e9)
    covered = [i for begin, end, _ in seen for i in range(begin, end)]
    assert sorted(covered) == list(range(count))


def test_small_work_stays_on_the_calling_thread() -> None:
    seen: list[Any] = []
    team = Team(4)
    team.run(mark, (seen,), 1000, work=10_000)
    assert seen == [(0, 1000, threading.current_thread().name)]


def test_grain_bounds_the_number_of_parts() -> None:
    seen: list[Any] = []
    eager(4).run(mark, (seen,), 100, work=1e9, grain=40)
    assert len(seen) == 2


def test_other_threads_take_part() -> None:
    seen: list[Any] = []
    barrier = threading.Barrier(2, timeout=30)

    def meet(begin: int, end: int) -> None:
        mark(seen, begin, end)
        if len(seen) <= 2:
            barrier.wait()  # passes only if two threads are inside at once

    eager(2).run(meet, (), 4, work=1e9)
    assert len({name for _, _, name in seen}) == 2


def test_no_team_runs_here() -> None:
    seen: list[Any] = []
    run(None, mark, (seen,), 5, work=1e9)
    assert seen == [(0, 5, threading.current_thread().name)]


def test_an_exception_in_any_part_is_raised_and_the_team_goes_on() -> None:
    team = eager(3)
    for bad in range(6):

        def fail(begin: int, end: int, bad: int = bad) -> None:
            if begin <= bad < end:
                raise IndexError(f"item {bad}")

        with pytest.raises(IndexError, match=f"item {bad}"):
            team.run(fail, (), 6, work=1e9)
    seen: list[Any] = []
    team.run(mark, (seen,), 6, work=1e9)
    assert sum(end - begin for begin, end, _ in seen) == 6


def test_an_error_does_not_keep_the_arrays() -> None:
    class Big:
        pass

    big = Big()
    alive = weakref.ref(big)

    def fail(held: Any, begin: int, end: int) -> None:
        raise IndexError("no")

    gc.disable()
    try:
        with pytest.raises(IndexError):
            eager(2).run(fail, (big,), 4, work=1e9)
        del big
        wait_until(lambda: alive() is None)
    finally:
        gc.enable()


def test_many_threads_call_at_once() -> None:
    team = eager(3)
    errors: list[BaseException] = []

    def add(out: np.ndarray, value: int, begin: int, end: int) -> None:
        out[begin:end] += value

    def call(value: int) -> None:
        try:
            for _ in range(50):
                out = np.zeros(97, np.int64)
                team.run(add, (out, value), 97, work=1e9)
                assert (out == value).all()
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=call, args=(value,)) for value in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not errors
    assert not any(caller.is_alive() for caller in callers)


def test_interrupt_waits_for_parts_in_progress() -> None:
    """After KeyboardInterrupt no worker may still write into the caller's arrays."""
    running, finished = threading.Event(), threading.Event()

    def part(begin: int, end: int) -> None:
        if threading.current_thread() is threading.main_thread():
            running.wait(30)
            raise KeyboardInterrupt
        running.set()
        time.sleep(0.05)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        eager(2).run(part, (), 2, work=1e9)
    assert finished.is_set()


def test_workers_end_with_their_team() -> None:
    before = set(workers())
    team = eager(4)
    assert not set(workers()) - before, "nothing starts before it is needed"
    team.run(mark, ([],), 10, work=1e9)
    mine = set(workers()) - before
    assert len(mine) == 3
    del team
    gc.collect()
    wait_until(lambda: not any(worker.is_alive() for worker in mine))


def test_a_closed_team_starts_again() -> None:
    team = eager(2)
    for _ in range(2):
        seen: list[Any] = []
        team.run(mark, (seen,), 10, work=1e9)
        assert sum(end - begin for begin, end, _ in seen) == 10
        team.close()
    team.close()


@pytest.mark.parametrize("threads", [0, -1])
def test_refuses(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}"):
        Team(threads)


def test_default_is_the_machine() -> None:
    assert Team().threads >= 1


def run_script(source: str) -> str:
    """Run a program of its own; it must end well, quickly and without a word on stderr."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork on this system")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    output = run_script(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        from genai.kernels.cpu.team import Team
        team, seen = Team(3, min_work_per_part=1), []
        kernel = lambda begin, end: seen.extend(range(begin, end))
        team.run(kernel, (), 50, work=1e9)
        child = os.fork()
        if child == 0:
            seen.clear()
            team.run(kernel, (), 50, work=1e9)
            os._exit(0 if sorted(seen) == list(range(50)) else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert output == "0\n"


def test_the_interpreter_ends_while_workers_wait_or_work() -> None:
    run_script(
        """
        import threading, time
        from genai.kernels.cpu.team import Team
        team = Team(4, min_work_per_part=1)
        team.run(lambda begin, end: None, (), 100, work=1e9)
        threading.Thread(target=lambda: team.run(lambda b, e: time.sleep(30), (), 8, work=1e9), daemon=True).start()
        time.sleep(0.2)
        """
    )


def wait_until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen within five seconds")
