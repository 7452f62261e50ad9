"""Runs a server with uvicorn: the socket, TLS, and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..common.log import logger
from ..errors import InputError, MissingPackageError, OptionError
from .guards import LOCAL_NAMES, is_loopback

if TYPE_CHECKING:
    # These modules import the packages of the extra `serve`. `check_packages` must run without them.
    from .balancer import Balancer
    from .serving import Server

    Service: TypeAlias = Server | Balancer

_log = logger(__name__)


@dataclass(frozen=True)
class Address:
    """The address on which a server listens.

    Attributes:
        host: name or address of the interface.
        port: the port; 0 = a free port.
        tls_cert, tls_key: files with a certificate chain and its private key; None = plain HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the address."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Raise an error unless the port and the TLS files can be used."""
        if not 0 <= self.port < 2**16:
            raise OptionError(f"port = {self.port}", "0 to 65535 is expected; 0 = a free port", "leave port out")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError(
                "tls_cert and tls_key belong together", "only one of the two is set", "set both, or leave both out"
            )
        if self.tls_cert is not None:
            self._check_tls()

    def _check_tls(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert or "", self.tls_key, lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"{self.tls_cert} and {self.tls_key} cannot be used", str(error),
                "pass a PEM file with the certificate chain, and a PEM file with its private key without a password",
            ) from error  # fmt: skip

    def hosts(self, more: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the names that the header `host` may have; empty = every name, for addresses that others reach."""
        return tuple({*LOCAL_NAMES, self.host.lower(), *(name.lower() for name in more)}) if self.is_local else ()

    def bind(self) -> socket.socket:
        """Return a socket that is bound to the address.

        Raises:
            OptionError: the name is unknown, or the port is used by another process.
        """
        try:
            found = socket.getaddrinfo(self.host.strip("[]"), self.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
        except OSError as error:
            raise OptionError(
                f"host = {self.host!r:.200}", f"the name has no address: {error.strerror}", "use an address or a name"
            ) from error
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError as error:
            made.close()
            raise OptionError(
                f"port = {self.port} on {self.host} cannot be used", str(error.strerror),
                "choose another port, or 0 for a free port",
            ) from error  # fmt: skip
        return made

    def url(self, bound: socket.socket) -> str:
        """Return the URL of a bound socket."""
        host, port = bound.getsockname()[:2]
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_packages() -> None:
    """Raise MissingPackageError if a package of the extra `serve` is not installed."""
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "the server cannot be started", f"the package {error.name} is not installed",
            "run `pip install starlette uvicorn msgspec`",
        ) from None  # fmt: skip


def serve(
    server: Service,
    bound: socket.socket,
    address: Address,
    on_ready: Callable[[], None],
    on_stop: Callable[[int], None] = lambda running: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Running requests are finished first, for a limited time.

    Args:
        server: the server, or a balancer.
        bound: a socket of `Address.bind`.
        address: the address.
        on_ready: called when the server accepts requests.
        on_stop: called with the number of running requests if there are some at the first signal.

    Raises:
        KeyboardInterrupt, SystemExit: a second Ctrl-C or SIGTERM ended the running requests.
    """
    check_packages()
    import uvicorn

    class Quiet(uvicorn.Server):
        """A uvicorn server that leaves signals to `_live`, so that streams end whole and the exit code is 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            server.start()
            on_ready()

    second = asyncio.run(_live(server, Quiet(_config(server, address)), bound, on_stop))
    if second == signal.SIGINT:
        raise KeyboardInterrupt
    if second is not None:
        raise SystemExit(128 + second)


def _config(server: Service, address: Address) -> Any:
    import uvicorn

    from .app import build_app
    from .balancer import Balancer
    from .connections import Connection

    return uvicorn.Config(
        server if isinstance(server, Balancer) else build_app(server),
        http=Connection,
        log_config=None,
        # Warnings are about wrong requests, and clients could fill the log with them.
        log_level="error",
        access_log=False,
        lifespan="on" if isinstance(server, Balancer) else "off",
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=64 * 1024,
        ssl_certfile=address.tls_cert,
        ssl_keyfile=address.tls_key,
    )


@contextlib.contextmanager
def serve_on_thread(server: Service) -> Iterator[str]:
    """Serve on a separate thread, at a free port of this machine, and yield the address, such as http://127.0.0.1:5123.

    At the end of the context, running requests are ended. The caller closes the server.
    """
    check_packages()
    import uvicorn

    address = Address(port=0)
    with address.bind() as bound:
        http = uvicorn.Server(_config(server, address))
        http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[bound])), name="genai-serve")
        thread.start()
        try:
            bound.listen()  # a client that connects before the event loop runs waits
            yield address.url(bound)
        finally:
            server.drain()
            http.should_exit = True
            thread.join()


class LoopErrors:
    """The handler of an event loop's errors, which reports a lack of file descriptors once.

    While no connection can be accepted, asyncio reports thousands of errors per second. If the standard error stream is
    a pipe that is read slowly, writing them would stop the server.
    """

    def __init__(self) -> None:
        self._is_reported = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error."""
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif not self._is_reported:
            self._is_reported = True
            _log.warning("new connections wait: the limit of open files is reached; raise it with `ulimit -n`")


async def _live(
    server: Service, http: Any, bound: socket.socket, on_stop: Callable[[int], None]
) -> signal.Signals | None:
    """Serve until a signal arrives; return the second signal if it arrives before the running requests have ended."""
    loop, stops = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(LoopErrors())
    signals: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        signals.append(number)
        server.drain()
        stops.set()
        if len(signals) == 1 and server.num_tasks:
            on_stop(server.num_tasks)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    serving = asyncio.create_task(http.serve(sockets=[bound]))
    stopping = asyncio.create_task(stops.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await _drain(server, lambda: len(signals) > 1)
        http.should_exit = True
        http.force_exit = len(signals) > 1
    stopping.cancel()
    await serving
    return signals[1] if signals[1:] else None


async def _drain(server: Service, is_urgent: Callable[[], bool]) -> None:
    """Wait until all requests have ended, or the time limit has passed; then end the rest with an error.

    Args:
        server: the server.
        is_urgent: returns True if the requests should end at once.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + server.drain_seconds
    while server.num_tasks and loop.time() < end and not is_urgent():
        await asyncio.sleep(0.02)
    server.stop_running()
    end = loop.time() + 1.0
    while server.num_tasks and loop.time() < end:
        await asyncio.sleep(0.02)
