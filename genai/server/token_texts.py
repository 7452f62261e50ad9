"""The texts and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ..engine.sampling.batch import TokenLogprob
from ..errors import TokenizerError
from ..llm.llm import LLM
from ..text.vocabulary import token_bytes

_LOWEST = -9999.0
"""The number that OpenAI's API writes for very small log-probabilities, because JSON has no infinity."""


class TokenTexts:
    """The texts of single tokens in the middle of a text.

    Args:
        llm: the model.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """The bytes of each token; None if they depend on adjacent tokens."""
        try:
            return [bytes(one) for one in token_bytes(self._llm.tokenizer).tokens]
        except TokenizerError:
            return None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        if self._bytes is None:
            return self._llm.tokenizer.decode_each([token])[0].encode()
        return self._bytes[token] if token < len(self._bytes) else b""

    def text(self, token: int) -> str:
        """Return the text of a token; bytes that are part of a character become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def name(self, token: int) -> str:
        """Return the text of a token, or its bytes in the form of OpenAI's older API if they are not UTF-8."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        """Return the log-probability of a token in the form of OpenAI's chat API."""
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        found = self.bytes_of(token)
        return {"token": found.decode("utf-8", "replace"), "logprob": number(logprob), "bytes": list(found)}


def number(logprob: float) -> float:
    """Return a log-probability as a JSON number."""
    return max(logprob, _LOWEST)
