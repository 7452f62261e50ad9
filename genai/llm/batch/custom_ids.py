"""The check that no two lines of an input have the same custom_id, as OpenAI's API requires."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...common.progress import task
from ...errors import GenaiError, InputError
from .lines import Lines
from .requests import PromptFormat

_MOST_SHOWN = 5


def check_custom_ids(lines: Lines, prompt_format: PromptFormat) -> None:
    """Raise InputError if two lines of a file have the same custom_id. Lines that are not valid are skipped.

    A file is checked once. An input that can be read only once is not checked; see `SeenIds`. Needs 8 bytes of memory
    per line.
    """
    columns = lines.columns()
    if lines.has_unique_ids or not lines.can_be_read_again or (columns is not None and "custom_id" not in columns):
        return
    hashes = array("q", (hash(name) for _, name in _names(lines, prompt_format)))
    values = np.frombuffer(hashes, np.int64)
    values.sort()  # in place
    if repeated := set(values[1:][values[1:] == values[:-1]].tolist()):
        found: dict[str, list[int]] = {}
        for number, name in _names(lines, prompt_format):
            if hash(name) in repeated:
                found.setdefault(name, []).append(number)
        if same := {name: numbers for name, numbers in found.items() if len(numbers) > 1}:
            raise _same_ids(lines, same)
    lines.has_unique_ids = True


class SeenIds:
    """The custom_ids of the lines so far, for an input that can be read only once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, name: str) -> None:
        """Add the custom_id of a line. Raise InputError if an earlier line has it."""
        if hash(name) in self._seen:
            raise InputError(f"custom_id = {name!r:.80}", "an earlier line has the same custom_id", _FIX)
        self._seen.add(hash(name))


_FIX = "give each line a different custom_id, or remove custom_id: the default contains the line number"


def _names(lines: Lines, prompt_format: PromptFormat) -> Iterator[tuple[int, str]]:
    """Yield the number and the custom_id of each line."""
    with task(f"Checking the lines of {lines.name}", lines.total or 0) as checking:
        for line in lines:
            checking.add(line.size)
            try:
                fields: Mapping[str, Any] = lines.fields(line)
                yield line.number, prompt_format.custom_id(fields, line.number)
            except GenaiError:
                continue


def _same_ids(lines: Lines, same: Mapping[str, Sequence[int]]) -> InputError:
    word = "rows" if lines.is_table else "lines"
    (first, numbers), *others = same.items()
    more = (
        f"; there are {len(others):,} more such IDs: {', '.join(f'{name!r:.40}' for name, _ in others[:_MOST_SHOWN])}"
    )
    return InputError(
        f"{lines.name}: {word} {_listed(numbers)} have the same custom_id {first!r:.80}",
        "a custom_id assigns a reply in the output to its line" + (more if others else ""),
        _FIX,
    )


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > _MOST_SHOWN:
        return f"{', '.join(map(str, numbers[:_MOST_SHOWN]))} and {len(numbers) - _MOST_SHOWN:,} others"
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
