"""Operators on strings (arrays of str objects). Regular expressions use RE2, which is linear in the text's length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..onnx.node import MS
from ..onnx.types import DataType, TensorType, Type
from .registry import KernelError, NodeSpec, Positive, operator
from .shape_rules import NodeTypes, shape_rule
from .support import checked_shape, objects


@operator("StringConcat", since_version=20)
def string_concat(left: Any, right: Any) -> Any:
    """Concatenate strings element by element."""
    left, right = np.broadcast_arrays(left, right)
    return objects([a + b for a, b in zip(left.reshape(-1), right.reshape(-1), strict=True)], left.shape)


@operator("StringSplit", since_version=20)
def string_split(x: Any, *, delimiter: str = "", maxsplit: int = -1, spec: NodeSpec) -> Any:
    """Return pieces along a new last axis, padded with "" to the longest row, and the number of pieces per string."""
    pieces = [text.split(delimiter or None, maxsplit) if text else [] for text in x.reshape(-1).tolist()]
    longest = max(map(len, pieces), default=0)
    result = np.full(checked_shape(spec, (len(pieces), longest), 8), "", object)
    for cells, row in zip(result, pieces, strict=True):
        cells[: len(row)] = row
    counts = np.array([len(row) for row in pieces], np.int64).reshape(x.shape)
    return result.reshape(*x.shape, longest), counts


_CASES: dict[str, Callable[[str], str]] = {"NONE": lambda text: text, "LOWER": str.lower, "UPPER": str.upper}


@operator("StringNormalizer", since_version=10)
def string_normalizer(
    x: Any, *, case_change_action: Literal["NONE", "LOWER", "UPPER"] = "NONE", is_case_sensitive: bool = False,
    stopwords: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Change the case of [C] or [1, C] and drop stop words; an empty result becomes one empty string.

    Case follows Unicode. The attribute `locale` has no effect, because Python's case mapping ignores locales.
    """
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise KernelError(
            f"StringNormalizer: the input has shape {list(x.shape)}, but it must have shape [C] or [1, C]"
        )
    fold, change = _CASES["NONE" if is_case_sensitive else "LOWER"], _CASES[case_change_action]
    dropped = {fold(word) for word in stopwords}
    texts = [change(text) for text in x.reshape(-1).tolist() if fold(text) not in dropped] or [""]
    return objects(texts, (len(texts),) if x.ndim == 1 else (1, len(texts)))


@dataclass(frozen=True)
class _Grams:
    """A pool of n-grams: the index of each n-gram, the lengths to search, and an output column and weight per index."""

    index_of: Mapping[tuple[Any, ...], int]
    lengths: Sequence[int]
    indexes: Any
    weights: Any


def _grams(spec: NodeSpec) -> _Grams:
    a = spec.attributes
    shortest, longest, skipped = (int(a[name]) for name in ("min_gram_length", "max_gram_length", "max_skip_count"))
    if shortest < 1 or longest < shortest or skipped < 0 or a["mode"] not in ("TF", "IDF", "TFIDF"):
        raise ValueError(
            f"TfIdfVectorizer: min_gram_length={shortest}, max_gram_length={longest}, max_skip_count={skipped} "
            f"and mode={a['mode']!r} are not a valid combination"
        )
    index_of, indexes = _gram_indices(spec), np.asarray(a["ngram_indexes"], np.int64)
    if len(indexes) < len(index_of) or not len(indexes) or indexes.min() < 0:
        raise ValueError(
            f"TfIdfVectorizer: ngram_indexes has {len(indexes)} values for {len(index_of)} n-grams, or contains a "
            "negative value"
        )
    weights = np.asarray(a.get("weights") or np.ones(len(indexes)), np.float32)
    if len(weights) != len(indexes):
        raise ValueError(f"TfIdfVectorizer: weights has {len(weights)} values, but ngram_indexes has {len(indexes)}")
    lengths = sorted({len(gram) for gram in index_of if shortest <= len(gram) <= longest})
    return _Grams(index_of, lengths, indexes, weights)


@operator("TfIdfVectorizer", since_version=9, grams=_grams)
def tf_idf_vectorizer(x: Any, *, mode: str, max_skip_count: int, grams: _Grams, spec: NodeSpec) -> Any:
    """Count each n-gram of a pool in a row, with or without gaps; return counts, presence, or weighted counts."""
    rows, width = x.reshape(1, -1) if x.ndim < 2 else x, int(grams.indexes.max()) + 1
    result = np.zeros(checked_shape(spec, (len(rows), width), 4), np.float32)
    for row, counts in zip(rows.tolist(), result, strict=True):
        for index in _occurrences(row, grams, max_skip_count):
            counts[grams.indexes[index]] += 1
    if mode != "TF":
        scale = np.zeros(width, np.float32)
        scale[grams.indexes] = grams.weights
        result = (result > 0) * scale if mode == "IDF" else result * scale
    return result[0] if x.ndim < 2 else result


def _gram_indices(spec: NodeSpec) -> dict[tuple[Any, ...], int]:
    """Return the n-grams of the pool with their indices: unigrams first, then bigrams, and so on."""
    pool = spec.attributes.get("pool_strings") or spec.attributes.get("pool_int64s") or []
    starts = [*(int(start) for start in spec.attributes["ngram_counts"]), len(pool)]
    grams: list[tuple[Any, ...]] = []
    for size, (begin, end) in enumerate(pairwise(starts), 1):
        if not 0 <= begin <= end <= len(pool) or (end - begin) % size:
            raise ValueError(
                f"TfIdfVectorizer: ngram_counts is {starts[:-1]}, which does not match a pool of {len(pool)} elements"
            )
        grams += [tuple(pool[first : first + size]) for first in range(begin, end, size)]
    return {gram: index for index, gram in enumerate(grams)}


def _occurrences(row: list[Any], grams: _Grams, most_skipped: int) -> Iterator[int]:
    """Yield the index of each n-gram that occurs. Unigrams have no gaps, so they are searched for only once."""
    for step in range(1, min(most_skipped + 1, max(len(row), 1)) + 1):
        for length in grams.lengths:
            if length == 1 and step > 1:
                continue
            for first in range(len(row) - (length - 1) * step):
                index = grams.index_of.get(tuple(row[first : first + (length - 1) * step + 1 : step]))
                if index is not None:
                    yield index


class PatternError(ValueError):
    """A pattern is malformed, or exceeds RE2's memory limit."""


class Regex:
    """A compiled pattern (github.com/google/re2/wiki/Syntax) with leftmost-longest matching."""

    def __init__(self, pattern: str) -> None:
        import re2

        if re.search(r"(?<!\\)(?:\\\\)*\\C", pattern):
            raise PatternError(
                f"the regular expression {pattern!r:.80} contains \\C, which matches a single byte and may split "
                "a character"
            )
        options = re2.Options()
        options.longest_match, options.never_capture, options.log_errors = True, True, False
        try:
            self._pattern = re2.compile(pattern, options)
        except re2.error as error:
            reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else error
            raise PatternError(f"the regular expression {pattern!r:.80} is not valid: {reason!s:.80}") from None
        # RE2's Python package would cache the last 128 patterns, each up to 8 MiB.
        re2.purge()

    def matches(self, text: str) -> bool:
        """Return True if the whole text matches."""
        return self._pattern.fullmatch(text) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Return the start and end of each non-empty match, from left to right."""
        return (match.span() for match in self._pattern.finditer(text) if match.end() > match.start())


@operator("RegexFullMatch", since_version=20, pattern=lambda spec: Regex(str(spec.attributes.get("pattern", ""))))
def regex_full_match(x: Any, *, pattern: Regex) -> Any:
    """Return True for each string that matches the whole pattern."""
    return np.array([pattern.matches(str(text)) for text in x.reshape(-1).tolist()], bool).reshape(x.shape)


@shape_rule("RegexFullMatch", domain="")
def regex_full_match_types(types: NodeTypes) -> list[Type | None]:
    """One boolean per string."""
    return [TensorType(DataType.BOOL, types.shape(0))]


_BEGIN, _END = "\x02", "\x03"
Splitter = Callable[[str], list[str]]


def _splitter(spec: NodeSpec) -> Splitter:
    """Return a function that splits a string, by a sequence of separators or by an expression that matches tokens."""
    separators, expression = spec.attributes.get("separators"), spec.attributes.get("tokenexp")
    if separators == [""]:
        if int(spec.attributes["mincharnum"]) > 1:
            raise KernelError("Tokenizer: mincharnum must be 1 if characters are tokens")
        return list
    if separators:
        patterns = [Regex(str(separator)) for separator in separators]
        for separator, pattern in zip(separators, patterns, strict=True):
            if pattern.matches(""):
                raise KernelError(f"Tokenizer: the separator {separator!r} matches the empty string")
        return lambda text: _separated(text, patterns)
    if not expression:
        raise KernelError("Tokenizer: either separators or tokenexp is required")
    expression_compiled = Regex(str(expression))
    return lambda text: [text[first:last] for first, last in expression_compiled.spans(text)]


def _separated(text: str, patterns: Sequence[Regex]) -> list[str]:
    parts = [text]
    for pattern in patterns:
        cut: list[str] = []
        for part in parts:
            position = 0
            for first, last in (*pattern.spans(part), (len(part), len(part))):
                cut.append(part[position:first])
                position = last
        parts = [part for part in cut if part]
    return parts


@operator("Tokenizer", domain=MS, split=_splitter)
def tokenizer(x: Any, *, mark: bool, mincharnum: Positive, pad_value: str, split: Splitter, spec: NodeSpec) -> Any:
    """Return each string's tokens along a new last axis; shorter rows are filled with `pad_value`."""
    if x.ndim not in (1, 2):
        raise KernelError(f"Tokenizer: the input has shape {list(x.shape)}, but it must have shape [C] or [N, C]")
    rows = [[token for token in split(str(text)) if len(token) >= mincharnum] for text in x.reshape(-1).tolist()]
    longest = max(map(len, rows), default=0)
    if longest and mark:
        longest, rows = longest + 2, [[_BEGIN, *row, _END] for row in rows]
    result = np.full(checked_shape(spec, (len(rows), longest), 8), pad_value, object)
    for target, row in zip(result, rows, strict=True):
        target[: len(row)] = row
    return result.reshape(*x.shape, longest)
