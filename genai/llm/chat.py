"""A conversation with a model: its messages, what to do when the context is full, and streamed replies."""

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
from ..errors import ContextOverflowError, GenaiError, InputError, OptionError, StateError
from ..lora.store import AdapterChoice
from ..text.parsing import Event, ToolCall
from .completion import ChatReply, Completion
from .llm import LLM
from .reply_shape import ReplyShape, ToolChoice, check_choice
from .request_options import RequestOptions
from .states import load_state
from .streaming import CompletionStream, Progress

OVERFLOWS = ("error", "truncate", "shift")
# Share of the context that is freed for the reply where max_tokens does not say how much it needs.
_REPLY_SHARE = 4
_FORMAT = "genai-chat-1"
# Behind the name of a saved conversation: its tokens with their keys and values.
_STATE_SUFFIX = ".state"


class ChatSession:
    """Keeps the messages of a chat; each turn computes only what the prefix cache does not hold.

    Args:
        llm: the model.
        system: a system message, or None.
        tools: JSON schemas of tools that the model may call. tool_choice: see LLM.chat.
        template: further variables of the chat template.
        on_overflow: what happens when the conversation does not fit the context.
            "error": the message is refused; a reply that reaches the end of the context stops there.
            "truncate": the oldest exchanges are left out of the prompt, until a reply has room.
            "shift": as truncate, and a reply that reaches the end goes on without the oldest exchanges.
            `num_left_out` says how many messages the last prompt left out; `messages` keeps them all.
        ctx_shift: a reply that reaches the end of the context goes on, without the older half of what lies behind the
            system message, or behind so many first tokens; see `RequestOptions`. Nothing is read again for it.
        options: of SamplingParams; n is 1.

    Attributes:
        on_prompt: told while a prompt is read how many of its tokens are computed, of how many.
        state_problem: why the keys and values beside a loaded conversation could not be used; None = they could.

    Raises:
        OptionError, ContextOverflowError: an option that is refused, see LLM.params.

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = None,
        template: Mapping[str, Any] | None = None,
        on_overflow: str = "error",
        ctx_shift: bool | int = False,
        **options: Unpack[SamplingOptions],
    ) -> None:
        if on_overflow not in OVERFLOWS:
            raise OptionError(
                f"on_overflow = {on_overflow!r}", f"allowed: {', '.join(OVERFLOWS)}", "pass one of them or leave it out"
            )
        if ctx_shift and on_overflow == "shift":
            raise OptionError(
                "ctx_shift contradicts on_overflow = 'shift'", "each says how a reply goes on that fills the context",
                "leave one of them out; on_overflow = 'truncate' leaves old messages out of prompts",
            )  # fmt: skip
        self.llm = llm
        self.ctx_shift = ctx_shift
        self._check_shift(llm)
        self.system = system
        check_choice(tool_choice, tools)
        self.tools, self.tool_choice = tools, tool_choice
        self.template = template
        self.on_overflow = on_overflow
        self.options: dict[str, Any] = {}
        self.set_options(**options)
        self.messages: list[dict[str, Any]] = []
        self.last_reply: ChatReply | None = None
        self.adapter: AdapterChoice = None
        self.num_left_out = 0
        self.on_prompt: Progress | None = None
        self.state_problem: GenaiError | None = None
        self._cached: list[int] = []
        self._running: CompletionStream | None = None

    def use_adapter(self, adapter: AdapterChoice) -> None:
        """Let replies from now on go through adapters that `llm` has loaded; None = through none.

        Raises:
            OptionError: a name that is not loaded; then nothing is changed.
        """
        self.llm.adapters.check(adapter)
        self.adapter = adapter

    # --- options and messages ------------------------------------------------------------------------------------

    @property
    def params(self) -> SamplingParams:
        """The options as they apply: those set, over the model's defaults."""
        return self.llm.params(**self.options)

    def set_options(self, changes: Mapping[str, Any] | None = None, /, **options: Unpack[SamplingOptions]) -> None:
        """Change sampling options, given by name or in `changes`; None goes back to the model's default.

        Raises:
            OptionError, ContextOverflowError: as LLM.params; then nothing is changed.
        """
        new = {**self.options, **(changes or {}), **options}
        new = {name: value for name, value in new.items() if value is not None}
        if self.llm.params(**new).n != 1:
            raise OptionError(f"n = {new['n']}", "a conversation has one reply at a time", "leave n out")
        self.options = new

    def switch(self, llm: LLM) -> None:
        """Go on with another model, without adapters; the caller closes the one before.

        Raises:
            OptionError, ContextOverflowError: the options do not fit it; then nothing is changed.
            UnsupportedModelError: its context cannot be shifted, and ctx_shift asks for that.
        """
        llm.params(**self.options)
        self._check_shift(llm)
        self.llm, self.num_left_out, self.last_reply, self.adapter = llm, 0, None, None
        self._cached = []

    def clear(self) -> None:
        """Forget all messages but the system message."""
        self.messages, self.last_reply, self.num_left_out, self._cached = [], None, 0, []

    def undo(self) -> str:
        """Take back the last exchange; gives the text of its user message. Raises StateError: there is none."""
        index = self._last_user_message()
        text = str(self.messages[index]["content"])
        del self.messages[index:]
        self.last_reply, self.num_left_out = None, 0
        return text

    def _last_user_message(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                return index
        raise StateError("there is no message yet", "nothing was said", "say something first")

    def prompt(self) -> str:
        """The exact text that the model would be asked to continue now: without the messages that are left out."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages[self.num_left_out :]]
        tools = None if self.tool_choice == "none" else self.tools
        return self.llm.render(messages, tools=tools, template=self.template)

    # --- turns ---------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> ChatReply:
        """Add a user message and wait for the whole reply; see send."""
        for _ in self.send(text):
            pass
        if self.last_reply is None:
            raise StateError("there is no reply yet", "nothing was answered", "send a message first")
        return self.last_reply

    def send(self, text: str) -> Iterator[Event]:
        """Add a user message and stream the reply, split into events. A caller that stops early keeps what there was.

        Raises:
            InputError: the text is empty.
            ContextOverflowError: the conversation does not fit; the message is then not kept.
        """
        if not text.strip():
            raise InputError("the message is empty", "there is nothing to answer", "write something")
        self.messages.append({"role": "user", "content": text})
        return self._answer(1)

    def give_results(self, results: Sequence[tuple[ToolCall, str]]) -> Iterator[Event]:
        """Add what the tools returned that the last reply called, and stream the reply to it.

        Args:
            results: each call with its result.

        Raises:
            InputError: there are none. ChatTemplateError, with the first event: the template has no results of tools.
        """
        if not results:
            raise InputError("there are no results", "there is nothing to answer", "give one for each call")
        for call, text in results:
            name = {"name": call.name} if call.id is None else {"name": call.name, "tool_call_id": call.id}
            self.messages.append({"role": "tool", **name, "content": text})
        return self._answer(len(results))

    def retry(self) -> Iterator[Event]:
        """Replace the reply to the last message by a new one. A seed that was set gives the same reply again.

        What followed the message stays where there is no new reply.

        Raises:
            StateError: nothing was said yet.
        """
        index = self._last_user_message()
        before, reply = self.messages[index:], self.last_reply
        del self.messages[index + 1 :]
        return self._answer(1, before, reply)

    def cancel(self) -> bool:
        """Let the running reply end where it is, from a signal handler or any thread; returns whether there was one."""
        stream = self._running
        if stream is not None:
            stream.cancel()
        return stream is not None

    def _answer(
        self, new: int, before: Sequence[dict[str, Any]] = (), reply: ChatReply | None = None
    ) -> Iterator[Event]:
        """Stream a reply; if there is none, `before` takes the place of the last `new` messages."""
        self.last_reply = None
        try:
            text, ids = self._fitting_prompt(())
            prompt: list[int] | None = ids
            splitter = self.llm.splitter(text)
            shape = self.llm.shape(text, tools=self.tools, tool_choice=self.tool_choice)
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
                    self.last_reply = self.llm.parsed(text, _joined(parts))
                    self.messages.append(self.last_reply.message)
            yield from splitter.finish()
        finally:
            if self.last_reply is None:
                self.messages[-new:], self.last_reply = before, reply

    def _stream(self, prompt: list[int], parts: Sequence[Completion], shape: ReplyShape) -> CompletionStream:
        options, num_reply = dict(self.options), sum(len(part.token_ids) for part in parts)
        if options.get("max_tokens") is not None:
            options["max_tokens"] -= num_reply
        if self.ctx_shift:
            options["ctx_shift"] = self._tokens_to_keep()
        stream = self.llm.stream_tokens(prompt, adapter=self.adapter, shape=shape, num_reply=num_reply, **options)
        stream.on_prompt = self.on_prompt
        return stream

    # --- context -------------------------------------------------------------------------------------------------

    @property
    def context_used(self) -> int:
        """Tokens of the last prompt and its reply."""
        if self.last_reply is None:
            return 0
        completion = self.last_reply.completion
        return completion.prompt_tokens + len(completion.token_ids) - completion.forgotten_tokens

    def _check_shift(self, llm: LLM) -> None:
        """Raise unless replies of this model can go on as ctx_shift says."""
        shift = RequestOptions(ctx_shift=self.ctx_shift).shift(llm.context_size)
        if shift is not None:
            llm.model.decoder.check_shift(shift)

    def _tokens_to_keep(self) -> bool | int:
        """Tokens that a reply keeps where the context is full: up to the end of the system message."""
        if self.ctx_shift is not True or not self.system:
            return self.ctx_shift
        text = self.prompt()
        end = text.find(self.system) + len(self.system)
        return len(self.llm.encode(text[:end])) if end >= len(self.system) else True

    @property
    def was_cut(self) -> bool:
        """Whether the last reply ended because the context was full."""
        if self.last_reply is None or self.last_reply.completion.finish_reason != "length":
            return False
        return self.context_used >= self.llm.context_size

    def _fitting_prompt(self, reply: Sequence[int]) -> tuple[str, list[int]]:
        """The prompt with as many messages as leave room for more; its tokens and those of the reply so far.

        Raises:
            ContextOverflowError: it does not fit, and nothing may be left out.
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
                if room > 1 and length and length < limit:  # less room than a reply may want, but some
                    return text, ids
                raise self._too_long(count)
            room = min(self.options.get("max_tokens") or limit, limit // _REPLY_SHARE)

    def _too_long(self, tokens: str) -> ContextOverflowError:
        if self.on_overflow == "error":
            subject = "the conversation" if len(self.messages) > 1 else "the message"
            fix = "shorten it, clear the conversation, use a larger context size, or let old messages be left out "
            fix += "(on_overflow = truncate or shift)"
        else:
            subject = "what cannot be left out of the conversation"
            fix = "shorten the message, or use a larger context size"
        return ContextOverflowError(
            f"{subject} has {tokens} tokens", f"the context holds {self.llm.context_size}, the reply included", fix
        )

    def _leave_out_more(self) -> bool:
        """Leave out one more exchange; False if only the message to be answered is left."""
        for index in range(self.num_left_out + 1, len(self.messages)):
            if self.messages[index]["role"] == "user":
                self.num_left_out = index
                return True
        return False

    def _shifted(self, parts: Sequence[Completion]) -> list[int] | None:
        """The prompt with which a reply that filled the context goes on; None if it is over."""
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
        """Write the conversation as JSON: messages, system message and options; each file whole, or not at all.

        Args:
            with_state: write the keys and values of its tokens beside it (`path` with ".state" behind it), so that
                whoever loads it need not read them again; see docs/states.md.

        Raises:
            InputError: the file cannot be written. StateFileError: that beside it cannot.
        """
        content = {
            "format": _FORMAT,
            "model": str(self.llm.model.folder),
            "system": self.system,
            "options": self.options,
            "messages": self.messages,
        }
        file_path = expanded(path)
        try:
            text = json.dumps(content, ensure_ascii=False, indent=2)
            with replacing(file_path) as file:
                file.write(f"{text}\n".encode())
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"{path}: the conversation cannot be saved", str(error), "choose another file") from error
        if with_state:
            self._save_state(_beside(file_path))

    def _save_state(self, path: Path) -> None:
        known = self._cached[: self.llm.context_size - 1]
        if not known or self.llm.model.decoder.pool is None:  # without a prefix cache nobody could use it
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return
        with self.llm.read(known, adapter=self.adapter) as state:
            state.save_state(path)

    def load(self, path: str | Path) -> None:
        """Read a conversation that `save` wrote; what there was is replaced.

        Keys and values beside it are put into the prefix cache; `state_problem` says why, where they do not fit.

        Raises:
            InputError: the file cannot be read, or is none of ours; then nothing is changed.
            OptionError: its options do not fit this model.
        """
        content = json_object(read_text_file(expanded(path)), path, InputError)
        messages = _checked_messages(content, path)
        system, options = content.get("system"), content.get("options") or {}
        before = self.options
        self.options = {}
        try:
            self.set_options(options)
        except BaseException:
            self.options = before
            raise
        self.clear()
        self.messages, self.system = messages, system
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
    """Where the keys and values of a saved conversation are."""
    return path.with_name(path.name + _STATE_SUFFIX)


def _joined(parts: Sequence[Completion]) -> Completion:
    """The parts of a reply that went on after a shift, as one."""
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


def _checked_messages(content: Mapping[str, Any], path: str | Path) -> list[dict[str, Any]]:
    valid = (
        content.get("format") == _FORMAT
        and isinstance(content.get("system"), str | None)
        and isinstance(content.get("options", {}), dict)
        and isinstance(content.get("messages"), list)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in content["messages"])
    )
    if not valid:
        raise InputError(
            f"{path}: not a saved conversation",
            f'an object with "format": "{_FORMAT}" and "messages" is expected',
            "give a file that /save wrote",
        )
    messages: list[dict[str, Any]] = content["messages"]
    return messages
