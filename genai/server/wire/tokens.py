"""Tokens and templates: /tokenize, /detokenize, /tokenizer_info and /apply-template, as in vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import GenaiError, RequestError
from ..calls import Call, JsonReply, converted
from .chat import usable_messages, usable_tools


class TokenizeRequest(msgspec.Struct):
    """A text (`prompt`, or `content` as in llama.cpp), or a conversation (`messages`)."""

    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_special: bool = False
    return_token_strs: bool = False
    with_pieces: bool = False
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class TemplateRequest(msgspec.Struct):
    """A conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None


async def tokenize(call: Call) -> JsonReply:
    """Return the token ids of a text or a conversation."""
    return await _in_thread(call, _tokenized)


async def _in_thread(call: Call, work: Callable[[Call], dict[str, Any]]) -> JsonReply:
    """Return the reply that a function makes on another thread, because texts can be long."""

    def body() -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(work(call)))

    server = call.server
    with server.admission.seat(call.key.name):
        return JsonReply(await (server.in_thread if call.is_short else server.at_length)(body))


def _tokenized(call: Call) -> dict[str, Any]:
    request: TokenizeRequest = converted(call.json(), TokenizeRequest)
    call.server.adapter_of(request.model)
    tokens: list[Any] = _encoded(call, request)
    count, texts = len(tokens), None
    if request.with_pieces or request.return_token_strs:
        texts = [call.server.token_texts.text(token) for token in tokens]
        if request.with_pieces:
            tokens = [{"id": token, "piece": text} for token, text in zip(tokens, texts, strict=True)]
    return {
        "count": count,
        "max_model_len": call.server.llm.context_size,
        "tokens": tokens,
        "token_strs": texts if request.return_token_strs else None,
    }


def _encoded(call: Call, request: TokenizeRequest) -> list[int]:
    llm = call.server.llm
    if request.messages is not None:
        return llm.encode(_rendered(call, request.messages, request.tools, request.chat_template_kwargs))
    if request.prompt is not None:
        return llm.encode(request.prompt, add_special_tokens=request.add_special_tokens)
    if request.content is not None:
        return llm.encode(request.content, add_special_tokens=request.add_special)
    raise RequestError(
        400, "prompt is missing", "a text or a conversation is required", "add prompt or messages",
        code="missing_required_parameter", param="prompt",
    )  # fmt: skip


def _rendered(call: Call, messages: Any, tools: Any, variables: Any) -> str:
    usable = usable_messages(call.server, messages)
    return call.server.llm.render(usable, tools=usable_tools(tools, []) or None, template=variables or None)


async def detokenize(call: Call) -> JsonReply:
    """Return the text of token ids."""
    return await _in_thread(call, _detokenized)


def _detokenized(call: Call) -> dict[str, Any]:
    request: DetokenizeRequest = converted(call.json(), DetokenizeRequest)
    call.server.adapter_of(request.model)
    text = call.server.llm.tokenizer.decode(request.tokens)
    return {"prompt": text, "content": text}


async def apply_template(call: Call) -> JsonReply:
    """Return the prompt of a conversation."""
    return await _in_thread(call, _applied)


def _applied(call: Call) -> dict[str, Any]:
    request: TemplateRequest = converted(call.json(), TemplateRequest)
    return {"prompt": str(_rendered(call, request.messages, request.tools, request.chat_template_kwargs))}


async def tokenizer_info(call: Call) -> JsonReply:
    """Return the special tokens and the chat template."""
    llm = call.server.llm
    tokenizer = llm.tokenizer
    eos = [int(token) for token in tokenizer.eos_token_ids]
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    try:
        template: str | None = tokenizer.template_text()
    except GenaiError:
        template = None
    return JsonReply(
        {
            "tokenizer_class": type(tokenizer.backend).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": llm.context_size,
            "bos_token": None if bos is None else tokenizer.token_text(bos),
            "eos_token": tokenizer.token_text(eos[0]) if eos else None,
            "pad_token": tokenizer.token_text(pad) if pad is not None and pad >= 0 else None,
            "bos_token_id": bos,
            "eos_token_ids": eos,
            "chat_template": template,
        }
    )


NEEDS = "completion"
ROUTES = (
    ("POST", "/tokenize", tokenize, False),
    ("POST", "/detokenize", detokenize, False),
    ("POST", "/apply-template", apply_template, False),
    ("GET", "/tokenizer_info", tokenizer_info, False),
)
