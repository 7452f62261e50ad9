"""The measurements of `genai bench serve`: the server beside its own engine, and optionally beside another server."""

from __future__ import annotations

import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..errors import ContextOverflowError, GenaiError, InputError, OptionError
from ..llm.llm import LLM
from ..models.model import Model
from ..server.run import check_packages, serve_on_thread
from ..server.serving import Server, ServerOptions
from .speed import BenchRow, Progress, silent
from .throughput import TimedRequest

CLIENTS = (1, 8, 32)
_START_SECONDS = 120.0
Tokens = list[list[int]]


@dataclass
class Times:
    """The times of the requests of one side, over all rounds.

    Attributes:
        speeds: tokens per second of each round.
        first: seconds until the first text of each request.
        between: seconds between two pieces of text of a request.
        cpu: processor seconds of the client in each round; empty without a client.
    """

    speeds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def figures(self) -> BenchRow:
        """Return the columns of a table."""
        found: BenchRow = {"tok/s": statistics.median(self.speeds)}
        for name, values in (("ttft", self.first), ("itl", self.between)):
            for percent in (50, 95):
                found[f"{name} p{percent} ms"] = float(np.percentile(values, percent)) * 1e3 if values else None
        return {**found, "client CPU s": statistics.median(self.cpu) if self.cpu else None}


Side = Callable[[Tokens, int, Times], None]


def bench_serve(
    model: Model,
    *,
    clients: Sequence[int] = CLIENTS,
    prompt: int = 128,
    tokens: int = 64,
    repeat: int = 3,
    compare: str | None = None,
    progress: Progress = silent,
) -> Iterator[BenchRow]:
    """Measure a server of this process, the engine without a server, and optionally another server.

    In each round, every side in turn gets the same work: as many requests as clients, which are sent at once, with
    prompts of random tokens that no cache holds. A separate process is the client.

    Args:
        clients: numbers of concurrent requests.
        prompt, tokens: tokens of each prompt and of each reply.
        repeat: number of rounds, after a warm-up round.
        compare: base URL of another server with OpenAI's API, or a command with {port} that starts one.

    Returns:
        A row per number of clients and side: the median tokens per second, percentiles of the milliseconds until the
        first text (ttft) and between two pieces of text (itl), and the client's processor time per round. The speed of
        the side "engine" is that of LLM.generate; its times are those of the engine's steps.

    Raises:
        ContextOverflowError: a request would not fit.
        OptionError: an argument is out of range, or `compare` is neither a URL nor a command.
        InputError: a server cannot be reached, or refuses the requests.
        MissingPackageError: a package of the extra `serve` is not installed.
    """
    check_packages()
    if not clients or min(clients) < 1 or tokens < 2:
        raise OptionError(
            f"clients = {[*clients]}, tokens = {tokens}", "at least 1 client and 2 tokens are needed", "use more"
        )
    if prompt + tokens > model.context_size:
        raise ContextOverflowError(
            f"a request has {prompt + tokens} tokens", f"the context size is {model.context_size}",
            "request fewer tokens",
        )  # fmt: skip
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(model, max_sequences=max(clients)))
        server = stack.enter_context(closing(Server(llm, ServerOptions(max_queue=max(clients)))))
        client = stack.enter_context(_client())
        url = stack.enter_context(serve_on_thread(server))
        sides: dict[str, Side] = {"engine": _engine_side(llm), "server": _server_side(client, f"{url}/v1", server.name)}
        if compare is not None:
            other = stack.enter_context(_other_server(compare))
            sides["compared"] = _server_side(client, other, _model_name(other))
        yield from _rows(sides, model.decoder.vocab_size, clients, (prompt, tokens), repeat, progress)


def _rows(
    sides: dict[str, Side],
    vocab_size: int,
    clients: Sequence[int],
    lengths: tuple[int, int],
    repeat: int,
    progress: Progress,
) -> Iterator[BenchRow]:
    rng, (prompt, tokens), done = np.random.default_rng(0), lengths, 0
    for count in clients:
        times = {name: Times() for name in sides}
        for number in range(repeat + 1):
            for name, side in sides.items():
                prompts = rng.integers(min(5, vocab_size - 1), vocab_size, (count, prompt)).tolist()
                side(prompts, tokens, times[name] if number else Times())  # round 0 is the warm-up
                done += 1
                progress(done, len(clients) * len(sides) * (repeat + 1))
        for name, found in times.items():
            yield {"side": f"{count} clients, {name}" if count > 1 else f"1 client, {name}", **found.figures()}


def _engine_side(llm: LLM) -> Side:
    """Return a function that runs LLM.generate, and then the same lengths with an engine on this thread."""

    def run(prompts: Tokens, tokens: int, times: Times) -> None:
        began = time.perf_counter()
        done = llm.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        times.speeds.append(sum(len(one.token_ids) for one in done) / (time.perf_counter() - began))
        decoder = llm.model.decoder
        engine = Engine(decoder, llm.model.sampler, llm.max_sequences)
        others = [[*reversed(prompt)] for prompt in prompts]  # the prefix cache holds the prompts of LLM.generate
        timed = [TimedRequest(one, tokens, decoder.vocab_size, watched=True) for one in others]
        began = time.perf_counter()
        for request in timed:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        for request in timed:
            if request.error is not None:
                raise request.error
            times.first.append(request.times[0] - began)
            times.between += np.diff(request.times).tolist()

    return run


def _server_side(client: _Client, url: str, name: str) -> Side:
    def run(prompts: Tokens, tokens: int, times: Times) -> None:
        found = client.run({"url": url, "model": name, "prompts": prompts, "tokens": tokens})
        times.speeds.append(found["tokens"] / found["seconds"])
        times.first += found["first"]
        times.between += found["between"]
        times.cpu.append(found["cpu"])

    return run


class _Client:
    """The process that sends requests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job of load_client.py."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        found: dict[str, Any] = json.loads(stdout.readline() or '{"error": "the client has ended"}')
        if "error" in found:
            raise InputError(
                f"{job['url']} cannot be measured", found["error"],
                "use a server that completes prompts of token ids at /completions",
            )  # fmt: skip
        return found


@contextmanager
def _client() -> Iterator[_Client]:
    command = [sys.executable, "-I", str(Path(__file__).with_name("load_client.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Client(process)
        finally:
            process.kill()


@contextmanager
def _other_server(compare: str) -> Iterator[str]:
    """Yield the base URL of another server, which is started if `compare` is a command."""
    if compare.startswith(("http://", "https://")):
        yield compare.rstrip("/")
        return
    if "{port}" not in compare:
        raise OptionError(
            f"compare = {compare!r:.200}", "a URL, or a command with {port} in place of the port, is expected",
            "pass a URL such as http://127.0.0.1:8080/v1, or add {port} to the command",
        )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in shlex.split(compare)]
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise InputError(
                f"{words[0]!r:.200} cannot be started", str(error.strerror), "correct the command"
            ) from error
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _await_server(url, process)
            yield url
        except GenaiError as error:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 1000))
            raise InputError(
                error.what, f"its last output is: {log.read().decode('utf-8', 'replace')}", error.fix
            ) from error
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_server(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            _model_name(url)
        except InputError:
            time.sleep(0.1)
        else:
            return
    raise InputError(
        "the command does not start a server", f"{url}/models does not reply", "run the command in a terminal"
    )


def _model_name(url: str) -> str:
    """Return the name of the first model of a server."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError, urllib.error.URLError) as error:
        raise InputError(
            f"{url}/models does not name a model", str(error)[:200], "pass the base URL, such as http://host:8080/v1"
        ) from error
