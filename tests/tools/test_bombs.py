"""Malicious model folders: some in every run, hundreds with `-m fuzz`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tools.bombs import KINDS, workshop

PATIENCE = 10.0


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[int], list[str]]]:
    with workshop(patience=PATIENCE) as run:
        yield run


@pytest.mark.parametrize("seed", range(2 * len(KINDS)))
def test_a_hostile_folder_does_no_harm(run: Callable[[int], list[str]], seed: int) -> None:
    assert run(seed) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 340))
def test_many_hostile_folders_do_no_harm(run: Callable[[int], list[str]], seed: int) -> None:
    assert run(seed) == []
