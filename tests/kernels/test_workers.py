"""Compiling in several processes: the same as in one, whatever becomes of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu import workers
from genai.kernels.cpu.jit import Kernel, Library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library of its own, on a machine of two cores."""
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(workers, "default_threads", lambda: 2)
    (tmp_path / "sources").mkdir()
    return Library(tmp_path / "sources")


def _adder(amount: int) -> Callable[..., None]:
    def add(x: Any) -> None:
        for i in range(x.shape[0]):
            x[i] += amount

    add.__name__ = f"add_{amount}"
    return add


def adders(library: Library, count: int = 5) -> list[Kernel]:
    return [library.kernel("void(int64[::1])")(_adder(amount)) for amount in range(count)]


def assert_they_work(kernels: list[Kernel]) -> None:
    for amount, kernel in enumerate(kernels):
        x = np.arange(3)
        kernel(x)
        assert x.tolist() == [amount, amount + 1, amount + 2]


def made_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what this very process compiles from now on."""
    names: list[str] = []
    make = Kernel.make

    def noted(self: Kernel) -> bytes:
        names.append(self.name)
        return make(self)

    monkeypatch.setattr(Kernel, "make", noted)
    return names


def test_other_processes_compile(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    here, shown = made_here(monkeypatch), []
    kernels = adders(library)
    report = library.prepare(kernels, lambda current, total: shown.append((current, total)))
    assert (report.compiled, report.loaded, here) == (5, 0, [])
    assert shown == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert_they_work(kernels)
    assert multiprocessing.active_children() == []
    again = adders(Library(library._sources))
    assert_they_work(again)
    assert here == [], "and what they have made is on disk"


def test_a_process_of_several_threads_is_not_forked(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("failure", ["dies", "raises"])
def test_processes_that_fail(
    library: Library, failure: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    here, process, make = [], os.getpid(), Kernel.make

    def fail_elsewhere(self: Kernel) -> bytes:
        if os.getpid() != process:
            if failure == "dies":
                os._exit(3)
            raise RuntimeError("no")
        here.append(self.name)
        return make(self)

    monkeypatch.setattr(Kernel, "make", fail_elsewhere)
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

    def wrong(x: Any) -> None:
        x.no_such_thing()

    kernels = [library.kernel("void(int64[::1])")(wrong), *adders(library, 2)]
    with pytest.raises(Exception, match="no_such_thing"):
        library.prepare(kernels, lambda current, total: None)


def test_expected_kernels_are_taken_once(library: Library) -> None:
    first, second, third = adders(library, 3)
    library.expect([first, second])
    assert library.prepare([third], lambda current, total: None).compiled == 1
    assert library.take_expected() == [first, second]
    assert library.take_expected() == []
