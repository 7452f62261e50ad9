"""A conversation with a model: messages, the template that renders them, and streamed replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import InputError
from .generator import Generator, GeneratorParams
from .reply import ReplyStats, stream_reply

if TYPE_CHECKING:
    from .model import Model
    from .tokenizer import Tokenizer


class ChatSession:
    """Keeps the messages of a chat and the cache behind them, so that each turn computes only what is new.

    Args:
        model: the model.
        tokenizer: its tokenizer, with a chat template.
        system: a system message, or None.
        max_tokens: most tokens per reply; None = up to the context's end.
        search_options: see `genai.search.SEARCH_OPTIONS`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        **search_options: Any,
    ) -> None:
        params = GeneratorParams(model)
        params.set_search_options(**search_options)
        self._generator = Generator(model, params)
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.stats = ReplyStats()
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def prompt(self) -> str:
        """The exact text that the model would be asked to continue now."""
        return self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)

    def send(self, text: str) -> Iterator[str]:
        """Add a user message and stream the reply. If the caller stops early, the partial reply is kept.

        Raises:
            InputError: the text is empty.
            ContextOverflowError: the conversation does not fit; the message is then not kept.
        """
        if not text.strip():
            raise InputError("the message is empty", "there is nothing to answer", "write something")
        self.messages.append({"role": "user", "content": text})
        self.stats = ReplyStats()
        pieces: list[str] = []
        try:
            prompt = self._tokenizer.encode(self.prompt()).tolist()
            for piece in stream_reply(self._generator, self._tokenizer, prompt, self.stats, self._max_tokens):
                pieces.append(piece)
                yield piece
        finally:
            if self.stats.prompt_tokens:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def close(self) -> None:
        """Give the cache back."""
        self._generator.close()
