"""/v1/batches: OpenAI's API for files of requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...errors import RequestError
from ..batches import Handler
from ..calls import Call, JsonReply, converted
from ..fields import read_fields
from ..file_store import owner_of
from . import chat, completions, embeddings, responses
from .files import enabled, page, query_of


async def _respond(call: Call) -> Any:
    """Run a request of the Responses API. The reply is in the output of the batch, so it is not stored by default."""
    call.body = msgspec.json.encode({"store": False, **call.json()})
    return await responses.create(call)


HANDLERS: dict[str, Handler] = {
    "/v1/chat/completions": chat.create,
    "/v1/completions": completions.create,
    "/v1/responses": _respond,
    "/v1/embeddings": embeddings.create,
}
"""The endpoints whose requests a batch can have."""
_WINDOW = re.compile(r"([1-9][0-9]{0,3})(h|d)\Z")


class BatchRequest(msgspec.Struct):
    """The fields of a request."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, Any] | None = None


async def create(call: Call) -> JsonReply:
    """Queue a batch."""
    batches, owner = enabled(call), owner_of(call.key)
    fields = read_fields("batches", call.json(), strict=call.server.options.strict)
    request: BatchRequest = converted(fields.values, BatchRequest)
    if request.endpoint not in HANDLERS:
        raise RequestError(
            400, f"endpoint = {request.endpoint!r:.80}", f"allowed: {', '.join(HANDLERS)}", "use one of these",
            param="endpoint",
        )  # fmt: skip
    window = _WINDOW.match(request.completion_window)
    if window is None:
        raise RequestError(
            400, f"completion_window = {request.completion_window!r:.80}", "a number of hours or days is expected",
            "use 24h, for example", param="completion_window",
        )  # fmt: skip
    file = batches.files.entries.find(request.input_file_id, owner)
    if file["purpose"] != "batch":
        raise RequestError(
            400, f"the file has the purpose {file['purpose']}", "the input of a batch has the purpose batch",
            "upload the requests", param="input_file_id",
        )  # fmt: skip
    call.note_ignored(fields.ignored)
    hours = int(window[1]) * (24 if window[2] == "d" else 1)
    return JsonReply(batches.shown(batches.create(call.key, file, request.endpoint, hours, request.metadata)))


async def list_batches(call: Call) -> JsonReply:
    """List the batches of a key."""
    batches, owner = enabled(call), owner_of(call.key)
    found = [batches.shown(entry) for entry in batches.entries.all(lambda entry: entry["owner"] == owner)]
    return JsonReply(page(found, query_of(call), 20, 100))


async def retrieve(call: Call) -> JsonReply:
    """Return a batch."""
    batches = enabled(call)
    return JsonReply(batches.shown(batches.entries.find(call.path["id"], owner_of(call.key))))


async def cancel(call: Call) -> JsonReply:
    """Cancel a batch."""
    batches = enabled(call)
    return JsonReply(batches.shown(batches.cancel(batches.entries.find(call.path["id"], owner_of(call.key)))))


ROUTES = (
    ("POST", "/v1/batches", create, False),
    ("GET", "/v1/batches", list_batches, False),
    ("GET", "/v1/batches/{id}", retrieve, False),
    ("POST", "/v1/batches/{id}/cancel", cancel, False),
)
