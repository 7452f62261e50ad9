"""The properties of a model that clients look for in lists of models."""

from __future__ import annotations

from ..errors import GenaiError
from .serving import Server


def capabilities(server: Server) -> list[str]:
    """Return the abilities of the model: "completion", "chat", "tools", "thinking", "structured_output"."""
    found = ["completion"]
    try:
        template = server.llm.tokenizer.template_text(with_tools=True)
    except GenaiError:
        return found
    found.append("chat")
    if server.llm.parser.calls is not None and "tools" in template:
        found.append("tools")
    if server.llm.parser.reasoning is not None:
        found.append("thinking")
    return [*found, "structured_output"]
