"""Operators on strings, which are arrays of str objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .support import from_function


def _objects(values: list[Any], shape: tuple[int, ...]) -> Any:
    result = np.empty(len(values), object)
    result[:] = values
    return result.reshape(shape)


def _joined(left: Any, right: Any) -> Any:
    left, right = np.broadcast_arrays(left, right)
    return _objects([a + b for a, b in zip(left.reshape(-1), right.reshape(-1), strict=True)], left.shape)


register("StringConcat", since_version=20)(from_function(_joined))


@register("StringSplit", since_version=20)
def string_split(spec: NodeSpec) -> Kernel:
    """Pieces along a new last axis, filled with "" to the longest; and how many pieces each string has."""
    delimiter, limit = spec.attributes.get("delimiter") or None, int(spec.attributes.get("maxsplit", -1))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.asarray(inputs[0])
        pieces = [text.split(delimiter, limit) if text else [] for text in x.reshape(-1).tolist()]
        longest = max(map(len, pieces), default=0)
        rows = [piece for row in pieces for piece in (*row, *[""] * (longest - len(row)))]
        counts = np.array([len(row) for row in pieces], np.int64).reshape(x.shape)
        return _objects(rows, (*x.shape, longest)), counts

    return kernel


@register("StringNormalizer", since_version=10)
def string_normalizer(spec: NodeSpec) -> Kernel:
    """Change case and drop stop words, of [C] or [1, C]; what is left is at least one (empty) string.

    Case follows Unicode; the attribute `locale` cannot change that, since Python's case mapping knows no locales.
    """
    change = str(spec.attributes.get("case_change_action", "NONE"))
    changes = {"NONE": lambda text: text, "LOWER": str.lower, "UPPER": str.upper}
    if change not in changes:
        raise KernelError(f"StringNormalizer: case_change_action {change!r} is unknown")
    case_sensitive = bool(spec.attributes.get("is_case_sensitive", 0))
    fold = (lambda text: text) if case_sensitive else str.lower
    stopwords = {fold(word) for word in spec.attributes.get("stopwords") or ()}

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
            raise KernelError(f"StringNormalizer: shape {list(x.shape)}, expected [C] or [1, C]")
        kept = [changes[change](text) for text in x.reshape(-1).tolist() if fold(text) not in stopwords] or [""]
        return (_objects(kept, (len(kept),) if x.ndim == 1 else (1, len(kept))),)

    return kernel
