"""Processes that are ended at random moments: one per phase in every run, hundreds by hand."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest

from tools.interrupts import PHASES, SIGNALS, Phase, workshop

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
