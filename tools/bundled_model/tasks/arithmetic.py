"""Addition and subtraction of integers from 0 to 99; differences may be negative.

A pair with at least one two-digit number may be held out, and then is in all phrasings. Addition pairs are unordered:
if 12 + 47 is held out, so is 47 + 12. Pairs of single digits are always in the training set.
"""

from random import Random

from ..turn import Turn

ADD_PHRASINGS = (
    *("{a}+{b}", "{a} + {b}", "{a}+{b}=", "{a} + {b} =", "{a} + {b}?", "{a}+{b}?", "what's {a}+{b}?"),
    "what is {a}+{b}",
    *("What is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?", "How much is {a} + {b}?", "{a} plus {b}"),
    *("How much is {a} plus {b}?", "Add {a} and {b}.", "Add {b} to {a}.", "Calculate {a} + {b}.", "Compute {a} + {b}."),
    *("What is the sum of {a} and {b}?", "Sum of {a} and {b}?", "Can you add {a} and {b}?", "Solve {a} + {b}."),
    *("Please add {a} and {b}.", "What do you get when you add {a} and {b}?", "Work out {a} + {b}.", "sum {a} {b}"),
    "Tom has {a} apples and gets {b} more. How many apples does he have?",
    "Mia sees {a} birds, then {b} more. How many birds is that?",
    "I have {a} coins and find {b} more. How many coins do I have?",
)
SUBTRACT_PHRASINGS = (
    *("{a}-{b}", "{a} - {b}", "{a}-{b}=", "{a} - {b} =", "{a} - {b}?", "{a}-{b}?", "what's {a}-{b}?"),
    "what is {a}-{b}",
    *("What is {a} - {b}?", "What is {a} minus {b}?", "What's {a} - {b}?", "How much is {a} - {b}?", "{a} minus {b}"),
    *("How much is {a} minus {b}?", "Subtract {b} from {a}.", "Take {b} away from {a}.", "Calculate {a} - {b}."),
    *("Compute {a} - {b}.", "What do you get when you subtract {b} from {a}?", "Work out {a} - {b}."),
    "Solve {a} - {b}.",
    *("Can you subtract {b} from {a}?", "What is {a} take away {b}?", "Please subtract {b} from {a}."),
)
STORY_SUBTRACT_PHRASINGS = (
    "Tom has {a} apples and eats {b}. How many are left?",
    "There are {a} birds and {b} fly away. How many birds stay?",
    "I had {a} coins and spent {b}. How many coins do I have now?",
)


_TERSE = 8  # the number of short phrasings, which come first; they show many sums in few tokens
_TERSE_SHARE = 0.4


def _phrasing(phrasings: tuple[str, ...], rng: Random) -> str:
    return rng.choice(phrasings[:_TERSE] if rng.random() < _TERSE_SHARE else phrasings)


def _number(rng: Random) -> int:
    return rng.randrange(10) if rng.random() < 0.1 else rng.randrange(100)


def _key(name: str, a: int, b: int) -> str | None:
    return None if a < 10 and b < 10 else f"{name}:{a},{b}"


def add(rng: Random) -> Turn:
    a, b = _number(rng), _number(rng)
    question = _phrasing(ADD_PHRASINGS, rng).format(a=a, b=b)
    return Turn(question, str(a + b), _key("add", min(a, b), max(a, b)), match="number")


def subtract(rng: Random) -> Turn:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    phrasing = _phrasing(SUBTRACT_PHRASINGS, rng)
    if a >= b and rng.random() < 0.1:
        phrasing = rng.choice(STORY_SUBTRACT_PHRASINGS)
    return Turn(phrasing.format(a=a, b=b), str(a - b), _key("subtract", a, b), match="number")
