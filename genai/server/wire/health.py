"""/health and /metrics: the state of the server for load balancers and monitoring."""

from __future__ import annotations

from ..calls import Call, JsonReply, TextReply
from ..metrics import CONTENT_TYPE


async def health(call: Call) -> JsonReply:
    """Return status 200 while the server accepts requests, and 503 while it stops."""
    stops = call.server.admission.is_draining
    return JsonReply({"status": "stopping" if stops else "ok"}, 503 if stops else 200)


async def metrics(call: Call) -> TextReply:
    """Return the metrics in the text format of Prometheus."""
    return TextReply(call.server.metrics.text(call.server), CONTENT_TYPE)


ROUTES = (
    ("GET", "/health", health, True),
    ("GET", "/metrics", metrics, False),
)
