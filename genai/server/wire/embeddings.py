"""/v1/embeddings: OpenAI's API for embeddings."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from ...embed.embedder import Embedder
from ...errors import ContextOverflowError, InputError, RequestError
from ..calls import Call, JsonReply, converted
from ..encoders import parts
from ..fields import Fields, read_fields

MOST_INPUTS = 2048
"""The maximum number of texts in a request, as in OpenAI's API."""

# The words of Cohere, Voyage and Jina for the kind of a text, and the names of prompts in models' files.
_PROMPTS = {
    "query": ("query",),
    "search_query": ("query", "search_query"),
    "document": ("document", "passage"),
    "passage": ("passage", "document"),
    "search_document": ("document", "passage", "search_document"),
}
_INDEX = re.compile(r"^(?:text|the vector of text) (\d+) ")


class EmbeddingRequest(msgspec.Struct):
    """The fields of a request."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate: bool = False
    input_type: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    normalize: bool | None = None


async def create(call: Call) -> JsonReply:
    """Return a vector for each text."""
    work = await call.decoded(_decoded)
    return JsonReply(await call.server.encoders.run(call.key, call.server.options.timeout, work))


def _decoded(call: Call) -> Callable[[Callable[[], None]], msgspec.Raw]:
    """Return the work that the body of a call asks for."""
    fields = read_fields("embeddings", call.json(), strict=call.server.options.strict)
    request: EmbeddingRequest = converted(fields.values, EmbeddingRequest)
    name, embedder = call.server.encoders.embedder(request.model)
    texts = _texts(request.input)
    prompts = _prompts(embedder, request, fields)
    call.check_ignored(fields.ignored)
    return partial(_body, embedder, name, request, texts, prompts)


def _texts(given: Any) -> Sequence[Any]:
    """Return the input as a list of texts and token ids of texts."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise _refused("input is empty", "at least one text is needed", "add a text")
    numbers = sum(isinstance(item, int) for item in given)
    if numbers == len(given):
        return [given]
    if numbers:
        raise _refused(
            "input mixes token ids and texts", "a list has token ids only, or none", "use lists of token ids"
        )
    if len(given) > MOST_INPUTS:
        raise _refused(f"input has {len(given):,} texts", f"the limit is {MOST_INPUTS:,}", "send several requests")
    return list(given)


def _prompts(embedder: Embedder, request: EmbeddingRequest, fields: Fields) -> dict[str, Any]:
    """Return the options for the text that precedes each text. An input_type without a prompt has no effect."""
    given = {name: getattr(request, name) for name in ("prompt_name", "prompt", "input_type")}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise _refused(
            f"{' and '.join(named)} contradict each other", "each of them selects the text before the texts",
            "leave all but one of them out", next(iter(named)),
        )  # fmt: skip
    if request.input_type is None:
        return named
    kind = request.input_type
    if kind in embedder.prompts:
        return {"prompt_name": kind}
    if kind not in _PROMPTS:
        known = ", ".join(dict.fromkeys((*_PROMPTS, *embedder.prompts)))
        raise _refused(f"input_type = {kind!r:.80}", f"known: {known}"[:500], "use one of these", "input_type")
    found = next((name for name in _PROMPTS[kind] if name in embedder.prompts), None)
    if found is None:
        fields.ignored.append("input_type")
        return {"prompt": ""}
    return {"prompt_name": found}


def _body(
    embedder: Embedder, name: str, request: EmbeddingRequest, texts: Sequence[Any], prompts: dict[str, Any],
    check: Callable[[], None],
) -> msgspec.Raw:  # fmt: skip
    """Return the body of the response. It is encoded here, because large bodies take long."""
    options = {"truncate": request.truncate, **prompts}
    options |= {"dimensions": request.dimensions, "normalize": request.normalize}
    data: list[dict[str, Any]] = []
    num_tokens = 0
    for begin, part in parts(texts):
        check()
        try:
            vectors, counts = embedder.embed_counted(part, **options)
        except InputError as error:
            raise in_fields(error, "input", begin, embedder.max_length) from error
        num_tokens += sum(counts)
        for index, vector in enumerate(vectors, begin):
            if request.encoding_format == "base64":
                written: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            else:
                written = vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": written})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.Raw(msgspec.json.encode({"object": "list", "data": data, "model": name, "usage": usage}))


def in_fields(error: InputError, name: str, begin: int, limit: int) -> RequestError:
    """Return the error about a text of a request.

    Args:
        error: the error of an encoder, which has the index of the text in its part.
        name: the field with the texts.
        begin: index of the first text of the part.
        limit: maximum number of tokens of a text.
    """
    found = _INDEX.match(error.what)
    what = error.what if found is None else f"{name}[{begin + int(found[1])}] {error.what[found.end() :]}"
    if isinstance(error, ContextOverflowError):
        return RequestError(
            400, f"This model's maximum context length is {limit} tokens. However, {what}", "texts are not truncated "
            "without a request", "shorten the text, or set truncate to true",
            code="context_length_exceeded", param=name,
        )  # fmt: skip
    return RequestError(400, what, error.why, error.fix, param=name if found is not None else None)


def _refused(what: str, why: str, fix: str, param: str = "input") -> RequestError:
    return RequestError(400, what, why, fix, param=param)


NEEDS = "embedding"
ROUTES = (
    ("POST", "/v1/embeddings", create, False),
    ("POST", "/embeddings", create, False),
)
