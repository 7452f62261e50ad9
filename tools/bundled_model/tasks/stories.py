"""Short stories with a fixed cast, from a small grammar: opening, wish, trouble, help, ending."""

from random import Random

from ..turn import Turn

CAST = {
    "Mia": ("Mia", "she", "her", "a girl who liked to ask questions"),
    "Tom": ("Tom", "he", "his", "a boy who liked to build things"),
    "Luna": ("Luna", "she", "her", "a grey cat with soft paws"),
    "Rex": ("Rex", "he", "his", "a brown dog with a happy tail"),
    "Grandma Rose": ("Grandma Rose", "she", "her", "a kind old woman with a big garden"),
    "Hoot": ("Hoot", "he", "his", "a wise owl who lived in the old tree"),
}
ASKS = (
    *("Tell me a story about {who}.", "Write a short story about {who}.", "Can you tell me a story about {who}?"),
    *("I want a story about {who}.", "Please tell a little story about {who}.", "story about {who}"),
    *("Make up a story about {who}.", "Tell a bedtime story about {who}.", "A story with {who}, please."),
)
ASKS_ANY = (
    *("Tell me a story.", "Write a short story.", "Can you tell me a story?", "A story, please."),
    "Tell a bedtime story.",
)
OPENINGS = (
    "One {time}, {A} went to {place} with {B}.",
    "It was a {weather} {time}, and {A} and {B} were in {place}.",
    "{A} was {about}. One {time} {he} met {B} in {place}.",
    "On a {weather} {time}, {A} asked {B} to come to {place}.",
)
WISHES = (
    "They wanted to find {thing}.",
    "{A} had lost {thing} and wanted it back.",
    "{B} had heard about {thing}, and {A} wanted to see it.",
    "They had a plan: to make {thing} for {C}.",
)
TROUBLES = (
    "But the way was dark, and {A} was a little afraid.",
    "But soon it began to rain, and the path was full of mud.",
    "But a big stone lay in the way, and they could not move it.",
    "They looked here and there, but they found nothing.",
    "Then the wind took {his} hat and carried it up into a tree.",
)
THOUGHTS = (
    '"What shall we do now?" asked {B}.',
    '"Do not give up," said {B}. "We can try again."',
    '"I have an idea," said {A}, "but I need your help."',
    '"Let us rest first," said {B}, and they sat down.',
)
HELPS = (
    "Then {C} came by and showed them a better way.",
    "They called {C}, who knew just what to do.",
    "{C} heard them and came to help at once.",
    "Together with {C} they tried once more, slowly and with care.",
)
TURNS = (
    "Under a leaf, right in front of them, was {thing}.",
    "Step by step it worked, and there was {thing}.",
    "They laughed, because {thing} had been close to them all the time.",
    "And so they got {thing} in the end.",
)
ENDINGS = (
    "They all went home for {food}, tired and happy.",
    "That evening they ate {food} and talked about the day.",
    '"Thank you," said {A}. "It is good to have friends."',
    "{A} smiled all the way home, and {B} did too.",
    "And {A} learned that a kind word opens many doors.",
)
SLOTS = {
    "time": ("morning", "day", "evening", "afternoon", "night"),
    "weather": ("warm", "cold", "quiet", "windy", "sunny"),
    "place": ("the garden", "the forest", "the old house", "the river", "the little town", "the green hill"),
    "thing": (
        *("a golden key", "a lost red ball", "a map of the stars", "a small blue boat", "a music box"),
        *("a basket of apples", "a paper kite", "a silver bell", "a book of songs", "a round white stone"),
    ),
    "food": ("apple cake", "warm soup", "bread and honey", "sweet tea and cake"),
}


def _cast(rng: Random, wanted: int) -> list[str]:
    names = list(CAST)
    rng.shuffle(names)
    return names[:wanted]


def _tell(rng: Random, asked: list[str]) -> str:
    others = [name for name in _cast(rng, len(CAST)) if name not in asked]
    names = (asked + others)[:3]
    _, he, his, about = CAST[names[0]]
    slots = {slot: rng.choice(options) for slot, options in SLOTS.items()}
    slots |= {"A": names[0], "B": names[1], "C": names[2], "he": he, "his": his, "about": about}
    parts = [OPENINGS, WISHES, TROUBLES, THOUGHTS, HELPS, TURNS, ENDINGS]
    if rng.random() < 0.25:
        parts.remove(THOUGHTS)
    return " ".join(rng.choice(part).format(**slots) for part in parts)


def story(rng: Random) -> Turn:
    if rng.random() < 0.15:
        return Turn(rng.choice(ASKS_ANY), _tell(rng, []))
    asked = _cast(rng, rng.choice((1, 2, 2, 3)))
    who = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + " and " + asked[-1]
    return Turn(rng.choice(ASKS).format(who=who), _tell(rng, asked))
