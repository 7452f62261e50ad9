"""/v1/streams: streams that were started with the header x-stream-id, which a client reads again or stops."""

from __future__ import annotations

from ..calls import Call, JsonReply
from ..replies import error_frame
from ..sse import EventStream


async def read(call: Call) -> EventStream:
    """Send all events of a stream from the beginning, also those that follow."""
    return call.server.streams.read(call.key, call.path["name"], error_frame(call.server, call.id))


async def stop(call: Call) -> JsonReply:
    """Stop a stream."""
    name = call.path["name"]
    call.server.streams.stop(call.key, name)
    return JsonReply({"id": name, "object": "stream", "stopped": True})


ROUTES = (
    ("GET", "/v1/streams/{name}", read, False),
    ("DELETE", "/v1/streams/{name}", stop, False),
)
