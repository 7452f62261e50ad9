"""The bodies of requests: their size, the time in which they must arrive, and the memory of all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RequestError
from .errors import RETRY_SECONDS
from .sse import ClientGone, Receive

BODY_SECONDS = 60.0
"""The time in which a client must send its body."""

MOST_BODIES = 16
"""The bodies of all requests together may have this number of times the maximum size of one body."""


@dataclass(eq=False)
class Bodies:
    """The bodies of all requests of a server. Only the event loop's thread uses it.

    Attributes:
        most: maximum number of bytes in one body.
        owner: the kind of server in messages.
        held: number of bytes in the bodies of all requests.
    """

    most: int
    owner: str = "server"
    held: int = 0


class Body:
    """The body of one request.

    Args:
        bodies: the bodies of all requests.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._size = bodies, 0

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Return the body. Its bytes count until `release`.

        Args:
            headers: the headers of the request, with names in lower case.
            receive: the ASGI function.

        Raises:
            ClientGone: the client closed the connection.
            RequestError: the body is too large, arrives too slowly, or all requests hold too many bytes.
        """
        most, parts = self._bodies.most, []
        declared = headers.get("content-length", "")
        is_too_large = declared.isascii() and declared.isdecimal() and (len(declared) > 18 or int(declared) > most)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while not is_too_large:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    self._count(len(parts[-1]))
                    is_too_large = self._size > most
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise RequestError(
                408, "the body did not arrive", f"it must arrive within {BODY_SECONDS:.0f} s", "send it faster",
                headers={"connection": "close"},
            ) from None  # fmt: skip
        if is_too_large:
            raise RequestError(
                413, "the body is too large", f"the limit is {most:,} bytes",
                f"send a smaller body, or raise the {self._bodies.owner}'s limit (--max-body)",
                headers={"connection": "close"},
            )  # fmt: skip
        return b"".join(parts)

    def _count(self, size: int) -> None:
        self._size += size
        self._bodies.held += size
        limit = MOST_BODIES * self._bodies.most
        if self._bodies.held > limit:
            raise RequestError(
                429, f"the {self._bodies.owner} holds too many large bodies",
                f"the limit for all requests is {limit:,} bytes", "send the request again later",
                code="rate_limit_exceeded", headers={"retry-after": str(RETRY_SECONDS), "connection": "close"},
            )  # fmt: skip

    def release(self) -> None:
        """Count the bytes of the body no more."""
        self._bodies.held -= self._size
        self._size = 0
