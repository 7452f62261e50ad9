"""Construction of the requests for a map's items.

Items are processed in groups, because passing text to the template process or the tokenizer threads costs more than the
work on short text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..engine.sampling.grammar import joined_options
from ..engine.sampling.params import SamplingParams
from ..errors import GenaiError, InputError, StateError
from ..lora.store import AdapterChoice
from ..text.tool_functions import as_tools
from .mapping import MapRequest
from .reply_shape import check_choice
from .requests import RequestBuilder

if TYPE_CHECKING:  # a circular import: LLM.map uses this module
    from .llm import LLM

T = TypeVar("T")
# The keys of an item that are arguments of LLM.render.
_RENDERED = ("messages", "tools", "template", "literal")


def attempt(work: Callable[[Any], T], argument: Any) -> T | GenaiError:
    """Return the result of `work`, or the error that `argument` caused.

    A StateError is raised, because it concerns the LLM and not the argument.
    """
    try:
        return work(argument)
    except StateError:
        raise
    except GenaiError as error:
        return error


class MapRequestBuilder:
    """A builder of the requests for items; see LLM.map.

    Args:
        llm: renders conversations and splits replies.
        requests: builds the requests.
        params, options, adapter: defaults for values that an item does not set.
    """

    def __init__(
        self,
        llm: LLM,
        requests: RequestBuilder,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        adapter: AdapterChoice = None,
    ) -> None:
        self._llm, self._requests, self._params = llm, requests, params
        self._options = {"adapter": adapter, **options}

    def build(self, items: Sequence[Any]) -> list[MapRequest | GenaiError]:
        """Return each item's requests, or its error. If an item was replaced with an error, that error is returned."""
        parsed = [item if isinstance(item, GenaiError) else attempt(_parsed_item, item) for item in items]
        valid = [item for item in parsed if isinstance(item, _ParsedItem)]
        chats = [item for item in valid if item.conversation is not None]
        how = {"literal": self._options.get("literal")}
        prompts = self._llm.render_all([{**how, **(chat.conversation or {})} for chat in chats]) if chats else []
        for chat, prompt in zip(chats, prompts, strict=True):
            chat.prompt = prompt
        known = self._requests.encoded([item.prompt for item in valid if isinstance(item.prompt, str)])
        return [
            item if isinstance(item, GenaiError) else attempt(partial(self._build_one, known), item) for item in parsed
        ]

    def _build_one(self, known: Mapping[str, NDArray[np.int32]], item: _ParsedItem) -> MapRequest:
        prompt, is_chat = item.prompt, item.conversation is not None
        if isinstance(prompt, GenaiError):
            raise prompt
        keep = self._llm.parser.markers if is_chat else ()
        options = joined_options(self._options, item.options)
        adapter = options.pop("adapter")
        if is_chat:
            options.pop("literal", None)  # applied when the conversation was rendered
        shape = self._llm.shape(str(prompt), **item.tool_options) if is_chat else None
        leaders = self._requests.batch(prompt, self._params, options, keep, adapter, shape, known=known)
        if not is_chat:
            return MapRequest(leaders, None)
        tools = item.tool_options.get("tools")
        return MapRequest(leaders, lambda completion: self._llm.parsed(str(prompt), completion, tools=tools))


@dataclass
class _ParsedItem:
    """The parts of a map's item.

    Attributes:
        prompt: a prompt for `generate`. For a conversation, it is set after rendering, to the prompt or to an error.
        options: fields of SamplingParams, and "adapter".
        conversation: arguments for `render_all`; None if the item is a prompt.
        tool_options: the arguments of LLM.shape that concern tool calls.
    """

    prompt: Any
    options: dict[str, Any]
    conversation: Mapping[str, Any] | None = None
    tool_options: dict[str, Any] = field(default_factory=dict)


def _parsed_item(item: Any) -> _ParsedItem:
    if isinstance(item, Sequence) and not isinstance(item, str) and item and isinstance(item[0], Mapping):
        return _ParsedItem(None, {}, {"messages": item})
    if not isinstance(item, Mapping):
        return _ParsedItem(item, {})
    if ("prompt" in item) == ("messages" in item):
        raise InputError(
            f"an item has the keys {', '.join(map(str, item)):.200}",
            "an item needs either a prompt or messages",
            'pass {"prompt": TEXT} or {"messages": [{"role": "user", "content": TEXT}]}',
        )
    options = dict(item)
    if "prompt" in item:
        return _ParsedItem(options.pop("prompt"), options)
    conversation = {name: options.pop(name) for name in _RENDERED if name in options}
    tools, choice = as_tools(conversation.get("tools")), options.pop("tool_choice", None)
    parallel = options.pop("parallel_tool_calls", None)
    check_choice(choice, tools)
    if choice == "none":
        conversation.pop("tools", None)
    elif "tools" in conversation:
        conversation["tools"] = tools
    tool_options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    return _ParsedItem(None, options, conversation, tool_options)
