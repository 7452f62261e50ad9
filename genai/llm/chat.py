"""A conversation with a model: its messages, the handling of a full context, and streamed replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ..common.atomic_files import replacing
from ..common.paths import expanded
from ..common.reading import json_object, read_text_file
from ..engine.sampling.params import SamplingOptions, SamplingParams
from ..errors import (
    ContextOverflowError,
    GenaiError,
    InputError,
    OptionError,
    StateError,
    UnsupportedModelError,
)
from ..lora.store import AdapterChoice, NamedChoice, PinnedAdapters
from ..text.chat_template import RenderedText
from ..text.parsing import Event, ToolCall
from ..text.tool_functions import Tool, as_tools
from .completion import ChatReply, Completion
from .llm import LLM
from .reply_shape import ReplyShape, ToolChoice, check_choice, check_parallel
from .request_options import RequestOptions
from .states import load_state
from .streaming import CompletionStream, Progress

OVERFLOWS = ("error", "truncate", "shift", "auto")
# A quarter of the context is reserved for the reply, unless max_tokens is lower.
_REPLY_SHARE = 4
_FORMAT = "genai-chat-1"
# Suffix of the file that holds a saved conversation's tokens, keys and values; it follows the conversation's file name.
_STATE_SUFFIX = ".state"


class ChatSession:
    """A conversation that keeps its messages. Each turn computes only the tokens that the prefix cache does not hold.

    Args:
        llm: the model.
        system: the system message, or None.
        tools: JSON schemas of tools that the model may call, and functions; see LLM.chat.
        tool_choice, parallel_tool_calls: see LLM.chat.
        template: additional variables for the chat template; see LLM.chat.
        on_overflow: behaviour when the conversation does not fit into the context.
            "error": refuse the message. A reply that fills the context ends there.
            "truncate": leave the oldest exchanges out of the prompt until there is space for a reply.
            "shift": like "truncate"; in addition, a reply that fills the context continues without the oldest
            exchanges.
            "auto": like "truncate"; in addition, a reply that fills the context continues as with `ctx_shift`, if the
            model supports that, up to as many tokens as the context has (or max_tokens). `shift_problem` is the error
            if it does not.
            `num_left_out` is the number of messages that the last prompt left out; `messages` keeps all.
        ctx_shift: when a reply fills the context, drop the older half of the tokens after the system message (or after
            a given number of first tokens), and continue; see `RequestOptions`. Nothing is recomputed.
        draws: True to draw tokens as `genai chat` does if the model's files name no sampling; see LLM.chat_params.
        literal: True to keep special tokens in messages, tools and their results as ordinary text; see LLM.chat. The
            attribute can be changed between messages.
        options: fields of SamplingParams; n must be 1.

    Attributes:
        on_prompt: called, while a prompt is processed, with the number of computed prompt tokens and their total
            number.
        shift_problem: with on_overflow = "auto", the reason why the last reply could not continue in a full context;
            None if it could.
        state_problem: the error that prevented the use of a loaded conversation's saved keys and values, or None.

    Raises:
        OptionError, ContextOverflowError: an option is invalid; see LLM.params. Or the chat template does not read a
            variable in `template`.

    >>> from genai import LLM
    >>> chat = ChatSession(LLM())
    >>> chat.ask("What is 12 + 7?").text
    '19'
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool | None = None,
        template: Mapping[str, Any] | None = None,
        on_overflow: str = "error",
        ctx_shift: bool | int = False,
        draws: bool = False,
        literal: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        if on_overflow not in OVERFLOWS:
            raise OptionError(
                f"on_overflow = {on_overflow!r}",
                f"allowed: {', '.join(OVERFLOWS)}",
                "pass one of these values, or leave it out",
            )
        if ctx_shift and on_overflow == "shift":
            raise OptionError(
                "ctx_shift contradicts on_overflow = 'shift'", "both options continue a reply that fills the context",
                "leave out one of the two, or set on_overflow = 'truncate' to leave old messages out of prompts",
            )  # fmt: skip
        self.llm = llm
        self.ctx_shift = ctx_shift
        self.literal = RequestOptions(literal=literal).literal
        self._check_shift(llm)
        self.system = system
        schemas = as_tools(tools)
        check_choice(tool_choice, schemas)
        check_parallel(parallel_tool_calls)
        self.tools, self.tool_choice, self.parallel_tool_calls = schemas, tool_choice, parallel_tool_calls
        self.template: Mapping[str, Any] = {}
        self.set_template(template or {})
        self.on_overflow = on_overflow
        self.draws = draws
        self.options: dict[str, Any] = {}
        self.set_options(**options)
        self.messages: list[dict[str, Any]] = []
        self.last_reply: ChatReply | None = None
        self._adapters = PinnedAdapters()
        self.num_left_out = 0
        self.on_prompt: Progress | None = None
        self.state_problem: GenaiError | None = None
        self.shift_problem: GenaiError | None = None
        self._cached: list[int] = []
        self._running: CompletionStream | None = None

    def use_adapter(self, adapter: AdapterChoice) -> None:
        """Use adapters that `llm` has loaded for all later replies; None = no adapter.

        The adapters stay the same if they are unloaded, and if other adapters are loaded under their names.

        Raises:
            OptionError: an adapter is not loaded. In this case, nothing changes.
        """
        self._adapters = self.llm.adapters.pin(adapter)

    @property
    def adapter(self) -> NamedChoice:
        """The adapters of later replies, as named in `use_adapter`. Setting the property calls `use_adapter`."""
        return self._adapters.choice

    @adapter.setter
    def adapter(self, adapter: AdapterChoice) -> None:
        self.use_adapter(adapter)

    # --- options and messages ------------------------------------------------------------------------------------

    @property
    def params(self) -> SamplingParams:
        """The effective options: the model's defaults, overridden by the options that were set."""
        return self._params(self.llm, self.options)

    def _params(self, llm: LLM, options: Mapping[str, Any]) -> SamplingParams:
        return llm.chat_params(**options) if self.draws else llm.params(**options)

    def set_options(self, changes: Mapping[str, Any] | None = None, /, **options: Unpack[SamplingOptions]) -> None:
        """Change sampling options, passed by name or in `changes`. None restores the model's default.

        Raises:
            OptionError, ContextOverflowError: see LLM.params. In this case, nothing changes.
        """
        new = {**self.options, **(changes or {}), **options}
        new = {name: value for name, value in new.items() if value is not None}
        if self._params(self.llm, new).n != 1:
            raise OptionError(f"n = {new['n']}", "a conversation has one reply at a time", "leave n out")
        self.options = new

    def set_template(self, changes: Mapping[str, Any]) -> None:
        """Set variables of the chat template for all later replies. None restores the template's default.

        Raises:
            OptionError: the chat template does not read a variable, or its name is reserved. In this case, nothing
                changes.
        """
        new = {name: value for name, value in {**self.template, **changes}.items() if value is not None}
        self._check_template(self.llm, new)
        self.template = new

    def _check_template(self, llm: LLM, template: Mapping[str, Any]) -> None:
        llm.tokenizer.check_template_variables(template, with_tools=bool(self.tools) and self.tool_choice != "none")

    def switch(self, llm: LLM) -> None:
        """Continue with another model, without adapters. The caller must close the previous model.

        Raises:
            OptionError, ContextOverflowError: the options, or the variables of the template, do not fit the model. In
                this case, nothing changes.
            UnsupportedModelError: ctx_shift is set, and the model's context cannot be shifted.
        """
        self._params(llm, self.options)
        self._check_shift(llm)
        self._check_template(llm, self.template)
        self.llm, self.num_left_out, self.last_reply = llm, 0, None
        self._adapters, self._cached = PinnedAdapters(), []

    def clear(self) -> None:
        """Delete all messages except the system message."""
        self.messages, self.last_reply, self.num_left_out, self._cached = [], None, 0, []

    def undo(self) -> str:
        """Remove the last exchange and return the text of its user message. Raise StateError if there is none."""
        index = self._last_user_message()
        text = str(self.messages[index]["content"])
        del self.messages[index:]
        self.last_reply, self.num_left_out = None, 0
        return text

    def _last_user_message(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                return index
        raise StateError("there is no message yet", "the conversation is empty", "send a message first")

    def prompt(self) -> str:
        """Return the exact prompt text for the next reply, without the messages that are left out."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages[self.num_left_out :]]
        tools = None if self.tool_choice == "none" else self.tools
        return self.llm.render(messages, tools=tools, template=self.template, literal=self.literal)

    # --- turns ---------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> ChatReply:
        """Add a user message and wait for the complete reply; see `send`."""
        for _ in self.send(text):
            pass
        if self.last_reply is None:
            raise StateError("there is no reply yet", "the model has not replied to a message", "send a message first")
        return self.last_reply

    def send(self, text: str) -> Iterator[Event]:
        """Add a user message, and stream the reply as events.

        If the caller stops early, the partial reply is kept.

        Raises:
            InputError: the text is empty.
            ContextOverflowError: the conversation does not fit into the context. In this case, the message is removed.
        """
        if not text.strip():
            raise InputError("the message is empty", "there is nothing to reply to", "write a message")
        self.messages.append({"role": "user", "content": text})
        return self._answer(1)

    def give_results(self, results: Sequence[tuple[ToolCall, str]]) -> Iterator[Event]:
        """Add the results of the tools that the last reply called, and stream the next reply.

        Args:
            results: pairs of a call and its result.

        Raises:
            InputError: `results` is empty.
            ChatTemplateError: the template does not support tool results. Raised with the first event.
        """
        if not results:
            raise InputError(
                "the list of results is empty", "there is nothing to reply to", "pass one result per tool call"
            )
        for call, text in results:
            name = {"name": call.name} if call.id is None else {"name": call.name, "tool_call_id": call.id}
            self.messages.append({"role": "tool", **name, "content": text})
        return self._answer(len(results))

    def retry(self) -> Iterator[Event]:
        """Replace the reply to the last message with a new reply. With a fixed seed, the new reply is the same.

        If no new reply is generated, the previous reply and the messages after it are restored.

        Raises:
            StateError: the conversation is empty.
        """
        index = self._last_user_message()
        before, reply = self.messages[index:], self.last_reply
        del self.messages[index + 1 :]
        return self._answer(1, before, reply)

    def cancel(self) -> bool:
        """End the running reply early; return False if there is none. Safe in signal handlers and on any thread."""
        stream = self._running
        if stream is not None:
            stream.cancel()
        return stream is not None

    def _answer(
        self, new: int, before: Sequence[dict[str, Any]] = (), reply: ChatReply | None = None
    ) -> Iterator[Event]:
        """Stream a reply. If no reply is generated, replace the last `new` messages with `before`."""
        self.last_reply = None
        try:
            text, ids = self._fitting_prompt(())
            prompt: list[int] | None = ids
            splitter = self.llm.splitter(text, tools=self.tools)
            shape = self.llm.shape(
                text,
                tools=self.tools,
                tool_choice=self.tool_choice,
                parallel_tool_calls=self.parallel_tool_calls,
            )
            parts: list[Completion] = []
            try:
                while prompt is not None:
                    with self._stream(prompt, parts, shape) as stream:
                        self._running = stream
                        try:
                            for piece in stream:
                                yield from splitter.feed(piece)
                        finally:
                            self._running = None
                            stream.close()
                            parts.append(stream.completion)
                            self._cached = [*prompt, *stream.completion.token_ids]
                    prompt = self._shifted(parts)
            finally:
                if parts:
                    self.last_reply = self.llm.parsed(text, _joined(parts), tools=self.tools)
                    self.messages.append(self.last_reply.message)
            yield from splitter.finish()
        finally:
            if self.last_reply is None:
                self.messages[-new:], self.last_reply = before, reply

    def _stream(self, prompt: list[int], parts: Sequence[Completion], shape: ReplyShape) -> CompletionStream:
        params, num_reply = self.params, sum(len(part.token_ids) for part in parts)
        if num_reply:
            least, most = max(0, params.min_tokens - num_reply), params.max_tokens
            params = params.replace(min_tokens=least, max_tokens=None if most is None else most - num_reply)
        keep = self._shift_of_reply()
        if keep is not False and self.ctx_shift is False and params.max_tokens is None:
            params = params.replace(max_tokens=max(self.llm.context_size, params.min_tokens))
        stream = self.llm.stream_tokens(
            prompt, params, adapter=self._adapters, shape=shape, num_reply=num_reply, ctx_shift=keep
        )
        stream.on_prompt = self.on_prompt
        return stream

    # --- context -------------------------------------------------------------------------------------------------

    @property
    def context_used(self) -> int:
        """The number of tokens in the last prompt and its reply."""
        if self.last_reply is None:
            return 0
        completion = self.last_reply.completion
        return completion.prompt_tokens + len(completion.token_ids) - completion.forgotten_tokens

    def _check_shift(self, llm: LLM) -> None:
        """Raise an error if the model does not support ctx_shift."""
        shift = RequestOptions(ctx_shift=self.ctx_shift).shift(llm.context_size)
        if shift is not None:
            llm.model.decoder.check_shift(shift)

    def _shift_of_reply(self) -> bool | int:
        """Return the context shift of a reply. With "auto", there is none if the model does not support it."""
        self.shift_problem = None
        if self.ctx_shift is not False or self.on_overflow != "auto":
            return self._tokens_to_keep(self.ctx_shift)
        keep = self._tokens_to_keep(True)
        shift = RequestOptions(ctx_shift=keep).shift(self.llm.context_size)
        try:
            if shift is not None:
                self.llm.model.decoder.check_shift(shift)
        except (OptionError, UnsupportedModelError) as error:
            self.shift_problem = error
            return False
        return keep

    def _tokens_to_keep(self, ctx_shift: bool | int) -> bool | int:
        """Return the number of tokens that a context shift keeps, which end with the system message."""
        if ctx_shift is not True or not self.system:
            return ctx_shift
        text = self.prompt()
        end = text.find(self.system) + len(self.system)
        if end < len(self.system):
            return True
        beginning = text.prefix(end) if isinstance(text, RenderedText) else text[:end]
        return len(self.llm.encode(beginning, add_special_tokens=False))

    @property
    def was_limited(self) -> bool:
        """True if the last reply continued in a full context, until it had as many tokens as the context."""
        if self.last_reply is None or self.options.get("max_tokens") is not None or self.on_overflow != "auto":
            return False
        completion = self.last_reply.completion
        is_long = len(completion.token_ids) >= self.llm.context_size
        return completion.finish_reason == "length" and completion.forgotten_tokens > 0 and is_long

    @property
    def was_cut(self) -> bool:
        """True if the last reply ended because the context was full."""
        if self.last_reply is None or self.last_reply.completion.finish_reason != "length":
            return False
        return self.context_used >= self.llm.context_size

    def _fitting_prompt(self, reply: Sequence[int]) -> tuple[str, list[int]]:
        """Return the prompt with as many messages as fit, and its token ids followed by the ids of the reply so far.

        Raises:
            ContextOverflowError: the prompt does not fit, and no more messages can be left out.
        """
        limit = self.llm.context_size
        room = 1
        while True:
            text = self.prompt()
            length = self.llm.tokenizer.too_many_tokens(text, limit)
            count = f"more than {length}"
            if not length:
                ids = [*self.llm.encode(text), *reply]
                length, count = len(ids), str(len(ids))
                if length + room <= limit:
                    return text, ids
            if self.on_overflow == "error" or not self._leave_out_more():
                if room > 1 and length and length < limit:  # some space, but less than the reply may need
                    return text, ids
                raise self._too_long(count)
            room = min(self.options.get("max_tokens") or limit, limit // _REPLY_SHARE)

    def _too_long(self, tokens: str) -> ContextOverflowError:
        can_grow = self.llm.context_size < self.llm.model.config.model.context_length
        if self.on_overflow == "error":
            subject = "the conversation" if len(self.messages) > 1 else "the message"
            larger = "use a larger context size, " * can_grow
            fix = f"shorten the message, clear the conversation, {larger}or leave out old messages "
            fix += "(on_overflow = truncate or shift)"
        else:
            subject = "the part of the conversation that cannot be left out"
            fix = "shorten the message" + ", or use a larger context size" * can_grow
        return ContextOverflowError(
            f"{subject} has {tokens} tokens",
            f"prompt and reply together are limited to {self.llm.context_size} tokens",
            fix,
        )

    def _leave_out_more(self) -> bool:
        """Leave out one more exchange; return False if only the message to reply to remains."""
        for index in range(self.num_left_out + 1, len(self.messages)):
            if self.messages[index]["role"] == "user":
                self.num_left_out = index
                return True
        return False

    def _shifted(self, parts: Sequence[Completion]) -> list[int] | None:
        """Return the prompt that continues a reply after it filled the context, or None if the reply is finished."""
        last, reply = parts[-1], [token for part in parts for token in part.token_ids]
        most = self.options.get("max_tokens")
        full = last.prompt_tokens + len(last.token_ids) >= self.llm.context_size
        over = last.finish_reason != "length" or not full or (most is not None and len(reply) >= most)
        if over or self.on_overflow != "shift" or not self._leave_out_more():
            return None
        try:
            return self._fitting_prompt(reply)[1]
        except ContextOverflowError:
            return None

    # --- files ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, with_state: bool = True) -> None:
        """Save the conversation as JSON: messages, system message and options. Each file is replaced atomically.

        Args:
            path: the file.
            with_state: also save the keys and values of the conversation's tokens, in a file with the suffix ".state",
                so that a later `load` need not recompute them; see docs/how-to/saved-states.md.

        Raises:
            InputError: the conversation's file cannot be written.
            StateFileError: the file with keys and values cannot be written.
        """
        content = {
            "format": _FORMAT,
            "model": str(self.llm.model.folder),
            "system": self.system,
            "options": self.options,
            "template": self.template,
            "literal": self.literal,
            "messages": self.messages,
        }
        file_path = expanded(path)
        try:
            text = json.dumps(content, ensure_ascii=False, indent=2)
            with replacing(file_path) as file:
                file.write(f"{text}\n".encode())
        except FileNotFoundError as error:
            raise InputError(
                f"{path}: the conversation cannot be saved",
                f"the folder {file_path.parent} does not exist",
                "create the folder, or choose another file",
            ) from error
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"{path}: the conversation cannot be saved", str(error), "choose another file") from error
        if with_state:
            self._save_state(_beside(file_path))

    def _save_state(self, path: Path) -> None:
        known = self._cached[: self.llm.context_size - 1]
        if not known or self.llm.model.decoder.pool is None:  # a state is useful only with a prefix cache
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return
        with self.llm.read(known, adapter=self._adapters) as state:
            state.save_state(path)

    def load(self, path: str | Path) -> None:
        """Load a conversation that was saved by `save`, and replace the current one.

        Saved keys and values are added to the prefix cache. If they cannot be used, `state_problem` holds the error.

        Raises:
            InputError: the file cannot be read, or is not a saved conversation. In this case, nothing changes.
            OptionError: the conversation's options or its variables of the template do not fit this model.
        """
        text = read_text_file(expanded(path))
        if not text.lstrip().startswith("{"):
            raise _not_saved(path)
        messages = _checked_messages(content := json_object(text, path, InputError), path)
        system, options = content.get("system"), content.get("options") or {}
        before = self.options, self.template
        self.options, self.template = {}, {}
        try:
            self.set_options(options)
            self.set_template(content.get("template") or {})
        except BaseException:
            self.options, self.template = before
            raise
        self.clear()
        self.messages, self.system = messages, system
        self.literal = self.literal if content.get("literal") is None else content["literal"]
        self._load_state(_beside(expanded(path)))

    def _load_state(self, path: Path) -> None:
        self.state_problem = None
        if self.llm.model.decoder.pool is None or not path.exists():
            return
        try:
            with load_state(self.llm, path, None, for_all=True) as state:
                self._cached = list(state.tokens)
        except GenaiError as error:
            self.state_problem = error


def _beside(path: Path) -> Path:
    """Return the path of the file that holds a saved conversation's keys and values."""
    return path.with_name(path.name + _STATE_SUFFIX)


def _joined(parts: Sequence[Completion]) -> Completion:
    """Join the parts of a reply that was continued after shifts into one completion."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    return replace(
        first,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=last.finish_reason,
        stopped_by=last.stopped_by,
        prompt_tokens=last.prompt_tokens - sum(len(part.token_ids) for part in parts[:-1]),
        forgotten_tokens=last.forgotten_tokens,
        proposed_tokens=sum(part.proposed_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
        timings=first.timings.followed_by(*(part.timings for part in parts[1:])),
        logprobs=None if first.logprobs is None else tuple(one for part in parts for one in part.logprobs or ()),
    )


def _not_saved(path: str | Path) -> InputError:
    return InputError(
        f"{path}: not a saved conversation",
        f'an object with "format": "{_FORMAT}" and "messages" is expected',
        "pass a file that was written by /save in a chat, or by ChatSession.save",
    )


def _checked_messages(content: Mapping[str, Any], path: str | Path) -> list[dict[str, Any]]:
    valid = (
        content.get("format") == _FORMAT
        and isinstance(content.get("system"), str | None)
        and isinstance(content.get("options", {}), dict)
        and isinstance(content.get("template", {}), dict)
        and isinstance(content.get("literal"), bool | None)
        and isinstance(content.get("messages"), list)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in content["messages"])
    )
    if not valid:
        raise _not_saved(path)
    messages: list[dict[str, Any]] = content["messages"]
    return messages
