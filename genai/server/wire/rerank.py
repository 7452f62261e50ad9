"""/v1/rerank, /v2/rerank and /rerank: the APIs of Cohere and Jina for reranking, which have the same fields."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...embed.reranker import Reranker
from ...errors import InputError, RequestError
from ..calls import Call, JsonReply, converted
from ..encoders import parts
from ..errors import ErrorReply
from ..fields import read_fields
from .embeddings import in_fields

MOST_DOCUMENTS = 10_000
"""The maximum number of documents in a request."""


class RerankRequest(msgspec.Struct):
    """The fields of a request."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    truncate: bool = False
    prompt_name: str | None = None
    prompt: str | None = None


async def create(call: Call) -> JsonReply:
    """Return the documents in the order of their relevance."""
    work = await call.decoded(_decoded)
    return JsonReply(await call.server.encoders.run(call.key, call.server.options.timeout, work))


def _decoded(call: Call) -> Callable[[Callable[[], None]], msgspec.Raw]:
    """Return the work that the body of a call asks for."""
    fields = read_fields("rerank", call.json(), strict=call.server.options.strict)
    request: RerankRequest = converted(fields.values, RerankRequest)
    name, reranker = call.server.encoders.reranker(request.model)
    documents = _documents(request)
    if request.top_n is not None and request.top_n < 1:
        raise RequestError(
            400, f"top_n = {request.top_n}", "a whole number of at least 1 is expected", "leave top_n out",
            param="top_n",
        )  # fmt: skip
    call.note_ignored(fields.ignored)
    return partial(_body, reranker, name, request, documents)


def _documents(request: RerankRequest) -> Sequence[str]:
    """Return the texts of the documents. Jina and Cohere also accept objects with the field `text`."""
    documents = request.documents
    if not documents or len(documents) > MOST_DOCUMENTS:
        raise RequestError(
            400, f"documents has {len(documents):,} documents", f"1 to {MOST_DOCUMENTS:,} documents are possible",
            "send several requests" if documents else "add a document", param="documents",
        )  # fmt: skip
    found = [one if isinstance(one, str) else one.get("text") for one in documents]
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise RequestError(
                400, f"documents[{index}] has no text", "a document is a text, or an object with the field text",
                "pass texts", param="documents",
            )  # fmt: skip
    return [str(text) for text in found]


def _body(
    reranker: Reranker, name: str, request: RerankRequest, documents: Sequence[str], check: Callable[[], None]
) -> msgspec.Raw:
    options: dict[str, Any] = {name: getattr(request, name) for name in ("truncate", "prompt_name", "prompt")}
    found: list[Any] = []
    num_tokens = 0
    for begin, part in parts(documents):
        check()
        try:
            scores, counts = reranker.score_counted(request.query, part, **options)
        except InputError as error:
            raise in_fields(error, "documents", begin, reranker.max_length) from error
        num_tokens += sum(counts)
        found.append(scores)
    scores = np.concatenate(found)
    results: list[dict[str, Any]] = []
    for index in np.argsort(-scores, kind="stable")[: request.top_n]:
        result: dict[str, Any] = {"index": int(index), "relevance_score": float(scores[index])}
        if request.return_documents:
            result["document"] = {"text": documents[index]}
        results.append(result)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {"id": f"rerank-{secrets.token_hex(12)}", "model": name, "object": "list"}
    return msgspec.Raw(msgspec.json.encode({**head, "results": results, "usage": usage}))


def error_body(reply: ErrorReply) -> Any:
    """Return the body for an error: OpenAI's form, and the message where clients of Cohere's API read it."""
    return {**reply.body(), "message": reply.message}


NEEDS = "rerank"
ROUTES = (
    ("POST", "/v1/rerank", create, False),
    ("POST", "/v2/rerank", create, False),
    ("POST", "/rerank", create, False),
)
