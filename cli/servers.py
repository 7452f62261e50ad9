"""`genai ps`, `stop` and `launch`: the running servers, and the clients that use them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genai.common.progress import task
from genai.common.reading import read_text_file
from genai.errors import InputError, OptionError, StateError, did_you_mean

from . import options as opt
from .terminal import emit, emit_figures, say

if TYPE_CHECKING:
    from genai.server.registry import RunningServer

Which = Annotated[
    str | None,
    typer.Argument(help="Port, process number, address or model of a server from `genai ps`.", metavar="SERVER"),
]


def ps(as_json: opt.AsJson = False) -> None:
    """List the servers that this user started with `genai serve` on this machine, and their models."""
    from genai.server.registry import servers

    found = servers()
    if as_json:
        rows = [
            {"pid": one.pid, "url": one.url, "models": [*one.models], "loaded": _loaded(one), "started": one.started}
            for one in found
        ]
        emit(json.dumps(rows, indent=2), "\n")
    elif not found:
        say("genai: no server is running; to start one, run `genai serve`")
    else:
        emit_figures((one.url, f"process {one.pid}, since {one.started}: {_shown(one)}") for one in found)


def _loaded(server: RunningServer) -> list[str]:
    """Return the models of a server that are in memory."""
    return [*(server.models if server.loaded is None else server.loaded)]


def _shown(server: RunningServer) -> str:
    """Return the models of a server; with several models, also which ones are in memory."""
    if server.loaded is None:
        return ", ".join(server.models)
    return ", ".join(f"{name} (loaded)" if name in server.loaded else name for name in server.models)


def stop(
    server: Which = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all servers of this user.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Number of seconds to wait for the end of each server.")
    ] = 60.0,
) -> None:
    """Stop a server that `genai ps` lists. It finishes its running requests first."""
    from genai.server.registry import servers

    found = servers()
    if every and server is not None:
        raise OptionError(
            f"--all cannot be used with {server:.80}", "--all stops every server", "remove one of the two"
        )
    for one in found if every else [chosen(found, server)]:
        one.stop()
        with task(f"Waiting for the requests of {one.url}"):
            end = time.monotonic() + timeout
            while one.is_alive and time.monotonic() < end:
                time.sleep(0.05)
        if one.is_alive:
            raise StateError(
                f"{one.url}: the server has not ended after {timeout:g} s",
                "it finishes its running requests, or the process is suspended",
                f"wait, or end the process with `kill -9 {one.pid}`",
            )
        say(f"genai: stopped {one.url}")


def chosen(found: list[RunningServer], server: str | None) -> RunningServer:
    """Return the server that a port, a process number, an address or a model names; without a name, the only server.

    Raises:
        StateError: no server is running.
        InputError: there is no such server, or several are running or have the model.
    """
    if not found:
        raise StateError("no server is running", "`genai ps` lists none", "to start a server, run `genai serve`")
    names = ", ".join(one.url for one in found)
    if server is None:
        if len(found) > 1:
            raise InputError("several servers are running", f"they are {names}", "name one of them by its port")
        return found[0]
    for one in found:
        if server in (one.port, str(one.pid)) or _address(server) == _address(one.url):
            return one
    having = [one for one in found if server in one.models]
    if len(having) > 1:
        urls = ", ".join(one.url for one in having)
        raise InputError(f"{server:.80}: several servers have this model", f"they are {urls}", "name one by its port")
    if having:
        return having[0]
    raise InputError(f"{server:.80}: there is no such server", f"the running servers are {names}", "run `genai ps`")


_LOCAL = re.compile(r"(https?://)(?:localhost|0\.0\.0\.0)(?=:|$)", re.ASCII)


def _address(text: str) -> str:
    """Return an address with a scheme, without a path, and with 127.0.0.1 for other names of this machine."""
    url = text.rstrip("/").removesuffix("/v1")
    return _LOCAL.sub(r"\g<1>127.0.0.1", url if "://" in url else f"http://{url}")


def key_of(path: Path) -> str:
    """Return the first key of a file of API keys. Raise InputError as read_keys."""
    from genai.server.keys import read_keys

    read_keys(path)
    lines = [line.split() for line in read_text_file(path).splitlines()]
    return next(words[-1] for words in lines if words and not words[0].startswith("#"))


def launch(
    client: Annotated[str, typer.Argument(help="Client: codex, claude, opencode or openwebui.")],
    server: Which = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of a model of the server [default: its first chat model].")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Add the settings to the client's file.")] = False,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with an API key of the server: KEY or NAME KEY.")
    ] = None,
) -> None:
    """Print the settings with which a client uses a running server, or add them to the client's file.

    Other settings in the file stay unchanged. If the file has another value for a setting, nothing is written.
    """
    from genai.server.client_setup import CLIENTS, setup_of
    from genai.server.registry import servers

    if client not in CLIENTS:
        known = ", ".join(CLIENTS)
        raise InputError(
            f"{client:.80} is not a known client", f"known: {known}", did_you_mean(client, CLIENTS, "use one")
        )
    one = chosen(servers(), server)
    if name is not None and name not in one.chat_models:
        known = ", ".join(one.chat_models)
        fix = did_you_mean(name, one.chat_models, "use one of these names")
        raise OptionError(f"--name {name:.80}: the server has no such model", f"it has {known}"[:500], fix)
    if not one.chat_models:
        raise InputError(
            f"{one.url}: no model of this server generates text", f"it has {', '.join(one.models)}"[:500],
            "name another server by its port",
        )  # fmt: skip
    if one.needs_key and api_key_file is None:
        raise InputError(
            f"{one.url}: the server needs an API key", "the client would have none",
            "pass a file with a key of this server (--api-key-file)",
        )  # fmt: skip
    key = None if api_key_file is None else key_of(api_key_file)
    setup = setup_of(client, _address(one.url), name or one.chat_models[0], Path.home(), one.chat_models, key)
    if not write:
        say(f"genai: add this to {setup.path}, or run the command again with --write:")
        emit(setup.text)
    elif setup.write():
        say(f"genai: wrote {setup.path}")
    else:
        say(f"genai: {setup.path} has these settings already")
    say(f"genai: then run `{setup.command}`")
