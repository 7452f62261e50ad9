"""Weekdays and months: next, previous, n-th, and days or months later.

There are only 7 days and 12 months, so the split key is the exact question: phrasing, name and number together.
"""

from random import Random

from ..split import normal_form
from ..turn import Turn

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh"),
    *("eighth", "ninth", "tenth", "eleventh", "twelfth"),
)
NEXT = (
    *("Which {unit} comes after {x}?", "What {unit} comes after {x}?", "What is the {unit} after {x}?"),
    *("Which {unit} follows {x}?", "What comes after {x}?", "{unit} after {x}?", "Name the {unit} after {x}."),
)
PREVIOUS = (
    *("Which {unit} comes before {x}?", "What {unit} comes before {x}?", "What is the {unit} before {x}?"),
    *("Which {unit} is just before {x}?", "What comes before {x}?", "{unit} before {x}?"),
    "Name the {unit} before {x}.",
)
NTH = (
    *("What is the {n} {unit} of the {whole}?", "Which {unit} is the {n} of the {whole}?", "{n} {unit} of the {whole}"),
    *("Name the {n} {unit} of the {whole}.", "Tell me the {n} {unit} of the {whole}."),
)
LATER = (
    *("What {unit} is {n} {units} after {x}?", "Which {unit} is {n} {units} after {x}?", "{n} {units} after {x}?"),
    *("Today is {x}. Which {unit} is it in {n} {units}?", "If it is {x} now, what {unit} is it in {n} {units}?"),
)
EARLIER = (
    *("What {unit} is {n} {units} before {x}?", "Which {unit} is {n} {units} before {x}?", "{n} {units} before {x}?"),
    "Today is {x}. Which {unit} was it {n} {units} ago?",
)
MONTH_LENGTH = ("How many days does {x} have?", "How many days are in {x}?", "Number of days in {x}?", "days in {x}?")
MONTH_NUMBER = ("What number is the month {x}?", "Which month number is {x}?", "{x} is month number what?")
LISTS = {
    "Name the days of the week.": DAYS,
    "List the days of the week.": DAYS,
    "What are the days of the week?": DAYS,
    "Name the months of the year.": MONTHS,
    "List the months of the year.": MONTHS,
    "What are the months of the year?": MONTHS,
    "Name the days of the weekend.": DAYS[5:],
    "Which days are the weekend?": DAYS[5:],
}


def _turn(question: str, reply: str) -> Turn:
    question = question[0].upper() + question[1:]
    return Turn(question, reply, f"calendar:{normal_form(question)}")


def _shifted(rng: Random, names: tuple[str, ...], words: dict[str, str]) -> Turn:
    index = rng.randrange(len(names))
    amount = rng.randrange(1, 11 if len(names) == 7 else 7)
    later = rng.random() < 0.6
    unit = words["unit"] + ("" if amount == 1 else "s")
    phrasing = rng.choice(LATER if later else EARLIER)
    question = phrasing.format(n=amount, units=unit, unit=words["unit"], x=names[index])
    return _turn(question, names[(index + (amount if later else -amount)) % len(names)])


def calendar(rng: Random) -> Turn:
    use_days = rng.random() < 0.5
    names = DAYS if use_days else MONTHS
    words = {"unit": "day" if use_days else "month", "whole": "week" if use_days else "year"}
    index = rng.randrange(len(names))
    roll = rng.random()
    if roll < 0.12:
        return _turn(rng.choice(NEXT).format(x=names[index], **words), names[(index + 1) % len(names)])
    if roll < 0.24:
        return _turn(rng.choice(PREVIOUS).format(x=names[index], **words), names[index - 1])
    if roll < 0.34:
        return _turn(rng.choice(NTH).format(n=ORDINALS[index], **words), names[index])
    if roll < 0.8:
        return _shifted(rng, names, words)
    if roll < 0.95:
        month = rng.randrange(12)
        if rng.random() < 0.6:
            return _turn(rng.choice(MONTH_LENGTH).format(x=MONTHS[month]), str(LENGTHS[month]))
        return _turn(rng.choice(MONTH_NUMBER).format(x=MONTHS[month]), str(month + 1))
    question = rng.choice(tuple(LISTS))
    return Turn(question, ", ".join(LISTS[question]) + ".")
