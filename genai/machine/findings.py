"""What a check says: a mark, a sentence, what to do, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Mark(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """It works, but there is something to know."""
    PROBLEM = "problem"
    """Models cannot be run before this is repaired."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        mark, text: the result.
        fix: what to do about it; empty where nothing is to be done.
        facts: the figures, as str, int, float, bool, None, and lists and dicts of these.
    """

    name: str
    mark: Mark
    text: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def usable(findings: Iterable[Finding]) -> bool:
    """Whether models can be run: no finding is a problem."""
    return all(finding.mark is not Mark.PROBLEM for finding in findings)
