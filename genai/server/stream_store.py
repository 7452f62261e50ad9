"""Streams that continue without their client, so that a page can read a reply to its end after a reload.

A request with the header `x-stream-id: ID` runs in a task of the server. Its events are stored, and any number of
clients with the same key can read them from the beginning. A stream without readers is cancelled after a minute.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ..errors import RequestError
from .keys import Key
from .sse import DONE, EventStream

if TYPE_CHECKING:  # a circular import: the server has a store
    from .serving import Server

LONELY_SECONDS = 60.0
"""The time after which a stream without readers is cancelled."""

KEEP_SECONDS = 300.0
"""The time for which the events of a stream are stored after its end."""

MOST_BYTES = 64 * 2**20
"""The maximum number of bytes of all stored events."""

_ID = re.compile(r"[A-Za-z0-9_-]{16,64}")


class _Stream:
    """The events of one stream. `base` is the number of events at its beginning that are no longer stored."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.base = self.size = self.readers = 0
        self.task: asyncio.Task[None] | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        self.news = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Wake all readers."""
        self.news.set()
        self.news = asyncio.Event()


class StreamStore:
    """The streams of a server. A key finds only its own streams. Not thread-safe.

    Args:
        server: the server.
        most_bytes: maximum number of bytes of all stored events.
        lonely_seconds: time after which a stream without readers is cancelled.
        keep_seconds: time for which the events are stored after the end of a stream.
    """

    def __init__(
        self,
        server: Server,
        *,
        most_bytes: int = MOST_BYTES,
        lonely_seconds: float = LONELY_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self._server, self._most_bytes = server, most_bytes
        self._lonely_seconds, self._keep_seconds = lonely_seconds, keep_seconds
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._streams)

    def start(
        self,
        key: Key,
        identifier: str,
        stream: EventStream,
        retain: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> EventStream:
        """Run a stream in a task, and return a stream that reads its events.

        Args:
            key: the API key.
            identifier: the identifier of the stream.
            stream: the stream.
            retain: holds the model until the function that it returns is called (see Server.retain).

        Raises:
            RequestError: the identifier is malformed or in use.
        """
        if not _ID.fullmatch(identifier):
            raise RequestError(
                400, f"x-stream-id = {identifier!r:.100}", "16 to 64 letters, digits, - and _ are expected",
                "send a random identifier, or leave the header out", param="x-stream-id",
            )  # fmt: skip
        name = (key.name, identifier)
        if name in self._streams:
            raise RequestError(
                409, f"x-stream-id = {identifier!r} is in use", "each stream has a separate identifier",
                f"read the stream with GET /v1/streams/{identifier}, or send another identifier",
                code="stream_exists", param="x-stream-id",
            )  # fmt: skip
        stored = self._streams[name] = _Stream()
        stored.task = asyncio.create_task(self._run(name, stored, stream))
        release = retain()
        stored.task.add_done_callback(lambda _: release())
        self._server.note_running(stored.task)
        self._set_timer(stored, self._lonely_seconds, stored.task.cancel)  # until the first reader begins
        return EventStream(self._events(name, stored, raises=True), stream.error_frame, stream.headers)

    def read(self, key: Key, identifier: str, error_frame: Callable[[BaseException], bytes]) -> EventStream:
        """Return a stream that reads the events of a stored stream from the beginning.

        Raises:
            RequestError: the stream, or its beginning, is not stored.
        """
        stored = self._find(key, identifier)
        return EventStream(self._events((key.name, identifier), stored, raises=False), error_frame)

    def stop(self, key: Key, identifier: str) -> None:
        """Cancel a stream. Its readers get its end, and its events remain stored for a while. See read for errors."""
        task = self._find(key, identifier).task
        if task is not None:
            task.cancel()

    def _find(self, key: Key, identifier: str) -> _Stream:
        found = self._streams.get((key.name, identifier))
        if found is None or found.base:
            raise RequestError(
                404, f"the stream {identifier!r:.100} is not stored",
                f"events are stored in memory until {self._keep_seconds:.0f} s after the end, up to "
                f"{self._most_bytes:,} bytes for all streams, without those of other keys",
                "send the request again", code="stream_not_found",
            )  # fmt: skip
        return found

    async def _run(self, name: tuple[str, str], stored: _Stream, stream: EventStream) -> None:
        """Store the events of a stream until its end."""
        try:
            async for data in stream.frames:
                self._add(stored, data)
        except asyncio.CancelledError:
            stop_error = self._server.stop_error()
            self._add(stored, DONE if stop_error is None else stream.error_frame(stop_error))
        except Exception as error:
            if stored.frames or stored.base:
                self._add(stored, stream.error_frame(error))
            else:
                stored.error = error
        finally:
            if hasattr(stream.frames, "aclose"):
                await stream.frames.aclose()
            stored.has_ended = True
            stored.wake()
            if stored.error is not None:
                self._remove(name)
            elif name in self._streams:
                self._set_timer(stored, self._keep_seconds, lambda: self._remove(name))

    def _add(self, stored: _Stream, data: bytes) -> None:
        stored.frames.append(data)
        stored.size += len(data)
        self._size += len(data)
        if self._size > self._most_bytes:
            self._shrink()
        stored.wake()

    def _shrink(self) -> None:
        """Remove the streams that ended first, or else the first half of the largest stream."""
        while self._size > self._most_bytes:
            if (ended := next((name for name, one in self._streams.items() if one.has_ended), None)) is not None:
                self._remove(ended)
                continue
            largest = max(self._streams.values(), key=lambda one: one.size)
            count = (len(largest.frames) + 1) // 2
            removed = sum(map(len, largest.frames[:count]))
            del largest.frames[:count]
            largest.base += count
            largest.size -= removed
            self._size -= removed

    def _remove(self, name: tuple[str, str]) -> None:
        stored = self._streams.pop(name, None)
        if stored is not None:
            self._size -= stored.size
            self._set_timer(stored, None, lambda: None)

    @staticmethod
    def _set_timer(stored: _Stream, seconds: float | None, then: Callable[[], object]) -> None:
        if stored.timer is not None:
            stored.timer.cancel()
        stored.timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, then)

    async def _events(self, name: tuple[str, str], stored: _Stream, *, raises: bool) -> AsyncIterator[bytes]:
        """Yield the stored events, and then those that follow.

        Args:
            name: the stream's key and identifier.
            stored: the stream.
            raises: True to raise the error of a stream that fails before its first event.
        """
        position, task = 0, stored.task
        stored.readers += 1
        if not stored.has_ended:
            self._set_timer(stored, None, lambda: None)
        try:
            while True:
                news = stored.news
                if position < stored.base:
                    raise RequestError(
                        503, "the reader is too slow", "the next events are no longer stored", "send the request again"
                    )
                if new := stored.frames[position - stored.base :]:
                    position += len(new)
                    yield b"".join(new)
                elif stored.has_ended:
                    break
                else:
                    await news.wait()
            if stored.error is not None and raises:
                raise stored.error
        finally:
            stored.readers -= 1
            if not stored.readers and not stored.has_ended and task is not None:
                self._set_timer(stored, self._lonely_seconds, task.cancel)
