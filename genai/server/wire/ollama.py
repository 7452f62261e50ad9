"""/api: the form of Ollama, for clients that know no other (`genai serve --ollama`).

Requests are converted to those of OpenAI's API, so that options have the same meaning and errors.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from ... import __version__
from ...errors import InputError, RequestError
from ..calls import Call, JsonReply, converted
from ..encoders import parts
from ..errors import ErrorReply
from ..events import Event, Reasoning, Text, ToolArguments, ToolCall
from ..replies import error_reply
from ..serving import Server
from ..sse import EventStream
from ..turns import RunningTurn, Turn, run_turn, start_turn
from .chat import decode_chat
from .completions import decode_completion
from .embeddings import in_fields
from .models import listed_models

PREFIX = "/api/"
"""The beginning of all paths."""

LATEST = ":latest"
"""The tag that clients of Ollama add to names without a tag."""

# Options of Ollama under other names, and options that concern the memory of the model, which have no effect.
_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n"}
_NAMES = {ours: name for name, ours in _RENAMED.items()} | {"response_format": "format"}
_SAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip


class OllamaRequest(msgspec.Struct):
    """The fields of /api/chat and /api/generate."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class OllamaEmbedRequest(msgspec.Struct):
    """The fields of /api/embed and /api/embeddings."""

    model: str | None = None
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool = True
    dimensions: int | None = None


class OllamaShowRequest(msgspec.Struct):
    """The fields of /api/show; older clients send `name`."""

    model: str | None = None
    name: str | None = None


class OllamaPullRequest(OllamaShowRequest):
    """The fields of /api/pull."""

    stream: bool = True
    insecure: bool = False


def error_body(reply: ErrorReply) -> Any:
    """Return the body of an error, with Ollama's names of fields."""
    name = _NAMES.get(reply.param or "")
    return {"error": reply.message if name is None else reply.message.replace(reply.param or "", name)}


# --- models ----------------------------------------------------------------------------------------------------------


async def version(call: Call) -> JsonReply:
    """Return the version of the toolkit."""
    return JsonReply({"version": __version__})


async def tags(call: Call) -> JsonReply:
    """List the models and adapters."""
    return JsonReply({"models": [_entry(card) for card in listed_models(call.server)]})


async def running(call: Call) -> JsonReply:
    """List the loaded models."""
    never = "9999-12-31T23:59:59Z"
    loaded = [card for card in listed_models(call.server) if card["state"] == "loaded"]
    more = [{"expires_at": never, "size_vram": 0, "context_length": card["context_length"]} for card in loaded]
    return JsonReply({"models": [{**_entry(card), **one} for card, one in zip(loaded, more, strict=True)]})


async def show(call: Call) -> JsonReply:
    """Return the properties of a model."""
    card = _card(call, converted(call.json(), OllamaShowRequest), "use one of these names")
    entry = _entry(card)
    info = {"general.architecture": "genai", "genai.context_length": card["context_length"]}
    return JsonReply(
        {
            "modelfile": "", "parameters": "", "template": "", "details": entry["details"],
            "model_info": info, "capabilities": entry["capabilities"], "modified_at": entry["modified_at"],
        }
    )  # fmt: skip


def _card(call: Call, request: OllamaShowRequest, fix: str) -> Mapping[str, Any]:
    """Return the description of the model that a request names. Raise RequestError if there is none."""
    name = (request.model or request.name or "").removesuffix(LATEST)
    known = listed_models(call.server)
    for card in known:
        if card["id"] == name:
            return card
    listed = ", ".join(one["id"] for one in known)
    raise RequestError(404, f"model {name!r:.200} not found", f"this server has {listed}"[:500], fix)


async def pull(call: Call) -> JsonReply | EventStream:
    """Report that a model of the server is present. Other models are refused: a request downloads nothing."""
    request: OllamaPullRequest = converted(call.json(), OllamaPullRequest)
    _card(call, request, "download the model with `genai pull`, and start the server with it")
    if not request.stream:
        return JsonReply({"status": "success"})

    async def frames() -> AsyncIterator[bytes]:
        yield _line({"status": "pulling manifest"}) + _line({"status": "success"})

    headers = {"content-type": "application/x-ndjson"}
    return EventStream(frames(), partial(_error_line, call), headers, pings=False)


async def refuse(call: Call) -> JsonReply:
    """Refuse to change the models of the server."""
    raise RequestError(
        403, "the models of this server cannot be changed by requests", "the server has the models of its start",
        "use `genai pull`, `genai build` and `genai rm`, and start the server again",
    )  # fmt: skip


# The words of Ollama for abilities.
_ABILITIES = {"completion": "completion", "tools": "tools", "thinking": "thinking", "embedding": "embedding"}


def _entry(card: Mapping[str, Any]) -> dict[str, Any]:
    details = {
        "parent_model": card["parent"] or "", "format": "onnx", "family": "genai", "families": ["genai"],
        "parameter_size": "", "quantization_level": "",
    }  # fmt: skip
    return {
        "name": card["id"],
        "model": card["id"],
        "modified_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "size": card["size"],
        "digest": "",
        "details": details,
        "capabilities": [_ABILITIES[one] for one in card["capabilities"] if one in _ABILITIES],
    }


# --- text ------------------------------------------------------------------------------------------------------------


async def chat(call: Call) -> JsonReply | EventStream:
    """Reply to a conversation. Without messages, the model is loaded."""
    request: OllamaRequest = converted(_obeyed(call), OllamaRequest)
    return await _reply(call, request, [_message(one) for one in request.messages or ()], _chat_part)


async def generate(call: Call) -> JsonReply | EventStream:
    """Reply to a prompt, or continue it if `raw` is true or there is a `suffix`."""
    request: OllamaRequest = converted(_obeyed(call), OllamaRequest)
    if request.images:
        raise _no_images()
    system = [{"role": "system", "content": request.system}] if request.system else []
    messages = [*system, {"role": "user", "content": request.prompt}] if request.prompt else []
    return await _reply(call, request, messages, _generate_part)


def _obeyed(call: Call) -> dict[str, Any]:
    """Return the fields of a body, and name those without effect."""
    body = call.json()
    known = OllamaRequest.__struct_fields__
    ignored = [name for name in body if name not in known or name == "keep_alive"]
    options = body.get("options")
    names = options if isinstance(options, dict) else {}
    call.check_ignored([*ignored, *(f"options.{one}" for one in names if one not in _SAME and one not in _RENAMED)])
    return body


async def _reply(
    call: Call, request: OllamaRequest, messages: Sequence[dict[str, Any]], part: Callable[..., dict[str, Any]]
) -> JsonReply | EventStream:
    server = call.server
    model = (request.model or "").removesuffix(LATEST) or None
    if not messages:
        server.adapter_of(model)
        loaded = {**part(Text(0, "")), "done": True, "done_reason": "load"}
        return JsonReply({**_head(server, model), **loaded})
    # As with Ollama, replies are random if neither the request nor the model's files say otherwise.
    fields = {**server.llm.chat_defaults, **_fields(request), "model": model, "stream": request.stream}
    if request.raw or request.suffix:
        body = {"max_tokens": -1, **fields, "prompt": request.prompt, "suffix": request.suffix or None}
        turn = decode_completion(replace(call, body=msgspec.json.encode(body)))[1]
    else:
        body = {**fields, **_chat_fields(request), "messages": messages}
        turn = decode_chat(replace(call, body=msgspec.json.encode(body)))[1]
    lines = _Lines(server, model, part)
    if request.stream:
        headers = {"content-type": "application/x-ndjson"}
        return EventStream(_frames(call, turn, lines), partial(_error_line, call), headers, pings=False)
    whole = await run_turn(server, turn, lines.collect)
    return JsonReply({**lines.head, **lines.whole(), **lines.end(whole)})


def _fields(request: OllamaRequest) -> dict[str, Any]:
    """Return the sampling options under the names of OpenAI's API."""
    given = {name: value for name, value in (request.options or {}).items() if value is not None}
    found = {name: given[name] for name in _SAME if name in given}
    found |= {new: given[old] for old, new in _RENAMED.items() if old in given}
    if isinstance(most := found.get("max_tokens"), int) and most < 0:  # without a limit
        del found["max_tokens"]
    if isinstance(last := found.get("penalty_last_n"), int) and last < 0:  # the whole context
        del found["penalty_last_n"]
    return found


def _chat_fields(request: OllamaRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if request.tools:
        found["tools"] = request.tools
    if request.format == "json":
        found["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": request.format}}
    elif request.format:
        raise RequestError(
            400, f"format = {request.format!r:.80}", "'json' or a JSON schema is expected", "leave format out",
            param="format",
        )  # fmt: skip
    if request.think is not None:
        levels = {True: "medium", False: "none"}
        found["reasoning_effort"] = levels[request.think] if isinstance(request.think, bool) else request.think
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API."""
    if message.get("images"):
        raise _no_images()
    found = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if message.get("thinking"):
        found["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        found["name"] = message["tool_name"]
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
        if not calls:
            del found["tool_calls"]
    return found


def _no_images() -> RequestError:
    return RequestError(400, "images cannot be used", "the model reads text only", "leave images out", param="images")


def _chat_part(event: Event) -> dict[str, Any]:
    """Return the fields of /api/chat for an event."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(event, Text):
        message["content"] = event.text
    elif isinstance(event, Reasoning):
        message["thinking"] = event.text
    elif isinstance(event, ToolCall):
        message["tool_calls"] = [{"function": {"name": event.name, "arguments": {}}}]
    return {"message": message}


def _generate_part(event: Event) -> dict[str, Any]:
    """Return the fields of /api/generate for an event."""
    if isinstance(event, Reasoning):
        return {"response": "", "thinking": event.text}
    return {"response": event.text if isinstance(event, Text) else ""}


def _head(server: Server, model: str | None) -> dict[str, Any]:
    return {"model": model or server.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class _Lines:
    """Writes the events of one turn as lines of JSON, or as one object."""

    def __init__(self, server: Server, model: str | None, part: Callable[..., dict[str, Any]]) -> None:
        self.head, self._part = _head(server, model), part
        self._begun = time.monotonic_ns()
        self._call: ToolCall | None = None
        self._parts: list[dict[str, Any]] = []

    def parts(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return the fields for events. A tool call is written when its arguments are complete."""
        found: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ToolCall):
                self._call = event
            elif isinstance(event, ToolArguments) and self._call is not None:
                part = self._part(self._call)
                if "message" in part:
                    part["message"]["tool_calls"][0]["function"]["arguments"] = _arguments(event.text)
                found.append(part)
            elif isinstance(event, Text | Reasoning):
                found.append(self._part(event))
        return found

    def collect(self, events: Sequence[Event]) -> None:
        """Store events for `whole`."""
        self._parts += self.parts(events)

    def whole(self) -> dict[str, Any]:
        """Return the fields of the whole reply."""
        found = self._part(Text(0, ""))
        for part in self._parts:
            into, source = (found["message"], part["message"]) if "message" in part else (found, part)
            for name, value in source.items():
                if name != "role":
                    into[name] = into[name] + value if name in into else value
        return found

    def end(self, running: RunningTurn) -> dict[str, Any]:
        """Return the fields of the end: its reason, token counts, and durations in nanoseconds."""
        completion = next(iter(running.completions.values()))
        reason = completion.finish_reason if completion.finish_reason in ("stop", "length") else "length"
        timings, usage = completion.timings, running.usage
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": time.monotonic_ns() - self._begun,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": int(timings.time_to_first_token * 1e9),
            "eval_count": usage.completion,
            "eval_duration": int(timings.decode_seconds * 1e9),
        }


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # the model wrote no JSON
        return {}


async def _frames(call: Call, turn: Turn, lines: _Lines) -> AsyncIterator[bytes]:
    with call.server.admission.seat(call.key.name) as seat:
        running = await start_turn(call.server, turn, seat)
        async for events in running.events():
            if found := [_line({**lines.head, **part, "done": False}) for part in lines.parts(events)]:
                yield b"".join(found)
        yield _line({**lines.head, **lines._part(Text(0, "")), **lines.end(running)})


def _line(content: Any) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _error_line(call: Call, error: BaseException) -> bytes:
    return _line(error_body(error_reply(call.server, call.id, error)))


# --- embeddings ------------------------------------------------------------------------------------------------------


async def embed(call: Call) -> JsonReply:
    """Return a vector for each text of `input`."""
    request, texts = _texts(call)
    begun = time.monotonic_ns()
    name, vectors, count = await _vectors(call, request, texts)
    took = {"total_duration": time.monotonic_ns() - begun, "load_duration": 0, "prompt_eval_count": count}
    return JsonReply({"model": name, "embeddings": vectors, **took})


async def embed_one(call: Call) -> JsonReply:
    """Return the vector of the text in `prompt`, as older clients expect it."""
    request, texts = _texts(call)
    _, vectors, _ = await _vectors(call, request, texts[:1])
    return JsonReply({"embedding": vectors[0]})


def _texts(call: Call) -> tuple[OllamaEmbedRequest, list[str]]:
    body = call.json()
    call.check_ignored([name for name in body if name not in OllamaEmbedRequest.__struct_fields__])
    request: OllamaEmbedRequest = converted(body, OllamaEmbedRequest)
    given = request.prompt if request.input is None else request.input
    texts = [given] if isinstance(given, str) else list(given or ())
    if not texts:
        raise RequestError(400, "input is missing or empty", "at least one text is needed", "add input", param="input")
    return request, texts


async def _vectors(call: Call, request: OllamaEmbedRequest, texts: Sequence[str]) -> tuple[str, list[list[float]], int]:
    encoders = call.server.encoders
    name, embedder = encoders.embedder((request.model or "").removesuffix(LATEST) or None)

    def work(check: Callable[[], None]) -> tuple[str, list[list[float]], int]:
        found: list[list[float]] = []
        count = 0
        for begin, part in parts(texts):
            check()
            try:
                vectors, counts = embedder.embed_counted(
                    part, truncate=request.truncate, dimensions=request.dimensions, normalize=None
                )
            except InputError as error:
                raise in_fields(error, "input", begin, embedder.max_length) from error
            found += vectors.tolist()
            count += sum(counts)
        return name, found, count

    return await encoders.run(call.key, call.server.options.timeout, work)


NEEDS = {
    "/api/chat": "completion", "/api/generate": "completion", "/api/embed": "embedding", "/api/embeddings": "embedding",
}  # fmt: skip
PINGS = False
"""Comments would not be JSON."""

ROUTES = (
    ("GET", "/api/version", version, False),
    ("GET", "/api/tags", tags, False),
    ("GET", "/api/ps", running, False),
    ("POST", "/api/show", show, False),
    ("POST", "/api/pull", pull, False),
    ("POST", "/api/create", refuse, False),
    ("POST", "/api/copy", refuse, False),
    ("POST", "/api/push", refuse, False),
    ("DELETE", "/api/delete", refuse, False),
    ("POST", "/api/chat", chat, False),
    ("POST", "/api/generate", generate, False),
    ("POST", "/api/embed", embed, False),
    ("POST", "/api/embeddings", embed_one, False),
)
