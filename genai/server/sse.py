"""Streams of server-sent events: comments while nothing is sent, errors in the stream, and slow readers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from .calls import FileReply

Send: TypeAlias = Callable[[Any], Any]
Receive: TypeAlias = Callable[[], Any]

PING_SECONDS = 10.0
"""The time without data after which a comment is sent. Proxies and clients close connections that are silent longer."""

WRITE_SECONDS = 60.0
"""The time that a client may take to read before its request is cancelled."""

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed the connection, or reads too slowly. It leaves no trace except in the log."""


@dataclass
class EventStream:
    """A response that is sent as server-sent events.

    Attributes:
        frames: the data; each item holds one or more whole events. An error before the first item becomes an HTTP
            status.
        error_frame: returns the event for an error that is raised later.
        headers: further headers.
        pings: True to send comments while there is no data.
    """

    frames: AsyncIterator[bytes]
    error_frame: Callable[[BaseException], bytes]
    headers: dict[str, str] = field(default_factory=dict)
    pings: bool = True


def frame(data: Any, event: str | None = None) -> bytes:
    """Return one event with JSON data."""
    start = b"" if event is None else b"event: " + event.encode() + b"\n"
    return start + b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


class StreamWriter:
    """Writes the parts of a response, and notes when it last wrote."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send, self._headers = send, headers
        self.has_begun, self._last = False, 0.0

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send data. Raise ClientGone if the client does not read."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                if not self.has_begun:
                    self.has_begun = True
                    await self._send(response_start(200, {**_HEADERS, **self._headers}))
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        self._last = loop.time()

    async def ping(self) -> None:
        """Send comments while nothing else is sent."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            silent = loop.time() - self._last
            if silent >= PING_SECONDS:
                await self.write(_PING)
            else:
                await asyncio.sleep(PING_SECONDS - silent)


def response_start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the ASGI message that begins a response."""
    pairs = [(name.encode("latin-1"), _header_value(value)) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _header_value(value: str) -> bytes:
    """Return a value without characters that would begin another header."""
    return "".join(c if " " <= c <= "~" else "?" for c in value).encode("latin-1")


async def send_stream(stream: EventStream, send: Send, stop_error: Callable[[], Exception | None]) -> None:
    """Send a stream to its end.

    Args:
        stream: the stream.
        send: the ASGI function.
        stop_error: returns the error to send if the task is cancelled because the server stops; None = another reason.

    Raises:
        Exception: an error before the first event. Later errors are sent as an event.
    """
    writer = StreamWriter(send, stream.headers)
    pinging = asyncio.create_task(writer.ping() if stream.pings else asyncio.sleep(0))
    try:
        async for data in stream.frames:
            await writer.write(data)
    except ClientGone:
        raise
    except (Exception, asyncio.CancelledError) as raised:
        error = stop_error() if isinstance(raised, asyncio.CancelledError) else raised
        if error is None:
            raise
        if not writer.has_begun:
            raise error from raised
        await writer.write(stream.error_frame(error))
    finally:
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)
        if hasattr(stream.frames, "aclose"):
            await stream.frames.aclose()
    await writer.write(b"", more=False)


_FILE_PART = 2**18


async def send_file(reply: FileReply, headers: Mapping[str, str], send: Send) -> None:
    """Send the content of a file. Raise ClientGone if the client does not read."""
    with reply.path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        facts = {"content-type": reply.content_type, "content-length": str(size)}
        await send(response_start(reply.status, {**facts, **headers, **reply.headers}))
        left = size
        while left > 0:
            part = await asyncio.to_thread(file.read, min(_FILE_PART, left))
            left = left - len(part) if part else 0
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await send({"type": "http.response.body", "body": part, "more_body": left > 0})
            except TimeoutError:
                raise ClientGone from None
        if not size:
            await send({"type": "http.response.body", "body": b""})
