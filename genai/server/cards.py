"""The properties of a model that clients look for in lists of models."""

from __future__ import annotations

from pathlib import Path

from ..errors import GenaiError
from ..text.chat_template import ChatTemplates
from ..text.parsing import detect, get_parser
from .serving import Server


def capabilities(server: Server) -> list[str]:
    """Return the abilities of the model: "completion", "chat", "tools", "thinking", "structured_output"."""
    try:
        template = server.llm.tokenizer.template_text(with_tools=True)
    except GenaiError:
        template = ""
    return _abilities(template)


def folder_capabilities(folder: Path) -> list[str]:
    """Return the abilities of a model that is not loaded, from its files."""
    try:
        return _abilities(ChatTemplates(folder).text() or "")
    except GenaiError:  # a load reports it
        return _abilities("")


def _abilities(template: str) -> list[str]:
    if not template:
        return ["completion"]
    parser, found = get_parser(detect(template)), ["completion", "chat"]
    if parser.calls is not None and "tools" in template:
        found.append("tools")
    if parser.reasoning is not None:
        found.append("thinking")
    return [*found, "structured_output"]
