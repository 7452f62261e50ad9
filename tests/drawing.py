"""Sweeps over many similar cases: a run computes a part of them, drawn by the commit, so that in time all are computed.

A pytest plugin. `@pytest.mark.drawn(n)` on a test or on some of its cases: one in n of those is run, and at least one;
cases without the mark, a sweep's core, always are. The fixture `drawn` has numbers for tests that make up their cases.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

VARIABLE = "TEST_CASES"  # processes that tests start, and xdist's, draw the same cases
ALL = "all"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        metavar="all|WORD",
        help="all cases of sweeps, or those that WORD draws [default: $TEST_CASES, else the commit; all without git]",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "drawn(n): one in n of these cases is run, drawn by the commit (see --cases)")
    os.environ[VARIABLE] = config.getoption("cases") or os.environ.get(VARIABLE) or commit(config.rootpath)


def commit(folder: Path) -> str:
    """The commit's name; ALL where git does not know it."""
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ALL
    return run.stdout.strip()[:12]


def keep(names: Iterable[str], one_in: int, word: str) -> set[str]:
    """One in so many of the names (rounded up), chosen by a word."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{word} {name}".encode()).digest())
    return set(ordered if word == ALL else ordered[: -(-len(ordered) // one_in)])


@pytest.hookimpl(trylast=True)  # of the cases that -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    word = os.environ[VARIABLE]
    sweeps: dict[tuple[str, int], list[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            sweeps.setdefault((item.nodeid.split("[")[0], *mark.args), []).append(item.nodeid)
    kept = {name for (_, one_in), names in sweeps.items() for name in keep(names, one_in, word)}
    drawn = {name for names in sweeps.values() for name in names}
    left_out = [item for item in items if item.nodeid in drawn - kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid in kept or item.nodeid not in drawn]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """At the end, since a quiet run (-q) has no header."""
    word = os.environ[VARIABLE]
    said = "all cases" if word == ALL else f"cases drawn by {word} (again: --cases={word}; all of them: --cases={ALL})"
    terminalreporter.write_line(said)
