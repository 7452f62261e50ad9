"""Counting up, down and in steps; numbers before, after or between others."""

from random import Random

from ..turn import Turn

UP = ("Count from {a} to {b}.", "count {a} to {b}", "Count up from {a} to {b}.", "List the numbers from {a} to {b}.")
DOWN = ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "count down {a} to {b}")
STEPS = ("Count from {a} to {b} by {n}.", "Count by {n} from {a} to {b}.", "count {a} to {b} by {n}")
AFTER = ("What number comes after {a}?", "Which number follows {a}?", "What comes after {a}?", "next number after {a}")
BEFORE = ("What number comes before {a}?", "Which number is just before {a}?", "What comes before {a}?")
BETWEEN = ("Which number is between {a} and {b}?", "What number is between {a} and {b}?", "between {a} and {b}?")


def _list(numbers: range) -> str:
    return ", ".join(str(number) for number in numbers)


def _sequence(rng: Random) -> Turn:
    kind = rng.choice(("up", "up", "down", "steps"))
    if kind == "steps":
        step = rng.choice((2, 2, 3, 5, 10))
        start = rng.randrange(0, 60)
        numbers = range(start, start + step * rng.randrange(2, 7) + 1, step)
        question = rng.choice(STEPS).format(a=start, b=numbers[-1], n=step)
        return Turn(question, _list(numbers), f"count:{start},{numbers[-1]},{step}")
    length = rng.randrange(3, 13)
    low = 1 if rng.random() < 0.2 else rng.randrange(0, 99 - length)
    high = low + length - 1
    if kind == "up":
        return Turn(rng.choice(UP).format(a=low, b=high), _list(range(low, high + 1)), f"count:{low},{high},1")
    return Turn(rng.choice(DOWN).format(a=high, b=low), _list(range(high, low - 1, -1)), f"count:{high},{low},-1")


def count(rng: Random) -> Turn:
    roll = rng.random()
    if roll < 0.6:
        return _sequence(rng)
    a = rng.randrange(1, 99)
    if roll < 0.75:
        return Turn(rng.choice(AFTER).format(a=a), str(a + 1), f"after:{a}", match="number")
    if roll < 0.9:
        return Turn(rng.choice(BEFORE).format(a=a), str(a - 1), f"before:{a}", match="number")
    return Turn(rng.choice(BETWEEN).format(a=a - 1, b=a + 1), str(a), f"between:{a}", match="number")
