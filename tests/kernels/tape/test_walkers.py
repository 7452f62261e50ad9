"""Tapes: every item once, meetings in order, errors, cancelling, forks; the same with and without futexes."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.jit import native_op
from genai.kernels.cpu.memory import read_int64, word, write_int64
from genai.kernels.cpu.tape.context import CONTEXT_WORDS, ContextTable, Word
from genai.kernels.cpu.tape.program import MAX_ARGUMENTS, Call, Items, Rows, TapeWriter
from genai.kernels.cpu.tape.waiting import KNOWS_CORE, fetch_add
from genai.kernels.cpu.tape.walkers import StepCancelled, StepError, Walkers

REFUSED = 42


@native_op
def count_visits(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """visits[item] += 1."""
    for item in range(begin, end):
        fetch_add(word(arguments, 0) + 8 * item, 1)
    return 0


@native_op
def sum_of_previous(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """out[item] = sum of the first `count` numbers of source: wrong if another thread is still writing them."""
    for item in range(begin, end):
        total = 0
        for i in range(word(arguments, 2)):
            total += read_int64(word(arguments, 0) + 8 * i)
        write_int64(word(arguments, 1) + 8 * item, total)
    return 0


@native_op
def refuse_item(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Refuses the item that its argument names."""
    return REFUSED if begin <= word(arguments, 0) < end else 0


@native_op
def busy(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Some tens of microseconds of work per item."""
    total = 0
    for item in range(begin, end):
        for i in range(10000):
            total += read_int64(word(arguments, 0) + 8 * (i % 8)) ^ item
    write_int64(scratch, total)
    return 0


@pytest.fixture(params=[1, 2, 3, 5])
def walkers(request: pytest.FixtureRequest) -> Iterator[Walkers]:
    team = Walkers(request.param, spins=10)
    yield team
    team.close()


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def tape_of(*calls: Call, meet: bool = True) -> Any:
    writer = TapeWriter()
    for call in calls:
        writer.add(call)
        if meet:
            writer.meet()
    return writer.finish()


@pytest.mark.parametrize("items", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("grain", [1, 3, 64])
def test_every_item_once(walkers: Walkers, items: int, grain: int) -> None:
    visits = np.zeros(1000, np.int64)
    tape = tape_of(*[Call(count_visits, [address(visits)], Items(Word.TOKENS, grain=grain))] * 3, meet=False)
    context = ContextTable()
    context.count(Word.TOKENS, items)
    for _ in range(5):
        walkers.walk(tape, context)
    np.testing.assert_array_equal(visits, np.where(np.arange(1000) < items, 15, 0))


def test_items_are_counted_by_the_context(walkers: Walkers) -> None:
    visits = np.zeros(100, np.int64)
    tape = tape_of(Call(count_visits, [address(visits)], Items(Word.WANTED, factor=5, divisor=4)))
    context = ContextTable()
    context.count(Word.WANTED, 7)
    walkers.walk(tape, context)
    assert visits.sum() == 9  # 35 / 4, rounded up


def test_meetings_order_calls(walkers: Walkers) -> None:
    """Each call reads what all items of the one before have written."""
    length, depth = 37, 60
    rows = np.ones((depth + 1, length), np.int64)
    calls = [
        Call(sum_of_previous, [address(rows[i]), address(rows[i + 1]), length], Items(factor=length))
        for i in range(depth)
    ]
    walkers.walk(tape_of(*calls), ContextTable())
    expected = np.ones(length, np.int64)
    for row in rows[1:]:
        with np.errstate(over="ignore"):
            expected = np.full(length, expected.sum(), np.int64)
        np.testing.assert_array_equal(row, expected)


def test_a_refusal_is_raised_and_ends_the_work(walkers: Walkers) -> None:
    visits = np.zeros(8, np.int64)
    tape = tape_of(Call(refuse_item, [3], Items(factor=5)), Call(count_visits, [address(visits)], Items(factor=8)))
    with pytest.raises(StepError, match=f"code {REFUSED}") as raised:
        walkers.walk(tape, ContextTable())
    assert raised.value.code == REFUSED
    assert not visits.any()
    walkers.walk(tape_of(Call(count_visits, [address(visits)], Items(factor=8))), ContextTable())
    assert visits.sum() == 8


def test_cancelling_from_another_thread(walkers: Walkers) -> None:
    source, context = np.arange(8), ContextTable()
    tape = tape_of(*[Call(busy, [address(source)], Items(factor=1000), scratch=64, held=(source,))] * 1000)
    timer = threading.Timer(0.2, lambda: context.count(Word.CANCEL, 1))
    timer.start()
    started = time.perf_counter()
    with pytest.raises(StepCancelled):
        walkers.walk(tape, context)
    assert time.perf_counter() - started < 15  # whole, it takes minutes
    timer.join()
    context.count(Word.CANCEL, 0)
    walkers.walk(tape_of(Call(busy, [address(source)], Items(factor=3), scratch=64)), context)


def test_an_interrupt_ends_a_long_step(walkers: Walkers) -> None:
    """Ctrl-C while machine code runs: raised soon, and the next step is whole again."""
    source, visits, context = np.arange(8), np.zeros(9, np.int64), ContextTable()
    tape = tape_of(*[Call(busy, [address(source)], Items(factor=1000), scratch=64)] * 1000)
    threading.Timer(0.2, _thread.interrupt_main).start()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        walkers.walk(tape, context, seconds=60)
    assert time.perf_counter() - started < 15
    context.count(Word.CANCEL, 0)
    walkers.walk(tape_of(Call(count_visits, [address(visits)], Items(factor=9))), context, seconds=60)
    assert visits.sum() == 9


def test_several_walkers_from_several_threads() -> None:
    visits, context = np.zeros(50, np.int64), ContextTable()
    tapes = [tape_of(Call(count_visits, [address(visits)], Items(factor=50))) for _ in range(3)]
    teams = [Walkers(2, spins=10) for _ in tapes]

    def work(team: Walkers, tape: Any) -> None:
        for _ in range(40):
            team.walk(tape, context)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(teams, tapes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(visits, np.full(50, 120))
    for team in teams:
        team.close()


@pytest.mark.skipif(not KNOWS_CORE, reason="the system does not tell on what core a thread runs")
def test_a_thread_sleeps_at_once_when_another_one_needs_its_core() -> None:
    """However long it would spin elsewhere."""
    import resource  # not on Windows

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
    team = Walkers(2, spins=10**15)
    try:
        source, context = np.arange(8), ContextTable()
        tape = tape_of(*[Call(busy, [address(source)], Items(factor=4), scratch=64, held=(source,))] * 50)
        team.walk(tape, context)  # now each knows where the other one is
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        team.walk(tape, context)
        sleeps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        assert sleeps >= 40, f"{sleeps} sleeps in 50 meetings of two threads"
    finally:
        os.sched_setaffinity(0, cores)
        team.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_threads_of_its_own(walkers: Walkers) -> None:
    visits = np.zeros(20, np.int64)
    tape = tape_of(Call(count_visits, [address(visits)], Items(factor=20)))
    walkers.walk(tape, ContextTable())
    child = os.fork()
    if child == 0:
        walkers.walk(tape, ContextTable())
        os._exit(0 if (visits == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    walkers.walk(tape, ContextTable())
    assert (visits == 2).all()


def started_since(before: set[threading.Thread]) -> int:
    """Others' threads may end meanwhile, so only new ones count."""
    return len(set(threading.enumerate()) - before)


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("ending", ["closed", "collected"])
def test_threads_end(ending: str) -> None:
    visits, before = np.zeros(4, np.int64), set(threading.enumerate())
    team = Walkers(3)
    team.walk(tape_of(Call(count_visits, [address(visits)], Items(factor=4))), ContextTable())
    assert started_since(before) == 2
    if ending == "closed":
        team.close()
        assert until(lambda: started_since(before) == 0)
        team.walk(tape_of(Call(count_visits, [address(visits)], Items(factor=4))), ContextTable())
        team.close()
    del team
    gc.collect()
    assert until(lambda: started_since(before) == 0)


def test_profile_has_a_time_after_every_call(walkers: Walkers) -> None:
    visits = np.zeros(4, np.int64)
    tape = tape_of(*[Call(count_visits, [address(visits)], Items(factor=4))] * 5)
    profile = np.zeros(5, np.int64)
    walkers.walk(tape, ContextTable(), profile=profile)
    assert (np.diff(profile) >= 0).all() and profile[0] > 0


def test_no_process_outlives_its_end() -> None:
    """An interpreter that ends while walkers sleep in machine code ends at once."""
    program = (
        "import numpy as np\n"
        "from genai.kernels.cpu.tape.walkers import Walkers\n"
        "from genai.kernels.cpu.tape.program import TapeWriter\n"
        "from genai.kernels.cpu.tape.context import ContextTable\n"
        "team = Walkers(3)\nteam.walk(TapeWriter().finish(), ContextTable())\nprint('done')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "done\n"


@pytest.mark.slow
def test_without_futexes(tmp_path: Path) -> None:
    """Systems without a futex: waiting threads sleep for moments instead. A cache of its own keeps that code apart.

    In one process (-n 0): others would not know of the change.
    """
    program = (
        "import sys\n"
        "from genai.kernels.cpu.tape import waiting\n"
        "waiting.HAS_FUTEX = waiting.KNOWS_CORE = False\n"
        "import pytest\n"
        f"sys.exit(pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', '-k', 'not without_futexes', {__file__!r}]))"
    )
    environment = {**os.environ, "GENAI_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout[-3000:]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        Walkers(0)
    with pytest.raises(ValueError, match=f"a row holds {MAX_ARGUMENTS}"):
        TapeWriter().add(Call(count_visits, [0] * (MAX_ARGUMENTS + 1)))
    with pytest.raises(ValueError, match="POSITIONS is not C-contiguous"):
        ContextTable().array(Word.POSITIONS, np.zeros((4, 4), np.int64)[:, 0])
    with pytest.raises(ValueError, match="rows are float64"):
        Rows.of(np.zeros((2, 2)))  # type: ignore[arg-type]
    assert max(Word) < CONTEXT_WORDS
