"""Unique items of arrays, which a grammar cannot compare: the reply is followed, and tokens that repeat an item are
removed from the masks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .json_schema import referred
from .schema_forms import few_values, json_key

if TYPE_CHECKING:
    from llguidance import LLMatcher

# The maximum number of tokens to look ahead, and of alternatives for each.
_MOST_STEPS, _MOST_TRIED = 2, 8
# The start of a number that is zero, whatever follows.
_ZERO = re.compile(r"-?0(?:\.0*)?[eE]")
# Bytes that can end a value.
_ENDS = b'",]} \n\t\r'
# Characters that may end a value, and the values around it.
_OUTSIDE = (b",", b"]", b"}", b"]]", b"]}", b"}]")
_WORDS = (b"true", b"false", b"null")
_IN_STRING = (b'"', b'"]', b'"}', b'"]]', b'"}]', b'"]}')


class _Level(NamedTuple):
    """An object or array that is not complete yet.

    Attributes:
        parts: the schemas that may apply to it.
        is_array: False for an object.
        is_unique: True if its items must be unique.
        start: position of the current value in the text; -1 before its first character.
        number: number of complete items.
        key: the current key of an object; None while the key is read.
        seen: the items of an array.
        rest: the items that a finite array can still have, as JSON; None if there are many.
    """

    parts: tuple[Mapping[str, Any], ...]
    is_array: bool
    is_unique: bool
    start: int = -1
    number: int = 0
    key: str | None = None
    seen: frozenset[str] = frozenset()
    rest: frozenset[str] | None = None


class UniqueItems:
    """The position of a reply in the arrays of a schema.

    Args:
        schema: the schema.
        tokens: the bytes of each token.
    """

    def __init__(self, schema: Any, tokens: Sequence[bytes]) -> None:
        self._schema, self._tokens = schema, tokens
        self._closing = frozenset(i for i, data in enumerate(tokens) if any(one in data for one in b'"]}\\'))
        self._ids: dict[bytes, list[int]] = {}
        for token, data in enumerate(tokens):
            self._ids.setdefault(data, []).append(token)
        self._text = b""
        self._levels: tuple[_Level, ...] = ()
        self._in_string = self._is_escaped = self._in_scalar = False

    def fork(self) -> UniqueItems:
        """Return an independent position."""
        return copy(self)

    def follow(self, token: int) -> bool:
        """Advance by a token. Return False if it repeats an item."""
        data = self._tokens[token] if token < len(self._tokens) else b""
        return all(self._feed(one) for one in data)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that repeat no item."""
        position = self.fork()
        return next((count for count, token in enumerate(tokens) if not position.follow(token)), len(tokens))

    # --- masks -------------------------------------------------------------------------------------------------

    def restrict(self, mask: NDArray[np.uint32], automaton: LLMatcher) -> None:
        """Remove the tokens from a mask that repeat an item, or after which every token repeats one."""
        for token in self._candidates(mask):
            if self._is_relevant(self._tokens[token] if token < len(self._tokens) else b""):
                after = self.fork()
                if not after.follow(token) or (after._may_end() and not after._continues(automaton, token, mask, 0)):
                    mask[token // 32] &= ~np.uint32(1 << (token % 32))

    def _candidates(self, mask: NDArray[np.uint32]) -> list[int]:
        """Return the allowed tokens for which `_is_relevant` can be true; inside strings, most tokens are allowed."""
        allowed = _tokens_of(mask)
        level = self._levels[-1] if self._levels else None
        if not self._in_string or self._is_escaped or level is None or level.rest is not None:
            return allowed
        found = [token for token in allowed if token in self._closing]
        if level.is_unique:
            partial = self._text[level.start :]
            rests = {text.encode()[len(partial) : -1] for text in level.seen if text.encode().startswith(partial)}
            known = set(allowed) if rests else set()
            found += [token for text in rests for token in self._ids.get(text, ()) if token in known]
        return found

    def _is_relevant(self, data: bytes) -> bool:
        """Return True if a token may end an item, or may be the last token before its end."""
        if not any(level.is_unique for level in self._levels):
            return b"[" in data and not self._in_string
        if not self._in_string:
            return True
        level = self._levels[-1]
        if not level.is_unique:
            return b'"' in data or b"}" in data or b"]" in data
        text, _, others = data.partition(b'"')
        if level.rest is not None or b'"' in others or self._is_escaped or text.endswith(b"\\"):
            return True
        partial = (self._text[level.start :] + text).decode("utf-8", "replace")
        return bool(level.seen) and _key(f'{partial}"') in level.seen

    def _may_end(self) -> bool:
        """Return True if the next characters may end an item that repeats another one, or if no item is left."""
        level = self._levels[-1] if self._levels else None
        if level is not None and not self._is_possible(level):
            return True
        word = b""
        if level is not None and self._in_scalar:
            partial = self._text[level.start :]
            word = next((one[len(partial) :] for one in _WORDS if one.startswith(partial)), b"")
        ends = _IN_STRING if self._in_string else _OUTSIDE
        return any(not self.fork()._follow_text(word + text) for text in ends)

    def _follow_text(self, text: bytes) -> bool:
        return all(self._feed(one) for one in text)

    def _is_possible(self, level: _Level) -> bool:
        """Return False if the current item of an array can only become one that the array has."""
        if level.start < 0 or not level.is_unique:
            return True
        partial = self._text[level.start :].decode("utf-8", "ignore").rstrip()
        if level.rest is None:
            return "0" not in level.seen or not _ZERO.match(partial)
        return any(text.startswith(partial) for text in level.rest)

    def _continues(self, automaton: LLMatcher, token: int, mask: NDArray[np.uint32], depth: int) -> bool:
        """Return True if a token may follow that repeats no item."""
        if self._levels and not self._is_possible(self._levels[-1]):
            return False
        after = automaton.deep_copy()
        if not after.consume_token(token):
            return False
        next_mask = np.zeros_like(mask)
        after.unsafe_compute_mask_ptr(next_mask.ctypes.data, next_mask.nbytes)
        uncertain = []
        for following in _tokens_of(next_mask):
            position = self.fork()
            if position.follow(following):
                if not position._may_end():
                    return True
                uncertain.append((position, following))
        return depth >= _MOST_STEPS or any(
            position._continues(after, following, mask, depth + (len(uncertain) > 1))
            for position, following in uncertain[:_MOST_TRIED]
        )

    # --- text --------------------------------------------------------------------------------------------------

    def _feed(self, byte: int) -> bool:
        """Advance by a byte. Return False if it ends an item that repeats another one."""
        one, is_new = chr(byte), True
        if self._in_string:
            self._text += bytes([byte])
            if self._is_escaped:
                self._is_escaped = False
            elif one == "\\":
                self._is_escaped = True
            elif one == '"':
                self._in_string = False
                is_new = self._end_string()
            return is_new
        if self._in_scalar and byte in _ENDS:
            self._in_scalar = False
            is_new = self._end_value()
        if one in "}]":
            self._levels = self._levels[:-1]
            self._text += bytes([byte])
            return self._end_value() and is_new
        if one not in ", :\n\t\r":
            self._start_value()
        self._text += bytes([byte])
        if one in "{[":
            self._levels = (*self._levels, self._level(one == "["))
        elif one == '"':
            self._in_string = True
        elif one not in ", :\n\t\r":
            self._in_scalar = True
        return is_new

    def _start_value(self) -> None:
        if self._levels and self._levels[-1].start < 0:
            self._levels = (*self._levels[:-1], self._levels[-1]._replace(start=len(self._text)))

    def _end_string(self) -> bool:
        level = self._levels[-1] if self._levels else None
        if level is None or level.is_array or level.key is not None:
            return self._end_value()
        key = json.loads(self._text[level.start :])
        self._levels = (*self._levels[:-1], level._replace(key=key, start=-1))
        return True

    def _end_value(self) -> bool:
        """End the current value of the innermost object or array. Return False if it repeats an item."""
        if not self._levels:
            return True
        level, is_new = self._levels[-1], True
        seen, rest = level.seen, level.rest
        if level.is_unique:
            key = _key(self._text[level.start :].decode("utf-8", "replace"))
            is_new, seen = key not in seen, seen | {key}
            rest = None if rest is None else frozenset(text for text in rest if _key(text) != key)
        found = level._replace(start=-1, number=level.number + 1, key=None, seen=seen, rest=rest)
        self._levels = (*self._levels[:-1], found)
        return is_new

    def _level(self, is_array: bool) -> _Level:
        """Return the level of an object or array that starts here."""
        if len(self._levels) == 0:
            parts = self._applying([self._schema])
        else:
            outer = self._levels[-1]
            parts = self._applying([one for part in outer.parts for one in _inner(part, outer)])
        is_unique = is_array and any(part.get("uniqueItems") is True for part in parts)
        values = few_values(self._schema, parts[0].get("items")) if is_unique and len(parts) == 1 else None
        rest = None
        if values is not None and "prefixItems" not in parts[0]:
            rest = frozenset(json.dumps(value, ensure_ascii=False) for value in values)
        return _Level(parts, is_array, is_unique, rest=rest)

    def _applying(self, parts: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
        """Return schemas with all their alternatives and the targets of their references."""
        waiting, found = list(parts), dict[int, Mapping[str, Any]]()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, Mapping) or id(part) in found:
                continue
            found[id(part)] = part
            for name in ("anyOf", "oneOf", "allOf"):
                waiting += part[name] if isinstance(part.get(name), list) else []
            if isinstance(ref := part.get("$ref"), str):
                waiting.append(referred(self._schema, ref))
        return tuple(found.values())


def _tokens_of(mask: NDArray[np.uint32]) -> list[int]:
    """Return the tokens that a mask allows."""
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def _inner(part: Mapping[str, Any], level: _Level) -> list[Any]:
    """Return the schemas that may apply to the current value in an object or array."""
    if level.is_array:
        first, items = part.get("prefixItems"), part.get("items")
        if isinstance(items, list):
            first, items = items, part.get("additionalItems")
        return [first[level.number]] if isinstance(first, list) and level.number < len(first) else [items]
    named, patterns = part.get("properties"), part.get("patternProperties")
    found = [named[level.key]] if isinstance(named, Mapping) and level.key in named else []
    others = list(patterns.values()) if isinstance(patterns, Mapping) else []
    return [*found, *others] if found else [*others, part.get("additionalProperties")]


def _key(text: str) -> str:
    """Return a text that is the same for equal values; the text itself if it is not complete."""
    try:
        return json_key(json.loads(text))
    except ValueError:
        return text
