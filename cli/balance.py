"""`genai balance`: one address for several servers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from . import listening
from .listening import checked_keys, say_stopping
from .terminal import say

_Servers = Annotated[list[str], typer.Argument(help="Addresses of the servers: http://HOST:PORT.", metavar="URL")]


def balance(
    urls: _Servers,
    host: listening.Host = "127.0.0.1",
    port: listening.Port = 8000,
    api_key_file: listening.KeyFile = None,
    insecure: listening.Insecure = False,
    tls_cert: listening.TlsCert = None,
    tls_key: listening.TlsKey = None,
    allow_host: listening.AllowHost = None,
    allow_origin: listening.AllowOrigin = None,
    max_body: listening.MaxBody = 16,
    drain_timeout: listening.DrainTimeout = 30.0,
    attempts: Annotated[
        int, typer.Option("--attempts", help="Maximum number of servers that may fail or be busy per request.", min=1)
    ] = 3,
) -> None:
    """Distribute requests over several servers of `genai serve`, and continue replies whose server fails.

    Requests of a session reach the same server, whose prefix cache has the earlier turns. If a server fails during a
    reply, another server with the same model generates the reply again, and the client gets only what it lacks.
    """
    from genai.server.run import Address, check_packages, serve as run

    check_packages()
    address = Address(host, port, tls_cert, tls_key)
    keys = checked_keys(address, api_key_file, insecure=insecure, allow_host=allow_host, risk="could use the servers")
    from genai.server.balancer import Balancer, BalancerOptions

    options = BalancerOptions(
        keys=keys, max_body=max_body * 2**20, allowed_hosts=address.hosts(tuple(allow_host or ())),
        allowed_origins=tuple(allow_origin or ()), drain_seconds=drain_timeout, attempts=attempts,
    )  # fmt: skip
    balancer = Balancer(urls, options)
    with address.bind() as bound:
        url = address.url(bound)
        try:
            on_stop = partial(say_stopping, "balance", drain_timeout)
            run(balancer, bound, address, lambda: say(f"genai balance: {balancer.title} at {url}/v1"), on_stop)
        except KeyboardInterrupt:
            say("genai balance: stopped; the running requests ended with an error")
            raise typer.Exit(130) from None
