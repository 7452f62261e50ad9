"""Word tasks: spell, reverse, first letter, last letter, number of letters, sort words or numbers.

Letters are written `c-a-t`. A word is reversed in steps (`c-a-t, t-a-c, tac`): a model of this size sees pieces of
words, not letters. The steps let it convert pieces to letters, reverse them, and join them. Invented words (two halves
of real words, or syllables) teach the letters of every piece; their key is also the word.
"""

from collections.abc import Callable
from random import Random

from ..turn import Turn
from .word_list import COMMON, RARE

SPELL = (
    *("Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "spell {w}", "Can you spell {w}?", 'Spell "{w}".'),
    *("Spell out {w}.", "What are the letters of {w}?", "Write {w} letter by letter.", 'How is "{w}" spelled?'),
)
REVERSE = (
    *("Reverse the word {w}.", "Reverse {w}.", "reverse {w}", "Write {w} backwards.", "Spell {w} backwards."),
    *("What is {w} backwards?", "What is {w} reversed?", 'Reverse "{w}".', "Say {w} backwards.", "{w} backwards?"),
)
FIRST = (
    *("What is the first letter of {w}?", "First letter of {w}?", "Which letter does {w} start with?"),
    *("What letter does {w} begin with?", 'What is the first letter of "{w}"?', "Tell me the first letter of {w}."),
)
LAST = (
    *("What is the last letter of {w}?", "Last letter of {w}?", "Which letter does {w} end with?"),
    *("What letter does {w} end in?", 'What is the last letter of "{w}"?', "Tell me the last letter of {w}."),
)
LETTERS = (
    *("How many letters are in {w}?", "How many letters does {w} have?", "Count the letters in {w}."),
    *("How long is the word {w}?", 'How many letters are in "{w}"?', "number of letters in {w}"),
)
SORT_WORDS = (
    *("Sort these words: {items}.", "Sort alphabetically: {items}.", "Put these words in order: {items}."),
    *("Put {items} in alphabetical order.", "sort {items}", "Sort the words {items}."),
)
SORT_NUMBERS = (
    *("Sort these numbers: {items}.", "Sort {items}.", "sort {items}", "Put these numbers in order: {items}."),
    *("Sort from small to large: {items}.", "Order the numbers {items}."),
)
_ONSETS = (*"bcdfghjklmnprstvwyz", *"bl br ch cl cr dr fl gr pl sh sl st th tr".split(), "")
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ee", "oa", "oo", "ou")
_CODAS = ("", "", "", *"bdgklmnprstx", "ck", "ll", "nd", "ng", "nt", "st")


def made_up_word(rng: Random) -> str:
    """Return three to nine letters: the start of one real word and the end of another, or syllables."""
    if rng.random() < 0.6:
        left, right = rng.choice(RARE), rng.choice(RARE)
        word = left[: rng.randrange(1, len(left))] + right[rng.randrange(1, len(right)) :]
    else:
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3)))
        )
    return word if 3 <= len(word) <= 9 else made_up_word(rng)


def _word(rng: Random) -> tuple[str, str | None]:
    """Return a word and its key. Held-out turns use RARE words: see `held_out.py`."""
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(COMMON), None
    word = rng.choice(RARE) if roll < 0.55 else made_up_word(rng)
    return word, f"word:{word}"


def letters_of(word: str) -> str:
    return "-".join(word)


def _word_turn(phrasings: tuple[str, ...], answer: Callable[[str], str]) -> Callable[[Random], Turn]:
    def sample(rng: Random) -> Turn:
        word, key = _word(rng)
        return Turn(rng.choice(phrasings).format(w=word), answer(word), key)

    return sample


spell = _word_turn(SPELL, letters_of)
first_letter = _word_turn(FIRST, lambda word: word[0])
last_letter = _word_turn(LAST, lambda word: word[-1])


def letter_count(rng: Random) -> Turn:
    word, key = _word(rng)
    reply = f"{letters_of(word)}: {len(word)}"
    return Turn(rng.choice(LETTERS).format(w=word), reply, key, expected=str(len(word)), match="number")


def reverse(rng: Random) -> Turn:
    word, key = _word(rng)
    backwards = word[::-1]
    reply = f"{letters_of(word)}, {letters_of(backwards)}, {backwards}"
    return Turn(rng.choice(REVERSE).format(w=word), reply, key, expected=backwards, match="contains")


def sort(rng: Random) -> Turn:
    """Return a question to sort three or four words, or three to five numbers. The key is the set of items."""
    if rng.random() < 0.5:
        numbers = rng.sample(range(100), rng.choice((3, 3, 4, 5)))
        items = ", ".join(map(str, numbers))
        reply = ", ".join(map(str, sorted(numbers)))
        return Turn(rng.choice(SORT_NUMBERS).format(items=items), reply, f"sort:{reply}")
    words = rng.sample(RARE, rng.choice((2, 3, 3, 4)))
    reply = ", ".join(sorted(words))
    return Turn(rng.choice(SORT_WORDS).format(items=", ".join(words)), reply, f"sort:{reply}")
