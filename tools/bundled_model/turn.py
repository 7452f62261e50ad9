"""One question with its answer, and the small changes of surface that real users make."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .split import is_held_out


@dataclass(frozen=True)
class Turn:
    """A user message and the reply to it.

    key: what the held-out split is decided on (None: always training).
    expected: what evaluation looks for in the reply (default: the whole reply).
    match: "exact", "number" (last integer) or "contains".
    """

    question: str
    reply: str
    key: str | None = None
    expected: str | None = None
    match: str = "exact"


Sampler = Callable[[Random], Turn]


def draw(sampler: Sampler, rng: Random, held_out: bool = False) -> Turn:
    """Draws from `sampler` until the turn lies on the wanted side of the split."""
    for _ in range(10_000):
        turn = sampler(rng)
        if is_held_out(turn.key) == held_out:
            return turn
    raise ValueError(f"{sampler!r} gave no turn with held_out={held_out} in 10000 draws")


def vary_surface(text: str, rng: Random) -> str:
    """The same question as a hurried user would type it: lower case, no final mark, or with a "please"."""
    roll = rng.random()
    if roll < 0.62:
        return text
    if roll < 0.72:
        return text[0].lower() + text[1:]
    if roll < 0.80:
        return text.lower().rstrip("?.!")
    if roll < 0.88:
        return text.rstrip("?.!")
    if roll < 0.92:
        return "Please: " + text
    if roll < 0.96:
        return text.rstrip("?.!") + ", please."
    return "Hey Pebble, " + text[0].lower() + text[1:]
