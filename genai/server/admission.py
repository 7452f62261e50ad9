"""Admission: which requests run, which wait, and which are refused because the server is full.

The engine admits as many sequences as its limit and its cache allow, in the order of their submission. So requests are
submitted only when they can start soon, and the requests that wait are chosen fairly among keys.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import RequestError
from .errors import RETRY_SECONDS


@dataclass(eq=False)
class Seat:
    """A request that is in the server, from its arrival to its end.

    Attributes:
        key: name of its API key.
        is_pending: True until the request runs.
    """

    key: str
    is_pending: bool = True


@dataclass(eq=False)
class Ticket:
    """A request that waits for its turn, or runs."""

    admission: Admission
    seat: Seat
    cost: int
    priority: int
    number: int
    ready: asyncio.Future[None]
    is_released: bool = False

    def release(self) -> None:
        """End the turn of the request. Further calls have no effect."""
        self.admission.release(self)


@dataclass
class Admission:
    """Limits of the requests that run and wait. Only the event loop's thread uses it.

    Attributes:
        most_running: maximum number of sequences that are submitted to the engine.
        most_waiting: maximum number of requests that wait; further requests are refused with status 429.
        most_per_key: maximum number of requests of one key that are in the server; None = no limit.
        refused: number of requests of all queues that were refused because of the load.
    """

    most_running: int
    most_waiting: int
    most_per_key: int | None = None
    refused: int = 0
    _drains: bool = False
    _seats: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)
    _waiting: list[Ticket] = field(default_factory=list)
    _served: dict[str, int] = field(default_factory=dict)
    _count: int = 0
    _num_pending: int = 0
    _parent: Admission | None = None

    def lane(self, most_running: int) -> Admission:
        """Return the limits of requests that run on another model.

        They have their own queue. The limit for each key, and the refusal of new requests while the server stops, apply
        to the requests of all queues together.
        """
        return Admission(most_running, self.most_waiting, self.most_per_key, _seats=self._seats, _parent=self)

    @property
    def is_draining(self) -> bool:
        """True if new requests are refused because the server stops."""
        return self._drains or (self._parent is not None and self._parent.is_draining)

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._drains = value

    @property
    def num_requests(self) -> int:
        """The number of requests that are in the server."""
        return self._seats.total()

    @property
    def num_running(self) -> int:
        """The number of sequences that are submitted to the engine."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """The number of requests that are being prepared, or wait for their turn."""
        return self._num_pending

    @contextmanager
    def seat(self, key: str) -> Iterator[Seat]:
        """Hold a place for a request from its arrival to its end.

        Raises:
            RequestError: the server is full or stops, or the key has too many requests.
        """
        if self.is_draining:
            raise stopping()
        if self.most_per_key is not None and self._seats[key] >= self.most_per_key:
            raise self._too_many(f"this key has {self._seats[key]} requests", "that is the limit for each key")
        if self._num_pending >= self.most_waiting + max(0, self.most_running - self.num_running):
            raise self._too_many(f"{self._num_pending} requests are waiting", "that is the limit of the queue")
        seat = Seat(key)
        self._seats[key] += 1
        self._num_pending += 1
        try:
            yield seat
        finally:
            self._num_pending -= seat.is_pending
            self._seats[key] -= 1
            if not self._seats[key]:
                del self._seats[key]

    def _too_many(self, what: str, why: str) -> RequestError:
        first = self
        while first._parent is not None:
            first = first._parent
        first.refused += 1
        headers = {"retry-after": str(RETRY_SECONDS), "retry-after-ms": str(RETRY_SECONDS * 1000)}
        return RequestError(429, what, why, "send the request again later", code="rate_limit_exceeded", headers=headers)

    async def enter(self, seat: Seat, cost: int = 1, priority: int = 0) -> Ticket:
        """Wait until a request may run. The returned ticket counts its sequences until it is released.

        Among the requests of the highest priority, the keys with the fewest running sequences are first; then the key
        that was served least recently; then the request that arrived first.

        Args:
            seat: the request.
            cost: number of sequences of the request.
            priority: requests with a higher priority are first.
        """
        self._count += 1
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = Ticket(self, seat, min(cost, self.most_running), priority, self._count, ready)
        self._waiting.append(ticket)
        self._admit()
        try:
            await ready
        except BaseException:
            ticket.release()
            raise
        return ticket

    def release(self, ticket: Ticket) -> None:
        """See Ticket."""
        key = ticket.seat.key
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        elif not ticket.is_released:
            self._running[key] -= ticket.cost
            if not self._running[key]:
                del self._running[key]
        ticket.is_released = True
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=self._rank)
            if self.num_running + first.cost > self.most_running:
                return
            self._waiting.remove(first)
            first.seat.is_pending = False
            self._num_pending -= 1
            self._running[first.seat.key] += first.cost
            self._count += 1
            self._served[first.seat.key] = self._count
            if not first.ready.done():
                first.ready.set_result(None)

    def _rank(self, ticket: Ticket) -> tuple[int, int, int, int]:
        key = ticket.seat.key
        return -ticket.priority, self._running[key], self._served.get(key, 0), ticket.number


def stopping() -> RequestError:
    """Return the error of requests that a server refuses because it stops."""
    return RequestError(
        503, "the server is stopping", "it finishes running requests only", "send the request again later",
        code="stopping", headers={"retry-after": str(RETRY_SECONDS), "connection": "close"},
    )  # fmt: skip
