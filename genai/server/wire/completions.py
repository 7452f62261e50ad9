"""/v1/completions: OpenAI's completions of raw texts or token ids, with the log-probabilities of prompts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from ...engine.sampling.batch import TokenLogprob
from ...errors import RequestError
from ...llm.completion import Completion
from ..calls import Call, JsonReply, converted
from ..errors import ErrorReply
from ..events import Event, Finish, Logprobs, Text
from ..fields import Fields, read_fields
from ..gaps import gap_prompt
from ..replies import error_frame, whole_reply
from ..sampling import response_format, sampling_options, time_limit
from ..serving import Server
from ..sse import DONE, EventStream, frame
from ..token_texts import number
from ..turns import RunningTurn, Turn, run_turn, start_turn
from .chat import StreamOptions, end_fields, usage

_MOST_PROMPTS, _MOST_LOGPROBS, _DEFAULT_TOKENS = 2048, 20, 16


class CompletionRequest(msgspec.Struct):
    """The fields of a request whose form this endpoint checks; the other fields are sampling options."""

    prompt: str | list[Any]
    suffix: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    add_special_tokens: bool | None = None

    @property
    def scores_prompt(self) -> bool:
        """True if the log-probabilities of the prompt's tokens are requested."""
        return self.echo and self.logprobs is not None


async def create(call: Call) -> JsonReply | EventStream:
    """Complete one or more prompts."""
    server = call.server
    request, turn = await call.decoded(decode_completion)
    encoder = _Encoder(server, request, turn)
    if request.stream:
        return EventStream(_frames(call, turn, encoder), error_frame(server, call.id))
    return await whole_reply(server, encoder, await run_turn(server, turn, encoder.collect))


def decode_completion(call: Call) -> tuple[CompletionRequest, Turn]:
    """Return the request in a call's body, and its turn."""
    fields = read_fields("completions", call.json(), strict=call.server.options.strict)
    request: CompletionRequest = converted(fields.values, CompletionRequest)
    turn = _turn(call, request, fields)
    call.check_ignored(fields.ignored)
    return request, turn


async def _frames(call: Call, turn: Turn, encoder: _Encoder) -> AsyncIterator[bytes]:
    with call.server.admission.seat(call.key.name) as seat:
        running = await start_turn(call.server, turn, seat)
        if begun := encoder.begin(running):
            yield begun
        async for events in running.events():
            if chunks := b"".join(encoder.chunks(events, running)):
                yield chunks
        yield encoder.end(running)


def _turn(call: Call, request: CompletionRequest, fields: Fields) -> Turn:
    server = call.server
    options: dict[str, Any] = {**sampling_options(fields), **time_limit(server, request.timeout)}
    if request.max_tokens is None:
        options["max_tokens"] = _DEFAULT_TOKENS
    elif request.max_tokens == 0 and request.echo:  # only the prompt is wanted; its last logits give one more token
        options["max_tokens"] = 1
    if request.logprobs is not None:
        if not 0 <= request.logprobs <= _MOST_LOGPROBS:
            raise RequestError(
                400, f"logprobs = {request.logprobs}", f"0 to {_MOST_LOGPROBS} alternatives are possible",
                "use a number in this range", param="logprobs",
            )  # fmt: skip
        options["logprobs"] = request.logprobs
        if request.echo:
            options["prompt_logprobs"] = request.logprobs
    if request.response_format is not None:
        options |= response_format(request.response_format)
    prompts = _prompts(request.prompt)
    if request.suffix:
        prompts = _gap_prompts(server, prompts, request, options)
        options["literal"] = False  # the tokens around the gap are special tokens in the text
    if request.add_special_tokens is not None and all(isinstance(prompt, str) for prompt in prompts):
        options["add_special_tokens"] = request.add_special_tokens
    options["adapter"] = server.adapter_of(request.model)
    return Turn(
        call.key, options, prompts=prompts, stream=request.stream and not request.scores_prompt,
        cache_salt=request.cache_salt, record=call.record, copies=fields.copies,
    )  # fmt: skip


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts: one text, one list of token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    found: list[Any] = [given] if given and all(_is_token(one) for one in given) else given
    if not 0 < len(found) <= _MOST_PROMPTS:
        raise RequestError(
            400, f"prompt has {len(found):,} prompts", f"1 to {_MOST_PROMPTS:,} are possible",
            "send several requests", param="prompt",
        )  # fmt: skip
    for index, prompt in enumerate(found):
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_token, prompt))):
            raise RequestError(
                400, f"prompt[{index}] is neither a text nor a list of token ids",
                "a prompt is a text or a list of whole numbers", "correct the prompt", param="prompt",
            )  # fmt: skip
    return found


def _gap_prompts(
    server: Server, prompts: Sequence[str | list[int]], request: CompletionRequest, options: Mapping[str, Any]
) -> list[Any]:
    """Return the prompts for the text between each prompt and the suffix.

    Raises:
        RequestError: the model cannot fill gaps, or another field contradicts the suffix.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if request.echo or options.get("literal") or len(texts) < len(prompts):
        raise RequestError(
            400, "suffix cannot be used with echo, literal or token ids", "the prompt is the text before the gap",
            "send the prompt as a text, without echo and literal", param="suffix",
        )  # fmt: skip
    return [gap_prompt(server.llm.tokenizer, text, request.suffix or "") for text in texts]


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Encoder:
    """Writes the events of one turn in the form of OpenAI's completions."""

    def __init__(self, server: Server, request: CompletionRequest, turn: Turn) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or server.name,
            "system_fingerprint": server.fingerprint,
        }
        self._request, self._turn, self._server = request, turn, server
        self._sends_usage = request.stream_options is not None and request.stream_options.include_usage
        self._texts: dict[int, str] = {}
        self._entries: dict[int, list[TokenLogprob]] = {}
        self._offsets: dict[int, int] = {}
        self._ends: dict[int, Finish] = {}

    # --- streams -----------------------------------------------------------------------------------------------------

    def begin(self, running: RunningTurn) -> bytes:
        """Return the chunks with the prompts, if they are requested without log-probabilities."""
        if not self._request.echo or self._request.scores_prompt:
            return b""
        echoes = [self._echo(running, sample) for sample in range(running.num_samples)]
        return b"".join(self._chunk(sample, text, None) for sample, text in enumerate(echoes))

    def chunks(self, events: Sequence[Event], running: RunningTurn) -> list[bytes]:
        """Return the chunks for events."""
        if self._request.scores_prompt:
            self.collect(events)
            ends = [event.sample for event in events if isinstance(event, Finish)]
            return [self._frame(self._choice(running, sample)) for sample in ends]
        found = []
        for event in events:
            if isinstance(event, Text):
                found.append(self._chunk(event.sample, event.text, self._entries.pop(event.sample, None)))
            elif isinstance(event, Logprobs):
                self._entries.setdefault(event.sample, []).extend(event.entries)
            elif isinstance(event, Finish):
                found.append(self._chunk(event.sample, "", self._entries.pop(event.sample, None), event))
        return found

    def end(self, running: RunningTurn) -> bytes:
        """Return the last chunks: the token counts, if they were requested, and the end of the stream."""
        if not self._sends_usage:
            return DONE
        return frame({**self._head, "choices": [], "usage": usage(running.usage)}) + DONE

    def _chunk(
        self, sample: int, text: str, entries: Sequence[TokenLogprob] | None, end: Finish | None = None
    ) -> bytes:
        logprobs = None
        if entries:
            logprobs = self._lists(entries, self._offsets.get(sample, 0))
            self._offsets[sample] = logprobs.pop("end")
        choice = {"index": sample, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self._frame({**choice, **(end_fields(end) if end is not None else {})})

    def _frame(self, choice: dict[str, Any]) -> bytes:
        return frame({**self._head, "choices": [choice], **({"usage": None} if self._sends_usage else {})})

    # --- whole replies -----------------------------------------------------------------------------------------------

    def collect(self, events: Sequence[Event]) -> None:
        """Add events to the completions of a whole reply."""
        for event in events:
            if isinstance(event, Text):
                self._texts[event.sample] = self._texts.get(event.sample, "") + event.text
            elif isinstance(event, Logprobs):
                self._entries.setdefault(event.sample, []).extend(event.entries)
            elif isinstance(event, Finish):
                self._ends[event.sample] = event

    def whole(self, running: RunningTurn) -> dict[str, Any]:
        """Return the body of a whole reply."""
        choices = [self._choice(running, sample) for sample in sorted(self._ends)]
        return {**self._head, "choices": choices, "usage": usage(running.usage), "seed": running.seed}

    def _choice(self, running: RunningTurn, sample: int) -> dict[str, Any]:
        end, text, logprobs = self._ends[sample], self._texts.get(sample, ""), None
        entries = self._entries.get(sample, [])
        if self._request.max_tokens == 0:
            text, entries = "", []
        if self._request.echo:
            text = self._echo(running, sample) + text
        if self._request.logprobs is not None:
            before = self._scored(running, sample, end.completion) if self._request.echo else []
            logprobs = self._lists([*before, *entries], 0)
            del logprobs["end"]
        return {"index": sample, "text": text, "logprobs": logprobs, **end_fields(end)}

    def _echo(self, running: RunningTurn, sample: int) -> str:
        prompt = self._turn.prompts[running.prompt_of(sample)]
        return prompt if isinstance(prompt, str) else self._server.llm.tokenizer.decode(prompt)

    def _scored(self, running: RunningTurn, sample: int, completion: Completion) -> list[TokenLogprob | int]:
        """Return the log-probabilities of a prompt's tokens; the first token has none, only its id."""
        tokens = running.requests[running.prompt_of(sample)].prompt
        known = completion.prompt_logprobs or ()
        return [int(tokens[0]), *(one for one in known if one is not None)]

    def _lists(self, entries: Sequence[TokenLogprob | int], offset: int) -> dict[str, Any]:
        """Return log-probabilities as the lists of OpenAI's API, and the offset in the text after the last token."""
        name = self._server.token_texts.name
        tokens, logprobs, tops, offsets = list[str](), list[float | None](), list[Any](), list[int]()
        for entry in entries:
            is_first = isinstance(entry, int)
            token = entry if isinstance(entry, int) else entry.token
            tokens.append(name(token))
            logprobs.append(None if isinstance(entry, int) else number(entry.logprob))
            top = {} if isinstance(entry, int) else {name(one): number(value) for one, value in reversed(entry.top)}
            tops.append(None if is_first else dict(reversed(top.items())))
            offsets.append(offset)
            offset += len(self._server.token_texts.text(token))
        lists = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
        return {**lists, "end": offset}


def error_body(reply: ErrorReply) -> dict[str, Any]:
    """Return the body of an error. The prompt has another name than in a chat."""
    body = reply.body()
    if reply.param == "messages":
        body["error"]["param"] = "prompt"
    return body


NEEDS = "completion"
ROUTES = (
    ("POST", "/v1/completions", create, False),
    ("POST", "/completions", create, False),
)
