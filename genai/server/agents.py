"""Conventions of agents and chat pages that would make the prefix cache useless, or a chat slow.

The list of headers is documented in docs/reference/server.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Lines that agents put before the system prompt, and that change with each request. Claude Code sends its version, its
# entry point and a hash of the request, so that no request would share a prefix with another.
VOLATILE_HEADERS = ("x-anthropic-billing-header",)
_HEADER = re.compile(rf"({'|'.join(map(re.escape, VOLATILE_HEADERS))}):[^\n]*(?:\n+|\Z)")
# Open WebUI asks for titles, tags and follow-up questions in this form, after a reply. Its requests for search queries
# and its prompts with documents also begin with "### Task:", but the user waits for them.
_TASK = re.compile(r"### Task:\n(?:Generate|Suggest|Predict) ")
_RESULT = re.compile(r'\{ ?"(?:title|tags|follow_ups)":')
# The headers in which agents and chat pages name a conversation: OpenAI's SDK for agents and others, Codex CLI, Claude
# Code, Cline, opencode, Open WebUI.
SESSION_HEADERS = (
    "x-session-id", "session_id", "session-id", "x-claude-code-session-id", "x-task-id", "x-session-affinity",
    "x-opencode-session", "x-openwebui-chat-id",
)  # fmt: skip
_LONGEST_SESSION = 100
TASK_PRIORITY = -1
"""The priority of requests for titles and tags, below that of chats."""


def without_headers(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return messages without volatile headers at the beginning of system messages, and the names of the headers."""
    found: list[Mapping[str, Any]] = []
    removed: list[str] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") not in ("system", "developer"):
            found.append(message)
        elif isinstance(content, str):
            text = without_header(content, removed)
            if text or not content:
                found.append({**message, "content": text})
        elif isinstance(content, list):
            parts = [_part(part, removed) for part in content]
            kept = [part for part in parts if part is not None]
            if kept or not content:
                found.append({**message, "content": kept})
        else:
            found.append(message)
    return found, removed


def _part(part: Any, removed: list[str]) -> Any:
    """Return a part of a message's content without its header; None if nothing remains."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    text = without_header(part["text"], removed)
    return {**part, "text": text} if text or not part["text"] else None


def without_header(text: str, removed: list[str]) -> str:
    """Return a text without volatile headers at its beginning, and add their names to `removed`."""
    begin = 0
    while (header := _HEADER.match(text, begin)) is not None:
        removed.append(header[1])
        begin = header.end()
    return text[begin:]


def is_side_task(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a chat page asks for a title, tags or follow-up questions beside a chat."""
    (message,) = messages if len(messages) == 1 else ({},)
    content = message.get("content")
    return isinstance(content, str) and bool(_TASK.match(content)) and bool(_RESULT.search(content))


def session_name(headers: Mapping[str, str], prompt_cache_key: str | None) -> str | None:
    """Return the name that a client gives to a conversation; None if it gives none."""
    given = (prompt_cache_key, *(headers.get(name) for name in SESSION_HEADERS))
    return next((name[:_LONGEST_SESSION] for name in given if name), None)
