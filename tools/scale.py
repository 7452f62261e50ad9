"""Simulate N servers behind a balancer: `python -m tools.scale [--nodes 10 100 1000] [--load 0.7]`.

The traffic is random: sessions with several turns arrive at random times. Each node runs a number of sequences and
stores the prefix caches of the sessions that it served last. The tool compares three ways to choose the node of a
request: at random, the less used one of two random nodes, and always the same node for a session.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tools.arguments import positive

POLICIES = ("random", "two", "session")


@dataclass(frozen=True)
class Node:
    """The speed of a node.

    Attributes:
        slots: number of sequences that run concurrently.
        prefill: prompt tokens per second of one sequence.
        decode: generated tokens per second of one sequence while all slots are used.
        sessions: number of sessions whose prefix cache the node stores.
    """

    slots: int = 16
    prefill: float = 1500.0
    decode: float = 12.0
    sessions: int = 64

    def seconds(self, computed: int, reply: int) -> float:
        """Return the time of a request with `computed` prompt tokens that are not cached, and `reply` tokens."""
        return computed / self.prefill + reply / self.decode


@dataclass(frozen=True)
class Traffic:
    """Random sessions.

    Attributes:
        turns: mean number of turns of a session.
        system: tokens of the first prompt.
        question: mean number of tokens of a question.
        reply: mean number of tokens of a reply.
        think: mean number of seconds between a reply and the next question.
    """

    turns: float = 6.0
    system: int = 6000
    question: float = 400.0
    reply: float = 150.0
    think: float = 10.0

    def mean_seconds(self, node: Node, *, cached: bool) -> float:
        """Return the mean time of a request, from arithmetic on means."""
        question, reply = self.question, self.reply
        if cached:
            computed = self.system / self.turns + question
        else:  # a turn follows (turns - 1) others on average, because the number of turns is geometric
            computed = self.system + question + (self.turns - 1) * (question + reply)
        return computed / node.prefill + reply / node.decode

    def capacity(self, node: Node, *, cached: bool) -> float:
        """Return the maximum number of requests per second of a node."""
        return node.slots / self.mean_seconds(node, cached=cached)


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        requests: number of requests that were started.
        waits: seconds that each request waited for a slot.
        cached: part of the prompt tokens that were cached.
        busy: used part of all slots.
    """

    requests: int
    waits: Sequence[float]
    cached: float
    busy: float

    def wait(self, part: float) -> float:
        """Return the wait that a part of the requests does not exceed."""
        return sorted(self.waits)[min(len(self.waits) - 1, int(part * len(self.waits)))]


class _Simulation:
    """The events of one simulation, in the order of their time."""

    def __init__(self, nodes: int, rate: float, seconds: float, policy: str, node: Node, traffic: Traffic, seed: int):
        self._random, self._node, self._traffic, self._policy = random.Random(seed), node, traffic, policy
        self._rate, self._begun, self._end = rate, seconds / 2, seconds
        self._running, self._queues = [0] * nodes, [deque[tuple[float, int, int, int, int]]() for _ in range(nodes)]
        self._stored: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(nodes)]
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._count = self._hits = self._tokens = 0
        self._waits: list[float] = []
        self._used = 0.0

    def run(self) -> Outcome:
        self._push(self._random.expovariate(self._rate), "session", ())
        while self._events and self._events[0][0] < self._end:
            now, _, kind, facts = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(now, *facts)
        capacity = (self._end - self._begun) * self._node.slots * len(self._running)
        return Outcome(len(self._waits), self._waits, self._hits / max(self._tokens, 1), self._used / capacity)

    def _push(self, time: float, kind: str, facts: tuple[int, ...]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, kind, facts))

    def _on_session(self, now: float) -> None:
        self._push(now + self._random.expovariate(self._rate), "session", ())
        self._push(now, "turn", (self._count, 0, self._traffic.system))

    def _on_turn(self, now: float, session: int, old: int, new: int) -> None:
        """A question arrives: `old` tokens were in the last prompt and reply, `new` tokens were not."""
        new += 1 + int(self._random.expovariate(1 / self._traffic.question))
        reply = 1 + int(self._random.expovariate(1 / self._traffic.reply))
        node = self._choose(session)
        request = (now, session, old, new, reply)
        if self._running[node] < self._node.slots:
            self._begin(now, node, request)
        else:
            self._queues[node].append(request)

    def _choose(self, session: int) -> int:
        count = len(self._running)
        if self._policy == "session":
            return random.Random(session).randrange(count)
        if self._policy == "random":
            return self._random.randrange(count)
        pair = (self._random.randrange(count), self._random.randrange(count))
        return min(pair, key=lambda one: self._running[one] + len(self._queues[one]))

    def _begin(self, now: float, node: int, request: tuple[float, int, int, int, int]) -> None:
        arrived, session, old, new, reply = request
        stored = self._stored[node]
        hit = old if session in stored else 0
        stored[session] = None
        stored.move_to_end(session)
        if len(stored) > self._node.sessions:
            stored.popitem(last=False)
        self._running[node] += 1
        seconds = self._node.seconds(old + new - hit, reply)
        if now >= self._begun:
            self._hits, self._tokens = self._hits + hit, self._tokens + old + new
            self._waits.append(now - arrived)
        self._used += max(0.0, min(now + seconds, self._end) - max(now, self._begun))
        self._push(now + seconds, "end", (node, session, old + new + reply))

    def _on_end(self, now: float, node: int, session: int, tokens: int) -> None:
        self._running[node] -= 1
        if self._queues[node]:
            self._begin(now, node, self._queues[node].popleft())
        if self._random.random() < 1 - 1 / self._traffic.turns:
            self._push(now + self._random.expovariate(1 / self._traffic.think), "turn", (session, tokens, 0))


def simulate(
    nodes: int, load: float, policy: str, *, seconds: float = 900.0, node: Node = Node(), traffic: Traffic = Traffic(),
    seed: int = 0,
) -> Outcome:  # fmt: skip
    """Simulate nodes that receive `load` of the requests that they can process if all prefixes are cached.

    The second half of the time counts, because the number of sessions grows in the first half.
    """
    rate = load * nodes * traffic.capacity(node, cached=True) / traffic.turns
    return _Simulation(nodes, rate, seconds, policy, node, traffic, seed).run()


def table(nodes: Sequence[int], load: float, seconds: float) -> str:
    """Return a table of simulations in Markdown."""
    lines = [
        "| nodes | choice | requests per second | median wait (s) | 95 % wait (s) | cached | used slots |",
        "|---|---|---|---|---|---|---|",
    ]
    for count in nodes:
        for policy in POLICIES:
            found = simulate(count, load, policy, seconds=seconds)
            waits = f"{statistics.median(found.waits):.1f} | {found.wait(0.95):.1f}"
            rate = f"{found.requests / seconds * 2:.1f}"
            lines.append(f"| {count:,} | {policy} | {rate} | {waits} | {found.cached:.0%} | {found.busy:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--nodes", type=positive, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--load", type=float, default=0.8, help="part of the capacity with cached prefixes")
    parser.add_argument("--seconds", type=positive, default=900)
    chosen = parser.parse_args()
    if not 0 < chosen.load < 10:
        parser.error("--load: a number above 0 and below 10 is expected")
    print(table(chosen.nodes, chosen.load, chosen.seconds))


if __name__ == "__main__":
    main()
