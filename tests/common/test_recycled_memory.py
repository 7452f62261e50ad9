"""Memory that arrays reuse: parts are free again when all views are deleted, and neighbours are joined."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from genai.common import host_memory
from genai.common.host_memory import RecycledMemory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems allocate each array")
SIZE = 1 << 20


def address(array: np.ndarray | None) -> int:
    assert array is not None
    return array.ctypes.data


def test_a_part_is_free_after_its_last_view():
    memory = RecycledMemory(SIZE)
    first, second = memory.array(1000), memory.array(100)
    assert first is not None and first.nbytes == 1000 and address(first) % 64 == 0
    assert address(second) == address(first) + 1024
    place, view = address(first), first[10:20].view(np.int16)
    view[:] = 7
    del first
    third = memory.array(1000)
    assert address(third) != place and (view == 7).all()
    del view
    assert address(memory.array(1000)) == place


def test_neighbours_are_joined():
    memory = RecycledMemory(SIZE)
    parts = [memory.array(SIZE // 4) for _ in range(4)]
    places = [address(part) for part in parts]
    assert memory.array(1) is None
    for index in (2, 0, 1):
        parts[index] = None
    assert memory.array(SIZE // 4 * 3 + 1) is None
    assert address(memory.array(SIZE // 4 * 3)) == places[0]
    parts.clear()
    assert address(memory.array(SIZE)) == places[0]
    assert memory.array(SIZE + 1) is None


def test_random_parts_never_overlap():
    memory, live, rng = RecycledMemory(SIZE), [], np.random.default_rng(0)
    for number in range(3000):
        part = memory.array(int(rng.integers(1, SIZE // 8)))
        if part is not None:
            part[:] = number % 251
            live.append((part, number % 251))
        if live and (part is None or rng.random() < 0.4):
            del live[int(rng.integers(len(live)))]
        if number % 100 == 0:
            assert all((part == value).all() for part, value in live)
        del part
    live.clear()
    assert memory.array(SIZE) is not None


def test_another_thread_deletes_a_part():
    memory = RecycledMemory(SIZE)
    parts = [memory.array(SIZE)]
    thread = threading.Thread(target=parts.clear)
    thread.start()
    thread.join()
    assert memory.array(SIZE) is not None


def test_a_caller_does_not_wait_for_another():
    """A signal handler that interrupts an allocation would wait for itself."""
    memory = RecycledMemory(SIZE)
    with memory._lock:
        assert memory.array(1) is None
    assert memory.array(1) is not None


def test_without_a_mapping(monkeypatch):
    def refused(*_):
        raise MemoryError("cannot map memory")

    monkeypatch.setattr(host_memory, "_mapping", refused)
    memory = RecycledMemory(SIZE)
    assert memory.array(1) is None
    monkeypatch.undo()
    assert memory.array(1) is None
