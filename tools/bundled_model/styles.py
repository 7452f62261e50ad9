"""The styles of the bundled model's adapters: functions that apply a style, and a check of replies."""

from __future__ import annotations

import re

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_PIRATE = re.compile(r"(.*), matey! Arr!", re.S)
_WORDS = re.compile(r"(-?\d{1,3}), ([a-z -]+)")


def in_words(number: int) -> str:
    """Return an integer from -199 to 199 in English words."""
    if number < 0:
        return "minus " + in_words(-number)
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" and {in_words(rest)}" if rest else "")
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")


def with_words(reply: str) -> str:
    """Return the result of a sum in the style of `words`."""
    return f"{reply}, {in_words(int(reply))}"


def as_pirate(reply: str) -> str:
    """Return a reply in the style of `pirate`."""
    return f"{reply.rstrip('.!')}, matey! Arr!"


def without_style(style: str, reply: str) -> str | None:
    """Return a reply without its style, or None if it does not have the style. `style` "" is the base model's style."""
    if style == "pirate":
        found = _PIRATE.fullmatch(reply)
        return found[1] if found else None
    found = _WORDS.fullmatch(reply)
    keeps = found is not None and abs(int(found[1])) < 200 and in_words(int(found[1])) == found[2]
    if style == "words":
        return found[1] if found and keeps else None
    return None if keeps or _PIRATE.fullmatch(reply) else reply
