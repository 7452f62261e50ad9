"""One question with its reply, and small variations in the question's form, as real users type them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .split import is_held_out


@dataclass(frozen=True)
class Turn:
    """A user message and the reply to it.

    Attributes:
        question: the message.
        reply: the reply.
        key: key of the held-out split; None for a turn that is always in the training set.
        expected: text that evaluation looks for in the reply; None for the whole reply.
        match: "exact", "number" (last integer) or "contains".
    """

    question: str
    reply: str
    key: str | None = None
    expected: str | None = None
    match: str = "exact"


Sampler = Callable[[Random], Turn]


def draw(sampler: Sampler, rng: Random, held_out: bool = False) -> Turn:
    """Draw from `sampler` until a turn is on the requested side of the split."""
    for _ in range(10_000):
        turn = sampler(rng)
        if is_held_out(turn.key) == held_out:
            return turn
    raise ValueError(f"{sampler!r} returned no turn with held_out={held_out} in 10000 draws")


def vary_surface(text: str, rng: Random) -> str:
    """Return the question as a hurried user would type it: lower case, no final mark, or with a "please"."""
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
