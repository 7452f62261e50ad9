"""Processes that are interrupted at random moments: one per phase in every run, hundreds with `-m fuzz`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest

from tools.interrupts import PHASES, SIGNALS, Phase, without_pythons_own, workshop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
PATIENCE = 10.0
Run = Callable[[Phase, int, random.Random], list[str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with workshop(patience=PATIENCE) as run:
        yield run


@pytest.mark.drawn(5)
@pytest.mark.parametrize("index", range(len(PHASES)), ids=[phase.name for phase in PHASES])
def test_a_process_that_is_ended_leaves_nothing(run: Run, index: int) -> None:
    assert run(PHASES[index], SIGNALS[index % len(SIGNALS)], random.Random(index)) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(300))
def test_many_processes_that_are_ended_leave_nothing(run: Run, seed: int) -> None:
    number = SIGNALS[seed // len(PHASES) % len(SIGNALS)]
    assert run(PHASES[seed % len(PHASES)], number, random.Random(1000 + seed)) == []


def test_what_python_says_itself_when_it_ends() -> None:
    """An interrupt while Python exits is not a fault, unless a line of other code is in its traceback."""
    own = (
        "Exception ignored in: <module 'threading' from '/usr/lib/python3.11/threading.py'>\n"
        'Traceback (most recent call last):\n  File "/usr/lib/python3.11/threading.py", line 1541, in _shutdown\n'
        "    def _shutdown():\n    \nKeyboardInterrupt: \n"
    )
    assert without_pythons_own(f"before\n{own}after") == "before\nafter"
    ours = own.replace("KeyboardInterrupt", '  File "/genai/llm/engine.py", line 1, in close\nKeyboardInterrupt')
    assert without_pythons_own(ours) == ours
