"""/v1/models: the model and its adapters, with the properties that agents look for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...hub.store import bytes_below
from ..calls import Call, JsonReply
from ..cards import capabilities
from ..router import Router
from ..serving import Server


async def list_models(call: Call) -> JsonReply:
    """List the model and its adapters."""
    server = call.server
    data = listed_models(server)
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
    if not name:  # the path ends with a slash
        return await list_models(call)
    server = call.server
    found = next((one for one in listed_models(server) if one["id"] == name), None)
    if found is None and isinstance(server, Router):
        base = server.named(name).name
        found = {**_routed(server, base)[0], "id": name, "parent": base}
    elif found is None:
        server.adapter_of(name)
        found = _model(server, name)
    return JsonReply(_as_anthropic(found) if _VERSION in call.headers else found)


# Clients of Anthropic's API send this header with every request.
_VERSION = "anthropic-version"


def _as_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model with the fields of Anthropic's API."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"type": "model", "display_name": model["id"], "created_at": created}
    return {**model, **names, "max_input_tokens": model["max_model_len"]}


def listed_models(server: Server) -> list[dict[str, Any]]:
    """Return the properties of all models and adapters."""
    if isinstance(server, Router):
        return [card for name in server.models for card in _routed(server, name)]
    return [_model(server, name) for name in server.model_names] + _encoders(server)


def _routed(router: Router, name: str) -> list[dict[str, Any]]:
    """Return the properties of a model of a router and of its adapters."""
    model = router.models[name]
    card = _card(router, model.folder, name, None, model.limit, router.capabilities_of(name))
    card |= {"state": router.state_of(name), "pinned": model.is_pinned}
    return [card, *({**card, "id": adapter, "parent": name} for adapter in model.adapters)]


def _encoders(server: Server) -> list[dict[str, Any]]:
    served = server.encoders.served.items()
    return [_card(server, one.model.folder, one.name, None, one.model.max_length, [kind]) for kind, one in served]


def _model(server: Server, name: str) -> dict[str, Any]:
    parent = None if name == server.name else server.name
    llm = server.llm
    return _card(server, llm.model.folder, name, parent, llm.context_size, capabilities(server))


def _card(
    server: Server, folder: Path, name: str, parent: str | None, size: int, abilities: list[str]
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "genai",
        "root": parent or name,
        "parent": parent,
        "size": bytes_below(folder),
        "max_model_len": size,
        "context_length": size,
        "context_window": size,
        "capabilities": abilities,
        "state": "loaded",
    }


def _entry(model: dict[str, Any]) -> dict[str, Any]:
    names = {"name": model["id"], "model": model["id"], "type": "model", "capabilities": model["capabilities"]}
    return {**names, "details": {"format": "onnx"}, "context_length": model["context_length"]}


ROUTES = (
    ("GET", "/v1/models", list_models, False),
    ("GET", "/models", list_models, False),
    ("GET", "/v1/models/{name:path}", show_model, False),
)
