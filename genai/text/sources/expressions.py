"""The regular expressions for pre-tokenization, with which byte-level tokenizers of well-known models split texts.

The expressions are written for the tokenizers library (Oniguruma). Versions for other libraries may look different, but
have the same meaning.
"""

from __future__ import annotations

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def modern(digits: str, contractions: str = f"{_CONTRACTIONS}|", letters: str = r"\p{L}", others: str = "") -> str:
    """Return an expression for words with a preceding character, groups of digits, and runs of other characters.

    Args:
        digits: expression for a group of digits.
        contractions: alternative for contractions, with a trailing |.
        letters: characters of words.
        others: characters that may follow punctuation, in addition to line breaks.
    """
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n{others}]*|{SPACES}"
    )


def by_case(digits: str, contractions: str = "", others: str = "/", without: str = "") -> str:
    """Return the same expression, with word boundaries where an upper-case letter follows a lower-case one.

    Args:
        digits: expression for a group of digits.
        contractions: expression for contractions at the end of a word.
        others: characters that may follow punctuation, in addition to line breaks.
        without: part of a character class that excludes letters from words.
    """
    large = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{large}*{small}+{contractions}|{first}{large}+{small}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n{others}]*|{SPACES}"
    )


LLAMA3, QWEN2 = modern(r"\p{N}{1,3}"), modern(r"\p{N}")
TEKKEN = by_case(r"\p{N}")
GPT4O = by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
# Unlike with the expressions above, runs of spaces at the end of a text stay together.
GPT4 = LLAMA3.removesuffix(SPACES) + r"\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
KIMI = r"\p{Han}+|" + by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?", "", r"&&[^\p{Han}]")
