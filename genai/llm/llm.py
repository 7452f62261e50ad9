"""LLM: prompts or conversations in, completions out; batches, streams and their async twins.

>>> import genai
>>> with genai.LLM() as llm:
...     print(llm.chat("What is 12 + 7?").text)
19
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, Unpack, overload

from ..common.single import Single
from ..engine.engine import DEFAULT_MAX_SEQUENCES, Engine
from ..engine.sampling.params import SamplingOptions, SamplingParams, has_grammar
from ..engine.worker import Worker
from ..errors import ChatTemplateError, GenaiError, InputError, OptionError, did_you_mean, kind_of
from ..lora.store import AdapterChoice, Adapters
from ..models.config import Config
from ..models.folders import bundled_model
from ..models.kv_types import check_here
from ..models.model import DEFAULT_PREFIX_BYTES, Model
from ..models.model_options import ModelOptions, check_model_options
from ..text.parsing import Event, Reply, ReplySplitter, detect, get_parser
from ..text.template_worker import SHARED
from ..text.tokenizer import Tokenizer
from .beams import await_beams, run_beams
from .completion import ChatReply, Completion, Done
from .generation import Generation
from .instances import Instance, SchemaClass, instance_of, with_schema
from .map_requests import MapRequestBuilder, attempt
from .mapping import DEFAULT_WINDOW, Answer, MapFigures, MapOptions, Mapper, MapRequest
from .reply_shape import ReplyShape, ToolChoice, reply_shape
from .request_options import BeamCallOptions, CallOptions, split_options
from .requests import Prompt, RequestBuilder
from .speculation import SpeculationChoice, SpeculationResources
from .states import TextState, load_state, read, retained_state, running_state
from .stats import Stats, read_stats
from .streaming import AsyncCompletionStream, CompletionStream, Progress, await_for, wait_for

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A conversation: a list of {"role", "content"}; a text is one user message."""
T = TypeVar("T")
_Ask: TypeAlias = Callable[[T], Prompt | Messages | Mapping[str, Any]]


class ChatOptions(CallOptions, total=False):
    """What calls that answer a conversation take besides its messages."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: ToolChoice
    template: Mapping[str, Any] | None
    params: SamplingParams | None
    adapter: AdapterChoice


class LLM(Single, contextlib.AbstractContextManager["LLM"]):
    """A model with its tokenizer, ready to generate. Safe to use from several threads and tasks: whatever runs at the
    same time shares the steps of one engine, and gives the same tokens as alone.

    Args:
        model: a model folder, a Config or a loaded Model; the name of a model that was pulled, whose checkpoint is
            built at the first use; None = the bundled model.
        pull: fetch a model that is not here, named as in `genai.pull`; otherwise nothing is ever fetched.
        precision: how the weights of a checkpoint are stored where it is built: "int4", "int8", "fp16" or "fp32";
            None = as it was built last, else "int4".
        max_sequences: sequences that run side by side; more wait.
        max_adapter_bytes: most memory for adapters; see genai.Adapters.
        prefix_cache_dir: a folder in which beginnings of prompts are kept, for later processes and for others; it takes
            at most prefix_cache_bytes (4 GiB). None = they are kept in memory only. See docs/states.md.
        speculation: guess tokens, so that a step may give several of them, where that is expected to be faster; no
            token is another for it. A genai.Speculation, or "lookup" (look for what followed when the last tokens came
            before), "auto" (the same, where the model can be speculated with), "off". A draft model that it names is
            loaded with the same model_options.
        model_options: for a folder: threads, kv_dtype, accuracy, cache_bytes, device, lora; see genai.Model.

    Raises:
        ModelFolderError, ConfigError, GraphError, UnsupportedModelError, TokenizerError: the model cannot be loaded.
        OptionError: an argument out of range. VocabularyMismatchError: a draft model with other tokens.
        InputError: a text to look through that cannot be read.

    >>> llm = LLM()
    >>> llm
    LLM('.../pebble')

    The examples of the methods go on with this `llm`.
    """

    # What is made of a folder; `genai.LLM` makes those of `genai.compat.onnxruntime_genai`.
    _model_class, _tokenizer_class = Model, Tokenizer

    def __init__(
        self,
        model: str | Path | Config | Model | None = None,
        *,
        pull: bool = False,
        precision: str | None = None,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        max_adapter_bytes: int | None = None,
        prefix_cache_dir: str | Path | None = None,
        prefix_cache_bytes: int | None = None,
        speculation: SpeculationChoice = "off",
        **model_options: Unpack[ModelOptions],
    ) -> None:
        if not isinstance(max_sequences, int) or isinstance(max_sequences, bool) or max_sequences < 1:
            raise OptionError(
                f"max_sequences = {max_sequences!r}", "a whole number of at least 1 is expected", "leave it out"
            )
        if prefix_cache_dir is None and prefix_cache_bytes is not None:
            raise OptionError(
                f"prefix_cache_bytes = {prefix_cache_bytes!r:.40} without prefix_cache_dir",
                "it limits that folder; memory is limited by cache_bytes",
                "give a folder, or leave it out",
            )
        with contextlib.suppress(ChatTemplateError):  # told to whoever renders a conversation
            SHARED.start()  # ready by the time the model is
        self._owns_model = not isinstance(model, Model)
        self.model = loaded = _loaded(self._model_class, model, model_options, pull=pull, precision=precision)
        self.tokenizer = self._tokenizer_class(loaded)
        self.parser = get_parser(detect(self.tokenizer.chat_template))
        try:
            self.adapters = Adapters(loaded, max_bytes=max_adapter_bytes)
            if prefix_cache_dir is not None:
                most = DEFAULT_PREFIX_BYTES if prefix_cache_bytes is None else prefix_cache_bytes
                loaded.keep_prefixes_in(prefix_cache_dir, most)
            self._speculation = SpeculationResources(
                loaded, self.tokenizer, speculation, dict(model_options), max_sequences
            )
        except BaseException:
            if self._owns_model:
                loaded.close()
            raise
        self._requests = RequestBuilder(loaded, self.tokenizer, self.adapters)
        self._max_sequences = max_sequences
        resources = self._speculation
        self._worker = Worker(lambda: Engine(loaded.decoder, loaded.sampler, max_sequences, resources.speculator()))

    # --- whole completions ---------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: Progress | None = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: type[Instance],
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: Progress | None = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Instance]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: type[Instance] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: Progress | None = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion] | list[Instance]:
        """Complete one prompt or many; many run as one batch.

        Args:
            prompts: texts or lists of token ids.
            params: options, for all prompts or one each; None = the model's defaults.
            schema: a Pydantic model: the replies are JSON of its schema, and come back as its instances.
            adapter: for all prompts or one each: the name of an adapter (see load_adapter), or names with weights such
                as {"a": 0.7, "b": 0.3}, whose sum is added; None = the model as it is.
            options: single options of SamplingParams, such as max_tokens or temperature; they replace those of
                `params`, or the model's defaults. Besides: priority and timeout (docs/llm.md), keep_state
                (docs/states.md); num_beams, length_penalty, early_stopping, num_return_sequences (docs/beams.md).
            progress: told every tenth of a second how many completions are done, of how many.

        Returns:
            One completion (or instance) per prompt and sample, in order: all samples of the first prompt, then of the
            second.

        Raises:
            InputError: no prompt, an empty one, or one that is neither text nor token ids.
            OptionError: options out of range, contradictory or unknown.
            GrammarError: a schema or grammar that cannot be used. ReplyFormatError: a reply that is no instance.
            ContextOverflowError: a prompt that leaves no room for an answer.
            CacheCapacityError: a sequence that the cache cannot hold even alone.
            SamplingError, LogitsProcessorError: no next token could be chosen.
            DeadlineError: the time was over before any of them had a token.
            StateError: the LLM is closed, or came here by a fork.

        >>> prompts = [llm.render(question) for question in ("What is 12 + 7?", "Spell the word cat.")]
        >>> [completion.text for completion in llm.generate(prompts)]
        ['19', 'c-a-t']
        >>> [completion.finish_reason for completion in llm.generate(prompts, max_tokens=1)]
        ['length', 'length']
        >>> story = llm.render("Tell me a story about Luna and Tom.")
        >>> len(llm.generate(story, temperature=0.8, seed=1, n=3, stop="."))
        3
        """
        shaped = with_schema(options, schema)
        generations = self._requests.batch(prompts, params, shaped, adapter=adapter, with_beams=True)
        completions = self._completed(generations, shaped, progress)
        return (
            completions
            if schema is None
            else [instance_of(schema, completion.text, completion) for completion in completions]
        )

    def _completed(
        self, generations: list[Generation], options: Mapping[str, Any], progress: Progress | None = None
    ) -> list[Completion]:
        request_options, _ = split_options(options)
        if request_options.beams is not None:
            return run_beams(self.model, generations, request_options, self._max_sequences, progress)
        return self._with_states(generations, wait_for(generations, self._worker, progress))

    def _with_states(self, generations: list[Generation], completions: list[Completion]) -> list[Completion]:
        """The completions, each with what its request left behind."""
        results = []
        for sample, completion in zip(
            (sample for generation in generations for sample in generation.samples), completions, strict=True
        ):
            # Nothing is left there: requests of one call hold each other until they are collected.
            state, sample.retained = retained_state(self, sample), None
            results.append(completion if state is None else replace(completion, state=state))
        return results

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion]:
        """`generate` for async code: awaits without blocking the event loop; cancelling the task cancels the work.

        >>> async def ask(*questions):
        ...     return await llm.agenerate([llm.render(question) for question in questions])
        >>> [completion.text for completion in asyncio.run(ask("What is 20 - 5?", "What is 12 + 7?"))]
        ['15', '19']
        """
        generations = self._requests.batch(prompts, params, options, adapter=adapter, with_beams=True)
        request_options, _ = split_options(options)
        if request_options.beams is not None:
            return await await_beams(self.model, generations, request_options, self._max_sequences)
        return self._with_states(generations, await await_for(generations, self._worker))

    def map(
        self,
        items: Iterable[T],
        ask: _Ask[T] | None = None,
        params: SamplingParams | None = None,
        *,
        in_order: bool = True,
        window: int = DEFAULT_WINDOW,
        on_answer: Callable[[Answer[T]], object] | None = None,
        progress: Callable[[MapFigures], object] | None = None,
        adapter: AdapterChoice = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[Answer[T]]:
        """Answer any number of items, lazily: only a window of them is read ahead of the answers.

        An item that is wrong, too long or fails has its error in its answer, and the others go on. Items are read on
        the thread that iterates over the answers: while `items` waits for something, so do answers that are done.

        Args:
            items: prompts (texts or token ids), conversations (lists of messages), or mappings: {"prompt": …} or
                {"messages": …}, where "tools" and "template" go with messages, and any option or "adapter" may stand
                beside them.
            ask: makes one of these of an item that is something else.
            params, adapter, options: as for generate; those of an item replace them.
            in_order: give the answers in the order of the items; otherwise as they are done.
            window: items that are read ahead. Those of a window are computed in order of their prompts, so that the
                prefix cache serves those that begin alike.
            on_answer: told of each answer when it is done, also where an earlier one is still awaited.
            progress: told every tenth of a second how far it is, while answers are waited for.

        Returns:
            An iterator over one Answer per item. Closing it, or dropping it, cancels what runs.

        Raises:
            OptionError, ContextOverflowError: at once, options that no item could have.
            StateError: the LLM is closed, or came here by a fork. What `ask` raises, unless it is a GenaiError,
            which is the answer to its item; and what `items` raises, after the answers to the items before.

        >>> questions = ({"a": a, "b": 7} for a in range(10, 13))
        >>> def ask(item):
        ...     return [{"role": "user", "content": f"What is {item['a']} + {item['b']}?"}]
        >>> for answer in llm.map(questions, ask):
        ...     print(answer.item["a"], answer.text)
        10 17
        11 18
        12 19
        >>> [answer.error is None for answer in llm.map(["Once", "", {"prompt": "Once", "top_p": 2}], max_tokens=4)]
        [True, False, False]
        """
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise OptionError(f"window = {window!r}", "a whole number of at least 1 is expected", "leave it out")
        if not isinstance(items, Iterable):
            raise InputError(f"items is {kind_of(items)}", "an iterable of items is expected", "such as a list")
        self._requests.check_all(params, options)
        how = MapOptions(window, 2 * self._max_sequences, in_order, on_answer, progress)

        def prepare(group: Sequence[T]) -> list[MapRequest | GenaiError]:
            builder = MapRequestBuilder(self, self._requests, params, options, adapter)
            return builder.build(group if ask is None else [attempt(ask, item) for item in group])

        return Mapper(iter(items), prepare, self._worker, how).answers()

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        adapter: AdapterChoice = None,
        **options: Unpack[CallOptions],
    ) -> CompletionStream:
        """Complete one prompt, or answer one conversation, piece by piece.

        Args:
            prompt: a text, token ids, or a list of messages.
            params, adapter, options: as for generate; n is 1.

        Returns:
            An iterator over pieces of text, whole characters only. Its `completion` says the rest, also before the end.
            Closing it (or leaving its `with` block) cancels what is left.

        Raises:
            As generate.

        >>> with llm.stream([{"role": "user", "content": "Count from 3 to 7."}]) as stream:
        ...     for piece in stream:
        ...         print(piece, end="|")
        3|,| |4|,| |5|,| |6|,| |7|
        >>> stream.completion.finish_reason
        'stop'
        """
        return self._streamed(self._requests.single(self._prompt(prompt), params, options, adapter=adapter))

    def _streamed(self, generations: list[Generation]) -> CompletionStream:
        stream = CompletionStream(generations, self._worker)
        stream.make_state = partial(running_state, self)
        return stream

    def astream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        adapter: AdapterChoice = None,
        **options: Unpack[CallOptions],
    ) -> AsyncCompletionStream:
        """`stream` for async code: an async iterator. Call it where an event loop runs.

        Raises:
            StateError: no event loop runs. Otherwise as generate.

        >>> async def count():
        ...     async with llm.astream(llm.render("Count from 3 to 7.")) as stream:
        ...         return [piece async for piece in stream if piece.isdigit()]
        >>> asyncio.run(count())
        ['3', '4', '5', '6', '7']
        """
        return AsyncCompletionStream(
            self._requests.single(self._prompt(prompt), params, options, adapter=adapter), self._worker
        )

    def stream_tokens(
        self,
        prompt: Sequence[int],
        *,
        adapter: AdapterChoice = None,
        shape: ReplyShape | None = None,
        num_reply: int = 0,
        **options: Unpack[CallOptions],
    ) -> CompletionStream:
        """`stream` of a rendered conversation: the pieces show the markers of reasoning and tool calls.

        Args:
            shape: what the reply may be, see `shape`. num_reply: how many tokens at the end of the prompt are the
                beginning of the reply.

        >>> "".join(llm.stream_tokens(llm.encode(llm.render("What is 20 - 5?"))))
        '15'
        """
        markers = self.parser.markers
        return self._streamed(self._requests.single(prompt, None, options, markers, adapter, shape, num_reply))

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt text.

        >>> len(llm.encode("12 + 7"))
        5
        """
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids

    # --- states --------------------------------------------------------------------------------------------------

    def read(self, prompt: Prompt, *, adapter: AdapterChoice = None, progress: Progress | None = None) -> TextState:
        """Read a text once, to go on from it many times.

        Args:
            prompt: a text or token ids. adapter: as for generate.
            progress: told every tenth of a second how many of its tokens are computed, of how many.

        Raises:
            As generate.

        >>> document = llm.read(llm.render("What is 12 + 7?"))
        >>> document.generate(["1", "2"], max_tokens=1)[0].text
        '9'
        """
        return self._read(prompt, adapter, None, progress)

    def _read(
        self, prompt: Prompt, adapter: AdapterChoice, before: TextState | None, progress: Progress | None = None
    ) -> TextState:
        (generation,) = self._requests.single(prompt, None, {"temperature": 0.0}, adapter=adapter)
        return read(self, generation, before, progress)

    def load_state(self, path: str | Path, *, adapter: AdapterChoice = None) -> TextState:
        """A state that `TextState.save_state` wrote, as it was; see docs/states.md.

        Args:
            adapter: the adapters that it went through, where they have other names now; None = as it was saved.

        Raises:
            StateFileError: there is none, it is damaged, or none of ours.
            StateMismatchError: it is of another model, format, type of cache, or of other adapters.
            OptionError: an adapter that is not loaded. CacheCapacityError: the cache has no room for it.

        >>> llm.load_state("holiday.state")
        Traceback (most recent call last):
        genai.errors.StateFileError: holiday.state: the state cannot be read
          why: [Errno 2] No such file or directory: 'holiday.state'
          fix: check the path
        """
        return load_state(self, path, adapter)

    def stats(self) -> Stats:
        """What this LLM has done so far, and what it does now.

        >>> llm.stats().generated_tokens > 0
        True
        """
        return read_stats(self.model, self._worker.engine)

    # --- conversations -------------------------------------------------------------------------------------------

    @overload
    def chat(self, messages: Messages, *, schema: None = None, **options: Unpack[ChatOptions]) -> ChatReply: ...

    @overload
    def chat(self, messages: Messages, *, schema: type[Instance], **options: Unpack[ChatOptions]) -> Instance: ...

    def chat(
        self, messages: Messages, *, schema: type[Instance] | None = None, **options: Unpack[ChatOptions]
    ) -> ChatReply | Instance:
        """Answer a conversation.

        Args:
            messages: the conversation so far, or one user message as text.
            schema: a Pydantic model: the reply is JSON of its schema, and comes back as its instance.
            tools: JSON schemas of tools that the model may call.
            tool_choice: "auto", "none", "required" or the one to call; see docs/structured_output.md.
            template: further variables of the chat template, such as documents or enable_thinking.
            params, adapter, options: as for generate; n is 1.

        Raises:
            ChatTemplateError: there is no chat template, or it refuses the messages or leaves out some, or the tools.
            Otherwise as generate.

        >>> messages = [{"role": "user", "content": "My name is Nora."}]
        >>> reply = llm.chat(messages)
        >>> reply.text
        'Nice to meet you, Nora!'
        >>> messages += [reply.message, {"role": "user", "content": "What is my name?"}]
        >>> llm.chat(messages).text
        'Your name is Nora.'
        """
        prompt, request = self._turn(messages, options, schema)
        (completion,) = self._with_states(request, wait_for(request, self._worker))
        return self._reply(prompt, completion, schema)

    @overload
    async def achat(self, messages: Messages, *, schema: None = None, **options: Unpack[ChatOptions]) -> ChatReply: ...

    @overload
    async def achat(
        self, messages: Messages, *, schema: type[Instance], **options: Unpack[ChatOptions]
    ) -> Instance: ...

    async def achat(
        self, messages: Messages, *, schema: type[Instance] | None = None, **options: Unpack[ChatOptions]
    ) -> ChatReply | Instance:
        """`chat` for async code.

        >>> asyncio.run(llm.achat("What day comes after Monday?")).text
        'Tuesday'
        """
        prompt, request = self._turn(messages, options, schema)
        (completion,) = self._with_states(request, await await_for(request, self._worker))
        return self._reply(prompt, completion, schema)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Iterator[Event | Done]:
        """Answer a conversation piece by piece, split into genai.text.parsing's events: Text, Reasoning, ToolCall, ….

        The last event is Done: it has the whole reply, its completion and usage. Arguments and errors as for chat;
        errors come with the first event.

        >>> for event in llm.stream_chat("What is 20 - 5?"):
        ...     print(repr(event)[:30])
        Text(text='1', problem='')
        Text(text='5', problem='')
        End(in_reasoning=False)
        Done(reply=ChatReply(reply=Rep
        >>> event.reply.text, event.completion.finish_reason, event.usage.completion_tokens
        ('15', 'stop', 2)
        """
        prompt, request = self._turn(messages, options)
        splitter = self.splitter(prompt)
        with CompletionStream(request, self._worker) as stream:
            for piece in stream:
                yield from splitter.feed(piece)
        yield from splitter.finish()
        yield Done(self.parsed(prompt, stream.completion))

    async def astream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncIterator[Event | Done]:
        """`stream_chat` for async code.

        >>> async def answer(question):
        ...     return "".join([event.raw async for event in llm.astream_chat(question)])
        >>> asyncio.run(answer("What is 20 - 5?"))
        '15'
        """
        prompt, request = self._turn(messages, options)
        splitter = self.splitter(prompt)
        async with AsyncCompletionStream(request, self._worker) as stream:
            async for piece in stream:
                for event in splitter.feed(piece):
                    yield event
        for event in splitter.finish():
            yield event
        yield Done(self.parsed(prompt, stream.completion))

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """The exact prompt text of a conversation.

        Raises:
            ChatTemplateError: there is no chat template, or it refuses the messages or leaves out some, or the tools.
            InputError: the messages are not a conversation.

        >>> llm.render("Hi")
        '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
        """
        checked = rendering(messages, tools, template)
        return self.tokenizer.chat_prompt(checked["messages"], tools=checked["tools"], **checked["variables"])

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | GenaiError]:
        """`render` of many conversations, in less time than one by one.

        Args:
            conversations: the arguments of each by name: messages, tools, template.

        Returns:
            For each its prompt, or the error that `render` raises.

        >>> llm.render_all([{"messages": "Hi"}, {"messages": []}])
        ['<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n', InputError('messages is empty', ...)]
        """
        checked = [attempt(lambda one: rendering(**one), one) for one in conversations]
        prompts = iter(self.tokenizer.chat_prompts([one for one in checked if not isinstance(one, GenaiError)]))
        return [one if isinstance(one, GenaiError) else next(prompts) for one in checked]

    def _reply(self, prompt: str, completion: Completion, schema: type[Instance] | None) -> ChatReply | Instance:
        reply = self.parsed(prompt, completion)
        return reply if schema is None else instance_of(schema, reply.text, completion)

    def _turn(
        self, messages: Messages, options: ChatOptions, schema: type[SchemaClass] | None = None
    ) -> tuple[str, list[Generation]]:
        """The rendered prompt of a conversation, and the request that answers it."""
        tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
        prompt_tools = None if choice == "none" else tools
        prompt = self.render(messages, tools=prompt_tools, template=options.pop("template", None))
        params, adapter = options.pop("params", None), options.pop("adapter", None)
        sampling = with_schema(options, schema)
        shape = None
        if tools or choice is not None or has_grammar(params, sampling):
            shape = self.shape(prompt, tools=tools, tool_choice=choice)
        return prompt, self._requests.single(prompt, params, sampling, self.parser.markers, adapter, shape)

    def _prompt(self, prompt: Prompt | Messages) -> Prompt:
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.render(prompt)  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def params(self, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """The options that a request with these arguments would have.

        Raises:
            OptionError: out of range, contradictory, unknown, or beyond the model's vocabulary.
            ContextOverflowError: more tokens are asked for than the context holds.

        >>> llm.params().temperature
        0.0
        >>> llm.params(top_p=0.9).temperature
        1.0
        """
        return self._requests.check(self._requests.params(params, options))

    @property
    def context_size(self) -> int:
        """Most tokens of a sequence, prompt and answer together: the model's context, or less if its folder says so.

        >>> llm.context_size
        1024
        """
        return self._requests.context_size

    def splitter(self, prompt: str) -> ReplySplitter:
        """Splits the reply to a rendered prompt while it is generated.

        >>> llm.splitter(llm.render("Hi")).feed("Hello!")
        [Text(text='Hello!', problem='')]
        """
        return ReplySplitter(self.parser, starts_in_reasoning=self.parser.starts_in_reasoning(prompt))

    def shape(
        self, prompt: str, *, tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: ToolChoice = None
    ) -> ReplyShape:
        """What the reply to a rendered prompt may be: for stream_tokens.

        >>> llm.shape(llm.render("What is 12 + 7?")).has_thought
        False

        Raises:
            OptionError: a choice of tools that cannot be obeyed.
            GrammarError: parameters of a tool that are no schema.
        """
        return reply_shape(self.tokenizer, self.parser, prompt, tools, tool_choice)

    def parsed(self, prompt: str, completion: Completion) -> ChatReply:
        """The parts of a reply to a rendered prompt.

        >>> prompt = llm.render("What is 20 - 5?")
        >>> llm.parsed(prompt, llm.generate(prompt)[0]).text
        '15'
        """
        splitter = self.splitter(prompt)
        return ChatReply(Reply.from_events([*splitter.feed(completion.text), *splitter.finish()]), completion)

    # --- adapters ------------------------------------------------------------------------------------------------

    def load_adapter(self, path: str | Path, name: str, scale: float = 1.0) -> None:
        """Read a low-rank adapter and give it a name, by which requests ask for it; running requests go on.

        Args:
            path: a folder as PEFT writes it, an `.onnx_adapter` file, or a GGUF file. scale: a factor on what it adds.

        Raises:
            As genai.Adapters.load.

        >>> from genai.models.folders import bundled_adapter
        >>> llm.load_adapter(bundled_adapter("words"), "words")
        >>> llm.chat("What is 12 + 7?", adapter="words").text
        '19, nineteen'
        """
        self.adapters.load(path, name, scale)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on; its memory goes back when the last of them ends.

        Raises:
            OptionError: there is none of that name.

        >>> llm.unload_adapter("words")
        """
        self.adapters.unload(name, when_idle=True)

    # --- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs and give the memory back; a Model given by the caller stays loaded.

        >>> with LLM() as other:
        ...     text = other.chat("What is 20 - 5?").text
        >>> other.chat("What is 20 - 5?")
        Traceback (most recent call last):
        genai.errors.StateError: the model is closed
          why: close() gave its memory back
          fix: load the model again
        """
        self._worker.close()
        self.adapters.close()
        self._speculation.close()
        if self._owns_model:
            self.model.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({str(self.model.folder)!r})"


_LLM_OPTIONS = (
    "pull",
    "precision",
    "max_sequences",
    "max_adapter_bytes",
    "prefix_cache_dir",
    "prefix_cache_bytes",
    "speculation",
)


def rendering(
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The arguments of LLM.render as Tokenizer.chat_prompts takes them. Raises InputError: no variables by name."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    variables = template or {}
    if not isinstance(variables, Mapping) or not all(type(name) is str for name in variables):
        raise InputError(f"template = {template!r:.80}", "variables by name are expected", "pass a dictionary")
    if reserved := sorted({"self", "messages", "tools"} & set(variables)):
        raise InputError(f"template sets {reserved[0]!r}", "that name is taken", "use the argument, or another name")
    return {"messages": messages, "tools": tools or None, "variables": variables}


def _loaded(
    kind: type[Model],
    model: str | Path | Config | Model | None,
    options: ModelOptions,
    *,
    pull: bool,
    precision: str | None,
) -> Model:
    if model is not None and not isinstance(model, (str, Path, Config, Model)):
        raise InputError(
            f"model is {kind_of(model)}", "a folder, a Config or a Model is expected", "pass the model's folder"
        )
    known = list(ModelOptions.__annotations__)
    for name, value in options.items():
        if name not in known:
            raise OptionError(
                f"unknown option {name!r} = {value!r:.80}",
                f"an LLM takes {', '.join([*_LLM_OPTIONS, *known])}; options of sampling go to "
                "generate, stream or chat",
                did_you_mean(name, [*known, *_LLM_OPTIONS], "leave it out"),
            )
    if isinstance(model, (str, Path)):
        from ..convert.resolve import loadable

        checked: dict[str, Any] = {name: value for name, value in options.items() if name != "quiet"}
        check_model_options(**checked)  # before a model is fetched or built
        check_here(options.get("device"), options.get("kv_dtype", "auto"))
        folder = loadable(model, fetch=pull, precision=precision, quiet=bool(options.get("quiet")))
        return kind(folder, **options)
    if pull or precision is not None:
        raise OptionError(
            "pull or precision without a name",
            "they say how a model that is named comes here",
            "give the model's name, or leave them out",
        )
    if not isinstance(model, Model):
        return kind(bundled_model() if model is None else model, **options)
    if options:
        raise OptionError(
            f"{', '.join(options)} given with a Model", "it is loaded already", "pass them to Model(...) instead"
        )
    return model
