"""What items of a map ask, made into requests: a group at a time, since templates and tokenizers take turns with
threads and processes, which cost more than a short text itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.sampling.grammar import joined_options
from ..engine.sampling.params import SamplingParams
from ..errors import GenaiError, InputError, StateError
from ..lora.store import AdapterChoice
from .mapping import MapRequest
from .reply_shape import check_choice
from .requests import RequestBuilder

if TYPE_CHECKING:  # LLM.map is written here
    from .llm import LLM

T = TypeVar("T")


def attempt(work: Callable[[Any], T], argument: Any) -> T | GenaiError:
    """What it returns, or the error of what it was given. Raises StateError: that is one of the LLM."""
    try:
        return work(argument)
    except StateError:
        raise
    except GenaiError as error:
        return error


class MapRequestBuilder:
    """Makes requests of items; see LLM.map.

    Args:
        llm: renders conversations and splits answers. requests: makes the requests.
        params, options, adapter: of items that do not say otherwise.
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
        """The requests of each item, or what is wrong with it; an error in place of an item stays one."""
        parsed = [item if isinstance(item, GenaiError) else attempt(_parsed_item, item) for item in items]
        valid = [item for item in parsed if isinstance(item, _ParsedItem)]
        chats = [item for item in valid if item.conversation is not None]
        prompts = self._llm.render_all([chat.conversation or {} for chat in chats]) if chats else []
        for chat, prompt in zip(chats, prompts, strict=True):
            chat.prompt = prompt
        known = self._requests.encoded([item.prompt for item in valid if isinstance(item.prompt, str)])
        return [
            item if isinstance(item, GenaiError) else attempt(partial(self._build_one, known), item) for item in parsed
        ]

    def _build_one(self, known: Mapping[str, list[int]], item: _ParsedItem) -> MapRequest:
        prompt, is_chat = item.prompt, item.conversation is not None
        if isinstance(prompt, GenaiError):
            raise prompt
        ids = known.get(prompt) if isinstance(prompt, str) else None
        keep = self._llm.parser.markers if is_chat else ()
        options = joined_options(self._options, item.options)
        adapter = options.pop("adapter")
        shape = self._llm.shape(str(prompt), tools=item.tools, tool_choice=item.choice) if is_chat else None
        leaders = self._requests.batch(ids or prompt, self._params, options, keep, adapter, shape)
        return MapRequest(leaders, (lambda completion: self._llm.parsed(prompt, completion)) if is_chat else None)


@dataclass
class _ParsedItem:
    """An item of a map, in its parts.

    Attributes:
        prompt: as `generate` takes it; of a conversation, known when it was rendered, or the error of that.
        options: of SamplingParams, and "adapter".
        conversation: what `render_all` takes; None where the item is none.
        tools, choice: those that the reply may call, and whether it does.
    """

    prompt: Any
    options: dict[str, Any]
    conversation: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    choice: Any = None


def _parsed_item(item: Any) -> _ParsedItem:
    if isinstance(item, Sequence) and not isinstance(item, str) and item and isinstance(item[0], Mapping):
        return _ParsedItem(None, {}, {"messages": item})
    if not isinstance(item, Mapping):
        return _ParsedItem(item, {})
    if ("prompt" in item) == ("messages" in item):
        raise InputError(
            f"an item has the keys {', '.join(map(str, item)):.200}",
            "it needs either a prompt or messages",
            'give {"prompt": TEXT} or {"messages": [{"role": "user", "content": TEXT}]}',
        )
    options = dict(item)
    if "prompt" in item:
        return _ParsedItem(options.pop("prompt"), options)
    conversation = {name: options.pop(name) for name in ("messages", "tools", "template") if name in options}
    tools, choice = conversation.get("tools"), options.pop("tool_choice", None)
    check_choice(choice, tools)
    if choice == "none":
        conversation.pop("tools", None)
    return _ParsedItem(None, options, conversation, tools, choice)
