"""The batch format of OpenAI's API: request bodies and response lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import GenaiError, InputError, OptionError, did_you_mean
from ..completion import ChatReply, Completion
from ..mapping import Answer
from ..request_options import LineOptions

if TYPE_CHECKING:
    from ...engine.sampling.batch import TokenLogprob
    from ...text.parsing import ToolCall
    from ...text.tokenizer import Tokenizer

# Options that a line may set: adapters, and LineOptions except functions and results without an output field.
OPTIONS = (
    *(name for name in LineOptions.__annotations__ if name not in ("logits_processors", "prompt_logprobs")),
    "adapter",
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Body fields that do not affect the response, because they concern the caller, storage or billing.
_ABOUT_THE_CALLER = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key stream_options".split()
)
# Body fields that are accepted only with their fixed value.
_ONLY: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "best_of": 1,
    "modalities": ["text"],
}
_LEAST_LOGPROB = -9999.0


def read_body(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a request in OpenAI's format as an item of LLM.map, and the name of its model.

    Args:
        fields: "custom_id", "method", "url" and "body".

    Raises:
        InputError: the request is not in OpenAI's format.
        OptionError: the body has an unknown or unsupported option.
    """
    url, body = fields.get("url", CHAT), fields["body"]
    if fields.get("method", "POST") != "POST" or url not in (CHAT, COMPLETIONS):
        raise InputError(
            f"the request has method {fields.get('method', 'POST')!r:.40}, url {url!r:.80}",
            f"requests must be POST to {CHAT} or {COMPLETIONS}",
            "use one of these URLs",
        )
    needed = "messages" if url == CHAT else "prompt"
    if not isinstance(body, Mapping) or needed not in body:
        raise InputError(
            f"the body for {url} lacks the field {needed!r}", "this field is required", f"add {needed!r} to the body"
        )
    # A null stands for the default, except for adapters: there, it selects the base model, as None does in Python.
    options = {name: value for name, value in body.items() if value is not None or name == "adapter"}
    item: dict[str, Any] = {needed: options.pop(needed)}
    if url == CHAT:
        item |= _chat_fields(options)
    if "response_format" in options:
        item |= _response_format(options.pop("response_format"))
    if "max_completion_tokens" in options:
        options["max_tokens"] = options.pop("max_completion_tokens")
    options = with_token_ids(options)
    for name, value in options.items():
        if name in OPTIONS:
            item[name] = value
        elif name in _ONLY:
            _check_only(name, value)
        elif name not in _ABOUT_THE_CALLER:
            known = (*OPTIONS, "messages", "tools", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
            raise OptionError(
                f"{name} = {value!r:.80}", f"{url} does not support this option", did_you_mean(name, known)
            )
    return item, str(options.get("model", ""))


def _chat_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that only chat requests have from the body, and return them as fields of an item."""
    item = {}
    if tools := options.pop("tools", None):
        item["tools"] = tools
    if (choice := options.pop("tool_choice", None)) is not None:
        item["tool_choice"] = choice
    if (parallel := options.pop("parallel_tool_calls", None)) is not None:
        item["parallel_tool_calls"] = parallel
    if (template := options.pop("chat_template_kwargs", None)) is not None:
        item["template"] = template
    top, wants_logprobs = options.pop("top_logprobs", None), options.pop("logprobs", False)
    if not isinstance(wants_logprobs, bool) or (top is not None and not wants_logprobs):
        raise OptionError(
            f"logprobs = {wants_logprobs!r:.40}, top_logprobs = {top!r:.40}",
            "in chat requests, logprobs is true or false, and top_logprobs needs logprobs = true",
            'for example, write "logprobs": true, "top_logprobs": 5',
        )
    return {**item, "logprobs": 0 if top is None else top} if wants_logprobs else item


def _response_format(response_format: Any) -> dict[str, Any]:
    """Convert a response_format to an option that constrains the reply."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema_format = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema_format, Mapping) or "schema" not in schema_format:
        raise OptionError(
            f"response_format = {response_format!r:.80}",
            'allowed: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}',
            "use one of these forms",
        )
    return {"json_schema": schema_format["schema"]}


def with_token_ids(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with integer keys in logit_bias, because JSON keys are text."""
    bias = options.get("logit_bias")
    bias_option = (
        {"logit_bias": {_token_id(token): value for token, value in bias.items()}} if isinstance(bias, Mapping) else {}
    )
    return {**options, **bias_option}


def _token_id(token: Any) -> Any:
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20 else token


def _check_only(name: str, value: Any) -> None:
    if value != _ONLY[name]:
        raise OptionError(
            f"{name} = {value!r:.80}", f"only {_ONLY[name]!r} is supported", f"leave {name} out of the body"
        )


class DecodesTokens(Protocol):
    """The interface that responses need from a tokenizer."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True)
class InnerTokens:
    """Decodes tokens in the middle of a text, where a leading space is kept."""

    tokenizer: Tokenizer

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids."""
        return "".join(self.tokenizer.decode_each(tokens))


class ResponseWriter:
    """Writes responses in the format of OpenAI's API.

    Args:
        model: the model name in the responses.
        tokenizer: decodes single tokens.
    """

    def __init__(self, model: str, tokenizer: DecodesTokens) -> None:
        self._model, self._tokenizer = model, tokenizer

    def line(self, id_: str, custom_id: str, answer: Answer[Any], created: int) -> bytes:
        """Return a line of the output. Either `error` or `response` is null."""
        error = None if answer.error is None else error_object(answer.error)
        response = None
        if error is None:
            body = self._body(id_, answer, created)
            response = {"status_code": 200, "request_id": id_, "body": body}
        line = {"id": id_, "error": error, "custom_id": custom_id, "response": response}
        # Half of a surrogate pair is valid in JSON but not in UTF-8, so it stays escaped.
        return json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

    def _body(self, id_: str, answer: Answer[Any], created: int) -> dict[str, Any]:
        first = answer.completions[0]
        samples = 1 + max(one.sample_index for one in answer.completions)
        chat = bool(answer.replies)
        choices = (
            [self._message(id_, index, reply) for index, reply in enumerate(answer.replies)]
            if chat
            else [self._text(one.prompt_index * samples + one.sample_index, one) for one in answer.completions]
        )
        prompts = [one for one in answer.completions if one.sample_index == 0]
        written = sum(len(one.token_ids) for one in answer.completions)
        read = sum(one.prompt_tokens for one in prompts)
        return {
            "id": id_,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
                "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
            },
            "seed": first.seed,
        }

    def _message(self, id_: str, index: int, reply: ChatReply) -> dict[str, Any]:
        message = dict(reply.message)
        if reply.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                _tool_call(call, f"{id_}/{index}/{position}") for position, call in enumerate(reply.tool_calls)
            ]
        logprobs = reply.completion.logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": None if logprobs is None else {"content": [self._content(one) for one in logprobs]},
            "finish_reason": "tool_calls" if reply.tool_calls else reply.completion.finish_reason,
        }

    def _text(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = completion.logprobs
        return {
            "index": index,
            "text": completion.text,
            "logprobs": None if logprobs is None else self._lists(logprobs),
            "finish_reason": completion.finish_reason,
        }

    def _content(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [{"token": self._token(token), "logprob": _number(value), "bytes": None} for token, value in entry.top]
        logprob = _number(entry.logprob)
        return {"token": self._token(entry.token), "logprob": logprob, "bytes": None, "top_logprobs": top}

    def _lists(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._token(entry.token) for entry in entries]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": [{self._token(token): _number(value) for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _token(self, token: int) -> str:
        return self._tokenizer.decode([token])


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Return a call. If the model wrote no ID, the ID is derived from `where`, so that each run writes the same."""
    id_ = call.id if call.id is not None else f"call_{hashlib.sha256(where.encode()).hexdigest()[:24]}"
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}


def _number(logprob: float) -> float:
    """Return the log-probability, but at least -9999, as in OpenAI's API, because JSON has no infinity."""
    return max(logprob, _LEAST_LOGPROB)


def error_object(error: GenaiError) -> dict[str, str]:
    """Return the error object of a line: the error's class, what, why and fix."""
    return {"code": type(error).__name__, "message": error.what, "why": error.why, "fix": error.fix}
