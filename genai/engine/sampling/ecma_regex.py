"""Regular expressions of JSON schemas, rewritten for llguidance.

JSON schemas use the syntax of ECMA 262, in Unicode mode. llguidance reads patterns in the syntax of Rust, in which
`[[:alpha:]]`, `[a&&b]` and `[a--b]` have other meanings. So a pattern is parsed, and written again with the few
constructs that both syntaxes share. Validators often use other engines, such as Python's `re`, in which `\\w` matches
more letters and `\\s` other white space. Where engines differ, the rewritten pattern matches only the texts that both
meanings match. A rewritten pattern can be rewritten again: the meaning remains the same.

llguidance's translation of patterns to JSON text has an error: a class that contains all control characters below
0x20 also matches `"` and `\\`. In the rewritten pattern, a class contains only those control characters that have a
short escape in JSON, such as `\\n`, unless the class has no other characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points as ranges, both ends included, in ascending order and apart from each other."""

_LAST = 0x10FFFF
# No letter, digit or white space has a code above this one.
_LAST_LETTER = 0x3FFFF
_SURROGATES = (0xD800, 0xDFFF)
_MOST_LEVELS = 50
# Control characters that JSON writes as \u00XX only. llguidance never writes 0x7f unescaped.
_RARE = ((0, 7), (11, 11), (14, 31), (127, 127))
RARE = frozenset(chr(code) for start, end in _RARE for code in range(start, end + 1))
_SYNTAX = frozenset("^$\\.*+?()[]{}|")
_PLAIN = frozenset(map(chr, range(32, 127))) - _SYNTAX
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]+)(,([0-9]*))?\}")
_NO_LOWER_BOUND = re.compile(r"\{,[0-9]*\}")
_MOST_REPEATS = 10**6
_GROUPS = {
    "(?=": "the lookahead (?=",
    "(?!": "the negative lookahead (?!",
    "(?<=": "the lookbehind (?<=",
    "(?<!": "the negative lookbehind (?<!",
    "(?>": "the atomic group (?>",
    "(?(": "the condition (?(",
    "(?#": "the comment (?#",
    "(?P=": "the back-reference (?P=",
}
# What Pydantic before 2.13 writes for decimals with a maximum of digits, with and without a maximum of decimal places.
_DECIMAL = re.compile(
    r"(\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*)\(\?:\\d\{0,(\d{1,4})\}\|\(\?=\[\\d\.\]\{1,(\d{1,4})\}0\*\$\)"
    r"\\d(?:\{0,\2\}\\\.\\d\{0,(\d{1,4})\}|\*\\\.\\d\*)0\*\$\)"
)
_MOST_DIGITS = 50
_GROUP_NAME = re.compile(r"\(\?P?<[^\W\d]\w*>")
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])")
# Names of general categories; two-letter names are those of unicodedata.
_CATEGORIES = dict(
    pair.split("=")
    for pair in (
        "Letter=L Cased_Letter=LC Uppercase_Letter=Lu Lowercase_Letter=Ll Titlecase_Letter=Lt Modifier_Letter=Lm"
        " Other_Letter=Lo Mark=M Combining_Mark=M Nonspacing_Mark=Mn Spacing_Mark=Mc Enclosing_Mark=Me Number=N"
        " Decimal_Number=Nd digit=Nd Letter_Number=Nl Other_Number=No Punctuation=P punct=P Connector_Punctuation=Pc"
        " Dash_Punctuation=Pd Open_Punctuation=Ps Close_Punctuation=Pe Initial_Punctuation=Pi Final_Punctuation=Pf"
        " Other_Punctuation=Po Symbol=S Math_Symbol=Sm Currency_Symbol=Sc Modifier_Symbol=Sk Other_Symbol=So"
        " Separator=Z Space_Separator=Zs Line_Separator=Zl Paragraph_Separator=Zp Other=C Control=Cc cntrl=Cc Format=Cf"
        " Surrogate=Cs Private_Use=Co Unassigned=Cn"
    ).split()
)
_CATEGORIES |= {short: short for short in _CATEGORIES.values()}
# Properties that llguidance knows and Python does not. None of them contains control characters without a short
# escape; the script Common does.
_PROPERTY = re.compile(
    r"(?:Script|sc)=(?!Common$|Zyyy$)[A-Za-z_]+"
    r"|Alphabetic|Alpha|Lowercase|Lower|Uppercase|Upper|ID_Start|IDS|ID_Continue|IDC|Ideographic|Ideo"
)


class PatternError(ValueError):
    """A pattern is not in ECMA 262's syntax, or uses a construct that no grammar can follow."""


@dataclass(frozen=True)
class Rewritten:
    """A pattern in the syntax that ECMA 262 and Rust share.

    Attributes:
        patterns: patterns, all of which a text must match; more than one if the pattern begins with lookaheads.
        rare: a control character that the pattern requires and that JSON writes as \\u00XX only; "" if there is none.
    """

    patterns: tuple[str, ...]
    rare: str = ""


def rewrite(pattern: str) -> Rewritten:
    """Rewrite a pattern of a JSON schema.

    Raises:
        PatternError: the pattern is malformed or uses an unsupported construct, which the message names.
    """
    if (decimal := _DECIMAL.fullmatch(pattern)) is not None:
        pattern = _without_lookahead(decimal)
    return _Reader(pattern).whole()


def _without_lookahead(decimal: re.Match[str]) -> str:
    """Return a pattern without the lookahead in `_DECIMAL`; it matches a subset of the texts."""
    start, whole, room = decimal[1], int(decimal[2]), int(decimal[3]) - 1
    parts = [f"\\d{{0,{whole}}}"]
    if decimal[4] is None:
        parts += [f"\\d{{{count}}}\\.\\d{{0,{room - count}}}0*" for count in range(min(room, _MOST_DIGITS) + 1)]
    elif room >= whole:
        parts.append(f"{parts[0]}\\.\\d{{0,{min(int(decimal[4]), room - whole)}}}0*")
    return f"{start}(?:{'|'.join(parts)})$"


def found_by_any_engine(pattern: str, texts: Iterable[str]) -> list[str]:
    """Return the texts in which an engine finds a pattern: ECMA 262 or Python's `re`.

    Python's `re` itself is not used, because its time can grow exponentially with the length of a text. Patterns with
    properties that RE2 does not support are found in no text.

    Raises:
        PatternError: the pattern is malformed or uses an unsupported construct.
    """
    import re2

    expression = _Reader(pattern, for_re2=True).whole().patterns[-1]
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(expression, options)
    except re2.error:
        return []
    return [text for text in texts if compiled.search(text)]


@dataclass(frozen=True)
class _Set:
    """A set of characters.

    Attributes:
        inner: characters that belong to the set in every engine.
        outer: characters that belong to the set in any engine.
        properties: escapes of Unicode properties, such as \\p{Script=Greek}, whose characters also belong to the set.
    """

    inner: Ranges
    outer: Ranges
    properties: tuple[str, ...] = ()

    def negated(self) -> _Set:
        if self.properties:
            if self.inner or len(self.properties) > 1:
                raise PatternError(f"a negated class with {self.properties[0]} and other characters is not supported")
            (name,) = self.properties
            return _Set((), (), (("\\p" if name[1] == "P" else "\\P") + name[2:],))
        return _Set(_without(self.outer), _without(self.inner))

    def folded(self) -> _Set:
        """Return the set without regard to the case of letters."""
        if self.properties:
            raise PatternError(f"{self.properties[0]} in a pattern without regard to case is not supported")
        return _Set(_folded(self.inner, _same_letters()), _folded(self.outer, _related_letters()))


class _Reader:
    """Reads a pattern from left to right and writes it again.

    Args:
        pattern: the pattern.
        for_re2: write a pattern that matches all texts that any engine matches, in the syntax of RE2.
    """

    def __init__(self, pattern: str, *, for_re2: bool = False) -> None:
        self._text, self._at, self._level = pattern, 0, 0
        self._for_re2 = for_re2
        self._ignores_case = self._dot_is_any = False
        self._rare: set[int] = set()
        self._ahead: list[str] = []

    def whole(self) -> Rewritten:
        if (flags := _FLAGS.match(self._text)) and flags[3] == ")":
            self._set_flags(flags)
            self._at = flags.end()
        first = self._at
        text = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("a ) has no opening (")
        if self._ahead and self._has_alternatives(first):
            raise PatternError(f"{_GROUPS['(?=']} beside other alternatives is not supported")
        if self._rare | {127} == set(map(ord, RARE)):
            raise PatternError("the pattern names every control character")
        return Rewritten((*self._ahead, text), chr(min(self._rare)) if self._rare else "")

    def _has_alternatives(self, first: int) -> bool:
        """Return True if the pattern has several alternatives outside groups."""
        reader = _Reader(self._text)
        reader._at, reader._ignores_case, reader._dot_is_any = first, self._ignores_case, self._dot_is_any
        reader._sequence(may_look=True)
        return reader._at < len(reader._text)

    def _next_is(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, what: str) -> str:
        if self._at >= len(self._text):
            raise PatternError(f"the pattern ends inside {what}")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> str:
        texts = [self._sequence(may_look=self._level == 0)]
        while self._next_is("|"):
            self._at += 1
            texts.append(self._sequence())
        return "|".join(texts)

    def _sequence(self, *, may_look: bool = False) -> str:
        parts: list[str] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if may_look and parts == ["^"] and self._next_is("(?="):
                self._at += 3
                self._ahead.append(f"^{self._group_body()}")
                if _QUANTIFIER.match(self._text, self._at):
                    raise PatternError("a quantifier after a lookahead is not supported")
                continue
            if may_look and parts == ["^"] and self._next_is("(?!") and (needed := self._needed()):
                self._ahead.append(needed)
                continue
            parts.append(self._quantified())
        return "".join(parts)

    def _needed(self) -> str:
        """Read a negative lookahead such as (?!^[-+.]*$), and return a pattern for the texts that it allows.

        They are the texts with a character outside the class. Return "" for other lookaheads.
        """
        first, self._at = self._at, self._at + 3
        self._at += self._next_is("^")
        if self._next_is("["):
            self._at += 1
            known = self._class()
            if self._next_is("*$)"):
                self._at += 3
                if not _QUANTIFIER.match(self._text, self._at) and not known.properties:
                    # In Python's `re`, $ also precedes a line end at the end of a text.
                    return self._written(_Set(known.inner, _joined((*known.outer, (10, 10)))).negated())
        self._at = first
        return ""

    def _quantified(self) -> str:
        if self._text[self._at] in "^$":
            self._at += 1
            if _QUANTIFIER.match(self._text, self._at):
                raise PatternError(f"{self._text[self._at]} follows {self._text[self._at - 1]}, which cannot repeat")
            return self._text[self._at - 1]
        if found := _QUANTIFIER.match(self._text, self._at):
            raise PatternError(f"{found[0]} follows nothing that can repeat")
        atom = self._atom()
        if not (found := _QUANTIFIER.match(self._text, self._at)):
            return atom
        self._at = found.end()
        written = found[0] if found[1] is None else self._count(found)
        if self._next_is("?"):  # which text a lazy quantifier prefers does not matter
            self._at += 1
        elif again := _QUANTIFIER.match(self._text, self._at):
            raise PatternError(f"{again[0]} follows the quantifier {found[0]}")
        return atom + written

    @staticmethod
    def _count(found: re.Match[str]) -> str:
        least, most = found[1].lstrip("0") or "0", (found[3] or "").lstrip("0") or ("0" if found[3] else "")
        if len(least) > 7 or len(most) > 7 or max(int(least), int(most or 0)) > _MOST_REPEATS:
            raise PatternError(f"{found[0][:40]} repeats too often; the limit is {_MOST_REPEATS:,}")
        if most and int(most) < int(least):
            raise PatternError(f"the numbers of {found[0]} are out of order")
        return f"{{{least}{',' + most if found[2] else ''}}}"

    def _atom(self) -> str:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            self._at += 1
            return self._written(self._class())
        self._at += 1
        if character == ".":
            every: Ranges = ((0, _LAST),)
            return self._written(_Set(every, every) if self._dot_is_any else _Set(_LINE_ENDS, _LINE_ENDS).negated())
        if character == "\\":
            return self._written(self._escape(in_class=False))
        if character == "{" and _NO_LOWER_BOUND.match(self._text, self._at - 1):
            raise PatternError("a quantifier without a lower bound has no single meaning")
        return self._written(_one(character))

    def _group(self) -> str:
        for opening, named in _GROUPS.items():
            if self._next_is(opening):
                raise PatternError(f"{named} is not supported")
        known = self._ignores_case, self._dot_is_any
        if name := _GROUP_NAME.match(self._text, self._at):
            self._at = name.end()
        elif flags := _FLAGS.match(self._text, self._at):
            if flags[3] == ")":
                raise PatternError(f"{flags[0]} is only supported at the start of the pattern")
            self._set_flags(flags)
            self._at = flags.end()
        elif self._next_is("(?"):
            raise PatternError(f"the group {self._text[self._at : self._at + 4]} is unknown")
        else:
            self._at += 1
        text = self._group_body()
        self._ignores_case, self._dot_is_any = known
        return text

    def _group_body(self) -> str:
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise PatternError(f"groups are nested more than {_MOST_LEVELS} levels deep")
        text = self._alternatives()
        self._level -= 1
        if not self._next_is(")"):
            raise PatternError("a ( has no closing )")
        self._at += 1
        return f"(?:{text})"

    def _set_flags(self, flags: re.Match[str]) -> None:
        for name, value in (*((name, True) for name in flags[1]), *((name, False) for name in flags[2] or "")):
            if name == "i":
                self._ignores_case = value
            elif name == "s":
                self._dot_is_any = value
            else:
                raise PatternError(f"the flag {name} of {flags[0]} is not supported")

    def _class(self) -> _Set:
        is_negated = self._next_is("^")
        self._at += is_negated
        if self._next_is("]"):
            raise PatternError("a class that begins with ] is empty or not, depending on the engine")
        items: list[_Set] = []
        while True:
            low = self._class_item()
            if low is None:
                break
            if not self._next_is("-") or self._next_is("-]"):
                items.append(low)
                continue
            self._at += 1
            high = self._class_item()
            if high is None:
                raise PatternError("a class has no closing ]")
            first, last = _single(low), _single(high)
            if first is None or last is None:  # as in [\w-.], where the hyphen is a character
                items += [low, _one("-"), high]
            elif first > last:
                raise PatternError(f"the range {_shown(first)}-{_shown(last)} in a class is out of order")
            else:
                items.append(_Set(((first, last),), ((first, last),)))
        joined = _Set(
            _joined(found for item in items for found in item.inner),
            _joined(found for item in items for found in item.outer),
            tuple(dict.fromkeys(found for item in items for found in item.properties)),
        )
        if self._ignores_case:
            joined = joined.folded()
        return joined.negated() if is_negated else joined

    def _class_item(self) -> _Set | None:
        character = self._take("a class")
        if character == "]":
            return None
        return self._escape(in_class=True) if character == "\\" else _one(character)

    def _escape(self, *, in_class: bool) -> _Set:
        name = self._take("an escape")
        if name in "dDwWsS":
            return _kind(name.lower()) if name.islower() else _kind(name.lower()).negated()
        if name in _CONTROLS:
            return _one(chr(_CONTROLS[name]))
        if name == "b" and in_class:
            return _one("\b")
        if name in "pP":
            return self._property(name)
        if name == "0" and not self._text[self._at : self._at + 1].isdigit():
            return _one("\0")
        if name == "c" and (letter := self._text[self._at : self._at + 1]).isascii() and letter.isalpha():
            self._at += 1
            return _one(chr(ord(letter) % 32))
        if name in "xu":
            return _one(chr(self._code(name)))
        if name in "bB":
            raise PatternError(f"the word boundary \\{name} is not supported")
        if name == "k" or (name.isdigit() and name.isascii()):
            raise PatternError(f"the back-reference \\{name} is not supported")
        if name.isascii() and name.isalpha():
            raise PatternError(f"the escape \\{name} is unknown")
        return _one(name)

    def _code(self, kind: str) -> int:
        text, at = self._text, self._at
        if kind == "u" and (braced := re.compile(r"\{([0-9A-Fa-f]{1,8})\}").match(text, at)):
            self._at, code = braced.end(), int(braced[1], 16)
        elif digits := re.compile(r"[0-9A-Fa-f]{2}" if kind == "x" else r"[0-9A-Fa-f]{4}").match(text, at):
            self._at, code = digits.end(), int(digits[0], 16)
            low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(text, self._at)
            if kind == "u" and 0xD800 <= code < 0xDC00 and low:
                self._at, code = low.end(), 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        else:
            raise PatternError(f"the escape \\{kind}{text[at : at + 4]} is incomplete")
        if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            raise PatternError(f"the code {code:#x} is no character")
        return code

    def _property(self, kind: str) -> _Set:
        found = re.compile(r"\{([^}]*)\}").match(self._text, self._at)
        if not found:
            raise PatternError(f"the escape \\{kind} has no property, such as \\p{{L}}")
        self._at = found.end()
        name = re.sub(r"^(General_Category|gc)=", "", found[1])
        if name in _CATEGORIES or name in ("Any", "ASCII"):
            ranges = _category(_CATEGORIES.get(name, name))
            known = _Set(ranges, ranges)
        elif _PROPERTY.fullmatch(found[1]):
            known = _Set((), (), (f"\\p{found[0]}",))
        else:
            raise PatternError(f"the property {found[0]} is not supported")
        return known.negated() if kind == "P" else known

    def _written(self, known: _Set) -> str:
        """Return the expression of a set of characters."""
        if self._ignores_case and len(known.inner) == 1 and _single(known) is not None:
            known = known.folded()
        if self._for_re2:
            return _for_re2(known)
        usual = _minus(known.inner, (*_RARE, _SURROGATES))
        if not usual and not known.properties:
            usual = _minus(known.inner, (_SURROGATES,))
            self._rare.update(code for start, end in usual for code in range(start, end + 1))
        if not usual and not known.properties:
            raise PatternError("a class has no characters")
        if len(usual) == 1 and usual[0][0] == usual[0][1] and not known.properties:
            return _literal(usual[0][0])
        texts = list(known.properties)
        if usual:
            ends = [start if start == end else (start, end) for start, end in usual]
            pieces = (
                _shown(found) if isinstance(found, int) else f"{_shown(found[0])}-{_shown(found[1])}" for found in ends
            )
            texts.append(f"[{''.join(pieces)}]")
        return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


# --- sets of characters -------------------------------------------------------------------------------------------


def _one(character: str) -> _Set:
    ranges = ((ord(character), ord(character)),)
    return _Set(ranges, ranges)


def _single(known: _Set) -> int | None:
    """Return the only character of a set; None if there are others."""
    if known.properties or known.inner != known.outer or len(known.inner) != 1:
        return None
    start, end = known.inner[0]
    return start if start == end else None


def _shown(code: int) -> str:
    """Return a character for use in a class."""
    if code < 128:
        return chr(code) if chr(code).isalnum() else f"\\x{code:02x}"
    return f"\\u{{{code:x}}}"


def _for_re2(known: _Set) -> str:
    """Return the expression of all characters that belong to a set in any engine, in the syntax of RE2."""
    ranges = "".join(f"\\x{{{start:x}}}-\\x{{{end:x}}}" for start, end in _minus(known.outer, (_SURROGATES,)))
    texts = [*(re.sub("(?:Script|sc)=", "", name) for name in known.properties), *([f"[{ranges}]"] if ranges else [])]
    if not texts:
        raise PatternError("a class has no characters")
    return f"(?:{'|'.join(texts)})"


def _literal(code: int) -> str:
    """Return a character for use outside classes."""
    character = chr(code)
    if character in _SYNTAX:
        return f"\\{character}"
    return character if character in _PLAIN else _shown(code)


def _joined(ranges: Iterable[tuple[int, int]], gap: int = 0) -> Ranges:
    """Sort ranges, and join those with at most `gap` other characters between them."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + 1 + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def _without(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    found, first = [], 0
    for start, end in ranges:
        if start > first:
            found.append((first, start - 1))
        first = end + 1
    return (*found, (first, _LAST)) if first <= _LAST else tuple(found)


def _minus(ranges: Ranges, others: Iterable[tuple[int, int]]) -> Ranges:
    return _without(_joined((*_without(ranges), *others)))


def _where(test: Callable[[str], bool], last: int = _LAST_LETTER) -> Ranges:
    return _joined((code, code) for code in range(last + 1) if test(chr(code)))


@lru_cache(maxsize=3)
def _kind(name: str) -> _Set:
    """Return the characters of \\d, \\w or \\s in ECMA 262 and in Python."""
    if name == "d":
        return _Set(((48, 57),), _where(str.isdecimal))
    if name == "w":
        # The letters of all scripts, without the small gaps between them, because small sets make small grammars.
        letters = _joined((found for found in _where(str.isalnum) if found[0] >= 128), gap=64)
        word = ((48, 57), (65, 90), (95, 95), (97, 122))
        return _Set(word, (*word, *letters))
    python = _where(str.isspace)
    return _Set(_minus(python, ((28, 31), (0x85, 0x85))), _joined((*python, (0xFEFF, 0xFEFF))))


@lru_cache(maxsize=64)
def _category(name: str) -> Ranges:
    """Return the characters of a general category, or of Any or ASCII."""
    if name in ("Any", "ASCII"):
        return ((0, _LAST if name == "Any" else 127),)
    names = ("Lu", "Ll", "Lt") if name == "LC" else (name,)
    return _where(lambda character: unicodedata.category(character).startswith(names), _LAST)


@lru_cache(maxsize=1)
def _related_letters() -> dict[int, frozenset[int]]:
    """Return for each letter the letters that some engine does not distinguish from it, except for the case."""
    groups: dict[str, set[int]] = {}
    for code in range(_LAST_LETTER + 1):
        character = chr(code)
        forms = {character.lower(), character.upper(), character.casefold()}
        if forms != {character}:
            joined = {code}.union(*(groups.get(form, ()) for form in (character, *forms)))
            joined |= {ord(form) for form in forms if len(form) == 1}
            groups |= dict.fromkeys((*forms, *map(chr, joined)), joined)
    return {ord(form): frozenset(group) for form, group in groups.items() if len(form) == 1}


@lru_cache(maxsize=1)
def _same_letters() -> dict[int, frozenset[int]]:
    """Return for each letter the letters that no engine distinguishes from it, except for the case."""

    def is_same(one: int, other: int) -> bool:
        first, second = chr(one), chr(other)
        return first.lower() == second.lower() and first.upper() == second.upper()

    return {
        code: frozenset(other for other in group if is_same(code, other)) for code, group in _related_letters().items()
    }


def _folded(ranges: Ranges, letters: dict[int, frozenset[int]]) -> Ranges:
    found = list(ranges)
    for code, group in letters.items():
        if any(start <= code <= end for start, end in ranges):
            found += [(other, other) for other in group]
    return _joined(found)
