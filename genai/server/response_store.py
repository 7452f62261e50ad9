"""A store in memory for the replies of the Responses API, so that requests can continue them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import RequestError
from .keys import Key

MOST_RESPONSES = 256
"""The maximum number of stored replies."""

MOST_BYTES = 64 * 2**20
"""The maximum number of bytes of all stored conversations and replies, which are stored as JSON."""


@dataclass(frozen=True)
class StoredResponse:
    """A reply with its conversation.

    Attributes:
        response: the reply, as the endpoint returned it.
        items: the items of the conversation, with those of the reply.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """The replies that were stored last. A key finds only the replies to its own requests. Thread-safe."""

    def __init__(self, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most_responses, self._most_bytes = most_responses, most_bytes
        self._stored: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, key: Key, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Store a reply. The replies that were used least recently are removed if the store is full."""
        name, content = (key.name, response["id"]), msgspec.json.encode((response, items))
        with self._lock:
            self._stored[name] = content
            self._size += len(content)
            while len(self._stored) > self._most_responses or self._size > self._most_bytes:
                self._size -= len(self._stored.popitem(last=False)[1])

    def find(self, key: Key, identifier: str, *, status: int = 404, param: str | None = None) -> StoredResponse:
        """Return a stored reply.

        Args:
            key: the key of the request.
            identifier: the id of the reply.
            status, param: for the error.

        Raises:
            RequestError: the reply is not stored.
        """
        with self._lock:
            found = self._stored.get((key.name, identifier))
            if found is not None:
                self._stored.move_to_end((key.name, identifier))
        if found is None:
            raise RequestError(
                status, f"the response {identifier!r:.100} is not stored",
                f"the server stores up to {self._most_responses} responses in memory, without those of other keys "
                "and those with store = false",
                "send the whole conversation in input", code="previous_response_not_found", param=param,
            )  # fmt: skip
        return StoredResponse(*msgspec.json.decode(found))

    def remove(self, key: Key, identifier: str) -> None:
        """Remove a stored reply. See find for errors."""
        self.find(key, identifier)
        with self._lock:
            self._size -= len(self._stored.pop((key.name, identifier), b""))
