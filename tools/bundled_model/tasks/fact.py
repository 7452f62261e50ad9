"""One thing that Pebble knows about the toolkit, and the words that ask for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """things: noun phrases ("What is ...?"). actions: verb phrases ("How do I ...?"). questions: whole sentences."""

    reply: str
    things: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
