"""Replies of OpenAI's Responses API, whole and streamed, and its errors."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import ErrorReply
from ..events import Event, Finish, Logprobs, Reasoning, Text, TokenCounts, ToolCall
from ..serving import Server
from ..sse import frame
from .responses_input import ENCRYPTED, ResponsesRequest, sealed


class ResponseEncoder:
    """Writes the events of one turn as items of the Responses API.

    Args:
        server: the server.
        request: the request.
    """

    def __init__(self, server: Server, request: ResponsesRequest) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self.output: list[dict[str, Any]] = []
        self._head = _head(self.id, server, request)
        self._seals = ENCRYPTED in (request.include or ())
        self._texts = server.token_texts
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False
        self._number = 0
        self._status, self._reason = "in_progress", ""

    def begin(self) -> bytes:
        """Return the first events of a stream."""
        response = self._response()
        return self._frame("created", response=response) + self._frame("in_progress", response=response)

    def frames(self, events: Sequence[Event]) -> bytes:
        """Add events to the reply, and return the events of the stream for them."""
        return b"".join(found for event in events for found in self._frames(event))

    def _frames(self, event: Event) -> list[bytes]:
        if isinstance(event, Text):
            return self._text_frames(event.text)
        if isinstance(event, Reasoning):
            item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning"}
            part = {"type": "reasoning_text", "text": ""}
            opened = self._opened({**item, "summary": [], "content": [], "encrypted_content": None}, part)
            self._part["text"] += event.text
            return [*opened, self._part_frame("reasoning_text.delta", delta=event.text)]
        if isinstance(event, ToolCall):
            closed = self._closed()
            call = {"call_id": event.id, "name": event.name, "arguments": ""}
            return closed + self._opened({"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", **call})
        if isinstance(event, Logprobs):
            self._logprobs += map(self._texts.chat_entry, event.entries)
            return []
        if isinstance(event, Finish):
            return self._finished(event)
        self.output[-1]["arguments"] += event.text
        return [self._item_frame("function_call_arguments.delta", delta=event.text)]

    def _text_frames(self, text: str) -> list[bytes]:
        opened = self._opened(
            {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "content": []},
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
        )
        self._part["text"] += text
        self._part["logprobs"] += self._logprobs
        found, self._logprobs = self._logprobs, []
        return [*opened, self._part_frame("output_text.delta", delta=text, logprobs=found)]

    def _finished(self, end: Finish) -> list[bytes]:
        if self._is_open and self.output[-1]["type"] == "message":
            self._part["logprobs"] += self._logprobs
        reason = end.completion.finish_reason
        self._status = "completed" if reason == "stop" else "incomplete"
        # The API has no reason for a timeout.
        self._reason = "" if reason == "stop" else "max_output_tokens"
        return self._closed(self._status)

    # --- items and parts ---------------------------------------------------------------------------------------------

    def _opened(self, item: dict[str, Any], part: dict[str, Any] | None = None) -> list[bytes]:
        """Begin an item, unless the last item is open and of this type."""
        if self._is_open and self.output[-1]["type"] == item["type"]:
            return []
        closed = self._closed()
        self._is_open = True
        self.output.append({**item, "status": "in_progress"})
        found = [*closed, self._frame("output_item.added", output_index=self._index, item=self.output[-1])]
        if part is not None:
            self.output[-1]["content"].append(part)
            found.append(self._part_frame("content_part.added", part=part))
        return found

    def _closed(self, status: str = "completed") -> list[bytes]:
        """End the open item."""
        if not self._is_open:
            return []
        self._is_open = False
        item, found = self.output[-1], []
        item["status"] = status
        if item["type"] == "function_call":
            found.append(self._item_frame("function_call_arguments.done", arguments=item["arguments"]))
        else:
            part, text = self._part, self._part["text"]
            if item["type"] == "message":
                found.append(self._part_frame("output_text.done", text=text, logprobs=part["logprobs"]))
            else:
                item["encrypted_content"] = sealed(text) if self._seals else None
                found.append(self._part_frame("reasoning_text.done", text=text))
            found.append(self._part_frame("content_part.done", part=part))
        return [*found, self._frame("output_item.done", output_index=self._index, item=item)]

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.output[-1]["content"][-1]
        return part

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _item_frame(self, kind: str, **fields: Any) -> bytes:
        return self._frame(kind, item_id=self.output[-1]["id"], output_index=self._index, **fields)

    def _part_frame(self, kind: str, **fields: Any) -> bytes:
        return self._item_frame(kind, content_index=0, **fields)

    def _frame(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        name = kind if kind == "error" else f"response.{kind}"
        return frame({"type": name, "sequence_number": self._number - 1, **fields}, name)

    # --- whole replies -----------------------------------------------------------------------------------------------

    def end(self, counts: TokenCounts, seed: int) -> bytes:
        """Return the last event of a stream."""
        return self._frame(self._status, response=self.whole(counts, seed))

    def whole(self, counts: TokenCounts, seed: int) -> dict[str, Any]:
        """Return the body of a whole reply."""
        return {**self._response(), "usage": _usage(counts), "seed": seed}

    def failed(self, reply: ErrorReply) -> bytes:
        """Return the last events of a stream that failed."""
        error = error_body(reply)["error"]
        self._status = "failed"
        response = {**self._response(), "error": {"code": "server_error", "message": error["message"]}}
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._frame("error", **fields) + self._frame("failed", response=response)

    def _response(self) -> dict[str, Any]:
        return {
            **self._head,
            "status": self._status,
            "output": self.output,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "incomplete_details": {"reason": self._reason} if self._reason else None,
        }


def _head(identifier: str, server: Server, request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a reply that do not depend on the turn."""
    reasoning = request.reasoning or {}
    return {
        "id": identifier,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model or server.name,
        "error": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": request.store is not False,
        "system_fingerprint": server.fingerprint,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(counts: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.total,
    }


# --- errors --------------------------------------------------------------------------------------------------------

# The names of fields in OpenAI's chat API, and those of this API: in messages, and as the field that is wrong.
_NAMES = {"response_format": "text.format", "max_tokens": "max_output_tokens"}
_PARAMS = {"response_format": "text", "max_tokens": "max_output_tokens", "messages": "input", "template": "reasoning"}
_NAME = re.compile(rf"(?<![\w'.])({'|'.join(_NAMES)})(?!\w)")


def error_body(reply: ErrorReply) -> dict[str, Any]:
    """Return an error in OpenAI's form, with the names of this API's fields."""
    param = None if reply.param is None else reply.param.partition("[")[0]
    message = _NAME.sub(lambda found: _NAMES[found[1]], reply.message)
    return replace(reply, message=message, param=_PARAMS.get(param or "", reply.param)).body()
