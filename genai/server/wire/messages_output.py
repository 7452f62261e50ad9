"""Replies of Anthropic's messages API, whole and streamed, and its errors."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import ErrorReply
from ..events import Event, Finish, Logprobs, Reasoning, Text, TokenCounts, ToolCall
from ..replies import error_reply
from ..serving import Server
from ..sse import frame
from .messages_input import MessagesRequest

SIGNATURE = "unsigned"
"""The signature of thinking blocks. Clients send it back; some drop blocks without one."""


class MessageEncoder:
    """Writes the events of one turn as blocks of Anthropic's messages API.

    Args:
        server: the server.
        request: the request.
    """

    def __init__(self, server: Server, request: MessagesRequest) -> None:
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": request.model or server.name,
        }
        self._max_tokens = request.max_tokens
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def begin(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        """Return the first events of a stream."""
        usage = _usage(TokenCounts(prompt_tokens, cached_tokens, 0))
        message = {**self._head, "content": [], **self._end, "usage": usage}
        return _frame("message_start", message=message) + _frame("ping")

    def frames(self, events: Sequence[Event]) -> bytes:
        """Add events to the reply, and return the events of the stream for them."""
        return b"".join(found for event in events for found in self._frames(event))

    def _frames(self, event: Event) -> list[bytes]:
        if isinstance(event, Text):
            return [*self._opened("text", {"text": ""}), self._added("text", "text_delta", event.text)]
        if isinstance(event, Reasoning):
            block = {"thinking": "", "signature": ""}
            return [*self._opened("thinking", block), self._added("thinking", "thinking_delta", event.text)]
        if isinstance(event, ToolCall):
            closed = self._closed()
            return closed + self._opened("tool_use", {"id": event.id, "name": event.name, "input": {}})
        if isinstance(event, Finish):
            self._end = self._end_of(event)
            return self._closed()
        if isinstance(event, Logprobs):
            return []
        self._arguments += event.text
        return [self._delta({"type": "input_json_delta", "partial_json": event.text})]

    def _opened(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Begin a block, unless the last block is open and of this kind."""
        if self._is_open and self._content[-1]["type"] == kind:
            return []
        closed = self._closed()
        self._is_open = True
        self._content.append({"type": kind, **block})
        return [*closed, _frame("content_block_start", index=self._index, content_block=self._content[-1])]

    def _closed(self) -> list[bytes]:
        """End the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        block, found = self._content[-1], []
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            found.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        elif block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
            self._arguments = ""
        return [*found, _frame("content_block_stop", index=self._index)]

    def _added(self, name: str, kind: str, text: str) -> bytes:
        self._content[-1][name] += text
        return self._delta({"type": kind, name: text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame("content_block_delta", index=self._index, delta=delta)

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _end_of(self, end: Finish) -> dict[str, Any]:
        """Return the fields that describe the end of the reply. There is no reason for a timeout: it is max_tokens."""
        completion, sequence = end.completion, None
        if completion.finish_reason == "stop" and end.has_calls:
            reason = "tool_use"
        elif completion.finish_reason == "stop":
            sequence = completion.stopped_by if isinstance(completion.stopped_by, str) else None
            reason = "end_turn" if sequence is None else "stop_sequence"
        elif completion.finish_reason == "timeout" or len(completion.token_ids) == self._max_tokens:
            reason = "max_tokens"
        else:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def end(self, counts: TokenCounts) -> bytes:
        """Return the last events of a stream."""
        return _frame("message_delta", delta=self._end, usage=_usage(counts)) + _frame("message_stop")

    def whole(self, counts: TokenCounts) -> dict[str, Any]:
        """Return the body of a whole reply."""
        return {**self._head, "content": self._content, **self._end, "usage": _usage(counts)}


def _frame(kind: str, **fields: Any) -> bytes:
    return frame({"type": kind, **fields}, kind)


def _usage(counts: TokenCounts) -> dict[str, int]:
    """Return token counts. As in Anthropic's API, input_tokens excludes the cached tokens."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
    }


def _input(arguments: str) -> dict[str, Any]:
    """Return the input of a tool. Tools that take plain text have the field "input"."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        found = arguments
    return found if isinstance(found, dict) else {"input": found}


# --- errors --------------------------------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The names of fields in OpenAI's chat API, and those of this API.
_FIELDS = {"response_format": "output_config.format"}
_TOKENS = re.compile(r"has (more than )?(\d+) tokens")
_CONTEXT = re.compile(r"maximum context length is (\d+) tokens")


def error_body(reply: ErrorReply) -> dict[str, Any]:
    """Return an error in the form of Anthropic's API."""
    message = reply.message
    for name, own in _FIELDS.items():
        message = message.replace(name, own)
    if reply.code == "context_length_exceeded":
        # Agents shorten their conversation if an error has these words.
        tokens, limit = _TOKENS.search(message), _CONTEXT.search(message)
        numbers = f": {tokens[2]} tokens > {limit[1]} maximum" if tokens and limit else ""
        message = f"prompt is too long{numbers}. {message}"
    kind = _TYPES.get(reply.status, "api_error" if reply.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_frame(server: Server, request: str) -> Callable[[BaseException], bytes]:
    """Return the function that writes an error as an event of a stream."""
    return lambda error: frame(error_body(error_reply(server, request, error)), "error")
