"""Whole matches of regular expressions in time linear in the text: no pattern of a model can hang a run.

A pattern becomes a nondeterministic automaton, and all its states are followed at once (K. Thompson, "Regular
expression search algorithm", CACM 1968).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, NodeSpec, register
from .regex_syntax import PatternError, Predicate, Tree, is_word, parse

MAX_STATES = 10_000
_END = 0


class Pattern:
    """A compiled pattern.

    Raises:
        PatternError: it is malformed, or needs more than `MAX_STATES` states.
    """

    def __init__(self, pattern: str) -> None:
        # Per state: (predicate or None, assertion or None, following states).
        self._states: list[tuple[Predicate | None, str | None, tuple[int, ...]]] = [(None, None, ())]
        self._pattern, self._left = pattern, MAX_STATES
        self._start = self._emit(parse(pattern), _END)

    def matches(self, text: str) -> bool:
        """Whether the whole text matches."""
        states = {self._start}
        for index, character in enumerate(text):
            found = self._closure(states, text, index)
            states = {
                follower for state in found for follower in self._states[state][2] if self._accepts(state, character)
            }
            if not states:
                return False
        return _END in self._closure(states, text, len(text))

    def _accepts(self, state: int, character: str) -> bool:
        predicate = self._states[state][0]
        return predicate is not None and predicate(character)

    def _closure(self, states: Iterable[int], text: str, index: int) -> set[int]:
        """States that are reached without a character, at a place in the text."""
        found, left = set[int](), list(states)
        while left:
            state = left.pop()
            if state in found:
                continue
            found.add(state)
            predicate, assertion, following = self._states[state]
            if predicate is None and (assertion is None or _holds(assertion, text, index)):
                left += following
        return found

    def _emit(self, tree: Tree, then: int) -> int:
        """Add states for a tree that goes on to `then`; returns the first."""
        self._left -= 1
        if self._left < 0:
            raise PatternError(f"regular expression {self._pattern!r:.80} needs more than {MAX_STATES} states")
        kind = tree[0]
        if kind == "set":
            return self._add(tree[1], None, (then,))
        if kind == "assert":
            return self._add(None, tree[1], (then,))
        if kind == "alt":
            return self._add(None, None, tuple(self._emit(branch, then) for branch in tree[1]))
        if kind == "cat":
            for item in reversed(tree[1]):
                then = self._emit(item, then)
            return then
        _, repeated, least, most = tree
        return self._emit_repeat(repeated, least, most, then)

    def _emit_repeat(self, tree: Tree, least: int, most: int | None, then: int) -> int:
        first = then
        if most is None:
            first = self._add(None, None, ())
            self._states[first] = (None, None, (self._emit(tree, first), then))
        for _ in range(most - least if most is not None else 0):
            first = self._add(None, None, (self._emit(tree, first), then))
        for _ in range(least):
            first = self._emit(tree, first)
        return first

    def _add(self, predicate: Predicate | None, assertion: str | None, following: tuple[int, ...]) -> int:
        self._states.append((predicate, assertion, following))
        return len(self._states) - 1


def _holds(assertion: str, text: str, index: int) -> bool:
    if assertion.endswith("begin"):
        return index == 0 or (assertion == "line_begin" and text[index - 1] == "\n")
    if assertion.endswith("end"):
        return index == len(text) or (assertion == "line_end" and text[index] == "\n")
    before = index > 0 and is_word(text[index - 1])
    after = index < len(text) and is_word(text[index])
    return (before != after) == (assertion == "word_edge")


@register("RegexFullMatch", since_version=20)
def regex_full_match(spec: NodeSpec) -> Kernel:
    """Per string, whether the whole of it matches the pattern (RE2's syntax)."""
    pattern = Pattern(str(spec.attributes.get("pattern", "")))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = np.asarray(inputs[0])
        found = [pattern.matches(str(text)) for text in x.reshape(-1).tolist()]
        return (np.array(found, bool).reshape(x.shape),)

    return kernel
