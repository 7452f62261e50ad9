"""/v1/models: the model and its adapters, with the properties that agents look for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ...errors import GenaiError
from ..calls import Call, JsonReply
from ..serving import Server


async def list_models(call: Call) -> JsonReply:
    """List the model and its adapters."""
    server = call.server
    data = [_model(server, name) for name in server.model_names] + _encoders(server)
    # Codex sends its version, and expects another form of entries in `models`; other agents read llama.cpp's form.
    entries = [] if "client_version=" in call.query else [_entry(one) for one in data]
    page: dict[str, Any] = {"object": "list", "data": data, "models": entries}
    if _VERSION in call.headers:
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        page |= {"data": [_as_anthropic(one) for one in data], "has_more": False, **ends}
    return JsonReply(page)


async def show_model(call: Call) -> JsonReply:
    """Return one model."""
    name = call.path["name"]
    found = next((one for one in _encoders(call.server) if one["id"] == name), None)
    if found is None or name in call.server.model_names:
        call.server.adapter_of(name)
        found = _model(call.server, name)
    return JsonReply(_as_anthropic(found) if _VERSION in call.headers else found)


# Clients of Anthropic's API send this header with every request.
_VERSION = "anthropic-version"


def _as_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model with the fields of Anthropic's API."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"type": "model", "display_name": model["id"], "created_at": created}
    return {**model, **names, "max_input_tokens": model["max_model_len"]}


def _encoders(server: Server) -> list[dict[str, Any]]:
    return [
        {
            "id": one.name,
            "object": "model",
            "created": server.created,
            "owned_by": "genai",
            "root": one.name,
            "parent": None,
            "max_model_len": one.model.max_length,
            "context_length": one.model.max_length,
            "context_window": one.model.max_length,
            "capabilities": [kind],
        }
        for kind, one in server.encoders.served.items()
    ]


def _model(server: Server, name: str) -> dict[str, Any]:
    size = server.llm.context_size
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "genai",
        "root": server.name,
        "parent": None if name == server.name else server.name,
        "max_model_len": size,
        "context_length": size,
        "context_window": size,
        "capabilities": capabilities(server),
    }


def _entry(model: dict[str, Any]) -> dict[str, Any]:
    names = {"name": model["id"], "model": model["id"], "type": "model", "capabilities": model["capabilities"]}
    return {**names, "details": {"format": "onnx"}, "context_length": model["context_length"]}


def capabilities(server: Server) -> list[str]:
    """Return the abilities of the model: "completion", "chat", "tools", "thinking", "structured_output"."""
    found = ["completion"]
    try:
        template = server.llm.tokenizer.template_text(with_tools=True)
    except GenaiError:
        return found
    found.append("chat")
    if server.llm.parser.calls is not None and "tools" in template:
        found.append("tools")
    if server.llm.parser.reasoning is not None:
        found.append("thinking")
    return [*found, "structured_output"]


ROUTES = (
    ("GET", "/v1/models", list_models, False),
    ("GET", "/models", list_models, False),
    ("GET", "/v1/models/{name:path}", show_model, False),
)
