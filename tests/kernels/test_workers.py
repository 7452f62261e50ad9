"""Compiling in several processes: the same as in one, whatever becomes of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.common.forks import STATUS_THREAD, THREAD_NAMES
from genai.kernels.cpu.jit import native, workers
from genai.kernels.cpu.jit.memory import read_int64, write_int64
from genai.kernels.cpu.jit.native import Library, NativeFunction

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library of its own, on a machine of two cores."""
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(workers, "default_threads", lambda: 2)
    monkeypatch.setattr(workers, "_BEHIND", [])
    (tmp_path / "sources").mkdir()
    return Library(tmp_path / "sources")


def _adder(amount: int) -> Callable[..., int]:
    def add(x: int, size: int) -> int:
        for i in range(size):
            write_int64(x + 8 * i, read_int64(x + 8 * i) + amount)
        return 0

    add.__name__ = f"add_{amount}"
    return add


def adders(library: Library, count: int = 5) -> list[NativeFunction]:
    return [library.kernel(_adder(amount)) for amount in range(count)]


def assert_they_work(kernels: list[NativeFunction]) -> None:
    for amount, kernel in enumerate(kernels):
        x = np.arange(3)
        kernel(x.ctypes.data, 3)
        assert x.tolist() == [amount, amount + 1, amount + 2]


def made_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what this very process compiles from now on."""
    names: list[str] = []
    make = NativeFunction.make

    def noted(self: NativeFunction) -> bytes:
        names.append(self.name)
        return make(self)

    monkeypatch.setattr(NativeFunction, "make", noted)
    return names


def test_other_processes_compile(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    here, shown = made_here(monkeypatch), []
    kernels, before = adders(library), multiprocessing.active_children()  # an earlier test may compile behind
    report = library.prepare(kernels, lambda current, total: shown.append((current, total)))
    assert (report.compiled, report.loaded, here) == (5, 0, [])
    assert shown == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert_they_work(kernels)
    assert set(multiprocessing.active_children()) <= set(before)
    again = adders(Library(library._sources))
    assert_they_work(again)
    assert here == [], "and what they have made is on disk"


def test_a_process_of_several_threads_is_not_forked(
    library: Library, kernels_are_compiled_here: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "can_fork", kernels_are_compiled_here)
    here, done = made_here(monkeypatch), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not workers.can_fork()
        assert library.prepare(adders(library, 2), lambda current, total: None).compiled == 2
    finally:
        done.set()
        thread.join()
    assert here == ["add_0", "add_1"]


@pytest.mark.parametrize("name", [f"{THREAD_NAMES}1", STATUS_THREAD])
def test_threads_of_the_pool_and_the_status_line_may_run_meanwhile(
    name: str, kernels_are_compiled_here: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name=name)
    thread.start()
    # Other tests of this process may have left threads of other kinds.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread(), thread])
    try:
        assert kernels_are_compiled_here()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("failure", ["dies", "raises"])
def test_processes_that_fail(
    library: Library, failure: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    here, process, make = [], os.getpid(), NativeFunction.make

    def fail_elsewhere(self: NativeFunction) -> bytes:
        if os.getpid() != process:
            if failure == "dies":
                os._exit(3)
            raise RuntimeError("no")
        here.append(self.name)
        return make(self)

    monkeypatch.setattr(NativeFunction, "make", fail_elsewhere)
    kernels = adders(library, 3)
    assert library.prepare(kernels, lambda current, total: None).compiled == 3
    assert here == ["add_0", "add_1", "add_2"]
    assert_they_work(kernels)
    assert "Traceback" not in capfd.readouterr().err


def test_no_more_processes(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(workers, "can_fork", lambda: True)
    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", refuse)
    kernels = adders(library, 3)
    assert library.prepare(kernels, lambda current, total: None).compiled == 3
    assert_they_work(kernels)


def test_a_kernel_that_cannot_be_compiled_is_told_here(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)

    def wrong(x: Any) -> Any:
        return x.no_such_thing()

    kernels = [library.kernel(wrong), *adders(library, 2)]
    with pytest.raises(Exception, match="no_such_thing"):
        library.prepare(kernels, lambda current, total: None)


def test_kernels_for_later_are_made_meanwhile(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants them waits for the process that makes them, and the wait counts as compiling."""
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    here, kernels = made_here(monkeypatch), adders(library, 4)
    assert library.prepare(kernels[:1], lambda current, total: None, later=kernels[1:]).compiled == 1
    assert not any(kernel.ready for kernel in kernels[1:])
    before = library.compile_seconds
    assert library.prepare(kernels, lambda current, total: None).compiled + sum(k.ready for k in kernels) >= 4
    assert library.compile_seconds >= before > 0
    assert here == ["add_0"], "one kernel alone is made here"
    assert_they_work(kernels)
    while any(workers.is_made_behind(kernel) for kernel in kernels):
        time.sleep(0.01)


def test_no_more_processes_behind_than_threads(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs are made, and none for what one is at work on already."""
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    monkeypatch.setattr(NativeFunction, "make", lambda self: time.sleep(100))
    kernels = adders(library, 4)
    for kernel in (kernels[0], *kernels):
        workers.make_behind([kernel], prepared=False)
    assert [workers.is_made_behind(kernel) for kernel in kernels] == [True, True, False, False]
    assert len(workers._BEHIND) == 2
    end_those_behind()


def end_those_behind() -> None:
    for child in workers._BEHIND:
        os.kill(child._pid, signal.SIGKILL)
        os.waitpid(child._pid, 0)


def test_what_starves_behind_is_made_here(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    monkeypatch.setattr(native, "_MOST_SECONDS_BEHIND", 0.1)
    process, make = os.getpid(), NativeFunction.make
    monkeypatch.setattr(NativeFunction, "make", lambda self: make(self) if os.getpid() == process else time.sleep(100))
    kernels = adders(library, 3)
    library.prepare([], lambda current, total: None, later=kernels)
    library.prepare(kernels, lambda current, total: None)
    assert_they_work(kernels)
    end_those_behind()


def test_nobody_waits_for_those_behind_at_the_end(tmp_path: Path) -> None:
    """Here they stand still; on a busy machine it takes them long to end. Their parent's output ends with it, too."""
    code = (
        SLOW_COMPILING.replace("while True:", "os.kill(os.getpid(), 19)\n    while True:").replace(
            "library.prepare(kernels)", "library.prepare([], later=kernels)"
        )
        + "while len(list(folder.glob('*.pid'))) < 2:\n    time.sleep(0.01)\nprint('over', flush=True)\n"
    )
    environment = {**os.environ, "GENAI_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.returncode) == ("over\n", 0), result.stderr


def test_later_is_here_where_a_process_fails(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    process, make = os.getpid(), NativeFunction.make
    monkeypatch.setattr(NativeFunction, "make", lambda self: make(self) if os.getpid() == process else os._exit(3))
    kernels = adders(library, 3)
    library.prepare([], lambda current, total: None, later=kernels)
    library.prepare(kernels, lambda current, total: None)
    assert_they_work(kernels)


def test_other_processes_log_nothing(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong there goes wrong here again, and is logged here."""
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    process, make, file = os.getpid(), NativeFunction.make, tmp_path / "log"

    def noisy(self: NativeFunction) -> bytes:
        native._log.warning("%s", "here" if os.getpid() == process else "there")
        return make(self)

    monkeypatch.setattr(NativeFunction, "make", noisy)
    handler = logging.FileHandler(file)
    monkeypatch.setattr(native._log, "handlers", [handler])
    with closing(handler):
        kernels = adders(library)
        library.prepare([], later=kernels[3:])
        library.prepare(kernels)
        assert library.prepare([library.kernel(_adder(5))]).compiled == 1, "one alone is made here"
    assert_they_work(kernels)
    assert set(file.read_text().split()) == {"here"}


SLOW_COMPILING = """
import os, sys, time
from pathlib import Path
from genai.kernels.cpu.jit import workers
from genai.kernels.cpu.jit.native import Library, NativeFunction
workers.default_threads = lambda: 2
folder = Path(sys.argv[1])
folder.joinpath("sources").mkdir()
library = Library(folder / "sources")

def make(self):
    (folder / f"{os.getpid()}.pid").touch()
    while True:
        sum(range(10**4))

NativeFunction.make = make
kernels = []
for number in range(6):
    def empty(x: int) -> int:
        return 0
    empty.__name__ = f"empty_{number}"
    kernels.append(library.kernel(empty))
library.prepare(kernels)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_their_parent(tmp_path: Path, end: int) -> None:
    """However it ends, also in the middle of a kernel."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SLOW_COMPILING, str(tmp_path)],
        env={**os.environ, "GENAI_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.DEVNULL,
    )

    def others() -> list[int]:
        return [int(path.stem) for path in tmp_path.glob("*.pid")]

    def eventually(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    eventually(lambda: len(others()) == 2)
    assert parent.pid not in others()
    parent.send_signal(end)
    parent.wait(60)
    eventually(lambda: not any(_runs(process) for process in others()))


def _runs(process: int) -> bool:
    """Whether it is there, and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_expected_kernels_are_taken_once(library: Library) -> None:
    first, second, third = adders(library, 3)
    library.expect([first, second])
    assert library.prepare([third], lambda current, total: None).compiled == 1
    assert library.take_expected() == [first, second]
    assert library.take_expected() == []
