"""Functions that the drivers of clients share. The drivers run in the environment of their client, without pytest.

A driver reads the addresses of two servers from the environment: SERVER serves everybody, LIMITED needs KEY and accepts
one request of a key at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

SERVER, LIMITED, KEY = os.environ["SERVER"], os.environ["LIMITED"], os.environ["KEY"]
QUESTION = "What is 12 + 7?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOO_LONG = "word " * 3000
STORY = "Tell me a story about Luna and Tom."


def counter(name: str, server: str = SERVER) -> float:
    """Return the value of a metric of a server."""
    request = urllib.request.Request(f"{server}/metrics", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def long_bias() -> dict[str, int]:
    """Return a logit bias that makes replies long: a text continues, and further tool calls follow the first."""
    request = urllib.request.Request(f"{SERVER}/tokenizer_info")
    with urllib.request.urlopen(request) as answer:
        return {str(token): -100 for token in json.load(answer)["eos_token_ids"]}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after half a minute."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


@contextmanager
def cancels() -> Iterator[None]:
    """Check that the block cancels a request."""
    before = counter("genai_cancelled_total")
    yield
    wait_for(lambda: counter("genai_cancelled_total") > before and not is_running())


@asynccontextmanager
async def cancels_task() -> AsyncIterator[None]:
    """Check that the block cancels a request, while the event loop continues."""
    before = counter("genai_cancelled_total")
    yield
    await asyncio.to_thread(wait_for, lambda: counter("genai_cancelled_total") > before and not is_running())


def is_running() -> bool:
    """Return True if a request is being generated."""
    return counter("genai_requests_running") > 0


@contextmanager
def busy() -> Iterator[None]:
    """Use the only place of the key on LIMITED until the server has refused a request."""
    refused = counter("genai_refused_total", LIMITED)
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": true, "max_tokens": 900, "stream": true}'
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"{LIMITED}/v1/chat/completions", body, headers)
    ends = threading.Event()

    def hold() -> None:
        while not ends.is_set():  # generation may end before the client arrives
            with urllib.request.urlopen(request) as answer:
                while not ends.is_set() and answer.readline():
                    pass

    def watch() -> None:
        wait_for(lambda: counter("genai_refused_total", LIMITED) > refused)
        ends.set()

    threads = [threading.Thread(target=hold), threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    wait_for(lambda: counter("genai_requests_running", LIMITED) > 0)
    yield
    for thread in threads:
        thread.join()


def raised(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """Call a function that must raise an error, and return the error."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_sum(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a call of the tool `add`."""
    assert set(arguments) == {"a", "b"} and all(0 <= number <= 99 for number in arguments.values()), arguments
