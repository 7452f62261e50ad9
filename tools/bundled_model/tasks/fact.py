"""A fact about the toolkit that Pebble learns, with the phrases that ask for the fact."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A fact. things: noun phrases ("What is ...?"). actions: verb phrases ("How do I ...?"). questions: sentences."""

    reply: str
    things: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
