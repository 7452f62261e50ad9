"""Questions about the toolkit: every fact in many phrasings, some of which are held out."""

from functools import cache
from random import Random

from ..split import is_held_out, normal_form
from ..turn import Turn
from .fact import Fact
from .facts import FACTS

THING = (
    *("What is {x}?", "What's {x}?", "Explain {x}.", "Tell me about {x}.", "What do you know about {x}?", "{x}?"),
    *("Can you explain {x}?", "Describe {x}.", "Define {x}.", "Please explain {x}.", "I want to know about {x}."),
    *("In short, what is {x}?", "Could you tell me what {x} is?", "What can you tell me about {x}?"),
)
PLURAL_THING = tuple(
    text.replace("What is {x}", "What are {x}").replace("What's {x}", "What are {x}") for text in THING
)
ACTION = (
    *("How do I {x}?", "How can I {x}?", "How to {x}?", "I want to {x}.", "Show me how to {x}.", "Tell me how to {x}."),
    *("What do I type to {x}?", "What should I do to {x}?", "How would I {x}?", "Can you help me {x}?", "{x}"),
    *("I would like to {x}.", "Is there a way to {x}?", "What is the way to {x}?", "Explain how to {x}."),
)
QUESTION = ("{x}", "Tell me: {x}", "I have a question: {x}", "Please say: {x}", "Quick question: {x}", "I wonder: {x}")


def _is_plural(thing: str) -> bool:
    return thing.endswith("s") and not thing.startswith(("a ", "an ", "the ", "genai", "one "))


def _phrase(template: str, words: str) -> str:
    text = template.format(x=words)
    if words.startswith(("genai", "--", "import")):
        return text
    return text[0].upper() + text[1:]


def _all_phrasings(fact: Fact) -> list[str]:
    texts = [
        _phrase(template, thing) for thing in fact.things for template in (PLURAL_THING if _is_plural(thing) else THING)
    ]
    texts += [_phrase(template, action) for action in fact.actions for template in ACTION]
    return texts + [template.format(x=question) for question in fact.questions for template in QUESTION]


def _key(fact_index: int, question: str) -> str:
    return f"toolkit:{fact_index},{normal_form(question)}"


@cache
def phrasings(fact_index: int, held_out: bool) -> tuple[str, ...]:
    """Return the fact's phrasings on one side of the split: at least one, and none with equal normal forms."""
    chosen: dict[str, str] = {}
    for question in _all_phrasings(FACTS[fact_index]):
        if is_held_out(_key(fact_index, question)) == held_out:
            chosen.setdefault(normal_form(question), question)
    if not chosen:
        raise ValueError(f"fact {fact_index} ({FACTS[fact_index].reply!r}) has no phrasing with held_out={held_out}")
    return tuple(chosen.values())


def toolkit(rng: Random) -> Turn:
    """Return a question from either side of the split; for any fact, one question in ten is held out."""
    index = rng.randrange(len(FACTS))
    question = rng.choice(phrasings(index, held_out=rng.random() < 0.1))
    return Turn(question, FACTS[index].reply, _key(index, question))
