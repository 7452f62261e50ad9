"""The tasks that Pebble learns: one module per kind, each with functions from a random source to a `Turn`.

This package does not depend on tokens or training. MIXTURE lists the share of each task among single turns.
"""

from ..turn import Sampler
from .arithmetic import add, subtract
from .calendar import calendar
from .comparison import compare
from .counting import count
from .small_talk import chat, out_of_range, unknown
from .stories import story
from .toolkit import toolkit
from .words import first_letter, last_letter, letter_count, reverse, sort, spell

MIXTURE: dict[str, tuple[Sampler, float]] = {
    "add": (add, 14),
    "subtract": (subtract, 16),
    "compare": (compare, 13),
    "count": (count, 7),
    "calendar": (calendar, 26),
    "spell": (spell, 8),
    "reverse": (reverse, 9),
    "first_letter": (first_letter, 3),
    "last_letter": (last_letter, 3),
    "letter_count": (letter_count, 4),
    "sort": (sort, 18),
    "toolkit": (toolkit, 11),
    "chat": (chat, 3),
    "unknown": (unknown, 1.5),
    "out_of_range": (out_of_range, 1.5),
    "story": (story, 2.5),
}
