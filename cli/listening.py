"""The address and the API keys of `genai serve` and `genai balance`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genai.errors import OptionError

from .terminal import say

if TYPE_CHECKING:
    from genai.server.keys import Key
    from genai.server.run import Address

Host = Annotated[
    str, typer.Option("--host", help="Address to listen on; other machines reach addresses other than 127.0.0.1.")
]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 = a free port.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="File with the accepted API keys: KEY or NAME KEY per line.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow an address that other machines reach without API keys.")
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="PEM file with the TLS certificate chain.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file with the TLS private key.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", help="Further name of this server in the Host header; may be repeated."),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Origin of web pages that may use the server; may be repeated."),
]
MaxBody = Annotated[int, typer.Option("--max-body", help="Maximum size of a request body in MiB.", min=1)]
DrainTimeout = Annotated[
    float, typer.Option("--drain-timeout", help="Seconds that running requests may take after SIGTERM.")
]


def checked_keys(
    address: Address, api_key_file: Path | None, *, insecure: bool, allow_host: list[str] | None, risk: str
) -> list[Key]:
    """Return the API keys of a server, and check that they suit its address.

    Args:
        address: the address.
        api_key_file: the file with the keys.
        insecure: True if other machines may reach the address without keys.
        allow_host: further names of the server.
        risk: what other machines could do without keys.

    Raises:
        GenaiError: the address or the file cannot be used, or an option does not apply to the address.
    """
    from genai.server.keys import read_keys

    address.check()
    keys = read_keys(api_key_file) if api_key_file is not None else []
    if not address.is_local and not keys and not insecure:
        raise OptionError(
            f"--host {address.host} needs API keys", f"other machines can reach this address, and {risk}",
            "add --api-key-file FILE, or --insecure if the network is trusted",
        )  # fmt: skip
    if insecure and (keys or address.is_local):
        reason = "--api-key-file protects the server" if keys else f"only this machine reaches {address.host}"
        raise OptionError("--insecure has no effect", reason, "remove --insecure")
    if allow_host and not address.is_local:
        raise OptionError(
            f"--allow-host cannot be used with --host {address.host}",
            "the Host header is checked only for addresses that other machines do not reach", "remove --allow-host",
        )  # fmt: skip
    return keys


def say_stopping(command: str, seconds: float, running: int) -> None:
    """Report that a server finishes its running requests."""
    requests = "1 request" if running == 1 else f"{running} requests"
    say(f"genai {command}: finishing {requests} in at most {seconds:g} seconds; Ctrl-C stops at once")
