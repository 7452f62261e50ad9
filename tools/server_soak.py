"""Load a server with unfriendly clients: `python -m tools.server_soak [--seconds N] [--connections N] [--seed N]`.

Connections send random requests to one server: chats, streams, completions, tools, schemas and adapters. Some clients
leave, read slowly, or send bad bodies and wrong keys. At the end, the tool reports every finished reply that differs
from the reply of the same request alone, unexpected statuses, and resources that were not released.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import genai
from genai.models.folders import bundled_adapter, bundled_model
from genai.server.app import build_app
from genai.server.keys import read_keys
from genai.server.serving import Server, ServerOptions

KEYS = {name: name * 20 for name in "abc"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TEXTS = ("What is 12 + 7?", "Spell the word cat.", "Tell me a story about Luna and Tom.", "My name is Nora. " * 40)


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all kinds, as paths and bodies."""
    found: list[tuple[str, dict[str, Any]]] = []
    for index in range(count):
        dice = random.Random(index)
        body: dict[str, Any] = {
            "seed": index,
            "temperature": dice.choice((0, 0.7, 1.3)),
            "max_tokens": dice.choice((1, 5, 20, 60)),
            "model": dice.choice(("pebble", "pebble", "words")),
        }
        body["n"] = dice.choice((1, 1, 2)) if body["temperature"] else 1
        text = dice.choice(TEXTS)
        if dice.random() < 0.25:
            found.append(("/v1/completions", {**body, "prompt": text, "logprobs": 1, "echo": dice.random() < 0.5}))
            continue
        body["messages"] = [{"role": "user", "content": text}]
        if dice.random() < 0.25:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        if dice.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        found.append(("/v1/chat/completions", body))
    return found


@dataclass
class Soak:
    """The state of a run.

    Attributes:
        known: the choices of each request alone.
        counts: the number of outcomes by name.
        wrong: descriptions of what went wrong.
    """

    url: str
    cases: list[tuple[str, dict[str, Any]]]
    known: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def alone(self, client: httpx.AsyncClient) -> None:
        """Get the reply to each request, one after the other."""
        for path, body in self.cases:
            answer = await client.post(path, json=body, headers=_key("a"))
            if answer.status_code != 200:
                raise SystemExit(f"{path} {body}: {answer.text}")
            self.known.append(answer.json()["choices"])

    async def connection(self, client: httpx.AsyncClient, dice: random.Random, end: float) -> None:
        """Send requests until the time is over."""
        while time.monotonic() < end:
            index = dice.randrange(len(self.cases))
            kind = dice.choices(("whole", "stream", "leave", "slow", "bad", "key"), (6, 4, 3, 1, 1, 1))[0]
            try:
                await getattr(self, f"_{kind}")(client, dice, index)
                self.counts[kind] += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    async def _whole(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        path, body = self.cases[index]
        answer = await client.post(path, json=body, headers=_key(dice.choice("abc")))
        if answer.status_code == 429:
            self.counts["refused"] += 1
        elif answer.status_code != 200:
            self.wrong.append(f"{path} {body}: {answer.status_code} {answer.text}"[:500])
        elif answer.json()["choices"] != self.known[index]:
            self.wrong.append(f"{path} {body}: differs: {answer.json()['choices']} and {self.known[index]}"[:900])

    async def _stream(self, client: httpx.AsyncClient, dice: random.Random, index: int, pause: float = 0.0) -> None:
        path, body = self.cases[index]
        lines: list[str] = []
        asked = client.stream("POST", path, json={**body, "stream": True}, headers=_key(dice.choice("abc")))
        async with asked as answer:
            if answer.status_code == 429:
                self.counts["refused"] += 1
                return
            async for line in answer.aiter_lines():
                lines.append(line)
                if pause:
                    await asyncio.sleep(pause)
        if "data: [DONE]" not in lines:
            self.wrong.append(f"{path} {body}: the stream ended early: {lines[-3:]}"[:500])
        elif (texts := _texts(lines, body["n"])) != (known := [_text(choice) for choice in self.known[index]]):
            self.wrong.append(f"{path} {body}: the stream differs: {texts} and {known}"[:900])

    async def _slow(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        await self._stream(client, dice, index, pause=0.05)

    async def _leave(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        path, body = self.cases[index]
        stream = dice.random() < 0.5
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(dice.random() * 0.3):
                await client.post(path, json={**body, "stream": stream}, headers=_key(dice.choice("abc")))

    async def _bad(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        path, body = self.cases[index]
        bodies = (b"", b"{", b"[" * 5000, json.dumps({**body, "temperature": -1}).encode(), json.dumps({}).encode())
        headers = {**_key("a"), "content-type": "application/json"}
        answer = await client.post(path, content=dice.choice(bodies), headers=headers)
        if answer.status_code != 400:
            self.wrong.append(f"a bad body: {answer.status_code} {answer.text}"[:300])

    async def _key(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        answer = await client.post(self.cases[index][0], json={}, headers={"authorization": "Bearer nothing"})
        if answer.status_code != 401:
            self.wrong.append(f"a wrong key: {answer.status_code} {answer.text}"[:300])


def _key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def _text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"] or ""


def _texts(lines: list[str], samples: int) -> list[str]:
    texts = [""] * samples
    for line in lines:
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return texts


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    config = uvicorn.Config(build_app(server), port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    http = uvicorn.Server(config)
    http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=lambda: asyncio.run(http.serve()))
    thread.start()
    while not http.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join()


async def _run(soak: Soak, connections: int, seconds: float, seed: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=connections)
    async with httpx.AsyncClient(base_url=soak.url, timeout=120, trust_env=False, limits=limits) as client:
        await soak.alone(client)
        end = time.monotonic() + seconds
        await asyncio.gather(*(soak.connection(client, random.Random(seed + i), end) for i in range(connections)))


def _left(server: Server) -> list[str]:
    """Return the resources that the server still holds when no request runs."""
    for _ in range(500):
        stats, admission = server.llm.stats(), server.admission
        held = {
            "requests": admission.num_requests,
            "running": admission.num_running + stats.running,
            "waiting": admission.num_waiting + stats.waiting,
            "blocks": (stats.cache_blocks or 0) - (stats.cache_blocks_free or 0),
            "tasks": server.num_tasks,
        }
        if not any(held.values()):
            return []
        time.sleep(0.01)
    return [f"{count} {name} were not released" for name, count in held.items() if count]


def _num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def main() -> int:
    """Run the soak, and print its counts and what went wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, genai.LLM(bundled_model(), lora=True) as llm:
        llm.load_adapter(bundled_adapter("words"), "words")
        path = Path(folder) / "keys"
        path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()), encoding="utf-8")
        server = Server(llm, ServerOptions(keys=read_keys(path), max_queue=arguments.connections // 2), name="pebble")
        files = _num_descriptors()
        with serving(server) as url:
            soak = Soak(url, requests(arguments.requests))
            asyncio.run(_run(soak, arguments.connections, arguments.seconds, arguments.seed))
            soak.wrong += _left(server)
        server.close()
        more = _num_descriptors() - files
        soak.wrong += [f"{more} more descriptors are open"] if more > 10 else []
    print(", ".join(f"{count:,} {name}" for name, count in soak.counts.most_common()))
    for text, count in Counter(soak.wrong).most_common(10):
        print(f"{count} times: {text}")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
