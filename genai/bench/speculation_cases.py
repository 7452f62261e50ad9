"""The cases of `genai bench speculation`: two replies that copy from the prompt, and two replies without repetition."""

from __future__ import annotations

import random

_CODE = '''def read_figures(path, separator=","):
    """The rows of a file, as lists of floats."""
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            rows.append([float(cell) for cell in line.split(separator)])
    return rows


def mean(values):
    """The arithmetic mean."""
    return sum(values) / len(values)


def columns(rows):
    """Rows become columns."""
    return [list(column) for column in zip(*rows)]


def report(path):
    """Print the mean of each column."""
    for number, column in enumerate(columns(read_figures(path))):
        print(f"column {number}: {mean(column):.3f}")
'''
_EDITED = _CODE.replace('separator=","', 'separator=";"').replace("mean", "average")

_ARTICLE = """\
The harbour of Lund was built in 1874 to ship timber to the south. For forty years it was the busiest port on the coast,
and more than three hundred families lived from the work on its quays. When the railway came, the timber went by train,
and the harbour fell silent. In 1963 the town council decided to fill in the old basin and build flats on it. A group of
fishermen protested, and the plan was given up after two years of debate. Today the harbour of Lund is a museum.
Visitors can see the old crane, which still works, and a ship that was built there in 1891. Last year more than fifty
thousand people came, most of them in summer, and the museum now employs twenty people from the town.
"""
_SUMMARY = """\
The harbour of Lund was built in 1874 to ship timber to the south, and for forty years it was the busiest port on the
coast. When the railway came, the harbour fell silent. In 1963 the town council decided to fill in the old basin, but a
group of fishermen protested, and the plan was given up. Today the harbour of Lund is a museum, where visitors can see
the old crane, which still works, and a ship that was built there in 1891. More than fifty thousand people came last
year, and the museum now employs twenty people from the town.
"""

_PROSE = """Nobody had warned Ingrid that autumn arrives early above the tree line. Her boots, bought cheaply in Oslo,
leaked; frost stiffened both laces overnight. She brewed tea using melted snow, ate dry biscuits, then studied an
unreliable map drawn by some optimistic uncle. Two passes led east. One looked steep but short, while its neighbour
wound lazily around frozen lakes toward a hut marked with red ink. Choosing quickly felt wise because clouds gathered.
Halfway up, hail began drumming against granite. Reindeer watched, unimpressed. By dusk, smoke rose from a chimney
below, promising soup, dry socks, perhaps even conversation.
"""


def _digits() -> str:
    """Return random digits. Pairs of digits recur, but do not predict the next digit."""
    rng = random.Random(0)
    return "".join(rng.choice("0123456789") for _ in range(400))


def built_in_cases() -> dict[str, tuple[str, str]]:
    """Return the prompts and the replies, by name."""
    return {
        "code editing": (f"Let cells be parted by ; and rename mean to average:\n\n{_CODE}\n", _EDITED),
        "summarising": (f"Summarise this text.\n\n{_ARTICLE}\n", _SUMMARY),
        "new prose": ("Begin a story that surprises me.\n", _PROSE),
        "random digits": ("Name random digits.\n", _digits()),
    }
