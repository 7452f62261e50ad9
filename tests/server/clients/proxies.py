"""Functions of the drivers of proxies: they start a proxy in front of the servers SERVER and SECOND, and use it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

SERVERS = os.environ["SERVER"], os.environ["SECOND"]


@contextmanager
def proxy(command: Callable[[int], Sequence[str]]) -> Iterator[str]:
    """Start a proxy at a free port, wait until it answers, and yield its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not _answers(url):
                assert process.poll() is None, "the proxy has ended"
                time.sleep(0.2)
            yield url
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            return "pebble" in answer.read().decode()
    except (OSError, urllib.error.URLError):
        return False


def check(url: str) -> None:
    """Request a chat and a stream of several conversations."""
    for number in range(1, 9):
        body = {"model": "pebble", "messages": [{"role": "user", "content": f"What is {number} + 7?"}]}
        found = json.loads(_post(url, body))
        assert found["choices"][0]["message"]["content"] == str(number + 7), found
        events = _post(url, {**body, "stream": True}).split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(texts) == str(number + 7) and "data: [DONE]" in events, events


def _post(url: str, body: object) -> str:
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def served() -> list[int]:
    """Return the number of chat requests that each server received."""
    found = []
    for server in SERVERS:
        with urllib.request.urlopen(f"{server}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        path = 'path="/v1/chat/completions"'
        found.append(int(sum(float(one.split()[-1]) for one in lines if "http_requests_total{" in one and path in one)))
    return found
