"""Sweeps over many similar cases: a run computes a part of them, drawn by the commit, so that in time all are computed.

A pytest plugin. `@pytest.mark.drawn(n)` on a test or on some of its cases: one in n of those is run, and at least one;
cases without the mark, a sweep's core, always are. The fixture `draw` is for tests that go through cases themselves.

Of tests of which a case takes long (tests/costly.txt) a run of all tests takes one test or case in three, each time
about as much; one that names files or tests takes all of them. `python -m tests.drawing LOG...` brings that file up to
date from what `pytest --durations=0` printed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "TEST_CASES"  # processes that tests start, and xdist's, draw the same cases
ALL = "all"
IS_WHOLE = "TEST_IN_TURN"  # set where all tests are run
COSTLY = Path(__file__).with_name("costly.txt")
LEAST_SECONDS, TOGETHER = 2.0, 3


@dataclass(frozen=True)
class Draw:
    """What a word draws; ALL draws everything."""

    word: str

    @property
    def seed(self) -> int:
        """For random cases."""
        return int.from_bytes(_digest(self.word)[:4])

    def fewer(self, count: int, one_in: int) -> int:
        """Of so many random cases (`seed` makes them), how many are computed: one in so many of them."""
        return count if self.word == ALL else -(-count // one_in)

    def part(self, names: Iterable[str], one_in: int) -> set[str]:
        """One in so many of the names (rounded up)."""
        ordered = sorted(names, key=lambda name: _digest(f"{self.word} {name}"))
        return set(ordered if self.word == ALL else ordered[: -(-len(ordered) // one_in)])

    def one_of_each(self, names: Sequence[str]) -> set[str]:
        """One of the first three names, one of the next three, and so on."""
        if self.word == ALL:
            return set(names)
        groups = (names[first : first + TOGETHER] for first in range(0, len(names), TOGETHER))
        return {min(group, key=lambda name: _digest(f"{self.word} {name}")) for group in groups}


def costly() -> dict[str, int]:
    """Seconds of the longest case of tests that take long, the longest first."""
    lines = (line.split(maxsplit=1) for line in COSTLY.read_text(encoding="utf-8").splitlines())
    return {name: int(seconds) for seconds, name in lines}


def durations(logs: Iterable[str], known: Mapping[str, int]) -> str:
    """The lines of costly.txt, from what pytest printed of durations; of tests that were not run, as they are known."""
    cases: Counter[str] = Counter()
    for log in logs:
        for taken, name in re.findall(r"^([\d.]+)s +(?:call|setup) +(tests/.*)$", log, re.MULTILINE):
            cases[name] += float(taken)
    longest: dict[str, float] = dict(known)
    for name, taken in cases.items():
        longest[_function(name)] = max(taken, longest.get(_function(name), 0.0))
    lines = sorted(((taken, name) for name, taken in longest.items() if taken >= LEAST_SECONDS), reverse=True)
    return "".join(f"{taken:.0f} {name}\n" for taken, name in lines)


def _function(name: str) -> str:
    return name.split("[")[0]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def commit(folder: Path) -> str:
    """The name of the commit; ALL where git does not know it."""
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ALL
    return run.stdout.strip()[:12]


@pytest.fixture(scope="session")
def draw() -> Draw:
    return Draw(os.environ[VARIABLE])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        metavar="all|WORD",
        help="all cases of sweeps, or those that WORD draws [default: $TEST_CASES, else the commit; all without git]",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "drawn(n): one in n of these cases is run, drawn by the commit (see --cases)")
    os.environ[VARIABLE] = config.getoption("cases") or os.environ.get(VARIABLE) or commit(config.rootpath)
    if not hasattr(config, "workerinput"):  # xdist's processes do as they are told
        os.environ[IS_WHOLE] = "1" if config.args_source is config.ArgsSource.TESTPATHS else ""


@pytest.hookimpl(trylast=True)  # of the cases that -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sweeps: dict[tuple[str, int], list[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            sweeps.setdefault((_function(item.nodeid), mark.args[0]), []).append(item.nodeid)
    left_out: set[str] = set()
    for (_, one_in), names in sweeps.items():
        left_out |= set(names) - Draw(os.environ[VARIABLE]).part(names, one_in)
    if os.environ[IS_WHOLE]:
        seconds = costly()
        long = [item.nodeid for item in items if _function(item.nodeid) in seconds and item.nodeid not in left_out]
        long.sort(key=lambda name: (-seconds[_function(name)], name))
        left_out |= set(long) - Draw(os.environ[VARIABLE]).one_of_each(long)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """At the end, since a quiet run (-q) has no header."""
    word = os.environ[VARIABLE]
    said = "all cases" if word == ALL else f"cases drawn by {word} (again: --cases={word}; all of them: --cases={ALL})"
    terminalreporter.write_line(said)


if __name__ == "__main__":
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    COSTLY.write_text(durations(texts, costly()), encoding="utf-8")
