"""How byte-level tokenizers cut texts before they look for tokens: the expressions of well-known models.

They are written for the tokenizers library (Oniguruma); those who publish for other libraries may write them otherwise,
with the same meaning.
"""

from __future__ import annotations

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def modern(digits: str, contractions: str = f"{_CONTRACTIONS}|", letters: str = r"\p{L}", others: str = "") -> str:
    """Words with what stands before them, so many digits together, and runs of other characters."""
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n{others}]*|{SPACES}"
    )


def by_case(digits: str, contractions: str = "", others: str = "/", without: str = "") -> str:
    """The same, but words end where small letters are followed by large ones.

    Args:
        others: what may follow punctuation, beside line breaks.
        without: characters that are no letters of words here.
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
# Runs of spaces at the end of a text stay together, unlike in those above.
GPT4 = LLAMA3.removesuffix(SPACES) + r"\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
KIMI = r"\p{Han}+|" + by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?", "", r"&&[^\p{Han}]")
