"""Replay a coding agent's conversation: `python -m tools.server_agents [--turns N] [--tokens N] [--seed N]`.

The tool makes a small model with random weights, the bundled tokenizer, a context of 32,768 tokens and a chat template
that renders tools. An agent with a long system prompt and many tools sends its whole conversation with every turn, and
each turn has a forced tool call or a text. The tool reports a turn that computes more than the previous reply and what
is new, and a turn whose reply differs from that of a server without a prefix cache.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import genai
from genai.server.run import serve_on_thread
from genai.server.serving import Server
from tools.arguments import positive
from tools.server_models import BLOCK, make_model, make_tools, text

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.{0:03d}; cc_entrypoint=cli; cch={0:05x};\n"


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation.

    Attributes:
        prompt: number of tokens of the prompt.
        cached: number of prompt tokens from the prefix cache.
        least: number of prompt tokens that the prefix cache must supply: the whole blocks of the previous prompt.
        seconds, cold_seconds: time until the end of the reply, with and without the prefix cache.
        is_equal: True if the replies with and without the prefix cache are equal.
        kind: "call" or "text".
    """

    prompt: int
    cached: int
    least: int
    seconds: float
    cold_seconds: float
    is_equal: bool
    kind: str

    @property
    def problems(self) -> list[str]:
        """What is wrong with the turn."""
        found = [] if self.is_equal else ["the reply differs from that of a server without a prefix cache"]
        if self.cached < self.least:
            found.append(f"{self.cached} of at least {self.least} tokens are cached")
        return found


class Agent:
    """A conversation with two servers, which must give equal replies.

    Args:
        warm: a client of the server with the prefix cache.
        cold: a client of a server whose prefix cache has nothing that a turn could use.
        tokens: approximate number of tokens of the system prompt and the tools.
        block: number of tokens of a block of the KV cache.
        seed: seed of all texts.
    """

    def __init__(self, warm: httpx.Client, cold: httpx.Client, *, tokens: int, block: int, seed: int = 0) -> None:
        self._warm, self._cold, self._block, self._seed = warm, cold, block, seed
        self._dice = random.Random(seed)
        self._tools = make_tools(max(2, tokens // 1000), self._dice)
        missing = tokens - self._size({"messages": [{"role": "user", "content": ""}], "tools": self._tools})
        sample = text(self._dice, 200)
        size = self._size({"messages": [{"role": "user", "content": sample}]})
        self._system = text(self._dice, max(1, missing * 200 // size))
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": text(self._dice, 20)}]
        self._before = 0

    def _size(self, body: dict[str, Any]) -> int:
        return int(_posted(self._warm, "/tokenize", body)["count"])

    def turn(self, number: int) -> Turn:
        """Send one turn, and add the reply and what follows to the conversation."""
        kind = "text" if number % 4 == 3 else "call"
        tool = self._dice.choice(self._tools)["function"]["name"]
        system = {"role": "system", "content": HEADER.format(number) + self._system}
        body = {
            "messages": [system, *self.messages],
            "tools": self._tools,
            "tool_choice": {"type": "function", "function": {"name": tool}} if kind == "call" else "auto",
            "max_tokens": 200 if kind == "call" else 40,
            "temperature": 0.7,
            "seed": self._seed + number,
        }
        begin = time.perf_counter()
        reply = _posted(self._warm, "/v1/chat/completions", body)
        middle = time.perf_counter()
        cold = _posted(self._cold, "/v1/chat/completions", {**body, "cache_salt": str(number)})
        end = time.perf_counter()
        usage, message = reply["usage"], reply["choices"][0]["message"]
        self._go_on(message)
        least, self._before = self._before // self._block * self._block, usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        is_equal = reply["choices"] == cold["choices"] and not cold["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Turn(usage["prompt_tokens"], cached, least, middle - begin, end - middle, is_equal, kind)

    def _go_on(self, message: dict[str, Any]) -> None:
        calls = message.get("tool_calls") or []
        self.messages.append(message)
        for call in calls:
            json.loads(call["function"]["arguments"])  # the schema bounds the arguments, so they are complete
            content = text(self._dice, 60)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not calls:
            self.messages.append({"role": "user", "content": text(self._dice, 15)})


def _posted(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
    return answer.json()


def replay(folder: Path, *, turns: int, tokens: int, seed: int = 0) -> Sequence[Turn]:
    """Return the turns of a conversation with the model in a folder."""
    with ExitStack() as stack:
        clients = []
        for _ in range(2):
            llm = stack.enter_context(genai.LLM(folder, max_sequences=2))
            server = Server(llm)
            stack.callback(server.close)
            url = stack.enter_context(serve_on_thread(server))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=600, trust_env=False)))
        agent = Agent(*clients, tokens=tokens, block=BLOCK, seed=seed)
        return [agent.turn(number) for number in range(turns)]


def main() -> int:
    """Replay the conversation, and print a line for each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=positive, default=20)
    parser.add_argument("--tokens", type=positive, default=25000, help="tokens of the system prompt and the tools")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="also write the model to this folder, which must not exist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(arguments.model or Path(made) / "agents")
        found = replay(folder, turns=arguments.turns, tokens=arguments.tokens, seed=arguments.seed)
    print("turn  kind  prompt  cached  computed  seconds  without cache")
    for number, turn in enumerate(found):
        computed = turn.prompt - turn.cached
        figures = f"{turn.prompt:7,} {turn.cached:7,} {computed:9,} {turn.seconds:8.2f} {turn.cold_seconds:14.2f}"
        print(f"{number:4}  {turn.kind} {figures}  {'; '.join(turn.problems)}".rstrip())
    return 1 if any(turn.problems for turn in found) else 0


if __name__ == "__main__":
    sys.exit(main())
