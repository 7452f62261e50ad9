"""Errors of requests: their HTTP statuses, and the bodies that clients of OpenAI's API read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import (
    CacheCapacityError,
    ChatTemplateError,
    ContextOverflowError,
    DamagedTemplateError,
    DeadlineError,
    GenaiError,
    InputError,
    OptionError,
    OutOfMemoryError,
    RequestError,
    StateError,
)

RETRY_SECONDS = 1
"""The delay after which a client may repeat a request that was refused because of the load."""


@dataclass(frozen=True)
class ErrorReply:
    """An error as it is sent to a client.

    Attributes:
        status: the HTTP status.
        type: the kind of error in OpenAI's vocabulary, such as "invalid_request_error".
        message: all parts of the error.
        code: a short name that programs compare.
        param: the field of the request that is wrong.
        headers: further headers of the response.
    """

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the body in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_NO_RETRY = {"x-should-retry": "false"}

# The names of options in Python, and the fields that set them.
_FIELDS = {
    "json_schema": "response_format",
    "template": "chat_template_kwargs",
    "structured output": "response_format",
}
_ALSO_WORDS = ("messages", "tools", "prompt", "stop", "seed", "grammar", "regex", "choice", "samplers", "input")
_BEGIN = re.compile(r"(?:unknown sampling option )?'?([a-z_]+(?:\[\d+\])?)'?(?= |\.|$)")


def reply_of(error: BaseException, *, context_size: int, hidden: Mapping[str, str]) -> ErrorReply:
    """Return the reply for an error that a request caused or met.

    Args:
        error: the error.
        context_size: maximum number of tokens in a sequence.
        hidden: texts that no reply may contain, such as paths, with their replacements.
    """
    if isinstance(error, RequestError):
        kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        return ErrorReply(error.status, kind, _message(error, hidden), error.code, error.param, error.headers)
    if isinstance(error, ContextOverflowError):
        # OpenAI's words, and Anthropic's: clients recognise the error by either.
        begin = f"This model's maximum context length is {context_size} tokens. However, the prompt is too long"
        said = f"{begin}: {_message(error, hidden)}"
        return ErrorReply(400, "invalid_request_error", said, "context_length_exceeded", "messages")
    if isinstance(error, DeadlineError):
        return ErrorReply(504, "timeout_error", _message(error, hidden), "timeout", headers=_NO_RETRY)
    if isinstance(error, CacheCapacityError):
        return ErrorReply(400, "invalid_request_error", _message(error, hidden), "cache_capacity_exceeded")
    if isinstance(error, DamagedTemplateError):
        said = (
            "the model cannot be used with messages: its chat template has an error; the server's log has the details"
        )
        return ErrorReply(500, "server_error", said, "damaged_template", headers=_NO_RETRY)
    if isinstance(error, OptionError | InputError | ChatTemplateError):
        renamed = _in_fields(error)
        return ErrorReply(400, "invalid_request_error", _message(renamed, hidden), None, _param(renamed))
    if isinstance(error, StateError | OutOfMemoryError | MemoryError):
        said = "the server cannot run this request now; repeat it later"
        return ErrorReply(503, "server_error", said, "unavailable", headers={"retry-after": str(RETRY_SECONDS)})
    said = "the request failed because of an error in the server; the server's log has the details"
    return ErrorReply(500, "server_error", said, "internal_error", headers=_NO_RETRY)


def _message(error: GenaiError, hidden: Mapping[str, str]) -> str:
    """Return the parts of an error as one text."""
    text = error.what + (f": {error.why}" if error.why else "") + (f"; {error.fix}" if error.fix else "")
    for secret, replacement in hidden.items():
        text = text.replace(secret, replacement)
    return text


def _in_fields(error: GenaiError) -> GenaiError:
    """Return the error with the names of fields in place of the names of options."""
    parts = [error.what, error.why, error.fix]
    for option, name in _FIELDS.items():
        if option == "template" and not error.what.startswith(option):
            continue  # the error is about a chat template
        pattern = re.compile(rf"(?<![\w'\"./-])(?<!chat ){re.escape(option)}(?![\w'\"-])")
        parts = [pattern.sub(name, part) for part in parts]
    return GenaiError(*parts)


def _param(error: GenaiError) -> str | None:
    """Return the field that an error begins with."""
    found = _BEGIN.match(error.what)
    if found is None:
        return None
    is_field = "_" in found[1] or "[" in found[1] or f"{found[1]} = " in error.what or found[1] in _ALSO_WORDS
    return found[1] if is_field else None
