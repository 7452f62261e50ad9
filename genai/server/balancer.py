"""An ASGI application in front of several servers: requests of a session reach the same server, and a reply whose
server fails continues on another one."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from ..common.log import logger
from ..errors import OptionError, RequestError
from .agents import session_name
from .bodies import Bodies, Body
from .errors import ErrorReply, reply_of
from .guards import check_framing, check_host, check_origin, cors_headers, host_name
from .keys import Key, find_key
from .metrics import CONTENT_TYPE, escaped, metric
from .request_tasks import RequestTasks, finish_unless_gone
from .resuming import Resumable, ServerStopped, StreamDiverged
from .sse import ClientGone, Receive, Send, frame, response_start

_log = logger(__name__)

FINGERPRINT = "x-system-fingerprint"
"""The response header with the fingerprint of the model."""

CONNECT_SECONDS = 5.0
"""The time in which a server must accept a connection."""

DOWN_SECONDS = 5.0
"""The time for which a server that failed is the last choice."""

SILENT_SECONDS = 15.0
"""The time without data from a server after which its /health is requested. Streams have a comment every ten seconds.
A machine without power or network closes no connection, so that without this check its requests would never end."""

HEALTH_SECONDS = 10.0
"""The time in which a silent server must answer. A server that computes also answers."""

SILENT_DOWN_SECONDS = 60.0
"""The time for which a silent server is the last choice. Each request that it gets costs the times above."""

_WRITE_SECONDS = 60.0
_PAUSE_SECONDS = 0.25
_SEED_BITS = 53  # as the server's
_SPARE = 1.25
# The endpoints whose replies depend on a seed, and those with an effect beyond the reply, which are not repeated.
_SEEDED = ("/chat/completions", "/completions", "/messages", "/responses")
_WITH_EFFECT = ("/v1/files", "/v1/batches")
_OF_ONE_SERVER = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_DROPPED = frozenset(
    ("connection", "content-length", "date", "expect", "host", "keep-alive", "origin", "server", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
_BROKEN = (httpx.TransportError, httpx.StreamError)
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"


@dataclass(frozen=True)
class BalancerOptions:
    """Options of a balancer.

    Attributes:
        keys: the accepted API keys; empty = the servers check the keys.
        max_body: maximum number of bytes in a request body.
        allowed_hosts, allowed_origins: see ServerOptions.
        drain_seconds: maximum number of seconds that running requests may take after the balancer was told to stop.
        attempts: maximum number of servers that may fail or be busy until a request fails. A server that does not have
            the model or the stored reply of a request is no attempt.
        session_header: a header that names the session of a request to the servers; "" = none.
    """

    keys: Sequence[Key] = ()
    max_body: int = 16 * 2**20
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    drain_seconds: float = 30.0
    attempts: int = 3
    session_header: str = ""


@dataclass(eq=False)
class Upstream:
    """A server that receives requests.

    Attributes:
        url: its address, without a path.
        running: number of its running requests.
        sent: number of requests that it received.
        failed: number of requests that it did not end.
        down_until: the time until which it is the last choice.
    """

    url: str
    running: int = 0
    sent: int = 0
    failed: int = 0
    down_until: float = 0.0

    def note_failure(self, seconds: float = DOWN_SECONDS) -> None:
        """Count a request that the server did not end, and make the server the last choice for a time."""
        self.failed += 1
        self.down_until = time.monotonic() + seconds


class Balancer(RequestTasks):
    """Distributes requests over servers. It is an ASGI application.

    The servers of a session are ordered by a hash of the session and the server's address (rendezvous hashing), so that
    only the sessions of a server that fails move. A session is what the client names as such, or else the beginning of
    the conversation; in the latter case, a server with more than 1.25 times the mean number of running requests is
    passed over.

    Attributes:
        upstreams: the servers.
        options: the options.
        replays: number of streams that continued on another server.
        is_draining: True if new requests are refused.
        bodies: the bodies of all requests.

    Args:
        urls: the addresses of the servers.
        options: the options.

    Raises:
        OptionError: there is no address, or an address is malformed.
    """

    def __init__(self, urls: Sequence[str], options: BalancerOptions | None = None) -> None:
        super().__init__("balancer")
        self.options = options or BalancerOptions()
        self.upstreams = [Upstream(url) for url in dict.fromkeys(map(_address, urls))]
        if not self.upstreams:
            raise OptionError("there is no server", "a balancer needs at least one", "pass the address of a server")
        self.replays = 0
        self.bodies = Bodies(self.options.max_body, "balancer")
        self._client: httpx.AsyncClient | None = None
        self.is_draining = False

    # --- the life of the balancer ------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The servers in messages."""
        return f"{len(self.upstreams)} server{'s' if len(self.upstreams) != 1 else ''}"

    @property
    def client(self) -> httpx.AsyncClient:
        """The client of the servers, which belongs to the running event loop."""
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30)
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
            self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        return self._client

    @property
    def drain_seconds(self) -> float:
        """See BalancerOptions."""
        return self.options.drain_seconds

    def start(self) -> None:
        """Start the work that does not belong to a request: there is none."""

    def drain(self) -> None:
        """Refuse new requests."""
        self.is_draining = True

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await _Forwarding(self, scope, receive, send).run()
            finally:
                self._tasks.discard(task)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self._client is not None:
                await self._client.aclose()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    # --- the servers of a request ------------------------------------------------------------------------------------

    def order(self, session: str, *, is_named: bool) -> list[Upstream]:
        """Return the servers in the order in which a request of a session is sent to them.

        Args:
            session: the session.
            is_named: True if the client named the session.
        """
        now = time.monotonic()
        ranked = sorted(self.upstreams, key=lambda one: _rank(session, one.url))
        if not is_named:
            mean = (sum(one.running for one in ranked) + 1) / len(ranked)
            ranked.sort(key=lambda one: one.running + 1 > max(2.0, _SPARE * mean))
        ranked.sort(key=lambda one: one.down_until > now)
        # A single server can be a balancer, too: it is asked again.
        return ranked * self.options.attempts if len(ranked) == 1 else ranked

    async def is_alive(self, upstream: Upstream) -> bool:
        """Return True if a server answers a second request while a first one waits for it."""
        try:
            await self.client.get(f"{upstream.url}/health", timeout=HEALTH_SECONDS)
        except _BROKEN:
            return False
        return True

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Return a status and the states of the servers. The status is 200 if a server accepts requests."""

        async def state_of(one: Upstream) -> str:
            try:
                reply = await self.client.get(f"{one.url}/health", timeout=CONNECT_SECONDS)
                return "ok" if reply.status_code == 200 else str(reply.json().get("status", reply.status_code))
            except (*_BROKEN, ValueError, AttributeError):
                return "unreachable"

        states = await asyncio.gather(*map(state_of, self.upstreams))
        said = "stopping" if self.is_draining else "ok" if "ok" in states else "no server accepts requests"
        counts = Counter(states)
        return 200 if said == "ok" else 503, {"status": said, "servers": dict(sorted(counts.items()))}

    def metrics(self) -> str:
        """Return the metrics."""
        lines: list[str] = []
        for name, kind, said, attribute in (
            ("requests_total", "counter", "Requests that the server received.", "sent"),
            ("failures_total", "counter", "Requests that the server did not end.", "failed"),
            ("requests_running", "gauge", "Running requests of the server.", "running"),
        ):
            samples = [f'{{server="{escaped(one.url)}"}} {getattr(one, attribute)}' for one in self.upstreams]
            lines += metric(f"genai_balancer_{name}", kind, said, samples)
        said = "Streams that continued on another server."
        lines += metric("genai_balancer_replays_total", "counter", said, [f" {self.replays}"])
        return "\n".join(lines) + "\n"


def _address(url: str) -> str:
    try:
        found = urlsplit(url)
        is_good = found.scheme in ("http", "https") and found.path in ("", "/", "/v1", "/v1/") and found.port != 0
        is_good = is_good and bool(host_name(found.netloc)) and not (found.query or found.fragment)
    except ValueError:
        is_good = False
    if not is_good:
        raise OptionError(
            f"{url!r:.200} is not the address of a server", "http:// or https://, a host and a port are expected",
            "for example, pass http://10.0.0.1:8000",
        )  # fmt: skip
    return url.rstrip("/").removesuffix("/v1")


def _rank(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode("utf-8", "surrogateescape"), digest_size=8).digest()


class _Silent(httpx.TransportError):
    """A server sends nothing, and does not answer other requests."""


class _Head(msgspec.Struct):
    """The fields of a request that determine its session and its seed."""

    seed: Any = msgspec.UNSET
    stream: Any = False
    prompt_cache_key: Any = None
    messages: Any = None
    input: Any = None
    prompt: Any = None


class _Forwarding:
    """One request, which is sent to servers until one of them ends it."""

    def __init__(self, balancer: Balancer, scope: Any, receive: Receive, send: Send) -> None:
        self._balancer, self._options = balancer, balancer.options
        self._scope, self._receive, self._send = scope, receive, send
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._path: str = scope["path"]
        self._notes: dict[str, str] = {}
        self._has_begun = self._has_ended = False
        self._type = ""  # the content type of the response
        self._heard = 0.0  # the time of the last data of the server
        self._body = Body(balancer.bodies)

    async def run(self) -> None:
        """Serve the request. Errors become responses."""
        try:
            body = await self._checked_body()
            if body is not None:
                await finish_unless_gone(asyncio.create_task(self._forward(body)), self._receive)
        except ClientGone:
            return
        except (Exception, asyncio.CancelledError) as raised:
            error = self._balancer.stop_error() if isinstance(raised, asyncio.CancelledError) else raised
            if error is None:
                raise
            if not isinstance(error, RequestError):
                _log.error("%s failed: %s", self._path, error, exc_info=error)
            await self._fail(error)
        finally:
            self._body.release()

    async def _checked_body(self) -> bytes | None:
        """Check the request, and return its body; None if it is answered already."""
        options = self._options
        check_framing(self._headers)
        check_host(self._scope, self._headers, options.allowed_hosts)
        check_origin(self._headers, options.allowed_origins)
        self._notes = cors_headers(self._headers, options.allowed_origins)
        if self._scope["method"] == "OPTIONS":
            await self._reply(204, {}, b"")
            return None
        if self._path == "/health":
            status, content = await self._balancer.health()
            await self._reply(status, {"content-type": "application/json"}, msgspec.json.encode(content))
            return None
        if options.keys:
            given = self._headers
            find_key(options.keys, given.get("authorization", ""), given.get("x-api-key", ""))
        if self._path == "/metrics":
            await self._reply(200, {"content-type": CONTENT_TYPE}, self._balancer.metrics().encode())
            return None
        if self._balancer.is_draining:
            raise RequestError(
                503, "the balancer is stopping", "it finishes running requests only", "send the request again later",
                code="stopping", headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip
        if self._path in _OF_ONE_SERVER:
            raise RequestError(
                400, f"{self._path} cannot be used with a balancer", "the adapter would be on one of the servers only",
                "send the request to each server", code="not_balanced",
            )  # fmt: skip
        return await self._body.read(self._headers, self._receive)

    # --- one server after another ------------------------------------------------------------------------------------

    async def _forward(self, body: bytes) -> None:
        body, session, is_named = self._prepared(body)
        headers = {name: value for name, value in self._headers.items() if name not in _DROPPED}
        headers["accept-encoding"] = "identity"
        if self._options.session_header:
            headers[self._options.session_header] = session
        is_repeatable = self._scope["method"] == "GET" or not self._path.startswith(_WITH_EFFECT)
        stream, refused, attempts = Resumable(), None, self._options.attempts
        order = self._balancer.order(session, is_named=is_named)
        for number, upstream in enumerate(order):
            if number and order[number - 1] is upstream:
                await asyncio.sleep(_PAUSE_SECONDS * number)  # a cluster needs time to notice that a replica failed
            upstream.sent += 1
            upstream.running += 1
            try:
                if stream.has_begun:
                    self._balancer.replays += 1
                refused = await self._heard_from(upstream, self._ask(upstream, headers, body, stream)) or refused
                if self._has_ended:
                    return
                attempts -= refused is not None and refused.status_code == 503
            except (*_BROKEN, ServerStopped) as error:
                attempts -= 1
                upstream.note_failure(SILENT_DOWN_SECONDS if isinstance(error, _Silent) else DOWN_SECONDS)
                _log.warning("%s did not end a request: %s", upstream.url, type(error).__name__.removeprefix("_"))
                if not (self._is_resumable and (is_repeatable or isinstance(error, _UNSENT))):
                    break
            except StreamDiverged:
                attempts -= 1
                _log.warning("%s cannot continue a stream: it has another model, or other options", upstream.url)
            finally:
                upstream.running -= 1
            if not attempts:
                break
        if refused is not None and not self._has_begun:
            await self._reply(refused.status_code, _passed(refused.headers), refused.content)
            return
        raise RequestError(
            502, "the servers did not end the request", "they cannot be reached, or stopped during the reply",
            "send the request again later", code="no_server", headers={"retry-after": "1"},
        )  # fmt: skip

    async def _heard_from(
        self, upstream: Upstream, asking: Coroutine[Any, Any, httpx.Response | None]
    ) -> httpx.Response | None:
        """Return the result of `_ask`. Raise _Silent if the server sends nothing and does not answer /health."""
        self._heard = time.monotonic()
        task = asyncio.create_task(asking)
        try:
            while not task.done():
                heard = self._heard
                silent = time.monotonic() - heard
                if silent < SILENT_SECONDS:
                    await asyncio.wait({task}, timeout=min(SILENT_SECONDS, SILENT_SECONDS - silent))
                elif not await self._balancer.is_alive(upstream) and heard == self._heard and not task.done():
                    raise _Silent(f"{upstream.url} sent nothing")
                elif heard == self._heard:
                    self._heard = time.monotonic()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _is_resumable(self) -> bool:
        """True if another server can continue the response: nothing was sent, or events."""
        return not self._has_begun or self._type.startswith(_EVENTS)

    def _prepared(self, body: bytes) -> tuple[bytes, str, bool]:
        """Return the body with a seed, the session, and True if the client named the session."""
        key = self._headers.get("authorization", "") or self._headers.get("x-api-key", "")
        try:
            head = msgspec.json.decode(body, type=_Head)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            head = None  # the server reports it
        named = session_name(self._headers, None if head is None else _text(head.prompt_cache_key))
        if head is None:
            return body, f"{key}\0{named or secrets.token_hex(8)}", named is not None
        if self._path.endswith(_SEEDED) and self._scope["method"] == "POST":
            body = _seeded(body, head.seed)
        session = named or hashlib.sha256(_beginning(head)).hexdigest()
        return body, f"{key}\0{session}" if not self._options.session_header else session, named is not None

    async def _ask(
        self, upstream: Upstream, headers: Mapping[str, str], body: bytes, stream: Resumable
    ) -> httpx.Response | None:
        """Send the request to a server, and pass its reply on. Return its reply if another server may know better.

        Raises:
            httpx.TransportError, ServerStopped: the server did not end the reply.
            StreamDiverged: the server cannot continue the stream.
        """
        query = self._scope.get("query_string", b"")
        url = f"{upstream.url}{self._scope.get('raw_path', self._path.encode()).decode('latin-1').partition('?')[0]}"
        request = self._balancer.client.build_request(
            self._scope["method"], url + (f"?{query.decode('latin-1')}" if query else ""), headers=headers, content=body
        )
        async with _response(self._balancer.client, request) as reply:
            if reply.status_code == 200 and reply.headers.get("content-type", "").startswith(_EVENTS):
                await self._pass_events(reply, stream)
                return None
            if reply.status_code in (500, 502, 504) and not _is_small(reply):
                raise httpx.RemoteProtocolError(f"status {reply.status_code} of a proxy")
            is_refused = self._has_begun or reply.status_code in (404, 503)
            if is_refused or _is_small(reply):
                await reply.aread()
                if is_refused or (reply.status_code == 400 and b'"previous_response_not_found"' in reply.content):
                    return reply
                await self._reply(reply.status_code, _passed(reply.headers), reply.content)
            else:
                await self._pass_bytes(reply)
            self._has_ended = True
            return None

    async def _pass_events(self, reply: httpx.Response, stream: Resumable) -> None:
        """Pass the events of a stream on that the client lacks."""
        stream.begin(reply.headers.get(FINGERPRINT, ""))
        async for data in reply.aiter_raw():
            new = stream.feed(data)
            if new:
                await self._write(200, _passed(reply.headers), new)
        if not stream.has_ended:
            raise httpx.RemoteProtocolError("the stream has no end")
        await self._write(200, {}, b"", more=False)
        self._has_ended = True

    async def _pass_bytes(self, reply: httpx.Response) -> None:
        async for data in reply.aiter_raw():
            await self._write(reply.status_code, _passed(reply.headers), data)
        await self._write(reply.status_code, _passed(reply.headers), b"", more=False)

    # --- the response ------------------------------------------------------------------------------------------------

    async def _write(self, status: int, headers: Mapping[str, str], data: bytes, *, more: bool = True) -> None:
        """Send a part of a body. Raise ClientGone if the client does not read."""
        self._heard = float("inf")  # the client is waited for
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                if not self._has_begun:
                    self._has_begun, self._type = True, headers.get("content-type", "")
                    await self._send(response_start(status, {**headers, **self._notes}))
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        self._heard = time.monotonic()

    async def _reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        length = {} if status in (204, 304) else {"content-length": str(len(body))}
        await self._write(status, {**headers, **length}, body, more=False)

    async def _fail(self, error: Exception) -> None:
        """Send an error: as a status, or as an event or a line of a stream that has begun.

        Another response that has begun is left without its end, so that the client does not take it for a whole one.
        """
        reply = reply_of(error, context_size=0, hidden={one.url: "a server" for one in self._balancer.upstreams})
        if self._has_begun and not self._type.startswith((_EVENTS, _LINES)):
            return
        if self._has_begun:
            content = _error_body(self._path, reply)
            is_line = self._type.startswith(_LINES)
            await self._write(
                reply.status, {}, msgspec.json.encode(content) + b"\n" if is_line else frame(content, "error")
            )
            await self._write(reply.status, {}, b"", more=False)
            return
        headers = {"content-type": "application/json", **reply.headers}
        await self._reply(reply.status, headers, msgspec.json.encode(_error_body(self._path, reply)))


@asynccontextmanager
async def _response(client: httpx.AsyncClient, request: httpx.Request) -> AsyncIterator[httpx.Response]:
    reply = await client.send(request, stream=True)
    try:
        yield reply
    finally:
        await reply.aclose()


def _passed(headers: httpx.Headers) -> dict[str, str]:
    """Return the headers of a reply that the client gets."""
    return {name: value for name, value in headers.items() if name not in _DROPPED}


def _is_small(reply: httpx.Response) -> bool:
    """Return True for a JSON body, which is read whole, so that a reply that breaks off can be repeated."""
    return str(reply.headers.get("content-type", "")).startswith("application/json")


def _error_body(path: str, reply: ErrorReply) -> Any:
    """Return an error in the form of the endpoint."""
    from .wire import messages, ollama, responses

    if path.startswith("/api/"):
        return ollama.error_body(reply)
    if path.endswith("/messages"):
        return messages.error_body(reply)
    if "/responses" in path:
        body = responses.error_body(reply)
        return {"type": "error", **body["error"]}
    return reply.body()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _seeded(body: bytes, seed: Any) -> bytes:
    """Return the body with a random seed if it has none, so that another server repeats the reply."""
    chosen = secrets.randbits(_SEED_BITS)
    if seed is msgspec.UNSET:
        begin = body.index(b"{") + 1
        separator = b"" if body[begin:].lstrip().startswith(b"}") else b","
        return body[:begin] + b'"seed":%d' % chosen + separator + body[begin:]
    if seed is None or seed == -1:
        return msgspec.json.encode({**msgspec.json.decode(body), "seed": chosen})
    return body


def _beginning(head: _Head) -> bytes:
    """Return the part of a request that all turns of its conversation share: up to the first message of the user."""
    if isinstance(head.messages, list):
        return msgspec.json.encode([*_up_to_user(head.messages)])
    if isinstance(head.input, list):
        return msgspec.json.encode([*_up_to_user(head.input)])
    return msgspec.json.encode(head.input or head.prompt)[:1000]


def _up_to_user(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        yield message
        if isinstance(message, dict) and message.get("role") == "user":
            return
