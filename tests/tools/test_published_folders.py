"""The table of folders that other tools wrote: current, complete, and within the limits that the page states."""

from __future__ import annotations

from tools import published_folders


def test_the_table_is_current() -> None:
    results, tools = published_folders.stored_results()
    assert published_folders.table(results, tools) in published_folders.PAGE.read_text(encoding="utf-8")
    assert [*results] == [*published_folders.CASES]


def test_the_limits() -> None:
    results, _ = published_folders.stored_results()
    assert len(results) == 30
    assert not {name: result.failures for name, result in results.items() if result.failures}
    assert sum(not result.reason and result.ratio <= 1.1 for result in results.values()) >= 24


def test_a_folder_that_runs_one_sequence_at_a_time() -> None:
    result = published_folders.Result(reason="a mask depends on the tokens", ratio=2.0)
    assert published_folders.row("optimum-llama", result).endswith("| one sequence at a time | 2.00 |")
