"""LLM: completes prompts and conversations, in batches, as streams, or from async code.

>>> import genai
>>> with genai.LLM() as llm:
...     print(llm.chat("What is 12 + 7?").text)
19
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Unpack, overload

from ..common.html_parts import figures
from ..common.progress import quietly
from ..common.single import Single
from ..engine.engine import DEFAULT_MAX_SEQUENCES, Engine
from ..engine.sampling.params import SamplingOptions, SamplingParams, has_grammar
from ..engine.worker import Worker
from ..errors import ChatTemplateError, GenaiError, InputError, OptionError, StateError, did_you_mean, kind_of
from ..lora.store import AdapterChoice, Adapters
from ..models.config import Config
from ..models.folders import bundled_model
from ..models.kv_types import check_here
from ..models.model import DEFAULT_PREFIX_BYTES, Model
from ..models.model_options import ModelOptions, check_model_options
from ..text.parsing import Event, Reply, ReplySplitter, detect, get_parser
from ..text.template_worker import SHARED
from ..text.tokenizer import Tokenizer
from ..text.tool_functions import Tool, as_tools
from .beams import await_beams, run_beams
from .completion import ChatReply, Completion, Done
from .generation import Generation
from .instances import Instance, SchemaClass, instance_of, with_schema
from .map_requests import MapRequestBuilder, attempt
from .mapping import DEFAULT_WINDOW, Answer, MapFigures, MapOptions, Mapper, MapRequest
from .reply_shape import ReplyShape, ToolChoice, reply_shape
from .request_options import BeamCallOptions, CallOptions, OnError, RequestOptions, check_on_error, split_options
from .requests import Prompt, RequestBuilder
from .speculation import SpeculationChoice, SpeculationResources, loads_head
from .states import TextState, load_state, read, retained_state, running_state
from .stats import Stats, read_stats
from .streaming import (
    AsyncCompletionStream,
    CompletionStream,
    GenerationGroup,
    Progress,
    await_for,
    await_groups,
    wait_for,
    wait_for_groups,
)

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A conversation: a list of {"role", "content"} messages, or a plain text, which is a single user message."""
T = TypeVar("T")
_Ask: TypeAlias = Callable[[T], Prompt | Messages | Mapping[str, Any]]


class ChatOptions(CallOptions, total=False):
    """Options of the methods that reply to a conversation."""

    tools: Sequence[Tool] | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool | None
    template: Mapping[str, Any] | None
    params: SamplingParams | None
    adapter: AdapterChoice


@dataclass(frozen=True)
class TurnParts:
    """The parts of a request for the reply to a conversation.

    Attributes:
        prompt: the rendered conversation.
        tools: JSON schemas of the tools.
        params, sampling, adapter: see LLM.generate; `sampling` has the options by name.
        shape: the allowed shape of the reply.
    """

    prompt: str
    tools: Sequence[Mapping[str, Any]] | None
    params: SamplingParams | None
    sampling: Mapping[str, Any]
    adapter: AdapterChoice
    shape: ReplyShape | None


class LLM(Single, contextlib.AbstractContextManager["LLM"]):
    """A model with its tokenizer, ready to generate.

    Several threads and tasks may use an LLM. Concurrent requests share the steps of one engine, and each request gets
    the same tokens as it would alone.

    Args:
        model: a model folder, a Config, a loaded Model, a GGUF file, or the name of a pulled model; None = the bundled
            model. GGUF files and the checkpoints of pulled models are built in the cache at the first use.
        pull: True to download a model that is not cached, given a name that `genai.pull` accepts. If False, nothing is
            downloaded.
        precision: storage of the weights of a model that is built from a checkpoint: "int4", "int8", "fp16" or
            "fp32"; None = the precision of the last build, or "int4" if there was none.
        max_sequences: maximum number of concurrent sequences; further sequences are queued.
        max_adapter_bytes: memory limit for adapters; see genai.Adapters.
        prefix_cache_dir: folder for prefix cache blocks, which concurrent and later processes reuse; None = the prefix
            cache is only in memory. See docs/how-to/saved-states.md.
        prefix_cache_bytes: size limit of prefix_cache_dir in bytes [default: 4 GiB].
        speculation: speculative decoding, which generates several tokens per step where that is expected to be faster;
            the output is unchanged. A genai.Speculation, "lookup" (propose the tokens that followed an earlier
            occurrence of the last tokens), "auto" ("lookup" if the model supports it, and the draft model or the MTP
            head of the folder if its genai_config.json describes one), "mtp" (the MTP head only) or "off". A draft
            model is loaded with the same model_options.
        model_options: options for a folder: threads, kv_dtype, accuracy, cache_bytes, device, lora; see genai.Model.

    Raises:
        ModelFolderError, ConfigError, GraphError, UnsupportedModelError, TokenizerError: the model cannot be loaded.
        OptionError: an argument is out of range.
        VocabularyMismatchError: the draft model has a different vocabulary.
        InputError: the lookup file cannot be read.

    Examples:
        >>> llm = LLM()
        >>> llm
        LLM('.../pebble')

        The examples of the methods use this `llm`.
    """

    # Classes that a folder is loaded with; `genai.LLM` uses the classes of `genai.compat.onnxruntime_genai`.
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
                f"max_sequences = {max_sequences!r}",
                "a whole number of at least 1 is expected",
                "leave max_sequences out",
            )
        if prefix_cache_dir is None and prefix_cache_bytes is not None:
            raise OptionError(
                f"prefix_cache_bytes = {prefix_cache_bytes!r:.40} cannot be used without prefix_cache_dir",
                "prefix_cache_bytes limits the size of the folder prefix_cache_dir; cache_bytes limits memory",
                "pass prefix_cache_dir, or leave prefix_cache_bytes out",
            )
        with contextlib.suppress(ChatTemplateError):  # the error is raised again when a conversation is rendered
            SHARED.start()  # the process starts while the model is loaded
        self._owns_model = not isinstance(model, Model)
        kind = partial(self._model_class, draft=speculation == "auto", mtp=loads_head(speculation))
        self.model = loaded = _loaded(kind, model, model_options, pull=pull, precision=precision)
        with quietly(bool(model_options.get("quiet"))):
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

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["return"],
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: Progress | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion | GenaiError]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        schema: type[Instance] | None = None,
        on_error: OnError = "raise",
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: Progress | None = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion] | list[Instance] | list[Completion | GenaiError]:
        """Complete one or more prompts; several prompts run as one batch.

        Args:
            prompts: texts or lists of token ids. A text gets the special tokens that the tokenizer adds to texts, such
                as BOS, unless it already begins with them or is the result of `render`.
            params: sampling options, either for all prompts or one per prompt; None = the model's defaults.
            schema: a Pydantic model class. Replies follow its JSON schema and are returned as instances of the class.
            on_error: "raise" to raise the first error of any prompt; "return" to return the error of each prompt that
                is invalid, too long or fails, in place of its completions. The other prompts are completed.
            adapter: either for all prompts or one per prompt: the name of an adapter (see load_adapter), or names with
                weights such as {"a": 0.7, "b": 0.3} for a weighted sum of adapters; None = no adapter.
            options: single fields of SamplingParams, such as max_tokens or temperature, which override `params` or the
                model's defaults. Also: priority and timeout (docs/how-to/llm.md), keep_state
                (docs/how-to/saved-states.md), add_special_tokens (see Tokenizer.encode_prompt), literal
                (docs/how-to/untrusted-text.md), num_beams, length_penalty, early_stopping and num_return_sequences
                (docs/how-to/beam-search.md).
            progress: called ten times per second with the number of finished completions and their total number.

        Returns:
            One completion (or instance) per prompt and sample, in order: all samples for the first prompt, then all
            samples for the second.

        Raises:
            InputError: there is no prompt, or a prompt is empty or is neither text nor token ids.
            OptionError: an option is unknown or out of range, or contradicts another option; or on_error="return" is
                used with a beam search or a schema.
            GrammarError: a schema or grammar cannot be used.
            ReplyFormatError: a reply is not a valid instance.
            ContextOverflowError: a prompt leaves no space for a reply.
            CacheCapacityError: a sequence does not fit into the cache, even on its own.
            SamplingError, LogitsProcessorError: no next token could be chosen.
            DeadlineError: the timeout expired before the first token of any completion.
            StateError: the LLM is closed, or was created in the parent of this forked process.

        Examples:
            >>> prompts = [llm.render(question) for question in ("What is 12 + 7?", "Spell the word cat.")]
            >>> [completion.text for completion in llm.generate(prompts)]
            ['19', 'c-a-t']
            >>> [completion.finish_reason for completion in llm.generate(prompts, max_tokens=1)]
            ['length', 'length']
            >>> story = llm.render("Tell me a story about Luna and Tom.")
            >>> len(llm.generate(story, temperature=0.8, seed=1, n=3, stop="."))
            3
            >>> good, bad = llm.generate([prompts[0], "word " * 5000], on_error="return")
            >>> good.text, type(bad).__name__
            ('19', 'ContextOverflowError')
        """
        if check_on_error(on_error, schema, options):
            requests = self._requests.each(prompts, params, options, adapter)
            self._requests.note_seed(params, options)
            valid = [leaders for leaders in requests if isinstance(leaders, list)]
            return self._results(requests, wait_for_groups(valid, self._worker, progress))
        shaped = with_schema(options, schema)
        generations = self._requests.batch(prompts, params, shaped, adapter=adapter, with_beams=True)
        self._requests.note_seed(params, shaped)
        completions = self._completed(generations, shaped, progress)
        return (
            completions
            if schema is None
            else [instance_of(schema, completion.text, completion) for completion in completions]
        )

    def _results(
        self, requests: Sequence[list[Generation] | GenaiError], groups: Sequence[GenerationGroup]
    ) -> list[Completion | GenaiError]:
        """Return the completions of each prompt, or its error."""
        found: list[Completion | GenaiError] = []
        finished = iter(groups)
        for leaders in requests:
            if isinstance(leaders, GenaiError):
                found.append(leaders)
                continue
            try:
                found += self._with_states(leaders, next(finished).completions())
            except StateError:
                raise
            except GenaiError as error:
                found.append(error)
        return found

    def _completed(
        self, generations: list[Generation], options: Mapping[str, Any], progress: Progress | None = None
    ) -> list[Completion]:
        request_options, _ = split_options(options)
        if request_options.beams is not None:
            return run_beams(self.model, generations, request_options, self._max_sequences, progress)
        return self._with_states(generations, wait_for(generations, self._worker, progress))

    def _with_states(self, generations: list[Generation], completions: list[Completion]) -> list[Completion]:
        """Return the completions, each with the state that its request retained."""
        results = []
        for sample, completion in zip(
            (sample for generation in generations for sample in generation.samples), completions, strict=True
        ):
            # Drop the reference: the requests of a call form a reference cycle until they are garbage collected.
            state, sample.retained = retained_state(self, sample), None
            results.append(completion if state is None else replace(completion, state=state))
        return results

    @overload
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion]: ...

    @overload
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["return"],
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion | GenaiError]: ...

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion] | list[Completion | GenaiError]:
        """`generate` for async code: the event loop is not blocked. Cancelling the task cancels the requests.

        Examples:
            >>> async def ask(*questions):
            ...     return await llm.agenerate([llm.render(question) for question in questions])
            >>> [completion.text for completion in asyncio.run(ask("What is 20 - 5?", "What is 12 + 7?"))]
            ['15', '19']
        """
        if check_on_error(on_error, None, options):
            requests = self._requests.each(prompts, params, options, adapter)
            self._requests.note_seed(params, options)
            valid = [leaders for leaders in requests if isinstance(leaders, list)]
            return self._results(requests, await await_groups(valid, self._worker))
        generations = self._requests.batch(prompts, params, options, adapter=adapter, with_beams=True)
        self._requests.note_seed(params, options)
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
        """Answer any number of items lazily: only a window of items is read ahead of the answers.

        If an item is invalid, too long, or fails, its answer holds the error, and the other items continue. Items are
        read on the thread that iterates over the answers. While `items` blocks, finished answers are not delivered.

        Args:
            items: prompts (texts or token ids), conversations (lists of messages), or mappings: {"prompt": …} or
                {"messages": …}, with options of generate and "adapter" as further keys. Mappings with "messages" may
                also have "tools" and "template".
            ask: a function that converts any other item to one of these forms.
            params, adapter, options: see generate; an item's own values override them.
            in_order: True to return answers in the order of the items; False to return them in the order in which they
                finish.
            window: number of items to read ahead. Items in a window are sorted by their prompts, so that prompts with
                a common prefix share it through the prefix cache.
            on_answer: called with each answer when the answer is finished, even if an earlier answer is still pending.
            progress: called ten times per second with the current figures while the caller waits for an answer.

        Returns:
            An iterator over one Answer per item. Closing or dropping the iterator cancels the running requests.

        Raises:
            OptionError, ContextOverflowError: the options or the adapter would fail for every item; raised immediately.
            StateError: the LLM is closed, or was created in the parent of this forked process.
            Others: exceptions from `items` and from `ask`, after the answers to all earlier items. A GenaiError from
                `ask` becomes the item's answer instead. Exceptions from `on_answer` and `progress`, immediately.

        Examples:
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
            raise OptionError(f"window = {window!r}", "a whole number of at least 1 is expected", "leave window out")
        if not isinstance(items, Iterable):
            raise InputError(
                f"items is {kind_of(items)}", "an iterable of items is expected", "pass an iterable, such as a list"
            )
        self._requests.check_all(params, options)
        self._requests.note_seed(params, options)
        pinned = self.adapters.pin(adapter)  # all items use the adapter that has this name now
        how = MapOptions(window, 2 * self._max_sequences, in_order, on_answer, progress)

        def prepare(prompts: Sequence[Any]) -> list[MapRequest | GenaiError]:
            return MapRequestBuilder(self, self._requests, params, options, pinned).build(prompts)

        def asked(item: T) -> Any:
            return item if ask is None else attempt(ask, item)

        return Mapper(iter(items), asked, prepare, self._worker, how).answers()

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        adapter: AdapterChoice = None,
        **options: Unpack[CallOptions],
    ) -> CompletionStream:
        """Stream the completion of a prompt, or the reply to a conversation.

        Args:
            prompt: text, token ids, or a list of messages.
            params, adapter, options: see generate; n must be 1.

        Returns:
            An iterator over pieces of text, each of which has whole characters. Its `completion` holds the other
            results, even before the end. Closing the stream (or leaving its `with` block) cancels the rest.

        Raises:
            GenaiError: the same errors as generate.

        Examples:
            >>> with llm.stream([{"role": "user", "content": "Count from 3 to 7."}]) as stream:
            ...     for piece in stream:
            ...         print(piece, end="|")
            3|,| |4|,| |5|,| |6|,| |7|
            >>> stream.completion.finish_reason
            'stop'
        """
        return self._streamed(self._single(prompt, params, options, adapter))

    def _single(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None,
        options: CallOptions,
        adapter: AdapterChoice,
    ) -> list[Generation]:
        """Return the request for one completion."""
        request = self._requests.single(self._prompt(prompt, options), params, options, adapter=adapter)
        self._requests.note_seed(params, options)
        return request

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
        """`stream` for async code: returns an async iterator. Call it inside a running event loop.

        Raises:
            StateError: no event loop is running.
            Others: the same errors as stream.

        Examples:
            >>> async def count():
            ...     async with llm.astream(llm.render("Count from 3 to 7.")) as stream:
            ...         return [piece async for piece in stream if piece.isdigit()]
            >>> asyncio.run(count())
            ['3', '4', '5', '6', '7']
        """
        return AsyncCompletionStream(self._single(prompt, params, options, adapter), self._worker)

    def stream_tokens(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: AdapterChoice = None,
        shape: ReplyShape | None = None,
        num_reply: int = 0,
        **options: Unpack[CallOptions],
    ) -> CompletionStream:
        """`stream` for a rendered conversation. The pieces include the markers of reasoning and tool calls.

        Args:
            prompt: token ids of the rendered conversation.
            params, adapter, options: see generate.
            shape: the allowed shape of the reply; see `shape`.
            num_reply: number of tokens at the end of the prompt that form the beginning of the reply.

        Examples:
            >>> "".join(llm.stream_tokens(llm.encode(llm.render("What is 20 - 5?"))))
            '15'
        """
        markers = self.parser.markers
        return self._streamed(self._requests.single(prompt, params, options, markers, adapter, shape, num_reply))

    def encode(self, text: str, *, add_special_tokens: bool | None = None, literal: bool | None = None) -> list[int]:
        """Return the token ids of a prompt's text: those that generate(text) or, for a rendered text, chat computes.

        Args:
            text: a raw text, or the result of `render`.
            add_special_tokens: True to add the special tokens that the tokenizer adds to texts, such as BOS, unless the
                text already begins with them; False to add none; None = True for a raw text, False for a rendered text.
            literal: True to encode special tokens in a raw text as ordinary text; see Tokenizer.encode.

        Examples:
            >>> len(llm.encode("12 + 7"))
            5
            >>> llm.encode("<|im_end|>"), len(llm.encode("<|im_end|>", literal=True))
            ([2], 9)
        """
        ids = self.tokenizer.encode_prompt(text, add_special_tokens=add_special_tokens, literal=literal)
        return [int(id_) for id_ in ids]

    # --- states --------------------------------------------------------------------------------------------------

    def read(
        self,
        prompt: Prompt,
        *,
        adapter: AdapterChoice = None,
        progress: Progress | None = None,
        literal: bool | None = None,
    ) -> TextState:
        """Process text once, so that many completions can continue the text.

        Args:
            prompt: text or token ids.
            adapter: see generate.
            progress: called ten times per second with the number of computed tokens and their total number.
            literal: see generate.

        Raises:
            GenaiError: the same errors as generate.

        Examples:
            >>> document = llm.read(llm.render("What is 12 + 7?"))
            >>> document.generate(["1", "2"], max_tokens=1)[0].text
            '9'
        """
        return self._read(prompt, adapter, None, progress, literal)

    def _read(
        self,
        prompt: Prompt,
        adapter: AdapterChoice,
        before: TextState | None,
        progress: Progress | None = None,
        literal: bool | None = None,
    ) -> TextState:
        options = {"temperature": 0.0, "literal": literal}
        (generation,) = self._requests.single(prompt, None, options, adapter=adapter)
        return read(self, generation, before, progress)

    def load_state(self, path: str | Path, *, adapter: AdapterChoice = None) -> TextState:
        """Load a state that was saved by `TextState.save_state`; see docs/how-to/saved-states.md.

        Args:
            path: the file.
            adapter: the adapters of the state, if their names have changed since it was saved; None = the saved names.

        Raises:
            StateFileError: the file is missing, damaged, or not a state file.
            StateMismatchError: the state belongs to a different model, format, cache type or adapters.
            OptionError: an adapter is not loaded.
            CacheCapacityError: the state does not fit into the cache.

        Examples:
            >>> llm.load_state("holiday.state")
            Traceback (most recent call last):
            genai.errors.StateFileError: holiday.state: the state cannot be read
              why: [Errno 2] No such file or directory: 'holiday.state'
              fix: check the path
        """
        return load_state(self, path, adapter)

    def stats(self) -> Stats:
        """Return the statistics of this LLM.

        Examples:
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
        """Reply to a conversation.

        Args:
            messages: the conversation so far, or one user message as text.
            schema: a Pydantic model class. The reply follows its JSON schema and is returned as an instance of the
                class.
            tools: the tools that the model may call: JSON schemas, and functions, which are described by their
                annotations and docstrings. The calls are in the reply's `tool_calls`; see
                docs/how-to/structured-output.md.
            tool_choice: "auto", "none", "required" or the tool to call; see docs/how-to/structured-output.md.
            parallel_tool_calls: False to allow at most one tool call in the reply.
            template: additional variables for the chat template, such as documents or enable_thinking. The template
                must read each of them; see `Tokenizer.template_variables`.
            literal: True to keep special tokens in the messages, tools and variables, such as "<|im_end|>", as ordinary
                text; the key "literal" of a message or of a part of its content overrides this value for its texts; see
                docs/how-to/untrusted-text.md.
            params, adapter, options: see generate; n must be 1.

        Raises:
            ChatTemplateError: there is no chat template, or it rejects the messages, or it omits messages or tools.
            Others: the same errors as generate.

        Examples:
            >>> messages = [{"role": "user", "content": "My name is Nora."}]
            >>> reply = llm.chat(messages)
            >>> reply.text
            'Nice to meet you, Nora!'
            >>> messages += [reply.message, {"role": "user", "content": "What is my name?"}]
            >>> llm.chat(messages).text
            'Your name is Nora.'
        """
        turn, request = self._turn(messages, options, schema)
        (completion,) = self._with_states(request, wait_for(request, self._worker))
        return self._reply(turn, completion, schema)

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

        Examples:
            >>> asyncio.run(llm.achat("What day comes after Monday?")).text
            'Tuesday'
        """
        turn, request = self._turn(messages, options, schema)
        (completion,) = self._with_states(request, await await_for(request, self._worker))
        return self._reply(turn, completion, schema)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Iterator[Event | Done]:
        """Stream the reply to a conversation as events of genai.text.parsing: Text, Reasoning, ToolCall, ….

        The last event is Done, which has the complete reply, its completion and usage. Arguments and errors are the
        same as those of chat. Errors are raised when the first event is requested.

        Examples:
            >>> for event in llm.stream_chat("What is 20 - 5?"):
            ...     print(repr(event)[:30])
            Text(text='1', problem='')
            Text(text='5', problem='')
            End(in_reasoning=False)
            Done(reply=ChatReply(reply=Rep
            >>> event.reply.text, event.completion.finish_reason, event.usage.completion_tokens
            ('15', 'stop', 2)
        """
        turn, request = self._turn(messages, options)
        splitter = self.splitter(turn.prompt, tools=turn.tools)
        with CompletionStream(request, self._worker) as stream:
            for piece in stream:
                yield from splitter.feed(piece)
        yield from splitter.finish()
        yield Done(self.parsed(turn.prompt, stream.completion, tools=turn.tools))

    async def astream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncIterator[Event | Done]:
        """`stream_chat` for async code.

        Examples:
            >>> async def answer(question):
            ...     return "".join([event.raw async for event in llm.astream_chat(question)])
            >>> asyncio.run(answer("What is 20 - 5?"))
            '15'
        """
        turn, request = self._turn(messages, options)
        splitter = self.splitter(turn.prompt, tools=turn.tools)
        async with AsyncCompletionStream(request, self._worker) as stream:
            async for piece in stream:
                for event in splitter.feed(piece):
                    yield event
        for event in splitter.finish():
            yield event
        yield Done(self.parsed(turn.prompt, stream.completion, tools=turn.tools))

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool] | None = None,
        template: Mapping[str, Any] | None = None,
        literal: bool | None = None,
    ) -> str:
        """Return the exact text of the prompt for a conversation.

        Pass the result to `generate` or `encode` unchanged. Other str operations lose the information which parts of it
        are literal, and that no special tokens are added.

        Args:
            messages, tools, template, literal: see chat.

        Raises:
            ChatTemplateError: there is no chat template, or it rejects the messages, or it omits messages or tools.
            InputError: the messages are not a conversation.
            OptionError: the chat template does not read a variable in `template`.

        Examples:
            >>> llm.render("Hi")
            '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
        """
        checked = rendering(messages, tools, template, literal)
        variables = checked.pop("variables")
        return self.tokenizer.chat_prompt(**checked, **variables)

    def render_all(self, conversations: Sequence[Mapping[str, Any]]) -> list[str | GenaiError]:
        """`render` for many conversations; faster than one call per conversation.

        Args:
            conversations: for each call to `render`, its arguments by name: messages, tools, template, literal.

        Returns:
            For each conversation, the prompt, or the error that `render` would raise.

        Examples:
            >>> llm.render_all([{"messages": "Hi"}, {"messages": []}])
            ['<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n', InputError('messages is empty', ...)]
        """
        checked = [attempt(lambda one: rendering(**one), one) for one in conversations]
        prompts = iter(self.tokenizer.chat_prompts([one for one in checked if not isinstance(one, GenaiError)]))
        return [one if isinstance(one, GenaiError) else next(prompts) for one in checked]

    def _reply(self, turn: TurnParts, completion: Completion, schema: type[Instance] | None) -> ChatReply | Instance:
        reply = self.parsed(turn.prompt, completion, tools=turn.tools)
        return reply if schema is None else instance_of(schema, reply.text, completion)

    def _turn(
        self, messages: Messages, options: ChatOptions, schema: type[SchemaClass] | None = None
    ) -> tuple[TurnParts, list[Generation]]:
        """Return the parts of the request for the reply to a conversation, and the request."""
        turn = self._turn_parts(messages, options, schema)
        request = self._requests.single(
            turn.prompt, turn.params, turn.sampling, self.parser.markers, turn.adapter, turn.shape
        )
        self._requests.note_seed(turn.params, turn.sampling)
        return turn, request

    def _turn_parts(
        self, messages: Messages, options: ChatOptions, schema: type[SchemaClass] | None = None
    ) -> TurnParts:
        """Return a conversation's rendered prompt and the arguments of the request for its reply."""
        tools, choice = as_tools(options.pop("tools", None)), options.pop("tool_choice", None)
        parallel = options.pop("parallel_tool_calls", None)
        prompt_tools = None if choice == "none" else tools
        template, literal = options.pop("template", None), options.pop("literal", None)
        prompt = self.render(messages, tools=prompt_tools, template=template, literal=literal)
        params, adapter = options.pop("params", None), options.pop("adapter", None)
        sampling = with_schema(options, schema)
        shape = None
        if tools or choice is not None or parallel is not None or has_grammar(params, sampling):
            shape = self.shape(prompt, tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
        return TurnParts(prompt, tools, params, sampling, adapter, shape)

    def _prompt(self, prompt: Prompt | Messages, options: CallOptions) -> Prompt:
        """Return the prompt. Remove the options that apply to the texts of messages."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.render(prompt, literal=options.pop("literal", None))  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def params(self, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return the sampling options for a request with these arguments.

        Raises:
            OptionError: an option is unknown or out of range, contradicts another option, or exceeds the model's
                vocabulary.
            ContextOverflowError: the options require more tokens than fit into the context.

        Examples:
            >>> llm.params().temperature
            0.0
            >>> llm.params(top_p=0.9).temperature
            1.0
        """
        checked = self._requests.check(self._requests.params(params, options))
        self._requests.note_seed(params, options)
        return checked

    def chat_params(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return the sampling options of a reply in `genai chat` with these arguments.

        If the model's files name no sampling, `genai chat` draws tokens as llama.cpp and Ollama do: temperature 0.8,
        top_k 40, top_p 0.95 and min_p 0.05. In all other cases, the options are those of `params`.

        Raises:
            OptionError, ContextOverflowError: see `params`.

        Examples:
            >>> llm.chat_params().temperature  # the files of the bundled model select greedy search
            0.0
        """
        checked = self._requests.check(self._requests.chat_params(options))
        self._requests.note_seed(None, options, in_chat=True)
        return checked

    @property
    def chat_defaults(self) -> Mapping[str, Any]:
        """The options that `chat_params` sets because the model's files name no sampling; empty if they name some.

        Examples:
            >>> llm.chat_defaults
            {}
        """
        return self._requests.chat_defaults

    @property
    def context_size(self) -> int:
        """Maximum number of tokens in a sequence, prompt and reply together.

        The number is the model's context size, or the smaller limit set in its folder.

        Examples:
            >>> llm.context_size
            1024
        """
        return self._requests.context_size

    @property
    def max_sequences(self) -> int:
        """Maximum number of concurrent sequences.

        Examples:
            >>> llm.max_sequences
            32
        """
        return self._max_sequences

    def splitter(self, prompt: str, *, tools: Sequence[Tool] | None = None) -> ReplySplitter:
        """Return a splitter for the reply to a rendered prompt; pass it the pieces of the stream.

        The tools determine the types of arguments that the model writes in XML.

        Examples:
            >>> llm.splitter(llm.render("Hi")).feed("Hello!")
            [Text(text='Hello!', problem='')]
        """
        return ReplySplitter(
            self.parser, starts_in_reasoning=self.parser.starts_in_reasoning(prompt), tools=as_tools(tools)
        )

    def shape(
        self,
        prompt: str,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = None,
        parallel_tool_calls: bool | None = None,
    ) -> ReplyShape:
        """Return the allowed shape of the reply to a rendered prompt, for stream_tokens.

        Examples:
            >>> llm.shape(llm.render("What is 12 + 7?")).has_thought
            False

        Raises:
            OptionError: tool_choice or parallel_tool_calls is invalid or cannot be enforced.
            GrammarError: a tool's parameters are not a JSON schema.
        """
        return reply_shape(self.tokenizer, self.parser, prompt, as_tools(tools), tool_choice, parallel_tool_calls)

    def parsed(self, prompt: str, completion: Completion, *, tools: Sequence[Tool] | None = None) -> ChatReply:
        """Return the parts of the reply to a rendered prompt.

        The tools determine the types of arguments that the model writes in XML.

        Examples:
            >>> prompt = llm.render("What is 20 - 5?")
            >>> llm.parsed(prompt, llm.generate(prompt)[0]).text
            '15'
        """
        splitter = self.splitter(prompt, tools=tools)
        return ChatReply(Reply.from_events([*splitter.feed(completion.text), *splitter.finish()]), completion)

    # --- adapters ------------------------------------------------------------------------------------------------

    def load_adapter(self, path: str | Path, name: str, scale: float = 1.0) -> None:
        """Load a LoRA adapter under a name that requests use to select the adapter. Running requests continue.

        Args:
            path: a folder of PEFT or mlx-lm, an `.onnx_adapter` file, or a GGUF file.
            name: the name for requests.
            scale: factor that the adapter's contribution is multiplied by.

        Raises:
            GenaiError: see genai.Adapters.load.

        Examples:
            >>> from genai.models.folders import bundled_adapter
            >>> llm.load_adapter(bundled_adapter("words"), "words")
            >>> llm.chat("What is 12 + 7?", adapter="words").text
            '19, nineteen'
        """
        self.adapters.load(path, name, scale)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Running requests continue to use it, and its memory is freed when the last one ends.

        Raises:
            OptionError: no adapter has that name.

        Examples:
            >>> llm.unload_adapter("words")
        """
        self.adapters.unload(name, when_idle=True)

    # --- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel running requests and free the memory. A Model that the caller passed in stays loaded.

        Examples:
            >>> with LLM() as other:
            ...     text = other.chat("What is 20 - 5?").text
            >>> other.chat("What is 20 - 5?")
            Traceback (most recent call last):
            genai.errors.StateError: the model is closed
              why: close() freed its memory
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

    def _repr_html_(self) -> str:
        """Return the facts about the model for a notebook."""
        model = self.model
        rows = [("model", model.folder.name), ("folder", model.folder), ("type", model.type)]
        if not model.is_closed:
            rows += [
                ("parameters", f"{model.info.parameters:,}"),
                ("context", f"{model.context_size:,} tokens"),
                ("KV cache", model.info.kv_dtype),
                ("device", f"{model.decoder.executor.device}, {model.threads} threads"),
                ("adapters", ", ".join(self.adapters.names) or "none"),
            ]
        return figures([*rows, ("state", "closed" if model.is_closed else "loaded")])


_LLM_OPTIONS = (
    "pull",
    "precision",
    "max_sequences",
    "max_adapter_bytes",
    "prefix_cache_dir",
    "prefix_cache_bytes",
    "speculation",
)


# Variables of templates that the call itself sets.
_RESERVED = frozenset(("self", "messages", "tools", "literal", "add_generation_prompt"))


def rendering(
    messages: Messages,
    tools: Sequence[Tool] | None = None,
    template: Mapping[str, Any] | None = None,
    literal: bool | None = None,
) -> dict[str, Any]:
    """Return the arguments of LLM.render in the form that Tokenizer.chat_prompts accepts.

    Raises:
        InputError: the text is empty, or `template` is not a mapping of names to variables.
        OptionError: `literal` is not a boolean.
    """
    literal = RequestOptions(literal=literal).literal
    if isinstance(messages, str):
        if not messages.strip():
            raise InputError("the message is empty", "there is nothing to reply to", "write a message")
        messages = [{"role": "user", "content": messages}]
    variables = template or {}
    if not isinstance(variables, Mapping) or not all(type(name) is str for name in variables):
        raise InputError(
            f"template = {template!r:.80}", "a mapping of variable names to values is expected", "pass a dictionary"
        )
    if reserved := sorted(_RESERVED & set(variables)):
        raise InputError(
            f"template sets {reserved[0]!r}",
            "this name is reserved",
            "use the arguments of the call, or choose another name",
        )
    return {"messages": messages, "tools": tools or None, "variables": variables, "literal": literal}


def _loaded(
    kind: Callable[..., Model],
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
                f"an LLM takes {', '.join([*_LLM_OPTIONS, *known])}; pass sampling options to generate, stream or chat",
                did_you_mean(name, [*known, *_LLM_OPTIONS], "leave it out"),
            )
    if isinstance(model, (str, Path)):
        from ..convert.resolve import loadable

        checked: dict[str, Any] = {name: value for name, value in options.items() if name != "quiet"}
        check_model_options(**checked)  # fail before a model is downloaded or built
        check_here(options.get("device"), options.get("kv_dtype", "auto"))
        folder = loadable(model, fetch=pull, precision=precision, quiet=bool(options.get("quiet")))
        return kind(folder, **options)
    if pull or precision is not None:
        raise OptionError(
            "pull and precision cannot be used without a model name",
            "pull and precision control how a named model is downloaded and built",
            "pass the model's name, or leave out pull and precision",
        )
    if not isinstance(model, Model):
        return kind(bundled_model() if model is None else model, **options)
    if options:
        raise OptionError(
            f"{', '.join(options)} cannot be used with a Model",
            "the model is already loaded",
            "pass these options to Model(...) instead",
        )
    return model
