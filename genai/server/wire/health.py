"""/health: the state of the server for load balancers."""

from __future__ import annotations

from ..calls import Call, JsonReply


async def health(call: Call) -> JsonReply:
    """Return status 200 while the server accepts requests, and 503 while it stops."""
    stops = call.server.admission.is_draining
    return JsonReply({"status": "stopping" if stops else "ok"}, 503 if stops else 200)


ROUTES = (("GET", "/health", health, True),)
