"""/v1/responses: OpenAI's Responses API, whole and streamed, with stored replies and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError
from ..calls import Call, JsonReply, converted
from ..fields import read_fields
from ..replies import error_reply
from ..sampling import time_limit
from ..sse import EventStream
from ..turns import Turn, count_prompt_tokens, run_turn, start_turn
from .responses_input import ResponsesRequest, chat_options, conversation, input_items
from .responses_output import ResponseEncoder, error_body

__all__ = ["ROUTES", "count_tokens", "create", "delete", "error_body", "show"]


@dataclass(frozen=True)
class _Decoded:
    """A decoded request.

    Attributes:
        request: the fields.
        turn: the turn.
        items: the items of the whole conversation.
    """

    request: ResponsesRequest
    turn: Turn
    items: list[dict[str, Any]]


async def create(call: Call) -> JsonReply | EventStream:
    """Reply to a conversation."""
    decoded = await call.decoded(_decoded)
    encoder = ResponseEncoder(call.server, decoded.request)
    if decoded.request.stream:
        return EventStream(
            _frames(call, decoded, encoder),
            lambda error: encoder.failed(error_reply(call.server, call.id, error)),
        )
    running = await run_turn(call.server, decoded.turn, encoder.frames)
    whole = encoder.whole(running.usage, running.seed)
    _store(call, decoded, whole)
    return JsonReply(whole)


async def _frames(call: Call, decoded: _Decoded, encoder: ResponseEncoder) -> AsyncIterator[bytes]:
    with call.server.admission.seat(call.key.name) as seat:
        running = await start_turn(call.server, decoded.turn, seat)
        yield encoder.begin()
        async for events in running.events():
            yield encoder.frames(events)
        # The reply is stored before the last event: a client may continue it as soon as the event arrives.
        _store(call, decoded, encoder.whole(running.usage, running.seed))
        yield encoder.end(running.usage, running.seed)


def _store(call: Call, decoded: _Decoded, whole: dict[str, Any]) -> None:
    if decoded.request.store is not False:
        call.server.responses.put(call.key, whole, [*decoded.items, *whole["output"]])


async def count_tokens(call: Call) -> JsonReply:
    """Return the number of tokens of a conversation's prompt."""
    turn = (await call.decoded(_decoded)).turn
    with call.server.admission.seat(call.key.name):
        return JsonReply(
            {"object": "response.input_tokens", "input_tokens": await count_prompt_tokens(call.server, turn)}
        )


async def show(call: Call) -> JsonReply:
    """Return a stored reply."""
    return JsonReply(call.server.responses.find(call.key, call.path["id"]).response)


async def delete(call: Call) -> JsonReply:
    """Remove a stored reply."""
    call.server.responses.remove(call.key, call.path["id"])
    return JsonReply({"id": call.path["id"], "object": "response", "deleted": True})


def _decoded(call: Call) -> _Decoded:
    """Return the request in a call's body."""
    server = call.server
    fields = read_fields("responses", call.json(), strict=server.options.strict)
    request: ResponsesRequest = converted(fields.values, ResponsesRequest)
    options = {**chat_options(server, request, fields), **time_limit(server, request.timeout)}
    items = input_items(request)
    if (previous := request.previous_response_id) is not None:
        stored = server.responses.find(call.key, previous, status=400, param="previous_response_id")
        items = [*stored.items, *items]
    if not items:
        raise RequestError(
            400, "input is missing or empty", "a conversation has at least one message", "add input", param="input",
            code="missing_required_parameter",
        )  # fmt: skip
    messages = call.without_headers(conversation(server, request.instructions, items, fields.ignored))
    call.check_ignored(fields.ignored)
    call.note_session(request.prompt_cache_key)
    turn = Turn(
        call.key, options, messages, stream=request.stream, cache_salt=request.cache_salt, record=call.record
    )  # fmt: skip
    return _Decoded(request, turn, items)


NEEDS = "completion"
ROUTES = (
    ("POST", "/v1/responses", create, False),
    ("POST", "/responses", create, False),
    ("POST", "/v1/responses/input_tokens", count_tokens, False),
    ("GET", "/v1/responses/{id}", show, False),
    ("DELETE", "/v1/responses/{id}", delete, False),
)
