"""`genai top`: the metrics of running servers in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.memory_limits import format_bytes
from genai.errors import GenaiError, StateError

from . import options as opt
from .servers import chosen, key_of
from .terminal import emit
from .wrapping import harmless, width_of

if TYPE_CHECKING:
    from rich.console import Group

    from genai.server.readings import ServerReading

_TopServer = Annotated[
    str | None,
    typer.Argument(
        help="Port, process number, address or model of a server [default: all servers of `genai ps`].",
        metavar="SERVER",
    ),
]


def top(
    server: _TopServer = None,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", help="Seconds between two readings.", min=0.1, max=3600.0)
    ] = 2.0,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with an API key of the servers: KEY or NAME KEY.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show the load and the speed of running servers until Ctrl-C.

    The speeds are those between two readings. If stdout is not a terminal, the figures are printed once.
    """
    view = _View(server, None if api_key_file is None else key_of(api_key_file))
    view.read()
    if as_json or once or not sys.stdout.isatty():
        time.sleep(interval)
        view.read()
        if as_json:
            emit(json.dumps(view.rows(), indent=2), "\n")
        else:
            _console().print(view.drawn())
        return
    from rich.live import Live

    try:
        with Live(view.drawn(), console=_console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                view.read()
                live.update(view.drawn(), refresh=True)
    except KeyboardInterrupt:  # the usual end of this command
        return


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, width=None if width_of(sys.stdout) is not None else 120, highlight=False)


@dataclass
class _View:
    """The last two readings of each server.

    Attributes:
        server: what the user named; None = all servers of the user.
        key: an API key.
    """

    server: str | None
    key: str | None
    _now: dict[str, ServerReading | GenaiError] = field(default_factory=dict)
    _before: Mapping[str, ServerReading | GenaiError] = field(default_factory=dict)

    def read(self) -> None:
        """Read the metrics of each server. A server that cannot be read has an error instead.

        Raises:
            GenaiError: the named server cannot be read.
        """
        from genai.server.readings import read_metrics

        def reading(url: str) -> ServerReading | GenaiError:
            try:
                return read_metrics(url, self.key)
            except GenaiError as error:
                return error

        self._before, self._now = self._now, {}
        urls = self._urls()
        with ThreadPoolExecutor(max(1, len(urls))) as threads:  # a server that hangs does not delay the others
            self._now = dict(zip(urls, threads.map(reading, urls), strict=True))
        for found in self._now.values():
            if isinstance(found, GenaiError) and self.server is not None and not self._before:
                raise found

    def _urls(self) -> Sequence[str]:
        from genai.server.registry import servers

        if self.server is not None and self._before:
            return [*self._before]
        if self.server is not None and self.server.startswith(("http://", "https://")):
            return [self.server.rstrip("/").removesuffix("/v1")]
        found = servers()
        if self.server is None and (found or self._before):
            return [one.url for one in found]
        return [chosen(found, self.server).url]

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each server for JSON."""
        return [_as_json(url, now, self._earlier(url, now)) for url, now in self._now.items()]

    def _earlier(self, url: str, now: ServerReading | GenaiError) -> ServerReading | GenaiError:
        before = self._before.get(url, now)
        return now if isinstance(before, GenaiError) else before

    def drawn(self) -> Group:
        """Return the figures as tables."""
        from rich.console import Group
        from rich.text import Text

        parts = [part for url, now in self._now.items() for part in _drawn(url, now, self._earlier(url, now))]
        return Group(*parts or [Text("no server is running")])


def _as_json(url: str, now: ServerReading | GenaiError, before: ServerReading | GenaiError) -> dict[str, Any]:
    from genai.server.readings import figures

    if isinstance(now, GenaiError) or isinstance(before, GenaiError):
        return {"url": url, "error": str(now)}
    models = [asdict(one) for one in figures(now, before)]
    return {"url": url, "requests": now.requests, "failed": now.failed, **now.values, "models": models}


_HEADS = (
    "model", "state", "running", "waiting", "cache", "prompt tok/s", "reply tok/s", "cached", "first token",
    "per token",
)  # fmt: skip


def _drawn(url: str, now: ServerReading | GenaiError, before: ServerReading | GenaiError) -> Iterator[Any]:
    """Yield the title and the table of a server."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from genai.server.readings import figures

    if isinstance(now, GenaiError) or isinstance(before, GenaiError):
        why = now if isinstance(now, GenaiError) else StateError("the server was restarted")
        said = f"{why.what.removeprefix(f'{url}: ')}{f': {why.why}' if why.why else ''}"
        yield Text(harmless(f"{url}  {said}", sys.stdout))
        return
    yield Text(f"{url}  {'  '.join(_facts(now))}")
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in _HEADS:
        found.add_column(head, justify="left" if head in _HEADS[:2] else "right", overflow="fold")
    for one in figures(now, before):
        found.add_row(
            Text(harmless(one.name, sys.stdout)), Text(harmless(one.state, sys.stdout)), str(one.running),
            str(one.waiting), f"{one.cache_usage:.0%}", f"{one.prompt_tokens_per_second:,.1f}",
            f"{one.generated_tokens_per_second:,.1f}", "-" if one.cached_ratio is None else f"{one.cached_ratio:.0%}",
            _time(one.first_token_seconds), _time(one.token_seconds),
        )  # fmt: skip
    yield found


def _facts(now: ServerReading) -> Iterator[str]:
    """Yield the figures of a whole server."""
    yield f"{now.requests:,} requests, {now.failed:,} failed, {int(now.values.get('refused_total', 0)):,} refused"
    running, waiting = (int(now.values.get(f"encoder_requests_{name}", 0)) for name in ("running", "waiting"))
    if running or waiting:
        yield f"encoders: {running} running, {waiting} waiting"
    if (limit := now.values.get("models_bytes_limit", 0.0)) > 0:
        yield f"models: {format_bytes(int(now.values.get('models_bytes', 0)))} of {format_bytes(int(limit))}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"
