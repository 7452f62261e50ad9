"""Operators on strings, which are arrays of str objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .support import checked_shape, from_function


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


@register("TfIdfVectorizer", since_version=9)
def tf_idf_vectorizer(spec: NodeSpec) -> Kernel:
    """How often each n-gram of a pool occurs in a row, also with gaps; as counts, presence or times a weight."""
    a = spec.attributes
    shortest, longest, most_skipped = (int(a[name]) for name in _GRAM_ATTRIBUTES)
    mode = str(a["mode"])
    if shortest < 1 or longest < shortest or most_skipped < 0 or mode not in ("TF", "IDF", "TFIDF"):
        raise ValueError(f"TfIdfVectorizer: lengths {shortest} to {longest}, skips {most_skipped}, mode {mode!r}")
    places = _gram_places(spec)
    indexes = np.asarray(a["ngram_indexes"], np.int64)
    if len(indexes) < len(places) or not len(indexes) or indexes.min() < 0:
        raise ValueError(f"TfIdfVectorizer: {len(indexes)} indexes for {len(places)} n-grams, or a negative one")
    width = int(indexes.max()) + 1
    weights = np.asarray(a.get("weights") or np.ones(len(indexes)), np.float32)
    if len(weights) != len(indexes):
        raise ValueError(f"TfIdfVectorizer: {len(weights)} weights for {len(indexes)} indexes")
    lengths = sorted({len(gram) for gram in places if shortest <= len(gram) <= longest})

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.asarray(inputs[0])
        rows = x.reshape(1, -1) if x.ndim < 2 else x
        result = np.zeros(checked_shape(spec, (len(rows), width), 4), np.float32)
        for row, counts in zip(rows.tolist(), result, strict=True):
            for place in _occurrences(row, places, lengths, most_skipped):
                counts[indexes[place]] += 1
        if mode != "TF":
            scale = np.zeros(width, np.float32)
            scale[indexes] = weights
            result = (result > 0) * scale if mode == "IDF" else result * scale
        return (result[0] if x.ndim < 2 else result,)

    return kernel


_GRAM_ATTRIBUTES = ("min_gram_length", "max_gram_length", "max_skip_count")


def _gram_places(spec: NodeSpec) -> dict[tuple[Any, ...], int]:
    """The n-grams of the pool: those of one element first, then of two, and so on."""
    pool = spec.attributes.get("pool_strings") or spec.attributes.get("pool_int64s") or []
    starts = [*(int(start) for start in spec.attributes["ngram_counts"]), len(pool)]
    grams: list[tuple[Any, ...]] = []
    for size, (begin, end) in enumerate(pairwise(starts), 1):
        if not 0 <= begin <= end <= len(pool) or (end - begin) % size:
            raise ValueError(f"TfIdfVectorizer: ngram_counts {starts[:-1]} do not fit a pool of {len(pool)}")
        grams += [tuple(pool[first : first + size]) for first in range(begin, end, size)]
    return {gram: place for place, gram in enumerate(grams)}


def _occurrences(
    row: list[Any], places: dict[tuple[Any, ...], int], lengths: list[int], most_skipped: int
) -> Iterator[int]:
    """The place of each n-gram that occurs; single elements have no gaps, so they are looked at once."""
    for step in range(1, min(most_skipped + 1, max(len(row), 1)) + 1):
        for length in lengths:
            if length == 1 and step > 1:
                continue
            for first in range(len(row) - (length - 1) * step):
                place = places.get(tuple(row[first : first + (length - 1) * step + 1 : step]))
                if place is not None:
                    yield place
