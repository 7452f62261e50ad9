"""RE2's syntax of regular expressions, read into a tree. Source: github.com/google/re2/wiki/Syntax.

A tree is made of tuples: ("set", predicate on a character), ("assert", kind), ("cat", trees), ("alt", trees) and
("repeat", tree, least, most or None).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any, TypeAlias

Predicate: TypeAlias = Callable[[str], bool]
Tree: TypeAlias = tuple[Any, ...]

MAX_REPEAT = 1000
MAX_DEPTH = 100
_EMPTY: Tree = ("cat", [])
_ESCAPES = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ASSERTIONS = {"A": "text_begin", "z": "text_end", "b": "word_edge", "B": "no_word_edge"}
_POSIX: dict[str, str] = {
    "alnum": "09AZaz",
    "alpha": "AZaz",
    "ascii": "\0\x7f",
    "blank": "\t\t  ",
    "cntrl": "\0\x1f\x7f\x7f",
    "digit": "09",
    "graph": "!~",
    "lower": "az",
    "print": " ~",
    "punct": "!/:@[`{~",
    "space": "\t\r  ",
    "upper": "AZ",
    "word": "09AZaz__",
    "xdigit": "09AFaf",
}
_PERL = {"d": "digit", "s": "perl_space", "w": "word"}
_RANGES = {**_POSIX, "perl_space": "\t\n\f\r  "}


class PatternError(ValueError):
    """A pattern is malformed, or beyond what this reader knows."""


def is_word(character: str) -> bool:
    """Whether \\w matches it: ASCII only, as in RE2."""
    return character.isascii() and (character.isalnum() or character == "_")


def parse(pattern: str) -> Tree:
    """A pattern as a tree.

    Raises:
        PatternError: it is malformed, nests too deeply, or names a Unicode script.
    """
    return _Parser(pattern).parse()


def _in_ranges(ranges: str) -> Predicate:
    pairs = [(ranges[i], ranges[i + 1]) for i in range(0, len(ranges), 2)]
    return lambda c: any(first <= c <= last for first, last in pairs)


def _negated(inside: Predicate) -> Predicate:
    return lambda c: not inside(c)


def _any_of(choices: list[Predicate]) -> Predicate:
    return choices[0] if len(choices) == 1 else lambda c: any(choice(c) for choice in choices)


def _ignoring_case(inside: Predicate) -> Predicate:
    return lambda c: inside(c) or inside(c.lower()) or inside(c.upper())


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.depth = pattern, 0, 0
        self.flags = frozenset[str]()

    def parse(self) -> Tree:
        tree = self._alternatives()
        if self.at < len(self.text):
            raise self._error("an unexpected )")
        return tree

    def _error(self, what: str) -> PatternError:
        return PatternError(f"regular expression {self.text!r:.80}: {what} at position {self.at}")

    def _peek(self, literal: str) -> bool:
        return self.text.startswith(literal, self.at)

    def _take(self, literal: str) -> bool:
        found = self._peek(literal)
        self.at += len(literal) if found else 0
        return found

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise self._error("an unexpected end")
        self.at += 1
        return self.text[self.at - 1]

    def _alternatives(self) -> Tree:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else ("alt", branches)

    def _sequence(self) -> Tree:
        items: list[Tree] = []
        while self.at < len(self.text) and not self._peek("|") and not self._peek(")"):
            if self._take("\\Q"):
                end = self.text.find("\\E", self.at)
                quoted = self.text[self.at : end if end >= 0 else None]
                self.at = len(self.text) if end < 0 else end + 2
                items += [self._literal(c) for c in quoted]
                items[-1:] = [self._repeated(items[-1])] if quoted else items[-1:]
            elif self._bounds() is not None:
                raise self._error("nothing to repeat")
            else:
                items.append(self._repeated(self._atom()))
        return items[0] if len(items) == 1 else ("cat", items)

    def _repeated(self, tree: Tree) -> Tree:
        """An atom and its repetition; which match a lazy one prefers makes no difference to a whole match."""
        bounds = self._bounds()
        if bounds is None:
            return tree
        self._take("?")
        if self._bounds() is not None:
            raise self._error("a repetition of a repetition")
        return ("repeat", tree, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple: tuple[tuple[str, tuple[int, int | None]], ...] = (("*", (0, None)), ("+", (1, None)), ("?", (0, 1)))
        for symbol, bounds in simple:
            if self._take(symbol):
                return bounds
        end = self.text.find("}", self.at)
        least, comma, most = self.text[self.at + 1 : max(end, 0)].partition(",")
        if not self._peek("{") or not _is_count(least) or not (most == "" or _is_count(most)):
            return None
        self.at = end + 1
        bounds = (int(least), int(most) if most else None if comma else int(least))
        if max(bounds[0], bounds[1] or 0) > MAX_REPEAT or (bounds[1] is not None and bounds[1] < bounds[0]):
            raise self._error(f"a bad repetition (0 to {MAX_REPEAT} are allowed)")
        return bounds

    def _atom(self) -> Tree:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return ("set", self._class())
        if character == ".":
            return ("set", (lambda c: True) if "s" in self.flags else (lambda c: c != "\n"))
        if character in "^$":
            side = "begin" if character == "^" else "end"
            return ("assert", f"{'line' if 'm' in self.flags else 'text'}_{side}")
        return self._escape() if character == "\\" else self._literal(character)

    def _literal(self, wanted: str) -> Tree:
        return ("set", self._cased(lambda c: c == wanted))

    def _cased(self, inside: Predicate) -> Predicate:
        return _ignoring_case(inside) if "i" in self.flags else inside

    def _escape(self) -> Tree:
        if self.at < len(self.text) and self.text[self.at] in _ASSERTIONS:
            return ("assert", _ASSERTIONS[self._next()])
        inside = self._escaped_set()
        return ("set", inside) if inside is not None else self._literal(self._escaped_character())

    def _escaped_set(self) -> Predicate | None:
        """\\d, \\W, \\pL, \\P{Lu} and the like, after the backslash; None where it is another escape."""
        letter = self._next()
        if letter.lower() in _PERL:
            inside = _in_ranges(_RANGES[_PERL[letter.lower()]])
        elif letter in "pP":
            inside = self._category()
        else:
            self.at -= 1
            return None
        return _negated(inside) if letter.isupper() else inside

    def _category(self) -> Predicate:
        name = self._next()
        if name == "{":
            end = self.text.find("}", self.at)
            name, self.at = (self.text[self.at : end], end + 1) if end >= 0 else ("", self.at)
        inverted = name.startswith("^")
        name = name.lstrip("^")
        if name == "Any":
            return (lambda c: False) if inverted else (lambda c: True)
        if name[:1] not in tuple("CLMNPSZ") or len(name) > 2:
            raise self._error(f"the Unicode class {name!r:.40} is not known (general categories are, scripts are not)")
        return lambda c: unicodedata.category(c).startswith(name) != inverted

    def _escaped_character(self) -> str:
        letter = self._next()
        if letter == "x":
            braced = self._take("{")
            end = self.text.find("}", self.at) if braced else self.at + 2
            digits = self.text[self.at : end] if end >= 0 else ""
            self.at = end + (1 if braced else 0)
            try:
                return chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise self._error(f"the character code {digits!r:.20} is none") from None
        if letter in "01234567":
            while len(letter) < 3 and self.at < len(self.text) and self.text[self.at] in "01234567":
                letter += self._next()
            return chr(int(letter, 8))
        if letter.isalnum():
            if letter not in _ESCAPES:
                raise self._error(f"the escape \\{letter} is not known")
            return _ESCAPES[letter]
        return letter

    def _class(self) -> Predicate:
        """What stands between [ and ]."""
        inverted, choices = self._take("^"), list[Predicate]()
        while not choices or not self._take("]"):
            posix = self._posix_class()
            if posix is not None:
                choices.append(posix)
                continue
            first = self._next()
            if first == "\\":
                inside = self._escaped_set()
                if inside is not None:
                    choices.append(inside)
                    continue
                first = self._escaped_character()
            choices.append(self._cased(_in_ranges(first + self._range_end(first))))
        inside = _any_of(choices)
        return _negated(inside) if inverted else inside

    def _range_end(self, first: str) -> str:
        if not self._peek("-") or self.text.startswith("-]", self.at):
            return first
        self.at += 1
        last = self._next()
        last = self._escaped_character() if last == "\\" else last
        if last < first:
            raise self._error(f"the range {first}-{last} is empty")
        return last

    def _posix_class(self) -> Predicate | None:
        end = self.text.find(":]", self.at)
        if not self._peek("[:") or end < 0:
            return None
        name = self.text[self.at + 2 : end]
        if name.lstrip("^") not in _POSIX:
            raise self._error(f"the class {name!r:.40} is not known")
        self.at = end + 2
        inside = self._cased(_in_ranges(_POSIX[name.lstrip("^")]))
        return _negated(inside) if name.startswith("^") else inside

    def _group(self) -> Tree:
        """After "(": flags for the rest of the group around it, or a group, whose flags end with it."""
        outer = self.flags
        if self._take("?"):
            self._take("P")
            if self._take("<"):
                end = self.text.find(">", self.at)
                if end < 0 or not self.text[self.at : end].isidentifier():
                    raise self._error("a malformed group name")
                self.at = end + 1
            elif self._set_flags():
                return _EMPTY
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} groups in each other")
        tree = self._alternatives()
        if not self._take(")"):
            raise self._error("a missing )")
        self.depth -= 1
        self.flags = outer
        return tree

    def _set_flags(self) -> bool:
        """Read flags up to ")" or ":"; True where they stand alone."""
        on = True
        while True:
            letter = self._next()
            if letter in "):":
                return letter == ")"
            if letter == "-" and on:
                on = False
            elif letter in "imsU":
                self.flags = self.flags | {letter} if on else self.flags - {letter}
            else:
                raise self._error(f"the group (?{letter} is not known")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
