"""Whole conversations for training: one task or several, recall of earlier turns, and sometimes a system message."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .split import is_held_out
from .tasks import MIXTURE
from .tasks.small_talk import tell_and_ask_favourite, tell_and_ask_name, untold
from .turn import Turn, draw, vary_surface

PairSampler = Callable[[Random], tuple[Turn, Turn]]

SYSTEM_MESSAGES = (
    "You are Pebble.",
    "You are Pebble, a small helpful assistant.",
    "You are a helpful assistant.",
    "Be brief.",
    "You are a kind assistant. Answer in one sentence.",
)
_NAMES = tuple(MIXTURE)
_WEIGHTS = tuple(weight for _, weight in MIXTURE.values())


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        pairs = [
            ({"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.reply})
            for turn in self.turns
        ]
        return system + [message for pair in pairs for message in pair]


def _single(rng: Random) -> Turn:
    name = rng.choices(_NAMES, _WEIGHTS)[0]
    return draw(MIXTURE[name][0], rng)


def draw_pair(sampler: PairSampler, rng: Random, held_out: bool = False) -> tuple[Turn, Turn]:
    """Draw from one side of the split a statement to remember and the question about it: (told, asked)."""
    while True:
        told, asked = sampler(rng)
        if is_held_out(asked.key) == held_out:
            return told, asked


def _with_recall(rng: Random, turns: list[Turn]) -> list[Turn]:
    """Insert a statement early and the question about it later; sometimes insert both kinds of pairs."""
    first = draw_pair(tell_and_ask_name, rng)
    second = draw_pair(tell_and_ask_favourite, rng)
    pairs = [first, second] if rng.random() < 0.4 else [rng.choice((first, second))]
    if len(pairs) == 1 and rng.random() < 0.15:
        return [*turns, untold(rng)] if rng.random() < 0.5 else [untold(rng), *turns]
    for told, asked in pairs:
        start = rng.randrange(0, min(2, len(turns)) + 1)
        turns.insert(start, told)
        turns.insert(rng.randrange(start + 1, len(turns) + 1), asked)
    return turns


def _varied(turn: Turn, rng: Random) -> Turn:
    return Turn(vary_surface(turn.question, rng), turn.reply, turn.key, turn.expected, turn.match)


def conversation(rng: Random, num_turns: int) -> Conversation:
    """Return a conversation of about `num_turns` turns, all from the training side of the split."""
    turns = [_single(rng) for _ in range(num_turns)]
    if num_turns == 1 and rng.random() < 0.02:
        turns = [untold(rng)]
    elif num_turns > 1 and rng.random() < 0.5:
        turns = _with_recall(rng, turns)
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.15 else None
    return Conversation(tuple(_varied(turn, rng) for turn in turns), system)


def short_conversation(rng: Random) -> Conversation:
    """Return a conversation, in most cases of one question, sometimes of a few."""
    return conversation(rng, rng.choices((1, 2, 3, 4, 6), (62, 12, 10, 8, 8))[0])


def long_conversation(rng: Random) -> Conversation:
    """Return a conversation with enough turns to fill most of the context."""
    return conversation(rng, rng.randrange(10, 41))
