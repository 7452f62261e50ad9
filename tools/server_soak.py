"""Load a server with unfriendly clients: `python -m tools.server_soak [--seconds N] [--connections N] [--seed N]`.

Connections send random requests to one server: chats, streams, completions, tools, schemas, adapters, and long prompts
beside short ones. Some clients leave, read slowly, or send bad bodies and wrong keys. At the end, the tool reports
every finished reply that differs from the reply of the same request alone, unexpected statuses, memory that grew, and
resources that were not released.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import genai
from genai.server.keys import read_keys
from genai.server.run import serve_on_thread
from genai.server.serving import Server, ServerOptions
from tools.adapter_soak import private_bytes
from tools.arguments import positive
from tools.server_models import make_adapter, make_model, make_tools, text

KEYS = {name: name * 20 for name in "abc"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TEXTS = ("What is 12 + 7?", "Spell the word cat.", "Tell me a story about Luna and Tom.", "My name is Nora. " * 40)


# One in this number of cases has a long prompt, and one in that number of requests.
_LONG_CASES, _LONG_REQUESTS = 20, 60
# Memory may grow by this factor from the second third of a run to the last.
_GROWTH = 1.05


@dataclass(frozen=True)
class Case:
    """A request: its path and its body, and True if its prompt is long."""

    path: str
    body: dict[str, Any]
    is_long: bool = False


def make_cases(count: int, long_tokens: int) -> list[Case]:
    """Return requests of all kinds. The prompts of some have about `long_tokens` tokens."""
    tools = make_tools(4, random.Random(0))
    found: list[Case] = []
    for index in range(count):
        dice = random.Random(index)
        body: dict[str, Any] = {
            "seed": index,
            "temperature": dice.choice((0, 0.7, 1.3)),
            "max_tokens": dice.choice((1, 5, 20, 60)),
            "model": dice.choice(("agents", "agents", "tuned")),
        }
        body["n"] = dice.choice((1, 1, 2)) if body["temperature"] else 1
        is_long = index % _LONG_CASES == 0
        content = text(dice, long_tokens * 2 // 5) if is_long else dice.choice(TEXTS)
        if dice.random() < 0.25:
            body |= {"prompt": content, "logprobs": 1, "echo": not is_long and dice.random() < 0.5}
            found.append(Case("/v1/completions", body, is_long))
            continue
        body["messages"] = [{"role": "user", "content": content}]
        if dice.random() < 0.25:
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        elif dice.random() < 0.4:
            name = dice.choice(tools)["function"]["name"]
            choice: Any = dice.choice(("auto", {"type": "function", "function": {"name": name}}))
            body |= {"tools": tools, "tool_choice": choice, "max_tokens": 200}
        if dice.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        found.append(Case("/v1/chat/completions", body, is_long))
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
    cases: list[Case]
    known: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def alone(self, client: httpx.AsyncClient) -> None:
        """Get the reply to each request, one after the other."""
        for case in self.cases:
            answer = await client.post(case.path, json=case.body, headers=_key("a"))
            if answer.status_code != 200:
                raise SystemExit(f"{case.path} {case.body}: {answer.text}"[:2000])
            self.known.append(answer.json()["choices"])

    async def connection(self, client: httpx.AsyncClient, dice: random.Random, end: float) -> None:
        """Send requests until the time is over."""
        long = [index for index, case in enumerate(self.cases) if case.is_long]
        short = [index for index, case in enumerate(self.cases) if not case.is_long]
        while time.monotonic() < end:
            index = dice.choice(short if dice.randrange(_LONG_REQUESTS) else long)
            kind = dice.choices(("whole", "stream", "leave", "slow", "bad", "key"), (6, 4, 3, 1, 1, 1))[0]
            try:
                await getattr(self, f"_{kind}")(client, dice, index)
                self.counts[kind] += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.wrong.append(f"{kind}: {_chain(error)}"[:400])

    def _about(self, index: int) -> str:
        return f"case {index} {self.cases[index].path} {self.cases[index].body}"[:250]

    async def _whole(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        path, body = self.cases[index].path, self.cases[index].body
        answer = await client.post(path, json=body, headers=_key(dice.choice("abc")))
        if answer.status_code == 429:
            self.counts["refused"] += 1
        elif answer.status_code != 200:
            self.wrong.append(f"{self._about(index)}: {answer.status_code} {answer.text}"[:500])
        elif answer.json()["choices"] != self.known[index]:
            self.wrong.append(
                f"{self._about(index)}: differs: {answer.json()['choices']} and {self.known[index]}"[:900]
            )

    async def _stream(self, client: httpx.AsyncClient, dice: random.Random, index: int, pause: float = 0.0) -> None:
        path, body = self.cases[index].path, self.cases[index].body
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
            self.wrong.append(f"{self._about(index)}: the stream ended early: {lines[-3:]}"[:500])
        elif (texts := _texts(lines, body["n"])) != (known := [_text(choice) for choice in self.known[index]]):
            self.wrong.append(f"{self._about(index)}: the stream differs: {texts} and {known}"[:900])

    async def _slow(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        await self._stream(client, dice, index, pause=0.05)

    async def _leave(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        path, body = self.cases[index].path, self.cases[index].body
        stream = dice.random() < 0.5
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(dice.random() * 0.3):
                await client.post(path, json={**body, "stream": stream}, headers=_key(dice.choice("abc")))

    async def _bad(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        path, body = self.cases[index].path, self.cases[index].body
        bodies = (b"", b"{", b"[" * 5000, json.dumps({**body, "temperature": -1}).encode(), json.dumps({}).encode())
        headers = {**_key("a"), "content-type": "application/json"}
        answer = await client.post(path, content=dice.choice(bodies), headers=headers)
        if answer.status_code not in (400, 429):
            self.wrong.append(f"a bad body: {answer.status_code} {answer.text}"[:300])

    async def _key(self, client: httpx.AsyncClient, dice: random.Random, index: int) -> None:
        answer = await client.post(self.cases[index].path, json={}, headers={"authorization": "Bearer nothing"})
        if answer.status_code != 401:
            self.wrong.append(f"a wrong key: {answer.status_code} {answer.text}"[:300])


def _chain(error: BaseException | None) -> str:
    """Return an error and its causes."""
    return "" if error is None else f"{error!r} {_chain(error.__cause__ or error.__context__)}"


def _key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a choice, with the names and the arguments of its calls."""
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice["delta"]
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return (message.get("content") or "") + "".join(one.get("name", "") + one["arguments"] for one in calls)


def _texts(lines: list[str], samples: int) -> list[str]:
    texts = [""] * samples
    for line in lines:
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            texts[choice["index"]] += _text(choice)
    return texts


async def _run(soak: Soak, connections: int, seconds: float, seed: int) -> list[int]:
    """Send the requests, and return the private memory in bytes, at 30 moments."""
    # httpx can close a connection because it expires while another request starts to use it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
    sizes: list[int] = []

    async def weigh(end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(seconds / 30)
            sizes.append(private_bytes())

    async with httpx.AsyncClient(base_url=soak.url, timeout=300, trust_env=False, limits=limits) as client:
        await soak.alone(client)
        end = time.monotonic() + seconds
        clients = (soak.connection(client, random.Random(seed + i), end) for i in range(connections))
        await asyncio.gather(weigh(end), *clients)
    return sizes


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


def _growth(sizes: list[int]) -> list[str]:
    """Return a problem if memory grew from the second third of a run to the last."""
    third = len(sizes) // 3
    middle, last = max(sizes[third : 2 * third], default=0), max(sizes[2 * third :], default=0)
    return [f"memory grew by {last / middle - 1:.1%}"] if middle and last > _GROWTH * middle else []


def main() -> int:
    """Run the soak, and print its counts and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="memory is checked in runs of 120 s and more")
    parser.add_argument("--connections", type=positive, default=200)
    parser.add_argument("--requests", type=positive, default=80, help="number of different requests")
    parser.add_argument("--long", type=positive, default=20000, help="tokens of the long prompts")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, genai.LLM(make_model(Path(made) / "agents"), lora=True) as llm:
        llm.load_adapter(make_adapter(llm, Path(made) / "adapter"), "tuned")
        path = Path(made) / "keys"
        path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()), encoding="utf-8")
        server = Server(llm, ServerOptions(keys=read_keys(path), max_queue=arguments.connections // 2))
        files = _num_descriptors()
        with serve_on_thread(server) as url:
            soak = Soak(url, make_cases(arguments.requests, arguments.long))
            sizes = asyncio.run(_run(soak, arguments.connections, arguments.seconds, arguments.seed))
            soak.wrong += _left(server)
        server.close()
        more = _num_descriptors() - files
        soak.wrong += [f"{more} more descriptors are open"] if more > 10 else []
        soak.wrong += _growth(sizes) if arguments.seconds >= 120 else []
    print(", ".join(f"{count:,} {name}" for name, count in soak.counts.most_common()))
    print("private memory, MiB: " + ", ".join(f"{size / 2**20:.0f}" for size in sizes[:: max(1, len(sizes) // 6)]))
    for problem, count in Counter(soak.wrong).most_common(10):
        print(f"{count} times: {problem}")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
