"""The ASGI application: routes, and the checks that precede every endpoint."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.routing import Match, Route

from ..errors import RequestError, did_you_mean
from . import page
from .bodies import Body
from .calls import Call, FileReply, JsonReply, TextReply
from .errors import ErrorReply
from .guards import check_framing, check_host, check_origin, cors_headers
from .keys import ANYONE, Key, find_key
from .replies import error_reply
from .request_tasks import finish_unless_gone
from .routing import late_stream, wanted_by
from .serving import Server
from .sse import ClientGone, EventStream, Receive, Send, frame, response_start, send_file, send_stream
from .wire import (
    adapters,
    batches,
    chat,
    completions,
    embeddings,
    files,
    health,
    messages,
    models,
    ollama,
    rerank,
    responses,
    streams,
    tokens,
)  # fmt: skip

Reply: TypeAlias = JsonReply | TextReply | FileReply | EventStream
Handler: TypeAlias = Callable[[Call], Awaitable[Reply]]
# Every wire module lists its endpoints: method, path, and handler.
_WIRES: tuple[Any, ...] = (
    health, models, chat, completions, messages, responses, tokens, adapters, embeddings, rerank, files, batches,
    streams,
)  # fmt: skip


class Endpoint:
    """A handler with its route's properties.

    Attributes:
        path: the path of the route.
        handle: the handler.
        is_open: True if no API key is needed.
        needs: the kind of model that the endpoint needs: "completion", "embedding" or "rerank"; "" = none.
        pings: True if a stream may begin with comments while its model is loaded.
        stores: True if a stream is stored under the name in the header x-stream-id.
        error_body: returns the body for an error, in the wire format of the endpoint.
    """

    def __init__(
        self, path: str, handle: Handler, *, is_open: bool, needs: str, pings: bool, stores: bool,
        error_body: Callable[[ErrorReply], Any],
    ) -> None:  # fmt: skip
        self.path, self.needs, self.pings, self.stores = path, needs, pings, stores
        self.handle, self.is_open, self.error_body = handle, is_open, error_body

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """The ASGI interface that makes this object an endpoint of a route."""


def _openai_error(reply: ErrorReply) -> Any:
    return reply.body()


def _endpoint(wire: Any, method: str, path: str, handle: Handler, *, is_open: bool) -> Endpoint:
    # Stored replies, which have paths with a parameter, need no model.
    needs = getattr(wire, "NEEDS", "") if method == "POST" or "{" not in path else ""
    return Endpoint(
        path, handle, is_open=is_open, needs=needs.get(path, "") if isinstance(needs, Mapping) else needs,
        pings=getattr(wire, "PINGS", True), stores=getattr(wire, "STORES", False),
        error_body=getattr(wire, "error_body", _openai_error),
    )  # fmt: skip


def _wires(server: Server) -> Sequence[Any]:
    options = server.options
    return [*_WIRES, *([page] if options.page else []), *([ollama] if options.ollama else [])]


def build_app(server: Server) -> App:
    """Return the ASGI application of a server."""
    return App(server)


class App:
    """The ASGI application of a server. Every request passes `__call__`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._routes = [
            Route(path, _endpoint(wire, method, path, handle, is_open=is_open), methods=[method])
            for wire in _wires(server)
            for method, path, handle, is_open in wire.ROUTES
        ]
        if server.batches is not None:
            server.batches.handlers = batches.HANDLERS

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            self.server.start()
            await _Exchange(self, scope, receive, send).run()
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def find(self, scope: Any) -> tuple[Endpoint, Mapping[str, str]]:
        """Return the endpoint of a request, and the parameters in its path.

        Raises:
            RequestError: there is no such path, or it has other methods.
        """
        allowed: list[str] = []
        for route in self._routes:
            match, child = route.matches(scope)
            if match == Match.FULL:
                endpoint: Endpoint = route.endpoint  # type: ignore[assignment]
                return endpoint, child["path_params"]
            if match == Match.PARTIAL:
                allowed += sorted(route.methods or ())
        method, path = scope["method"], scope["path"]
        if allowed:
            raise RequestError(
                405, f"{method:.20} cannot be used with {path:.200}", f"allowed: {', '.join(allowed)}",
                "use another method", headers={"allow": ", ".join(allowed)},
            )  # fmt: skip
        begin = ollama.PREFIX if self.server.options.ollama and path.startswith(ollama.PREFIX) else ""
        paths = sorted({route.path for route in self._routes if route.path.startswith(begin)})
        raise RequestError(
            404, f"there is no path {path:.200}", f"the paths are {', '.join(paths)}",
            did_you_mean(path, paths, "use one of these paths"),
            code="unknown_path",
        )  # fmt: skip


class _Exchange:
    """One request and its response."""

    def __init__(self, app: App, scope: Any, receive: Receive, send: Send) -> None:
        self._app, self._server = app, app.server
        self._scope, self._receive, self._plain_send = scope, receive, send
        self._id = f"req_{secrets.token_hex(12)}"
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._notes = {"x-request-id": self._id}
        self._error_body: Callable[[ErrorReply], Any] = _openai_error
        self.status = 0
        self._path, self._began = "", time.monotonic()
        self._needs, self._sent = "", b""
        self._body = Body(self._server.bodies)
        self._record: dict[str, Any] = {}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._plain_send(message)

    async def run(self) -> None:
        """Serve the request. Errors become responses."""
        call: Call | None = None
        try:
            call = await self._call()
            if call is not None:
                await self._watched(call)
        except ClientGone:
            self.status = self.status or 499
        except Exception as error:
            reply = error_reply(self._server if call is None else call.server, self._id, error)
            self._record["error"] = reply.message
            if not self.status:
                await self._respond(JsonReply(self._error_body(reply), reply.status, dict(reply.headers)))
        finally:
            self._body.release()
            self._note_end()

    def _note_end(self) -> None:
        """Count the request, and write it to the log."""
        self._server.metrics.requests[self._path, self.status] += 1
        log, traces = self._server.log, self._server.traces
        seconds = round(time.monotonic() - self._began, 4)
        if log is not None and self._path != "/health":
            facts = {"id": self._id, "method": self._scope["method"], "path": self._scope["path"][:200]}
            log.write({**facts, "status": self.status, "seconds": seconds, **self._record})
        if traces is not None and self._needs:
            facts = {"id": self._id, "seconds": seconds, **self._record}
            traces.record(self._scope["method"], self._path, self._headers, self._sent, facts, self.status)

    async def _call(self) -> Call | None:
        """Check the request, and read its body. Return None if it is answered already."""
        options = self._server.options
        if options.ollama and self._scope["path"].startswith(ollama.PREFIX):
            self._error_body = ollama.error_body  # also for paths that do not exist
        check_framing(self._headers)
        check_host(self._scope, self._headers, options.allowed_hosts)
        check_origin(self._headers, options.allowed_origins)
        self._notes |= cors_headers(self._headers, options.allowed_origins)
        if self._scope["method"] == "OPTIONS":
            await self._respond(TextReply("", status=204))
            return None
        endpoint, path = self._app.find(self._scope)
        self._path = endpoint.path
        self._error_body, self._handle, self._needs = endpoint.error_body, endpoint.handle, endpoint.needs
        self._pings, self._stores = endpoint.pings, endpoint.stores
        key = ANYONE if endpoint.is_open else self._key()
        self._record["key"] = key.name
        body = self._sent = await self._body.read(self._headers, self._receive)
        if self._server.log is not None and self._server.log.with_prompts:
            self._record["body"] = body.decode("utf-8", "replace")
        query = self._scope.get("query_string", b"").decode("latin-1")
        return Call(self._server, key, self._id, self._headers, path, query, body, self._notes, self._record)

    def _key(self) -> Key:
        if not self._server.options.keys:
            return ANYONE
        return find_key(
            self._server.options.keys, self._headers.get("authorization", ""), self._headers.get("x-api-key", "")
        )

    async def _watched(self, call: Call) -> None:
        """Serve a call, and cancel it when the client closes the connection."""
        serving = asyncio.create_task(self._serve(call))
        self._server.note_running(serving)
        try:
            await finish_unless_gone(serving, self._receive)
        except asyncio.CancelledError as cancelled:
            if (error := self._server.stop_error()) is None:
                raise
            raise error from cancelled

    async def _serve(self, call: Call) -> None:
        if not self._needs:
            await self._reply(call)
            return
        wanted, is_stream = wanted_by(call, self._needs)
        if is_stream and self._pings and not self._server.is_ready(wanted):
            stream = late_stream(call, wanted, self._handle, self._error_frame, is_stored=self._stores)
            await send_stream(stream, self._send, self._server.stop_error)
            return
        async with self._server.serving(wanted) as server:
            call.server = server
            if server.fingerprint:
                self._notes["x-system-fingerprint"] = server.fingerprint
            await self._reply(call)

    def _error_frame(self, error: BaseException) -> bytes:
        return frame(self._error_body(error_reply(self._server, self._id, error)), "error")

    async def _reply(self, call: Call) -> None:
        reply = await self._handle(call)
        if isinstance(reply, EventStream):
            reply.headers |= self._notes
            await send_stream(reply, self._send, self._server.stop_error)
        elif isinstance(reply, FileReply):
            await send_file(reply, self._notes, self._send)
        else:
            await self._respond(reply)

    async def _respond(self, reply: JsonReply | TextReply) -> None:
        body = reply.body()
        headers = {"content-type": reply.content_type, "content-length": str(len(body)), **self._notes, **reply.headers}
        if reply.status in (204, 304):
            del headers["content-type"], headers["content-length"]
        await self._send(response_start(reply.status, headers))
        await self._send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
