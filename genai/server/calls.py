"""A call of an endpoint: what the client sent, and the replies that an endpoint can return."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..common.log import logger
from ..errors import RequestError
from .agents import session_name, without_headers
from .fields import check_strict
from .guards import FORM, is_from_program
from .keys import Key

if TYPE_CHECKING:  # a circular import: the server runs batches, whose requests and errors refer to the server
    from .serving import Server

_log = logger(__name__)
T = TypeVar("T")
_LARGE_BODY = 2**17
"""The size in bytes from which on a body is decoded on another thread, because it can take seconds."""


@dataclass
class Call:
    """One call of an endpoint.

    Attributes:
        server: the server.
        key: the API key.
        id: identifier of the call, which the header x-request-id returns.
        headers: the headers of the request, with names in lower case.
        path: the parameters in the path.
        query: the query string.
        body: the body.
        notes: headers for the response.
        record: facts about the call for the request log.
    """

    server: Server
    key: Key
    id: str
    headers: Mapping[str, str]
    path: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    body: bytes = b""
    notes: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def is_short(self) -> bool:
        """True if the body is so small that decoding it takes milliseconds."""
        return len(self.body) <= _LARGE_BODY

    async def decoded(self, decode: Callable[[Call], T]) -> T:
        """Call a function that decodes the body, without blocking the event loop for long. Raises as the function."""
        if self.is_short:
            return decode(self)
        return await self.server.at_length(decode, self)

    def json(self) -> dict[str, Any]:
        """Return the body as an object.

        Raises:
            RequestError: the body is not a JSON object.
        """
        kind = self.headers.get("content-type", "application/json").lower()
        is_curl = kind == FORM and self.body.lstrip()[:1] == b"{" and is_from_program(self.headers)
        if not kind.startswith("application/json") and not is_curl:
            raise RequestError(
                415, f"the content type is {self.headers['content-type']!r:.80}", "bodies are JSON",
                "send the header content-type: application/json; with curl, add -H 'content-type: application/json'",
            )  # fmt: skip
        try:
            found = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError(
                400, "the body is not JSON", str(error) or "it is nested too deeply", "send a JSON object",
                code="invalid_json",
            ) from error  # fmt: skip
        if not isinstance(found, dict):
            raise RequestError(400, "the body is not a JSON object", "fields are read by name", "send an object")
        return found

    def without_headers(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return messages without volatile headers, which are named in a response header, unless they are kept."""
        if self.server.options.keep_headers:
            return messages
        messages, removed = without_headers(messages)
        if removed:
            self.notes["x-removed-headers"] = ", ".join(dict.fromkeys(removed))
        return messages

    def note_session(self, prompt_cache_key: str | None = None) -> None:
        """Write the name that the client gives to the conversation, if any, to the request log."""
        if (name := session_name(self.headers, prompt_cache_key)) is not None:
            self.record["session"] = name

    def note_ignored(self, names: list[str]) -> None:
        """Name fields without effect in a response header and in the log."""
        if names:
            self.notes["x-ignored-fields"] = ", ".join(dict.fromkeys(names))[:1000]
            self.record["ignored_fields"] = [*dict.fromkeys(names)]
            _log.debug("request %s: fields without effect: %s", self.id, self.notes["x-ignored-fields"])

    def check_ignored(self, names: list[str]) -> None:
        """Name fields without effect as `note_ignored`. Raise RequestError if the server is strict."""
        self.note_ignored(names)
        if self.server.options.strict:
            check_strict(names)


def converted(values: Mapping[str, Any], kind: type[Any]) -> Any:
    """Return fields as a msgspec.Struct.

    Raises:
        RequestError: a field has the wrong type.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        if (missing := re.match(r"Object missing required field `(\w+)`", what)) is not None and not place:
            raise RequestError(
                400, f"{missing[1]} is missing", "the field is required", f"add {missing[1]}",
                code="missing_required_parameter", param=missing[1],
            ) from error  # fmt: skip
        name = place.rstrip("`").lstrip(".")
        raise RequestError(
            400, f"{name or 'the body'} cannot be used", what.replace("`", ""), "correct the field",
            code="invalid_type", param=name.split(".")[0].split("[")[0] or None,
        ) from error  # fmt: skip
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply", "nesting is limited", "send a flatter body") from None


@dataclass
class JsonReply:
    """A response with a JSON body."""

    content: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    content_type = "application/json"

    def body(self) -> bytes:
        """Return the bytes of the body."""
        return msgspec.json.encode(self.content)


@dataclass
class TextReply:
    """A response with a text."""

    content: str
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the bytes of the body."""
        return self.content.encode()


@dataclass
class FileReply:
    """A response with the content of a file, which is read while it is sent."""

    path: Path
    content_type: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
