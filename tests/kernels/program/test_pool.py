"""Runs: every item once, barriers in order, one pool for all, errors, cancelling, forks; with futexes and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.common.forks import THREAD_NAMES
from genai.common.interrupts import ThreadsRefused
from genai.kernels.cpu.jit.arguments import Address, Arguments
from genai.kernels.cpu.jit.memory import read_int64, write_int64
from genai.kernels.cpu.jit.native import LIBRARY, native_op
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.calls import Call, Items, Program, Rows, program_of
from genai.kernels.cpu.program.step_table import CONTEXT_FIELDS, ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import MAX_THREADS, Threads
from genai.kernels.cpu.program.waiting import HAS_FUTEX, KNOWS_CORE, fetch_add
from genai.kernels.device import StepCancelled, StepError

REFUSED = 42
# Nanoseconds of work: too little for more than one thread, enough for all, and so much that it must be interruptible.
SMALL, SHARED, LONG = 10.0, 1e6, 60e9


class VisitArguments(Arguments):
    visits: Address


class SumArguments(Arguments):
    source: Address
    out: Address
    count: int


class RefuseArguments(Arguments):
    item: int


class BusyArguments(Arguments):
    source: Address


@native_op(VisitArguments)
def count_visits(arguments: VisitArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """visits[item] += 1."""
    for item in range(begin, end):
        fetch_add(arguments.visits + 8 * item, 1)
    return 0


@native_op(SumArguments)
def sum_of_previous(arguments: SumArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """out[item] = sum of the first `count` numbers of source: wrong if another thread is still writing them."""
    for item in range(begin, end):
        total = 0
        for i in range(arguments.count):
            total += read_int64(arguments.source + 8 * i)
        write_int64(arguments.out + 8 * item, total)
    return 0


@native_op(RefuseArguments)
def refuse_item(arguments: RefuseArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Refuses the item that its argument names."""
    return REFUSED if begin <= arguments.item < end else 0


@native_op(BusyArguments)
def busy(arguments: BusyArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Some microseconds of work per item."""
    total = 0
    for item in range(begin, end):
        for i in range(10000):
            total += read_int64(arguments.source + 8 * (i % 8)) ^ item
    write_int64(scratch, total)
    return 0


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Threads:
    return Threads(request.param)


@pytest.fixture
def new_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of which no thread has started."""
    monkeypatch.setattr(thread_pool, "_POOL", thread_pool._Pool(spins=10))


def visit(visits: np.ndarray, items: Items | None = None) -> Call:
    return Call(count_visits, VisitArguments(visits=visits), items or Items(factor=len(visits)))


def work(items: int) -> Call:
    source = np.arange(8)
    return Call(busy, BusyArguments(source=source), Items(factor=items), scratch=64)


def minutes() -> Program:
    """A program that takes minutes, which no test waits for."""
    return in_order(*[work(100_000)] * 1000)


def in_order(*calls: Call) -> Program:
    return program_of([[call] for call in calls])


@pytest.mark.parametrize("items", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("grain", [1, 3, 64])
def test_every_item_once(threads: Threads, items: int, grain: int) -> None:
    visits = np.zeros(1000, np.int64)
    program = program_of([[visit(visits, Items(StepField.TOKENS, grain=grain))] * 3])
    context = ContextTable()
    context.count(StepField.TOKENS, items)
    for _ in range(5):
        threads.run(program, context, nanoseconds=SHARED)
    np.testing.assert_array_equal(visits, np.where(np.arange(1000) < items, 15, 0))


def test_items_are_counted_by_the_context(threads: Threads) -> None:
    visits = np.zeros(100, np.int64)
    context = ContextTable()
    context.count(StepField.LOGITS_ROWS, 7)
    threads.run(in_order(visit(visits, Items(StepField.LOGITS_ROWS, factor=5, divisor=4))), context, nanoseconds=SHARED)
    assert visits.sum() == 10  # 7 / 4, rounded up, times 5


def test_barriers_order_calls(threads: Threads) -> None:
    """Each call reads what all items of the one before have written."""
    length, depth = 37, 60
    rows = np.ones((depth + 1, length), np.int64)
    calls = [
        Call(sum_of_previous, SumArguments(source=rows[i], out=rows[i + 1], count=length), Items(factor=length))
        for i in range(depth)
    ]
    threads.run(in_order(*calls), nanoseconds=SHARED)
    expected = np.ones(length, np.int64)
    for row in rows[1:]:
        with np.errstate(over="ignore"):
            expected = np.full(length, expected.sum(), np.int64)
        np.testing.assert_array_equal(row, expected)


def test_what_only_long_prompts_need_is_made_ready_when_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call counted by prefill rows runs where there are some, whether its operator was there before or not."""
    made, expected, prepare = [False], [], LIBRARY.prepare

    def note(wanted: Any, *arguments: Any, later: Any = (), **named: Any) -> Any:
        expected.extend(later)
        return prepare(wanted, *arguments, **named)

    monkeypatch.setattr(LIBRARY, "prepare", note)
    monkeypatch.setattr(type(count_visits), "ready", property(lambda op: op is not count_visits or made[0]))
    monkeypatch.setattr(type(count_visits), "load", lambda op: made[0])
    visits = np.zeros(8, np.int64)
    program = program_of([[Call(count_visits, VisitArguments(visits=visits), Items(StepField.PREFILL_ROWS))]])
    context = ContextTable()
    assert expected == [count_visits] and program.later == [0]
    context.count(StepField.PREFILL_ROWS, 0)
    Threads(1).run(program, context, nanoseconds=SMALL)
    assert program.later == [0], "without prefill rows nothing waits for it"
    made[0] = True
    context.count(StepField.PREFILL_ROWS, 5)
    Threads(1).run(program, context, nanoseconds=SMALL)
    assert visits.tolist() == [1] * 5 + [0] * 3
    assert program.later == []


def test_programs_without_calls(threads: Threads) -> None:
    """No thread is still in such a program when the next program starts."""
    visits, program = np.zeros(20, np.int64), program_of([])
    for _ in range(50):
        threads.run(program, nanoseconds=SHARED)
        threads.run(in_order(visit(visits)), nanoseconds=SHARED)
    np.testing.assert_array_equal(visits, 50)


def test_a_refusal_is_raised_and_ends_the_work(threads: Threads) -> None:
    visits = np.zeros(8, np.int64)
    refuse = Call(refuse_item, RefuseArguments(item=3), Items(factor=5))
    with pytest.raises(StepError, match=f"unknown reason .code {REFUSED}"):
        threads.run(in_order(refuse, visit(visits)), nanoseconds=SHARED)
    assert not visits.any()
    threads.run(in_order(visit(visits)), nanoseconds=SHARED)
    assert visits.sum() == 8


def test_cancelling_from_another_thread(threads: Threads) -> None:
    context, program = ContextTable(), minutes()
    timer = threading.Timer(0.2, lambda: context.count(StepField.CANCEL, 1))
    timer.start()
    started = time.perf_counter()
    with pytest.raises(StepCancelled):
        threads.run(program, context, nanoseconds=SHARED)
    assert time.perf_counter() - started < 60  # the program takes minutes
    timer.join()
    context.count(StepField.CANCEL, 0)
    threads.run(in_order(work(3)), context, nanoseconds=SHARED)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals")
@pytest.mark.parametrize("context", [ContextTable(), None], ids=["with a context", "without"])
def test_an_interrupt_ends_a_long_run(threads: Threads, context: ContextTable | None) -> None:
    """Ctrl-C while machine code runs is raised soon, and the next run is complete."""
    visits, program = np.zeros(9, np.int64), minutes()
    threads.run(in_order(work(3)), context, nanoseconds=SHARED)  # all is compiled before the interrupt
    threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        threads.run(program, context, nanoseconds=LONG)
    assert time.perf_counter() - started < 60  # the program takes minutes
    if context is not None:
        assert context.values[StepField.CANCEL] == 1
        context.count(StepField.CANCEL, 0)
    for nanoseconds in (LONG, SHARED):
        threads.run(in_order(visit(visits)), context, nanoseconds=nanoseconds)
    assert visits.sum() == 18


def run_at_once(jobs: Sequence[tuple[Threads, Program]], times: int) -> None:
    """Run each job on a separate Python thread."""

    def run(threads: Threads, program: Program) -> None:
        for _ in range(times):
            threads.run(program, nanoseconds=SHARED)

    callers = [threading.Thread(target=run, args=job) for job in jobs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()


def test_several_callers_with_several_numbers_of_threads() -> None:
    visits = np.zeros(50, np.int64)
    run_at_once([(Threads(count), in_order(*[visit(visits)] * 3)) for count in (2, 2, 1, 5, 3)], 40)
    np.testing.assert_array_equal(visits, 5 * 40 * 3)


def test_several_callers_of_one_program() -> None:
    visits = np.zeros(50, np.int64)
    program = in_order(visit(visits), visit(visits))
    run_at_once([(Threads(count), program) for count in (3, 3, 2)], 40)
    np.testing.assert_array_equal(visits, 3 * 40 * 2)


def test_a_small_run_waits_for_nobody() -> None:
    visits = np.zeros(9, np.int64)
    program = in_order(visit(visits))
    caller = threading.Thread(target=lambda: Threads(3).run(program, nanoseconds=SMALL), daemon=True)
    with thread_pool._POOL.lock:
        caller.start()
        caller.join(20)
        assert visits.all()


def pool_threads() -> dict[str, threading.Thread]:
    return {thread.name: thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAMES)}


@pytest.mark.usefixtures("new_pool")
def test_the_pool_grows_when_more_threads_are_wanted() -> None:
    """Numbers of threads in any order; none starts before it is needed, and none twice."""
    visits, before = np.zeros(50, np.int64), set(threading.enumerate())
    program = in_order(visit(visits), visit(visits))
    order = [1, 2, 1, 5, 1, 3, 2, 5, 4, 1, 2, 6, 2, 3]
    for turn, count in enumerate(order, 1):
        Threads(count).run(program, nanoseconds=SHARED)
        np.testing.assert_array_equal(visits, 2 * turn)
        started = [t.name for t in set(threading.enumerate()) - before if t.name.startswith(THREAD_NAMES)]
        assert sorted(started) == [f"{THREAD_NAMES}{number}" for number in range(1, max(order[:turn]))]


def status_of(thread: threading.Thread) -> tuple[str, int]:
    """The thread's state ("S" = sleeping), and the number of times that it has gone to sleep."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return status["State"].split()[0], int(status["voluntary_ctxt_switches"])


@pytest.mark.usefixtures("new_pool")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells how often a thread slept")
def test_a_thread_that_does_not_take_part_is_not_woken() -> None:
    before = set(threading.enumerate())
    Threads(4).run(in_order(work(8)), nanoseconds=SHARED)
    started = sorted(set(threading.enumerate()) - before, key=lambda thread: thread.name)
    while any(status_of(thread)[0] != "S" for thread in started):
        time.sleep(0.01)
    counts = [status_of(thread)[1] for thread in started]
    for _ in range(50):
        Threads(2).run(in_order(work(2)), nanoseconds=SHARED)
        time.sleep(0.001)
    first, *others = [status_of(thread)[1] for thread in started]
    assert first > counts[0] and others == counts[1:]


@pytest.mark.skipif(not KNOWS_CORE, reason="the system does not tell on what core a thread runs")
def test_a_thread_sleeps_at_once_when_another_one_needs_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """This does not depend on how long it spins on other cores."""
    import resource  # not on Windows

    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(thread_pool, "_POOL", thread_pool._Pool(spins=10**15))
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
    try:
        program = in_order(*[work(4)] * 50)
        Threads(2).run(program, nanoseconds=SHARED)  # each thread now has the other one's core
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        Threads(2).run(program, nanoseconds=SHARED)
        sleeps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        assert sleeps >= 40, f"{sleeps} sleeps at 50 barriers of two threads"
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(not HAS_FUTEX, reason="threads of the many pools made here would look for work now and then")
@pytest.mark.usefixtures("new_pool")
@pytest.mark.parametrize("nanoseconds", [SHARED, LONG], ids=["short", "long"])
def test_an_interrupt_anywhere_leaves_a_pool_that_works(
    interrupted: Callable[[Callable[[], object], int], bool], monkeypatch: pytest.MonkeyPatch, nanoseconds: float
) -> None:
    """No thread is started twice, and none still works on the caller's memory."""
    visits = np.zeros(20, np.int64)
    program = in_order(visit(visits))
    for place in range(1, 500):
        monkeypatch.setattr(thread_pool, "_POOL", thread_pool._Pool(spins=10))
        before = threading.active_count()
        came = interrupted(lambda: Threads(3).run(program, nanoseconds=nanoseconds), place)
        assert not any(thread.name == "genai-step" for thread in threading.enumerate())
        visits[:] = 0
        Threads(3).run(program, nanoseconds=SHARED)
        assert (visits == 1).all(), f"interrupted at place {place}"
        assert threading.active_count() == before + 2, f"interrupted at place {place}"
        if not came:
            break
    assert 20 < place < 499


@pytest.mark.usefixtures("new_pool")
def test_threads_that_cannot_be_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails without waiting for them."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    visits = np.zeros(20, np.int64)
    program = in_order(visit(visits))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ThreadsRefused, match="can't start new thread"):
            Threads(3).run(program, nanoseconds=SHARED)
    Threads(3).run(program, nanoseconds=SHARED)
    assert (visits == 1).all()


def status_of_child(run: Callable[[], bool]) -> int:
    """The exit status of a forked process: 0 if it returns True."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if run() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@needs_fork
@pytest.mark.usefixtures("new_pool")
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_forked_child_starts_threads_of_its_own(threads: Threads, ran_before: bool) -> None:
    """Any number of threads, and in its own children too. The parent continues."""
    visits = np.zeros(20, np.int64)
    program = in_order(visit(visits))
    LIBRARY.prepare([thread_pool.driver.run_program, thread_pool.driver.serve])

    def child() -> bool:
        for count in (threads.count, 4, 2):
            Threads(count).run(program, nanoseconds=SHARED)
        return bool((visits == ran_before + 3).all())

    if ran_before:
        threads.run(program, nanoseconds=SHARED)
    assert status_of_child(child) == 0
    assert status_of_child(lambda: child() and status_of_child(lambda: len(pool_threads()) == 0) == 0) == 0
    threads.run(program, nanoseconds=SHARED)
    assert (visits == ran_before + 1).all()


@needs_fork
def test_a_fork_waits_for_the_run_in_progress() -> None:
    visits = np.zeros(20, np.int64)
    program = in_order(work(100_000), visit(visits))
    caller = threading.Thread(target=lambda: Threads(3).run(program, nanoseconds=SHARED))
    caller.start()
    while not thread_pool._POOL.workspace._running:
        time.sleep(0.001)
    assert not visits.any()

    def child() -> bool:
        whole = bool((visits == 1).all())
        Threads(3).run(in_order(visit(visits)), nanoseconds=SHARED)
        return whole and bool((visits == 2).all())

    assert status_of_child(child) == 0
    caller.join()


@needs_fork
@pytest.mark.usefixtures("new_pool")
def test_a_fork_inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may fork. The parent's run continues. The child's fails, and its next run succeeds."""
    visits, children = np.zeros(20, np.int64), []
    program, grow = in_order(visit(visits)), thread_pool._Workspace._grow

    def forking(self: Any, *sizes: int) -> None:
        if not children:
            children.append(os.fork())
        grow(self, *sizes)

    monkeypatch.setattr(thread_pool._Workspace, "_grow", forking)
    refused = False
    try:
        Threads(2).run(program, nanoseconds=SHARED)
    except ThreadsRefused as error:
        refused = "forked" in str(error)
    if children == [0]:
        try:
            Threads(2).run(program, nanoseconds=SHARED)
            os._exit(0 if refused and (visits == 1).all() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert not refused
    assert (visits == 1).all()


@pytest.mark.usefixtures("new_pool")
def test_a_run_inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that starts a run gets an error, and the run that it interrupted completes."""
    visits, grow = np.zeros(20, np.int64), thread_pool._Workspace._grow
    program = in_order(visit(visits))

    def computing(self: Any, *sizes: int) -> None:
        with pytest.raises(ThreadsRefused, match="a signal handler tried to start a run"):
            Threads(2).run(program, nanoseconds=SHARED)
        grow(self, *sizes)

    monkeypatch.setattr(thread_pool._Workspace, "_grow", computing)
    Threads(2).run(program, nanoseconds=SHARED)
    assert (visits == 1).all()


def test_no_process_outlives_its_end() -> None:
    """An interpreter that ends while threads sleep in machine code ends at once."""
    program = (
        "import threading\n"
        "import numpy as np\n"
        "from genai.kernels.cpu.ceilings import ITEM_BYTES, read_call\n"
        "from genai.kernels.cpu.program.calls import program_of\n"
        "from genai.kernels.cpu.program.thread_pool import Threads\n"
        "call = read_call(np.zeros(8 * ITEM_BYTES, np.uint8), 8, 1)\n"
        "Threads(3).run(program_of([[call]]), nanoseconds=1e6)\n"
        "print(threading.active_count())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "3\n"


@pytest.mark.slow
def test_without_futexes(tmp_path: Path) -> None:
    """On systems without a futex, waiting threads take short sleeps. A separate cache holds that code.

    The tests run in one process (-n 0), because others would not have the change.
    """
    skipped = "not without_futexes and not is_not_woken"
    program = (
        "import sys\n"
        "from genai.kernels.cpu.program import waiting\n"
        "waiting.HAS_FUTEX = waiting.KNOWS_CORE = False\n"
        "import pytest\n"
        f"sys.exit(pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', '-k', {skipped!r}, {__file__!r}]))"
    )
    environment = {**os.environ, "GENAI_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout[-3000:]


def test_bad_arguments() -> None:
    for count in (0, MAX_THREADS + 1):
        with pytest.raises(ValueError, match=f"threads is {count}, expected 1 to {MAX_THREADS}"):
            Threads(count)
    with pytest.raises(ValueError, match="rows are float64"):
        Rows.of(np.zeros((2, 2)))  # type: ignore[arg-type]
    assert max(StepField) < CONTEXT_FIELDS
