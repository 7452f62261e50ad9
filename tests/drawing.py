"""Random selection of cases: each run computes some cases of a sweep, drawn by the commit; over time, all are computed.

This is a pytest plugin. `@pytest.mark.drawn(n)` marks a test or some of its cases; one in n of them runs, at least one.
Cases without the mark, a sweep's core, always run. The fixture `draw` is for tests that loop over cases themselves.

A run of all tests runs one in twelve of the tests and cases that take a long time (tests/costly.txt), so that each run
takes about the same time. A run that names files or tests runs all of them. `python -m tests.drawing LOG...` updates
costly.txt from the output of `pytest --durations=0`.
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

VARIABLE = "TEST_CASES"  # child processes of tests and xdist's workers draw the same cases
ALL = "all"
IS_WHOLE = "TEST_IN_TURN"  # set if all tests are run
COSTLY = Path(__file__).with_name("costly.txt")
LEAST_SECONDS, TOGETHER = 1.0, 12


@dataclass(frozen=True)
class Draw:
    """The selection that a word determines; the word ALL selects everything."""

    word: str

    @property
    def seed(self) -> int:
        """A seed for random cases."""
        return int.from_bytes(_digest(self.word)[:4])

    def fewer(self, count: int, one_in: int) -> int:
        """Return the number of random cases (made with `seed`) to compute: one in `one_in` of `count`."""
        return count if self.word == ALL else -(-count // one_in)

    def part(self, names: Iterable[str], one_in: int) -> set[str]:
        """Return one in `one_in` of the names, rounded up."""
        ordered = sorted(names, key=lambda name: _digest(f"{self.word} {name}"))
        return set(ordered if self.word == ALL else ordered[: -(-len(ordered) // one_in)])

    def one_of_each(self, names: Sequence[str]) -> set[str]:
        """Return one of the first twelve names, one of the next twelve, and so on."""
        if self.word == ALL:
            return set(names)
        groups = (names[first : first + TOGETHER] for first in range(0, len(names), TOGETHER))
        return {min(group, key=lambda name: _digest(f"{self.word} {name}")) for group in groups}


def costly() -> dict[str, int]:
    """Return the seconds of the longest case of each slow test, the slowest test first."""
    lines = (line.split(maxsplit=1) for line in COSTLY.read_text(encoding="utf-8").splitlines())
    return {name: int(seconds) for seconds, name in lines}


def durations(logs: Iterable[str], known: Mapping[str, int]) -> str:
    """Return the lines of costly.txt from pytest's list of durations; tests that did not run keep their known times."""
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
    """Return the name of the commit, or ALL if git does not know it."""
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
    if not hasattr(config, "workerinput"):  # xdist's workers inherit this
        os.environ[IS_WHOLE] = "1" if config.args_source is config.ArgsSource.TESTPATHS else ""


@pytest.hookimpl(trylast=True)  # after -m and -k have selected items
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
    """Report the selection at the end, because a quiet run (-q) has no header."""
    word = os.environ[VARIABLE]
    said = "all cases" if word == ALL else f"cases drawn by {word} (again: --cases={word}; all of them: --cases={ALL})"
    terminalreporter.write_line(said)


if __name__ == "__main__":
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    COSTLY.write_text(durations(texts, costly()), encoding="utf-8")
