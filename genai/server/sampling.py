"""Sampling options in requests: the fields of OpenAI's API, and the options of this toolkit by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.sampling.params import DRAWING
from ..errors import OptionError, RequestError
from ..llm.batch.openai_format import with_token_ids
from ..llm.request_options import LineOptions
from .fields import Fields
from .serving import Server

# Options that the endpoints set themselves, or that have no form in JSON.
_NOT_BY_NAME = ("logits_processors", "logprobs", "prompt_logprobs", "add_special_tokens", "max_tokens", "stop", "n")
BY_NAME = tuple(name for name in LineOptions.__annotations__ if name not in _NOT_BY_NAME)
_MOST_SAMPLES = 128
_MOST_STRINGS, _MOST_CHARACTERS = 1000, 100_000
# A top_p that keeps only the most likely token, as 0 does in OpenAI's API.
_SMALLEST_TOP_P = 1e-6


def sampling_options(fields: Fields) -> dict[str, Any]:
    """Return the options of a request that OpenAI's endpoints share.

    Raises:
        RequestError: n is out of range.
    """
    values = fields.values
    options = {name: values[name] for name in BY_NAME if name in values}
    most = values.get("max_completion_tokens", values.get("max_tokens"))
    if most is not None and most != -1:  # -1 is llama.cpp's default, no limit
        options["max_tokens"] = most
    if (stop := values.get("stop")) is not None and stop != []:
        options["stop"] = stop
    samples = values.get("n", 1)
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= _MOST_SAMPLES:
        raise RequestError(
            400, f"n = {samples!r:.40}", f"1 to {_MOST_SAMPLES} samples are possible", "correct n", param="n"
        )
    options["n"] = samples
    check_strings(options)
    seed = options.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        del options["seed"]
        if seed != -1:  # -1 is llama.cpp's value for a new seed; OpenAI's seeds have a sign
            options["seed"] = seed % 2**64
    if options.get("top_p") == 0:
        options["top_p"] = _SMALLEST_TOP_P
    if options.get("top_k") == -1:  # vLLM's value for all tokens
        options["top_k"] = 0
    options |= _structure(values)
    if options.get("temperature") == 0:
        # All samples of a greedy request are equal, so one is generated.
        fields.copies, options["n"] = samples, 1
        # Greedy decoding takes the most likely token, whatever these options are, and many clients send both.
        for name in DRAWING:
            if options.pop(name, None) not in (None, 0, 1, 0.0, 1.0):
                fields.ignored.append(name)
    return with_token_ids(options)


def check_strings(options: Mapping[str, Any]) -> None:
    """Raise RequestError for options with so many strings that every step of all requests would take longer."""
    for name in ("stop", "banned_strings", "dry_sequence_breakers"):
        value = options.get(name)
        texts = [one for one in value if isinstance(one, str)] if isinstance(value, list) else [value or ""]
        if len(texts) > _MOST_STRINGS or sum(len(one) for one in texts if isinstance(one, str)) > _MOST_CHARACTERS:
            raise RequestError(
                400, f"{name} has too many strings",
                f"at most {_MOST_STRINGS:,} strings with {_MOST_CHARACTERS:,} characters together are possible",
                "shorten the list", param=name,
            )  # fmt: skip


# vLLM's names of the options for structured output, new and old.
_STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def _structure(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that vLLM's fields for structured output set.

    Raises:
        RequestError: a field has an unknown part.
    """
    found = {option: values[f"guided_{name}"] for name, option in _STRUCTURES.items() if f"guided_{name}" in values}
    outputs = values.get("structured_outputs", {})
    for name, value in outputs.items() if isinstance(outputs, Mapping) else [(str(outputs), True)]:
        if name == "json_object":
            found |= {"json_schema": {"type": "object"}} if value else {}
        elif name in _STRUCTURES:
            found |= {_STRUCTURES[name]: value} if value is not None else {}
        elif value is not None:
            raise RequestError(
                400, f"structured_outputs has {name!r:.80}", f"allowed: {', '.join(_STRUCTURES)}, json_object",
                "use one of these names", param="structured_outputs",
            )  # fmt: skip
    return found


def response_format(value: Any) -> dict[str, Any]:
    """Return the option for a response_format: the reply's JSON schema.

    Raises:
        RequestError: the format is unknown.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = value.get("schema")
        return {"json_schema": schema if isinstance(schema, Mapping) else {"type": "object"}}
    inner = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        return {"json_schema": inner["schema"]}
    if kind == "json_schema" and isinstance(value.get("schema"), Mapping):  # as in the Responses API
        return {"json_schema": value["schema"]}
    raise RequestError(
        400, f"response_format = {value!r:.80}",
        'allowed: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}',
        "use one of these forms", param="response_format",
    )  # fmt: skip


def text_format(options: Mapping[str, Any], form: Mapping[str, Any], name: str, ignored: list[str]) -> dict[str, Any]:
    """Return the options that set the format of a reply's text.

    As in OpenAI's API, the format has no effect if the reply consists of tool calls only.

    Args:
        options: the options of the request, with the tools and the choice of tools.
        form: the options for the format, as `response_format` returns them.
        name: the field with the format.
        ignored: receives the name if the format has no effect.
    """
    choice = options.get("tool_choice")
    if not form or not options.get("tools") or (choice != "required" and not isinstance(choice, Mapping)):
        return dict(form)
    ignored.append(name)
    return {}


def reasoning_variables(server: Server, effort: str, *, with_tools: bool) -> dict[str, Any] | None:
    """Return the variables of the chat template that set the effort of reasoning; None if it reads none of them."""
    known = server.llm.tokenizer.template_variables(with_tools=with_tools)
    if "reasoning_effort" in known and effort != "none":
        return {"reasoning_effort": effort}
    is_off = effort in ("none", "minimal")
    for name in ("enable_thinking", "thinking"):
        if name in known:
            return {name: not is_off}
    return None


def time_limit(server: Server, value: Any) -> dict[str, Any]:
    """Return the timeout option of a request: the smaller one of the request's limit and the server's.

    Raises:
        OptionError: the limit is not a number of seconds.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise OptionError(f"timeout = {value!r:.40}", "a positive number of seconds is expected", "leave timeout out")
    limits = [limit for limit in (value, server.options.timeout) if limit is not None]
    return {"timeout": min(limits)} if limits else {}
