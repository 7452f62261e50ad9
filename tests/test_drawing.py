"""Sweeps of which each run computes a part: the part is reported, and can be run again or completed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import drawing
from tests.drawing import ALL, VARIABLE, Draw, commit

ROOT = Path(__file__).resolve().parent.parent
NAMES = [f"case {i}" for i in range(10)]
SWEEP = """
import pytest

@pytest.mark.parametrize("case", ["core", *(pytest.param(f"case{i}", marks=pytest.mark.drawn(4)) for i in range(10))])
def test_sweep(case):
    print(case)

def test_seed(draw):
    print("seed", draw.seed)
"""


def test_one_in_so_many_rounded_up() -> None:
    assert [len(Draw("a").part(NAMES, one_in)) for one_in in (1, 3, 4, 10, 99)] == [10, 4, 3, 1, 1]
    assert Draw("a").part([], 3) == set()
    assert Draw(ALL).part(NAMES, 99) == set(NAMES)
    assert (Draw("a").fewer(10, 4), Draw(ALL).fewer(10, 4)) == (3, 10)


def test_a_word_draws_the_same_and_many_words_draw_all() -> None:
    assert Draw("a").part(reversed(NAMES), 4) == Draw("a").part(NAMES, 4)
    assert Draw("a").seed == Draw("a").seed != Draw("b").seed
    assert set().union(*(Draw(f"{word}").part(NAMES, 4) for word in range(50))) == set(NAMES)


def test_the_commit_or_all_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == ALL
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert commit(tmp_path) == ALL  # no commits yet
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert re.fullmatch("[0-9a-f]{12}", commit(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == ALL


def run(tmp_path: Path, *options: str, word: str = "") -> tuple[set[str], str]:
    """Run the sweep; return the names of the cases that ran, and pytest's output."""
    (tmp_path / "test_sweep.py").write_text(SWEEP)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        VARIABLE: word,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.drawing", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    return set(re.findall(r"core|case\d+", done.stdout)), done.stdout


def test_a_run_says_what_it_drew_and_draws_it_again(tmp_path: Path) -> None:
    some, said = run(tmp_path, "--cases=abc")
    assert len(some) == 4 and "core" in some
    assert "7 deselected" in said
    assert "cases drawn by abc (again: --cases=abc; all of them: --cases=all)" in said
    assert f"seed {Draw('abc').seed}" in said
    assert run(tmp_path, word="abc")[0] == some
    assert run(tmp_path, "--cases=b")[0] != some


def test_all_of_it_or_the_one_that_is_named(tmp_path: Path) -> None:
    every, said = run(tmp_path, "--cases=all", word="abc")
    assert len(every) == 11
    assert "all cases\n" in said
    missing = min(every - run(tmp_path, word="abc")[0])
    assert run(tmp_path, f"test_sweep.py::test_sweep[{missing}]", word="abc")[0] == {missing}
    assert run(tmp_path, "-k", missing, word="abc")[0] == {missing}


LOG = """
12.50s call     tests/a.py::test_long[a b]
3.00s setup    tests/a.py::test_long[a b]
6.10s call     tests/a.py::test_long[c]
4.00s call     tests/a.py::test_short
9.00s call     tests/b.py::test_other
"""


def test_one_in_twelve_of_those_that_take_long(tmp_path: Path) -> None:
    names = [f"case {i}" for i in range(20)]
    drawn = [Draw(f"word {i}").one_of_each(names) for i in range(200)]
    assert all(len(some) == 2 and len(some & set(names[:12])) == len(some & set(names[12:])) == 1 for some in drawn)
    assert set().union(*drawn) == set(names) == Draw(ALL).one_of_each(names)
    known = {"tests/c.py::test_of_old": 7, "tests/b.py::test_other": 8}
    assert drawing.durations([LOG], known).split() == [
        "16", "tests/a.py::test_long", "9", "tests/b.py::test_other", "7", "tests/c.py::test_of_old",
        "4", "tests/a.py::test_short",
    ]  # fmt: skip


def test_tests_that_take_long_are_there() -> None:
    for name in drawing.costly():
        file, first, *_ = name.split("::")
        assert re.search(rf"(def|class) {first}\b|\b{first} = ", (ROOT / file).read_text()), name


def test_a_run_of_everything_leaves_some_out(tmp_path: Path) -> None:
    """Two cases are slow here: one of them runs, or both if all cases are requested."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    costly = "{'test_sweep.py::test_sweep': 9}"
    (tmp_path / "here.py").write_text(f"import tests.drawing\ntests.drawing.costly = lambda: {costly}\n")
    whole, said = run(tmp_path, "-p", "here", "-k", "case1 or case2", "--cases=abc")
    assert len(whole) == 1, said
    assert len(run(tmp_path, "-p", "here", "-k", "case1 or case2", "--cases=all")[0]) == 2
