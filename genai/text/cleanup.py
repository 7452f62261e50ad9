"""The clean-up of decoded English that tokenizer_config.json may ask for, for a whole text and for a growing one."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RULES = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_LONGEST = 4

# A rule begins with a space, and no rule but " ' " holds another. So no rule, nor one that acts on the result of
# another, reaches across the end of a word in front of a space, unless the word ends like a rule goes on behind it.
_CERTAIN = re.compile(r".*[^ 'n](?= )", re.DOTALL)


def clean_up(text: str) -> str:
    """The text without the spaces English does not want; the rules act one after the other, as in transformers."""
    for old, new in _RULES:
        text = text.replace(old, new)
    return text


class CleanUp:
    """A stage of the detokenizer: cleans up what no rule can reach any more, and holds the rest back."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, token: str) -> Iterable[str]:
        text = self._held + token
        if len(text) >= _LONGEST and " " not in text[-_LONGEST:]:
            end = len(text)
        else:
            certain = _CERTAIN.match(text)
            end = certain.end() if certain else 0
        self._held = text[end:]
        return [clean_up(text[:end])]

    def end(self) -> Iterable[str]:
        held, self._held = self._held, ""
        return [clean_up(held)]
