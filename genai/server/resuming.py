"""Streams that continue on another server: the events that a client has received, and what a repeated stream adds.

Two servers with equal fingerprints give equal replies to equal requests with the same seed, but they divide the text
into different events, and identifiers are random. So the text of each part of a reply is compared and skipped, whatever
its events, and the identifiers of the first stream replace those of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

Key: TypeAlias = tuple[Any, ...]
"""The part of a reply that an event belongs to."""

# The error of a server that stops; in Anthropic's API, errors have no code.
_STOPPED = "the server was stopped before the reply ended"
_ENDS = ("message_stop", "response.completed", "response.incomplete", "response.failed")


class StreamDiverged(Exception):
    """A repeated stream has another text than the client has received."""


class ServerStopped(Exception):
    """The server ended a stream because it stops; another server can continue the stream."""


class Resumable:
    """The events of a stream that a client has received.

    Attributes:
        fingerprint: the fingerprint of the server; "" = unknown.
        has_ended: True if the last event has been read.
        has_begun: True if the client has received an event, other than comments.
    """

    def __init__(self) -> None:
        self.fingerprint = self._current = ""
        self.has_ended = self.has_begun = False
        self._sent: dict[Key, str] = {}
        self._read: dict[Key, int] = {}
        self._logprobs: dict[Key, int] = {}
        self._logprobs_read: dict[Key, int] = {}
        self._ids: dict[Key, str] = {}
        self._renamed: dict[bytes, bytes] = {}
        self._number = 0
        self._is_repeated = False
        self._rest = b""

    def begin(self, fingerprint: str) -> None:
        """Read the stream from its beginning, from the first or from another server.

        Args:
            fingerprint: the fingerprint in the server's headers; "" = its events may have one.
        """
        self._current, self._rest, self._renamed = fingerprint, b"", {}
        self._read, self._logprobs_read = {}, {}
        self._is_repeated = self.has_begun
        if not self.has_begun:
            self.fingerprint = fingerprint

    def feed(self, data: bytes) -> bytes:
        """Read a part of a stream, and return the whole events that the client has not received.

        Raises:
            StreamDiverged: the text is not the one that the client has received.
            ServerStopped: the server ends the stream because it stops.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join([new for event in events if (new := self._event(event))])

    def _event(self, event: bytes) -> bytes:
        """Return an event, or what the client lacks of it."""
        lines = event.split(b"\n")
        text = next((line[6:] for line in lines if line.startswith(b"data: ")), None)
        if text is None:
            return event + b"\n\n"
        if text == b"[DONE]":
            self.has_ended = True
            return event + b"\n\n"
        try:
            data = msgspec.json.decode(text)
        except msgspec.DecodeError:
            data = None
        if not isinstance(data, dict):
            return event + b"\n\n"
        if data.get("type") == "error" or ("error" in data and lines[0] == b"event: error"):
            self._check_error(data)
            return event + b"\n\n"
        self._note_ids(data)
        new = self._news(data)
        if new is None:
            return b""
        self.has_begun = True
        self.has_ended |= data.get("type") in _ENDS
        if "sequence_number" in data:
            data["sequence_number"], self._number = self._number, self._number + 1
        if not self._is_repeated:
            return event + b"\n\n"
        written = msgspec.json.encode(data)
        for theirs, ours in self._renamed.items():
            written = written.replace(theirs, ours)
        return b"".join([*(line + b"\n" for line in lines if line.startswith(b"event: ")), b"data: ", written, b"\n\n"])

    def _check_error(self, data: Mapping[str, Any]) -> None:
        error = data.get("error")
        error = error if isinstance(error, dict) else data
        if error.get("code") == "stopping" or "the server was stopped before the reply ended" in str(
            error.get("message")
        ):
            raise ServerStopped
        self.has_ended = True

    def _note_ids(self, data: dict[str, Any]) -> None:
        """Note the identifiers of a reply, or those that they replace in a repeated stream."""
        whole = data.get("response") or data.get("message") or data
        found: dict[Key, Any] = {
            ("reply",): whole.get("id"),
            ("created",): whole.get("created") or whole.get("created_at"),
        }
        if isinstance(item := data.get("item"), dict):
            found["item", data.get("output_index")] = item.get("id")
        self._current = self._current or str(whole.get("system_fingerprint") or "")
        if self._is_repeated and (not self._current or self._current != self.fingerprint):
            raise StreamDiverged
        self.fingerprint = self._current
        for key, value in found.items():
            if value is None:
                continue
            ours = self._ids.setdefault(key, value)
            if key == ("created",):
                whole["created" if "created" in whole else "created_at"] = ours
            elif ours != value:
                self._renamed[str(value).encode()] = str(ours).encode()

    def _news(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return an event without the text that the client has; None if nothing remains."""
        key, get, put = _part(data)
        text = None if get is None else get()
        position = self._read.get(key, 0)
        sent = self._sent.get(key, "")
        has_news = self._drop_logprobs(key, data)
        if text is None:  # an event that occurs once
            self._sent[key] = " "
            return data if has_news or not sent or not self._is_repeated else None
        overlap = text[: max(0, len(sent) - position)]
        if sent[position : position + len(overlap)] != overlap:
            raise StreamDiverged
        self._read[key] = position + len(text)
        new = text[len(overlap) :]
        self._sent[key] = sent + new
        put(new)
        return data if new or has_news or not self._is_repeated else None

    def _drop_logprobs(self, key: Key, data: dict[str, Any]) -> bool:
        """Remove the log-probabilities that the client has. Return True if others remain."""
        choices = data.get("choices")
        holder = choices[0] if choices else data
        found = holder.get("logprobs")
        if not found:
            return False
        place = ("logprobs", holder.get("index"), data.get("output_index"))
        lists = found if isinstance(found, dict) else {"": found}
        count = max((len(one) for one in lists.values() if isinstance(one, list)), default=0)
        read = self._logprobs_read[place] = self._logprobs_read.get(place, 0) + count
        new = max(0, min(count, read - self._logprobs.get(place, 0)))
        self._logprobs[place] = max(read, self._logprobs.get(place, 0))
        if new < count:
            kept = {name: one[count - new :] if isinstance(one, list) else one for name, one in lists.items()}
            holder["logprobs"] = kept if isinstance(found, dict) else kept[""]
        return new > 0


_Part: TypeAlias = tuple[Key, Callable[[], str] | None, Callable[[str], None]]


def _part(data: dict[str, Any]) -> _Part:
    """Return the part of the reply that an event belongs to, and functions that read and set its text."""
    if "choices" in data:
        return _part_of_choice(data["choices"][0]) if data["choices"] else (("usage",), None, _nothing)
    key = (data.get("type"), data.get("index"), data.get("output_index"), data.get("content_index"))
    delta = data.get("delta")
    if isinstance(delta, str):
        return key, lambda: delta, lambda new: data.__setitem__("delta", new)
    if isinstance(delta, dict) and data.get("type") == "content_block_delta":
        name = next((one for one in ("text", "thinking", "partial_json") if one in delta), None)
        if name is not None:
            return (*key, name), lambda: delta[name], lambda new: delta.__setitem__(name, new)
        return (*key, delta.get("type")), None, _nothing
    return key, None, _nothing


def _part_of_choice(choice: dict[str, Any]) -> _Part:
    index = choice.get("index")
    if choice.get("finish_reason") is not None:
        return ("end", index), None, _nothing
    if "text" in choice:
        return ("text", index), lambda: choice["text"], lambda new: choice.__setitem__("text", new)
    delta = choice.get("delta") or {}
    if delta.get("tool_calls"):
        call = delta["tool_calls"][0]
        function = call["function"]
        if "name" in function:
            return ("call", index, call["index"]), None, _nothing
        return (
            ("arguments", index, call["index"]), lambda: function["arguments"],
            lambda new: function.__setitem__("arguments", new),
        )  # fmt: skip
    if "role" in delta:
        return ("role", index), None, _nothing
    names = [*_texts(delta)]
    if names:
        return (names[0], index), lambda: delta[names[0]], lambda new: delta.update(dict.fromkeys(names, new))
    return ("chunk", index), None, _nothing


def _texts(delta: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the fields with text; the text of reasoning has two."""
    yield from (name for name in ("content", "reasoning_content", "reasoning") if isinstance(delta.get(name), str))


def _nothing(_: str) -> None:
    """Set no text."""
