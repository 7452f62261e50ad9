"""/v1/messages: Anthropic's messages API, whole and streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ..calls import Call, JsonReply, converted
from ..fields import read_fields
from ..sampling import time_limit
from ..sse import EventStream
from ..turns import Turn, count_prompt_tokens, run_turn, start_turn
from .messages_input import MessagesRequest, chat_options, conversation
from .messages_output import MessageEncoder, error_body, error_frame

__all__ = ["ROUTES", "count_tokens", "create", "error_body"]


async def create(call: Call) -> JsonReply | EventStream:
    """Reply to a conversation."""
    request, turn = await call.decoded(_decoded)
    encoder = MessageEncoder(call.server, request)
    if request.stream:
        return EventStream(_frames(call, turn, encoder), error_frame(call.server, call.id))
    running = await run_turn(call.server, turn, encoder.frames)
    return JsonReply(encoder.whole(running.usage))


async def count_tokens(call: Call) -> JsonReply:
    """Return the number of tokens of a conversation's prompt."""
    _, turn = await call.decoded(_decoded)
    with call.server.admission.seat(call.key.name):
        return JsonReply({"input_tokens": await count_prompt_tokens(call.server, turn)})


async def _frames(call: Call, turn: Turn, encoder: MessageEncoder) -> AsyncIterator[bytes]:
    with call.server.admission.seat(call.key.name) as seat:
        running = await start_turn(call.server, turn, seat)
        has_begun = False
        async for events in running.events():
            # The first event has the number of cached tokens, which is known when the prompt has been processed.
            start = b"" if has_begun else encoder.begin(running.prompt_tokens, running.cached_tokens)
            has_begun = True
            yield start + encoder.frames(events)
        yield encoder.end(running.usage)


def _decoded(call: Call) -> tuple[MessagesRequest, Turn]:
    """Return the request in a call's body, and its turn."""
    server = call.server
    call.notes["request-id"] = call.id
    fields = read_fields("messages", call.json(), strict=server.options.strict)
    request: MessagesRequest = converted(fields.values, MessagesRequest)
    options = {**chat_options(server, request, fields), **time_limit(server, request.timeout)}
    messages = call.without_headers(conversation(request, fields.ignored))
    call.check_ignored(fields.ignored)
    call.note_session()
    turn = Turn(
        call.key, options, messages, stream=request.stream, cache_salt=request.cache_salt, record=call.record
    )  # fmt: skip
    return request, turn


NEEDS = "completion"
ROUTES = (
    ("POST", "/v1/messages", create, False),
    ("POST", "/v1/messages/count_tokens", count_tokens, False),
)
