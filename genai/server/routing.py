"""The model that a call needs, and streams that begin while their model is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from .calls import Call
from .keys import ANYONE, Key
from .sse import EventStream


@dataclass(frozen=True)
class Wanted:
    """The model that a request needs.

    Attributes:
        kind: "completion", "embedding" or "rerank".
        model: the name in the request; None = the first model of this kind.
        key: the API key of the request.
        timeout: maximum number of seconds until the model is loaded; None = no limit.
    """

    kind: str
    model: str | None = None
    key: Key = ANYONE
    timeout: float | None = None


class _Head(msgspec.Struct):
    """The fields of a request that are read before its model is loaded."""

    model: Any = None
    stream: Any = False
    timeout: Any = None


def wanted_by(call: Call, kind: str) -> tuple[Wanted, bool]:
    """Return the model that a call needs, and True if the reply is a stream.

    Raises:
        RequestError: the body is not a JSON object.
    """
    limit = call.server.options.timeout
    if not call.body:
        named = parse_qs(call.query).get("model", [None])
        return Wanted(kind, named[-1], call.key, limit), False
    try:
        head = msgspec.json.decode(call.body, type=_Head)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        head = _Head(**{name: value for name, value in call.json().items() if name in _Head.__struct_fields__})
    if isinstance(head.timeout, int | float) and head.timeout > 0:
        limit = head.timeout if limit is None else min(limit, head.timeout)
    model = head.model if isinstance(head.model, str) else None  # the endpoint reports another type
    return Wanted(kind, model, call.key, limit), head.stream is True


def late_stream(
    call: Call,
    wanted: Wanted,
    handle: Callable[[Call], Awaitable[object]],
    error_frame: Callable[[BaseException], bytes],
    *,
    is_stored: bool,
) -> EventStream:
    """Return the stream of a call whose model is not loaded yet. Comments are sent until the model is loaded.

    If the call names its stream, the stream is stored from now on, so that a client can read it again during the load.

    Args:
        call: the call.
        wanted: its model.
        handle: the handler of the endpoint.
        error_frame: returns the event for an error of the load.
        is_stored: True if the endpoint stores streams that the header x-stream-id names.

    Raises:
        RequestError: see StreamStore.start.
    """
    identifier = call.headers.get("x-stream-id") if is_stored else None
    if identifier is not None:
        # The handler must not store the stream again.
        call.headers = {name: value for name, value in call.headers.items() if name != "x-stream-id"}
    store = call.server.streams

    async def frames() -> AsyncIterator[bytes]:
        async with call.server.serving(wanted) as server:
            call.server = server
            reply = await handle(call)
            assert isinstance(reply, EventStream)  # every endpoint streams if the field `stream` is true
            stream.error_frame = reply.error_frame
            stream.headers |= {**call.notes, **reply.headers}
            parts: Any = reply.frames
            async with aclosing(parts):
                async for data in parts:
                    yield data

    stream = EventStream(frames(), error_frame)
    return stream if identifier is None else store.start(call.key, identifier, stream)
