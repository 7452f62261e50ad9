"""Comparison of numbers: the bigger or smaller of two or three, equality of two, even or odd."""

from random import Random

from ..turn import Turn

BIGGER = (
    *("Which is bigger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is larger, {a} or {b}?"),
    *("Which is greater, {a} or {b}?", "bigger: {a} or {b}", "Is {a} or {b} bigger?", "max of {a} and {b}"),
    *("What is the larger of {a} and {b}?", "Pick the bigger number: {a}, {b}.", "Which one is more, {a} or {b}?"),
)
SMALLER = (
    *("Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?", "What is less, {a} or {b}?"),
    *("Which is the smallest, {a} or {b}?", "smaller: {a} or {b}", "Is {a} or {b} smaller?", "min of {a} and {b}"),
    *("What is the smaller of {a} and {b}?", "Pick the smaller number: {a}, {b}.", "Which one is less, {a} or {b}?"),
)
YES_NO = {
    "bigger": ("Is {a} bigger than {b}?", "Is {a} greater than {b}?", "Is {a} more than {b}?", "{a} > {b}?"),
    "smaller": ("Is {a} smaller than {b}?", "Is {a} less than {b}?", "{a} < {b}?"),
    "equal": ("Is {a} equal to {b}?", "Are {a} and {b} equal?", "Is {a} the same as {b}?", "{a} = {b}?"),
}
PARITY = ("Is {a} even or odd?", "Is {a} odd or even?", "Even or odd: {a}?", "{a}: even or odd?")


def _pair(rng: Random) -> tuple[int, int]:
    """Return two numbers; close pairs and equal pairs are hard, so they are frequent."""
    a = rng.randrange(100)
    roll = rng.random()
    if roll < 0.1:
        return a, a
    if roll < 0.35:
        return a, min(99, max(0, a + rng.choice((-3, -2, -1, 1, 2, 3))))
    if roll < 0.5:
        return a, 10 * (a // 10) + rng.randrange(10)
    return a, rng.randrange(100)


def compare(rng: Random) -> Turn:
    roll = rng.random()
    if roll < 0.1:
        a = rng.randrange(100)
        return Turn(rng.choice(PARITY).format(a=a), "odd" if a % 2 else "even")
    a, b = _pair(rng)
    key = f"compare:{min(a, b)},{max(a, b)}"
    if roll < 0.4:
        relation = rng.choice(tuple(YES_NO))
        truth = {"bigger": a > b, "smaller": a < b, "equal": a == b}[relation]
        return Turn(rng.choice(YES_NO[relation]).format(a=a, b=b), "Yes." if truth else "No.", key)
    phrasing, reply = (rng.choice(BIGGER), max(a, b)) if roll < 0.7 else (rng.choice(SMALLER), min(a, b))
    if a == b:
        return Turn(phrasing.format(a=a, b=b), "They are equal.", key)
    return Turn(phrasing.format(a=a, b=b), str(reply), key, match="number")
