"""Replies for errors, which every wire format shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..common.log import logger
from ..errors import RequestError
from .calls import JsonReply
from .errors import ErrorReply, reply_of
from .sse import frame

if TYPE_CHECKING:  # a circular import: the server runs batches, whose requests and errors refer to the server
    from .serving import Server
    from .turns import RunningTurn

_log = logger(__name__)


def error_reply(server: Server, request: str, error: BaseException) -> ErrorReply:
    """Return the reply for an error, and log errors of the server.

    Args:
        server: the server.
        request: identifier of the call.
        error: the error.
    """
    reply = reply_of(error, context_size=server.context_size, hidden=server.hidden)
    if reply.status >= 500 and not isinstance(error, RequestError):
        _log.error("request %s failed: %s", request, error, exc_info=error if reply.code == "internal_error" else None)
    return reply


def error_frame(server: Server, request: str) -> Callable[[BaseException], bytes]:
    """Return the function that writes an error as an event in OpenAI's form."""
    return lambda error: frame(error_reply(server, request, error).body(), "error")


class Encoder(Protocol):
    """Writes the reply to a turn."""

    def whole(self, running: RunningTurn) -> dict[str, Any]:
        """Return the body of a whole reply."""


_MANY_ENTRIES = 200
"""The number of log-probabilities from which on a reply is written on another thread, because it can take seconds."""


async def whole_reply(server: Server, encoder: Encoder, running: RunningTurn) -> JsonReply:
    """Return the whole reply to a turn that has ended, without blocking the event loop for long."""

    def body() -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(encoder.whole(running)))

    if running.num_logprobs <= _MANY_ENTRIES:
        return JsonReply(encoder.whole(running))
    return JsonReply(await server.at_length(body))
