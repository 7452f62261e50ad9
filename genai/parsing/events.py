"""What a reply is split into. The `raw` of all events, in order, is the reply as it was generated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Text:
    """A piece of the answer.

    Attributes:
        text: the piece.
        problem: why this text, which looked like a tool call, is none; "" for ordinary text.
    """

    text: str
    problem: str = ""

    @property
    def raw(self) -> str:
        """The generated text behind this event."""
        return self.text


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str

    @property
    def raw(self) -> str:
        """The generated text behind this event."""
        return self.text


@dataclass(frozen=True)
class ToolCall:
    """One complete call of a tool.

    Attributes:
        name: the tool.
        arguments: the decoded JSON object; a string only for a tool that takes plain text (gpt-oss's own `python`).
        raw: the generated text behind this event. Of several calls in one JSON array, the first has all of it.
        id: the id given by the model, or None.
        index: 0 for the first call of the reply.
    """

    name: str
    arguments: dict[str, Any] | str
    raw: str
    id: str | None = None
    index: int = 0

    @property
    def arguments_text(self) -> str:
        """The arguments as text, as OpenAI-style APIs carry them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Marker:
    """Text that only marks where spans begin and end, with the line breaks beside it: not for the reader."""

    raw: str


@dataclass(frozen=True)
class End:
    """The reply is over.

    Attributes:
        in_reasoning: it ended before the reasoning was closed, so the answer is missing.
    """

    in_reasoning: bool = False

    @property
    def raw(self) -> str:
        """Nothing was generated for this event."""
        return ""


Event: TypeAlias = Text | Reasoning | ToolCall | Marker | End
