"""Replies for errors, which every wire format shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..common.log import logger
from ..errors import RequestError
from .errors import ErrorReply, reply_of
from .sse import frame

if TYPE_CHECKING:  # a circular import: the server runs batches, whose requests and errors refer to the server
    from .serving import Server

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
        _log.error("request %s failed: %s", request, error, exc_info=error if reply.status == 500 else None)
    return reply


def error_frame(server: Server, request: str) -> Callable[[BaseException], bytes]:
    """Return the function that writes an error as an event in OpenAI's form."""
    return lambda error: frame(error_reply(server, request, error).body(), "error")
