"""/v1/chat/completions: OpenAI's chat API, whole and streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from ...engine.sampling.batch import TokenLogprob
from ...errors import RequestError, did_you_mean
from ...text.template_messages import ROLES, is_unknown_role
from ..agents import TASK_PRIORITY, is_side_task
from ..calls import Call, JsonReply, converted
from ..events import Event, Finish, Logprobs, Reasoning, Text, TokenCounts, ToolArguments, ToolCall
from ..fields import Fields, read_fields
from ..replies import error_frame, whole_reply
from ..sampling import reasoning_variables, response_format, sampling_options, text_format, time_limit
from ..serving import Server
from ..sse import DONE, EventStream, frame
from ..token_texts import TokenTexts
from ..turns import RunningTurn, Turn, run_turn, start_turn


class StreamOptions(msgspec.Struct):
    """The options of a stream."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The fields of a request whose form this endpoint checks; the other fields are sampling options."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    timeout: float | None = None


async def create(call: Call) -> JsonReply | EventStream:
    """Reply to a conversation."""
    server = call.server
    request, turn = await call.decoded(decode_chat)
    encoder = ChatEncoder(server, request)
    if request.stream:
        stream = EventStream(_frames(call, turn, encoder), error_frame(server, call.id))
        identifier = call.headers.get("x-stream-id")
        return stream if identifier is None else server.streams.start(call.key, identifier, stream, server.retain)
    return await whole_reply(server, encoder, await run_turn(server, turn, encoder.collect))


def decode_chat(call: Call) -> tuple[ChatRequest, Turn]:
    """Return the request in a call's body, and its turn."""
    fields = read_fields("chat", call.json(), strict=call.server.options.strict)
    request: ChatRequest = converted(fields.values, ChatRequest)
    turn = _turn(call, request, fields)
    call.check_ignored(fields.ignored)
    call.note_session(request.prompt_cache_key)
    return request, turn


async def _frames(call: Call, turn: Turn, encoder: ChatEncoder) -> AsyncIterator[bytes]:
    with call.server.admission.seat(call.key.name) as seat:
        running = await start_turn(call.server, turn, seat)
        yield encoder.begin(running)
        async for events in running.events():
            yield b"".join(encoder.chunks(events))
        yield encoder.end(running)


def _turn(call: Call, request: ChatRequest, fields: Fields) -> Turn:
    """Return the turn that a request asks for. Fields without effect are added to `fields.ignored`."""
    server = call.server
    options: dict[str, Any] = {**sampling_options(fields), **time_limit(server, request.timeout)}
    tools = usable_tools(request.tools, fields.ignored)
    if tools:
        options |= {"tools": tools, "tool_choice": request.tool_choice}
        if request.parallel_tool_calls is False:  # True is the default
            options["parallel_tool_calls"] = False
    elif request.tool_choice not in (None, "auto", "none"):
        options["tool_choice"] = request.tool_choice
    if request.response_format is not None:
        form = response_format(request.response_format)
        options |= text_format(options, form, "response_format", fields.ignored)
    if request.logprobs:
        options["logprobs"] = _number_of_alternatives(request)
    elif request.top_logprobs:
        raise RequestError(
            400, f"top_logprobs = {request.top_logprobs} without logprobs", "top_logprobs needs logprobs = true",
            "set logprobs to true", param="top_logprobs",
        )  # fmt: skip
    template = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        found = reasoning_variables(server, request.reasoning_effort, with_tools=bool(tools))
        if found is None:
            fields.ignored.append("reasoning_effort")
        template = {**(found or {}), **template}
    if template:
        options["template"] = template
    options["adapter"] = server.adapter_of(request.model)
    messages = usable_messages(server, call.without_headers(request.messages))
    if is_side_task(messages):
        options["priority"] = TASK_PRIORITY
    return Turn(
        call.key,
        options,
        messages,
        stream=request.stream,
        cache_salt=request.cache_salt,
        record=call.record,
        copies=fields.copies,
    )


def _number_of_alternatives(request: ChatRequest) -> int:
    number = request.top_logprobs or 0
    if not 0 <= number <= 20:
        raise RequestError(
            400, f"top_logprobs = {number}", "0 to 20 alternatives are possible", "use a number in this range",
            param="top_logprobs",
        )  # fmt: skip
    return number


def usable_tools(tools: Sequence[Mapping[str, Any]] | None, ignored: list[str]) -> list[dict[str, Any]]:
    """Return the tools that are functions. Agents also send tools that only OpenAI's servers run; they are ignored."""
    found = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type", "function") == "function":
            found.append(dict(tool))
        else:
            ignored.append(f"tools[{index}] ({tool.get('type')!s:.40})")
    return found


def usable_messages(server: Server, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read: the role "developer" becomes "system".

    Raises:
        RequestError: a role is neither a role of the API nor a role that the chat template mentions.
    """
    template = server.llm.tokenizer.chat_template
    knows_developer = "developer" in template
    found = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if isinstance(role, str) and role and is_unknown_role(role, template):
            raise RequestError(
                400, f"messages[{index}].role = {role!r:.40}", f"allowed: {', '.join(ROLES)}",
                did_you_mean(role, ROLES, "use one of these roles"), param=f"messages[{index}]",
            )  # fmt: skip
        copy = {name: value for name, value in message.items() if name not in _OF_CLIENTS and value is not None}
        if copy.get("role") == "developer" and not knows_developer:
            copy["role"] = "system"
        if copy.get("role") == "assistant" and "content" not in copy and "tool_calls" not in copy:
            copy["content"] = ""
        if isinstance(content := copy.get("content"), list):
            copy["content"] = [_part(part) for part in content]
        found.append(copy)
    return found


# Fields of messages that clients send back, and that no template reads.
_OF_CLIENTS = frozenset(("refusal", "annotations", "audio", "function_call", "cache_control", "reasoning_details"))


def _part(part: Any) -> Any:
    """Return a part of a message's content without the marks of other servers' prompt caches."""
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


class ChatEncoder:
    """Writes the events of one turn in the form of OpenAI's chat API.

    Args:
        server: the server.
        request: the request.
    """

    def __init__(self, server: Server, request: ChatRequest) -> None:
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model or server.name,
            "system_fingerprint": server.fingerprint,
        }
        options = request.stream_options
        self._sends_usage = options is not None and options.include_usage
        self._texts: TokenTexts = server.token_texts
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._entries: dict[int, Sequence[TokenLogprob]] = {}
        self._written: dict[int, list[dict[str, Any]]] = {}
        self._messages: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, Finish] = {}

    # --- streams -----------------------------------------------------------------------------------------------------

    def begin(self, running: RunningTurn) -> bytes:
        """Return the first chunks, which have the role of each sample."""
        count = running.num_samples
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(sample, delta) for sample in range(count))

    def chunks(self, events: Sequence[Event]) -> list[bytes]:
        """Return the chunks for events."""
        found: list[bytes] = []
        for event in events:
            sample = event.sample
            delta: dict[str, Any]
            if isinstance(event, Text):
                found.append(self._chunk(sample, {"content": event.text}))
            elif isinstance(event, Reasoning):
                delta = {"reasoning_content": event.text, "reasoning": event.text}
                found.append(self._chunk(sample, delta))
            elif isinstance(event, ToolCall):
                call = {"index": event.index, "id": event.id, "type": "function"}
                delta = {"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]}
                found.append(self._chunk(sample, delta))
            elif isinstance(event, ToolArguments):
                delta = {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
                found.append(self._chunk(sample, delta))
            elif isinstance(event, Logprobs):
                self._logprobs.setdefault(sample, []).extend(map(self._texts.chat_entry, event.entries))
            else:
                found.append(self._chunk(sample, {}, event))
        return found

    def end(self, running: RunningTurn) -> bytes:
        """Return the last chunks: the token counts, if they were requested, and the end of the stream."""
        if not self._sends_usage:
            return DONE
        return frame({**self._head, "object": _CHUNK, "choices": [], **_costs(running)}) + DONE

    def _chunk(self, sample: int, delta: dict[str, Any], end: Finish | None = None) -> bytes:
        logprobs = self._logprobs.pop(sample, None) if delta.keys() != {"role", "content"} else None
        choice: dict[str, Any] = {
            "index": sample,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": None,
        }
        if end is not None:
            choice |= end_fields(end)
        chunk = {**self._head, "object": _CHUNK, "choices": [choice]}
        if self._sends_usage:
            chunk["usage"] = None
        return frame(chunk)

    # --- whole replies -----------------------------------------------------------------------------------------------

    def collect(self, events: Sequence[Event]) -> None:
        """Add events to the messages of a whole reply."""
        for event in events:
            message = self._messages.setdefault(event.sample, {"role": "assistant", "content": None})
            if isinstance(event, Text):
                message["content"] = (message["content"] or "") + event.text
            elif isinstance(event, Reasoning):
                message["reasoning_content"] = message.get("reasoning_content", "") + event.text
            elif isinstance(event, ToolCall):
                function = {"name": event.name, "arguments": ""}
                message.setdefault("tool_calls", []).append({"id": event.id, "type": "function", "function": function})
            elif isinstance(event, ToolArguments):
                message["tool_calls"][event.index]["function"]["arguments"] += event.text
            elif isinstance(event, Logprobs):
                self._entries[event.sample] = event.entries  # a whole reply has one such event per sample
            else:
                self._ends[event.sample] = event

    def whole(self, running: RunningTurn) -> dict[str, Any]:
        """Return the body of a whole reply."""
        choices = [self._choice(sample) for sample in sorted(self._ends)]
        head = {**self._head, "object": "chat.completion", "choices": choices}
        return {**head, "usage": usage(running.usage), "seed": running.seed}

    def _choice(self, sample: int) -> dict[str, Any]:
        message = self._messages[sample]
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
        logprobs = None
        if (entries := self._entries.get(sample)) is not None:
            # Copies of a sample share the entries. They are converted once, because they can be large.
            logprobs = self._written.get(id(entries)) or [*map(self._texts.chat_entry, entries)]
            self._written[id(entries)] = logprobs
        return {
            "index": sample,
            "message": {**message, "refusal": None},
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            **end_fields(self._ends[sample]),
        }


_CHUNK = "chat.completion.chunk"


def end_fields(end: Finish) -> dict[str, Any]:
    """Return the fields of a choice that describe its end.

    OpenAI's API has no reason for a timeout, so it is "length", and stop_reason (a field of vLLM) names it.
    """
    completion = end.completion
    if completion.finish_reason == "timeout":
        return {"finish_reason": "length", "stop_reason": "timeout"}
    reason = "tool_calls" if end.has_calls and completion.finish_reason == "stop" else completion.finish_reason
    # As in vLLM, stop_reason is a stop string or a token of stop_token_ids, and null for the end of a reply.
    return {"finish_reason": reason, "stop_reason": None if completion.stopped_by in end.eos else completion.stopped_by}


def _costs(running: RunningTurn) -> dict[str, Any]:
    """Return the token counts and, for a single sample, the speed in the form of llama.cpp."""
    counts, ended = running.usage, [*running.completions.values()]
    if len(ended) != 1:
        return {"usage": usage(counts)}
    timings = ended[0].timings
    times = {
        "cache_n": counts.cached,
        "prompt_n": counts.prompt - counts.cached,
        "prompt_ms": timings.time_to_first_token * 1000,
        "predicted_n": counts.completion,
        "predicted_ms": timings.decode_seconds * 1000,
        "predicted_per_second": timings.tokens_per_second(counts.completion),
    }
    return {"usage": usage(counts), "timings": times}


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Return token counts in the form of OpenAI's API."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.total,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


NEEDS = "completion"
STORES = True
ROUTES = (
    ("POST", "/v1/chat/completions", create, False),
    ("POST", "/chat/completions", create, False),
)
