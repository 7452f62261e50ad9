"""GeneratorParams and Generator: the token-by-token API of onnxruntime-genai, with checked indices.

>>> import genai as og                                            # doctest: +SKIP
>>> model = og.Model("configs/models/pebble")                     # doctest: +SKIP
>>> tokenizer = og.Tokenizer(model)                               # doctest: +SKIP
>>> params = og.GeneratorParams(model)                            # doctest: +SKIP
>>> params.set_search_options(max_length=64)                      # doctest: +SKIP
>>> generator = og.Generator(model, params)                       # doctest: +SKIP
>>> generator.append_tokens(tokenizer.encode("What is 12 + 7?"))  # doctest: +SKIP
>>> while not generator.is_done():                                # doctest: +SKIP
...     generator.generate_next_token()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ...common.single import Single
from ...engine.decoder import Decoder
from ...engine.sampling.grammar import Grammar
from ...engine.sampling.params import SamplingParams
from ...engine.sampling.plan import RowSampler, plan_sampling, request_seed
from ...engine.sampling.search_options import SEARCH_OPTIONS, SearchOptions, checked
from ...engine.sampling.state import SamplerState
from ...engine.sequence import DecoderSequence, Logits
from ...engine.speculation.options import SPECULATIVE_OPTIONS, SpeculativeOptions, checked as checked_speculative
from ...engine.state_file import SavedState, read_state, state_path, write_state
from ...engine.static_batch import StaticBatch, check_batch_size
from ...errors import (
    ContextOverflowError,
    InputError,
    NotSupportedYetError,
    OptionError,
    StateError,
    StateMismatchError,
    UnsupportedModelError,
)
from ...lora.store import Adapters, PinnedAdapters
from ...models.model import Model
from ...text.vocabulary import guidance_of
from ..refused import GENERATING_PAGE, REASONS, refusing_method
from .guidance import guidance_grammar
from .log import log, log_values
from .round_counts import RoundCounts
from .rounds import Rounds, is_speculative
from .token_rows import LastRun, PaddedRows, token_rows

# The lengths at which onnxruntime-genai computes a sequence again with the RoPE tables for long contexts. No round
# computes tokens on both sides.
_ROPE_SWITCHES = {"phi3": 4097, "phimoe": 4097, "phi3small": 8193}


class GeneratorParams:
    """Search options for generation.

    The defaults are in the "search" block of the model's genai_config.json.

    Args:
        model: the model that will generate.
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, Model):
            raise InputError(
                f"GeneratorParams needs a Model, not {type(model).__name__}",
                "the options depend on the model",
                "pass a Model",
            )
        self.model = model
        self._grammar: Grammar | None = None
        self._appends_forced = False
        self._options = {name: option.default for name, option in SEARCH_OPTIONS.items()}
        self._options["max_length"] = model.context_size
        configured = {name: value for name, value in model.config.search.items() if name in SEARCH_OPTIONS}
        # A folder's default, often 50, may exceed a tiny vocabulary. A caller's value must not.
        if "top_k" in configured:
            configured["top_k"] = min(configured["top_k"], model.config.model.vocab_size)
        # A folder's max_length, usually the model's whole context, may exceed the context that fits in memory.
        if model.context_size < configured.get("max_length", 0) <= model.config.model.context_length:
            configured["max_length"] = model.context_size
        self.set_search_options(**configured)
        self._speculative = {name: option.default for name, option in SPECULATIVE_OPTIONS.items()}
        self.set_speculative_options(**model.config.speculative)

    def set_search_options(self, **options: Unpack[SearchOptions]) -> None:
        """Set search options; see `SEARCH_OPTIONS` for names, types and ranges.

        Raises:
            OptionError: an option is unknown, of the wrong type or out of range. In that case, no option is set.
        """
        new = {name: checked(name, value) for name, value in options.items()}
        context, vocab = self.model.context_size, self.model.config.model.vocab_size
        for name in ("max_length", "min_length"):
            if new.get(name, 0) > context:
                length = self.model.config.model.context_length
                why = f"the context size is {context} tokens (the model's context_length is {length})"
                raise OptionError(f"{name} = {new[name]}", why, f"use a value of at most {context}")
        if new.get("top_k", 0) > vocab:
            raise OptionError(
                f"top_k = {new['top_k']}",
                f"the model's vocabulary has {vocab} tokens",
                f"use a value from 0 (all tokens) to {vocab}",
            )
        self._options.update(new)

    def get_search_options(self) -> dict[str, Any]:
        """Return the current options; numbers are floats, as in onnxruntime-genai."""
        return _as_floats(self._options)

    def set_speculative_options(self, **options: Unpack[SpeculativeOptions]) -> None:
        """Set options of speculative decoding, which never changes a token.

        The draft model proposes tokens if the model has one. Otherwise, the n-gram lookup does if ngram_size is not 0.

        Args:
            options: max_draft_tokens (proposed tokens per round, 1 to 16; default 4); ngram_size (0 = no lookup, or 2
                to 16: the last ngram_size - 1 tokens must match); ngram_chained_lookup (look up each token separately);
                min_adaptive_k (0 = fixed width, or 1 to 16: the first and least width of rounds that adapt to the
                measured speed, up to 16); cooldown (pause for one step after three rounds without an accepted token).

        Raises:
            OptionError: an option is unknown, of the wrong type or out of range. In that case, no option is set.
        """
        self._speculative.update({name: checked_speculative(name, value) for name, value in options.items()})

    def get_speculative_options(self) -> dict[str, Any]:
        """Return the current speculative options; numbers are floats, as in onnxruntime-genai."""
        return _as_floats(self._speculative)

    def set_guidance(self, type: str, data: str, enable_ff_tokens: bool = False) -> None:
        """Make the output match a grammar. The match starts after the last appended tokens.

        Args:
            type: "json_schema", "regex" or "lark_grammar"; "" with data "" = none.
            data: the schema as JSON text, the expression, or the grammar. Generated JSON may contain whitespace.
            enable_ff_tokens: True to append all tokens that the grammar determines in one step, before
                generate_next_token chooses a token. Requires a batch_size of 1, as in onnxruntime-genai.

        Raises:
            OptionError: the type is unknown, or only one of type and data is given. If the grammar cannot be used,
                Generator raises GrammarError.
        """
        self._grammar = guidance_grammar(type, data)
        self._appends_forced = bool(enable_ff_tokens)


class Generator(Single, AbstractContextManager["Generator"]):
    """A generator of tokens for one sequence, or for a batch of sequences that advance together.

    Args:
        model: the model.
        params: the search options, including batch_size.

    Raises:
        OptionError: options contradict each other.
        CacheCapacityError: memory is insufficient for batch_size.
    """

    def __new__(cls, model: Model, params: GeneratorParams) -> Generator:
        """Create a BeamGenerator if num_beams is above 1."""
        if cls is Generator and isinstance(params, GeneratorParams) and params._options["num_beams"] > 1:
            from .beams import BeamGenerator  # a subclass of this class

            cls = BeamGenerator
        return super().__new__(cls)

    def __init__(self, model: Model, params: GeneratorParams) -> None:
        if not isinstance(model, Model) or not isinstance(params, GeneratorParams):
            raise InputError(
                f"Generator needs (Model, GeneratorParams), not ({type(model).__name__}, {type(params).__name__})",
                "a Generator generates tokens with a model and options",
                "pass a Model and a GeneratorParams in this order",
            )
        if params.model is not model:
            raise InputError(
                "params belong to another model",
                "the limits of params depend on the model",
                "create GeneratorParams(model) again",
            )
        self._options = dict(params._options)
        if self._options["min_length"] > self._options["max_length"]:
            low, high = self._options["min_length"], self._options["max_length"]
            raise OptionError(
                f"min_length = {low} is greater than max_length = {high}",
                "no sequence can satisfy both",
                "lower min_length or raise max_length",
            )
        self._model = model
        self._eos = model.config.model.eos_token_ids
        _check_beams(self._options, guided=params._grammar is not None)
        speculates = is_speculative(model, self._options, params._speculative)
        count = self._options["batch_size"]
        check_batch_size(model.decoder, count * self._options["num_beams"])
        sampling = SamplingParams.from_search_options(self._options)
        matcher = None if params._grammar is None else guidance_of(model).matcher(params._grammar)
        vocab_size = model.decoder.vocab_size
        plan = plan_sampling(sampling, vocab_size=vocab_size, eos_token_ids=self._eos, matcher=matcher)
        self._appends_forced = params._appends_forced and count == 1
        seed, budget = request_seed(sampling), self._options["chunk_size"] or None
        self._batch = StaticBatch(
            model.decoder, model.sampler, plan, count, seed=seed, token_budget=budget,
            observe=partial(log_values, "model_logits"),
        )  # fmt: skip
        self._rounds: Rounds | None = None
        if speculates:
            forced, switch = self._appends_forced, _ROPE_SWITCHES.get(model.type)
            self._rounds = Rounds(
                self._batch, dict(params._speculative), max_length=self.max_length, draft=model.draft,
                appends_forced=forced, switch=switch,
            )  # fmt: skip
        self._shown = PaddedRows(count, self._pad_token())
        self._next_tokens: NDArray[np.int32] | None = None
        self._terminated = False
        self._adapters: Adapters | None = None
        self._active: list[PinnedAdapters] = []

    @property
    def _sequences(self) -> list[DecoderSequence]:
        if not self._batch.is_open:
            raise StateError("the generator is closed", "close() freed the KV cache", "create a new Generator")
        return self._batch.sequences

    @property
    def _last_run(self) -> LastRun:
        if self._rounds is not None and self._shown.width:
            self._rounds.settle(self._shown.width)
        names, inputs = self._model.config.model.decoder.names, self._model.info.inputs
        return LastRun(self._batch, names, inputs, self._pad_token())

    @property
    def max_length(self) -> int:
        """The maximum number of tokens per sequence."""
        return int(self._options["max_length"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        return self._eos

    # --- input ---------------------------------------------------------------------------------------------------

    def append_tokens(self, tokens: Any) -> None:
        """Append prompt tokens and compute them.

        Results show shorter rows padded on the right with pad_token_id, and the padding counts toward max_length and
        min_length, as in onnxruntime-genai. Padding is not computed.

        Args:
            tokens: token ids as a list, array or Tensor: [L] for one sequence; the result of Tokenizer.encode_batch; a
                list of lists of any lengths; or an array [batch_size, L] or [batch_size * L]. In an array, trailing ids
                equal to pad_token_id are treated as padding, except for the number of them that all rows share.

        Raises:
            InputError: values are not whole numbers, ids are outside the vocabulary, the number of rows is not
                batch_size, or a row is empty.
            ContextOverflowError: there are more tokens than max_length allows.
        """
        self._check_running()
        config = self._model.config.model
        rows = token_rows(tokens, len(self._sequences), config.vocab_size, config.pad_token_id)
        longest, before, limit = max(map(len, rows)), self._shown.width, self.max_length
        if before + longest > limit:
            raise ContextOverflowError(
                f"{longest} tokens after {before} tokens exceed max_length {limit}",
                f"the model's context_length is {config.context_length}, and each row has the length of the longest",
                "shorten the prompt, or raise max_length if the context allows",
            )
        discarded = self._rounds is not None and self._rounds.discard(before)
        self._shown.append(rows)
        try:
            with self._rounds.reconciling() if self._rounds is not None and discarded else nullcontext():
                self._batch.append_tokens(rows)
        except BaseException:
            self._shown.rewind(before)
            raise
        if self._rounds is not None:
            self._rounds.follows_prompt = True
        self._next_tokens = self._shown.last()
        log("append_next_tokens", "{count}, token_count {width}", count=longest, width=self._shown.width)
        self._note_padding()
        for row in self._batch.rows:
            row.begin_grammar()

    def rewind_to(self, length: int) -> None:
        """Discard all tokens starting at position `length`. Earlier tokens stay cached.

        Raises:
            InputError: length is negative, or exceeds the length of the sequences.
        """
        self._open_decoder()
        width = self._shown.width
        if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or not 0 <= length <= width:
            why = f"a rewind can only shorten the sequences, which have {width} tokens"
            raise InputError(f"rewind_to({length!r})", why, f"pass the number of tokens to keep, from 0 to {width}")
        if self._rounds is not None:
            self._rounds.reset()
        self._batch.rewind(self._shown.rewind(int(length)))
        self._note_padding()
        self._next_tokens = None

    def _note_padding(self) -> None:
        """Update the padding of each row, which counts toward min_length."""
        for index, row in enumerate(self._batch.rows):
            row.padding = self._shown.padding(index)

    # --- generation ----------------------------------------------------------------------------------------------

    def generate_next_token(self) -> None:
        """Choose and append the next token of every sequence that has not ended; do nothing when all have ended.

        A chosen EOS ends its sequence. While other sequences continue, the EOS is shown, followed by pad_token_id; the
        EOS that ends the last sequence is not shown.

        Raises:
            StateError: no tokens were appended yet.
        """
        self._check_running()
        log("generate_next_token", STEP, width=self._shown.width, **self._options)
        if self.is_done():
            self._next_tokens = np.full(len(self._sequences), self._pad_token(), np.int32)
            return
        if self._rounds is None and self._appends_forced and not self._append_forced():
            return
        picked, pad = self._choose(), self._pad_token()
        shown = [picked.get(index, pad) for index in range(len(self._batch.ended))]
        self._next_tokens = np.array(shown, np.int32)
        if ended := [index for index in picked if self._batch.ended[index]]:
            log("hit_eos", "sequences {ended}", ended=ended)
        if going_on := picked.keys() - ended:
            self._shown.append_column(shown, going_on)
            if self._shown.width >= self.max_length:
                log("hit_max_length", "{length}", length=self.max_length)

    def _choose(self) -> dict[int, int]:
        """Choose the next token of every sequence that has not ended, by index of the sequence."""
        width = self._shown.width
        if self._rounds is None:
            return self._batch.step(is_last=width + 1 >= self.max_length)
        return {0: self._rounds.next(width)}

    def _append_forced(self) -> bool:
        """Append the tokens that the grammar determines after a chosen token.

        Returns:
            True if another token must be chosen.
        """
        for token in self._batch.append_forced(self.max_length - self._shown.width):
            self._shown.append_column([token], {0})
            self._next_tokens = np.array([token], np.int32)
        return self._shown.width < self.max_length

    def _drop_ahead(self) -> None:
        """Discard tokens that are chosen but not shown yet."""
        if self._rounds is not None:
            self._rounds.discard(self._shown.width)

    def _pad_token(self) -> int:
        config = self._model.config.model
        if config.pad_token_id is not None:
            return config.pad_token_id
        return self._eos[0] if self._eos else 0

    def _compute(self, indices: Sequence[int]) -> Logits:
        """Return logits [B, V]; see StaticBatch.logits."""
        self._open_decoder()
        if self._rounds is not None and (known := self._rounds.logits(self._shown.width)) is not None:
            return known
        self._drop_ahead()
        return self._batch.logits(indices)

    def is_done(self) -> bool:
        """Return True if every sequence has ended (EOS), or if the sequences have max_length tokens."""
        return all(self._batch.ended) or self._shown.width >= self.max_length

    # --- results -------------------------------------------------------------------------------------------------

    def get_next_tokens(self) -> NDArray[np.int32]:
        """Return the tokens chosen or appended last, int32 [B]; sequences that ended earlier show pad_token_id.

        Raises:
            StateError: no token was appended since the start or the last rewind.
        """
        if self._next_tokens is None:
            raise StateError(
                "no token has been generated yet",
                "get_next_tokens returns the last generated tokens",
                "call generate_next_token first",
            )
        return self._next_tokens.copy()

    def get_sequence(self, index: int) -> NDArray[np.int32]:
        """Return the prompt and the output of one sequence, int32 [L] with L = token_count().

        Shorter rows are padded with pad_token_id: after the prompt, and after the EOS that ended the row. The EOS that
        ended the whole batch is not included.

        Raises:
            InputError: the index is outside 0..batch_size - 1.
        """
        count = len(self._batch.rows)
        if not isinstance(index, (int, np.integer)) or isinstance(index, bool) or not 0 <= index < count:
            raise InputError(
                f"get_sequence({index!r})", f"the batch has {count} sequences", f"use an index from 0 to {count - 1}"
            )
        return self._shown.row(int(index))

    def token_count(self) -> int:
        """Return the number of tokens in each sequence, including the prompt and padding."""
        return self._shown.width

    def get_logits(self) -> NDArray[np.float32]:
        """Return the logits of the next token, float32 [B, 1, V]; compute them if necessary.

        Raises:
            StateError: no tokens were appended yet, or the generator or its model is closed.
        """
        return np.array(self._compute(range(len(self._sequences))))[:, None, :]

    def get_output(self, name: str) -> NDArray[np.float32]:
        """Return an output of the graph from the last computation: "logits", or another output with one row per token.

        Returns:
            float32 [B, T, width]. After append_tokens, T is the number of prompt tokens, else 1. Each call recomputes
            the output. Positions without a token, in shorter rows and in sequences that have ended, contain zeros.

        Raises:
            StateError: no tokens were appended yet.
            InputError: the output does not exist; keys and values are not available.
        """
        return self._last_run.output(name)

    def get_input(self, name: str) -> NDArray[Any]:
        """Return an input of the graph from the last computation: token ids, attention mask or position ids, [B, T].

        Raises:
            StateError: no tokens were appended yet.
            InputError: the graph has no such input; keys and values are not available.
        """
        return self._last_run.input(name)

    def set_model_input(self, name: str, value: Any) -> None:
        """Set an input of the graph that is neither tokens nor state, for all later computations.

        Raises:
            InputError: the graph has no such input, or the value is not an array or Tensor.
        """
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            raise InputError(
                f"set_model_input received {array.dtype}", "an array of numbers is expected", "pass a numeric array"
            )
        self._drop_ahead()
        for sequence in self._sequences:
            sequence.give(name, array)

    def set_active_adapter(self, adapters: Adapters, name: str) -> None:
        """Compute all later tokens with an adapter. Cached tokens do not change.

        Several adapters may be active. As in onnxruntime-genai, an adapter replaces earlier adapters that change the
        same projections.

        Raises:
            OptionError: there is no adapter with this name.
            StateError: another Adapters container was used before.
            InputError: `adapters` is not an Adapters of this model, or the adapter changes only some of the projections
                of an active adapter.
        """
        if not isinstance(adapters, Adapters) or adapters.model is not self._model:
            raise InputError(
                f"set_active_adapter needs the Adapters of this model, not {type(adapters).__name__}",
                "an adapter can be used only with the model that it was loaded for",
                "create Adapters(model) and load the adapter into it",
            )
        if self._adapters not in (None, adapters):
            raise StateError(
                "Generator state can only register a single Adapters container.",
                "adapter names are unique only within one container",
                "load all adapters of a generator into one Adapters object",
            )
        self._open_decoder()
        self._drop_ahead()
        self._batch.settle()
        # Neither cached tokens nor the last logits of sequences that have ended may change.
        if lost := [
            i for i, one in enumerate(self._sequences) if self._batch.ended[i] and one.num_computed < len(one.tokens)
        ]:
            self._compute(lost)
        if adapters.values(name):
            self._give_values(adapters, name)
            return
        added = adapters.pin(name)
        active = [one for one in self._active if not one.modules <= added.modules]
        for one in active:
            if shared := one.modules & added.modules:
                raise InputError(
                    f"adapters {one.choice!r} and {name!r} both change {min(shared)!r}, and {one.choice!r} changes "
                    "other modules too",
                    "the later adapter would replace only part of the earlier adapter",
                    "use only one adapter, or add several with LLM and adapter={name: weight}",
                )
        active.append(added)
        mix = adapters.mix(PinnedAdapters(name, tuple(entry for one in active for entry in one.entries)))
        for sequence in self._sequences:
            sequence.adapt(mix)
        self._adapters, self._active = adapters, active

    def _give_values(self, adapters: Adapters, name: str) -> None:
        """Switch to the graph as it was exported, whose inputs include the adapter's arrays."""
        if self._rounds is not None:
            raise UnsupportedModelError(
                f"adapter {name!r} cannot be used with speculative decoding",
                "it replaces inputs of the graph, which then runs as exported, without verifying proposed tokens",
                "turn speculation off: ngram_size=0, and Model(folder, draft=False)",
            )
        if self._active:
            raise InputError(
                f"adapter {name!r} replaces inputs of the graph, but adapter {self._active[0].choice!r} is active",
                "adapters that replace inputs cannot be combined with adapters that change projections",
                "use each adapter in a separate generator",
            )
        self._batch.move_to(self._model.decoder_as_exported())
        for sequence in self._sequences:
            for input_name, value in adapters.values(name).items():
                sequence.give(input_name, value)
        self._adapters = adapters

    def set_runtime_option(self, key: str, value: str) -> None:
        """Stop or allow computations, from any thread.

        Setting `terminate_session` to "1" stops the current computation, and later computations are refused until it is
        set to "0".

        Raises:
            OptionError: the option or value is unknown.
        """
        if key != "terminate_session" or value not in ("0", "1"):
            raise OptionError(
                f"runtime option {key!r} = {value!r}",
                "the generator has no onnxruntime session with runtime options",
                _TERMINATE,
            )
        self._terminated = value == "1"
        if self._terminated:
            self._batch.decoder.interrupt(self._sequences)
            if self._rounds is not None:
                self._rounds.interrupt()

    def _open_decoder(self) -> Decoder:
        """Return the decoder. Raises StateError if the generator or its model is closed."""
        _ = self._sequences, self._model.decoder
        return self._batch.decoder

    def _check_running(self) -> None:
        self._open_decoder()
        if self._terminated:
            why = "set_runtime_option('terminate_session', '1') was called"
            raise StateError("Session in Terminated state", why, "set terminate_session to '0' to continue")

    def set_logits(self, logits: Any) -> None:
        """Replace the logits for the choice of the next token.

        Args:
            logits: float array of B * V values, such as [B, 1, V].

        Raises:
            InputError: the number of values is wrong, or they are not numbers.
        """
        array = np.asarray(logits)
        size = len(self._sequences) * self._batch.decoder.vocab_size
        if array.dtype.kind not in "fiu" or array.size != size:
            raise InputError(
                f"set_logits received {array.dtype} {list(array.shape)}",
                f"{len(self._sequences)} x {self._batch.decoder.vocab_size} = {size} numbers are expected",
                "change the array that get_logits returned and pass it back",
            )
        self._open_decoder()
        if self._rounds is not None:
            self._rounds.settle(self._shown.width)
        self._batch.set_logits(array.reshape(len(self._sequences), -1))

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Generate until done, yielding the tokens of each step, int32 [B]."""
        while not self.is_done():
            self.generate_next_token()
            yield self.get_next_tokens()

    # --- states --------------------------------------------------------------------------------------------------

    def fork(self) -> Generator:
        """Return another generator with the same sequences, options and random numbers.

        The generators share cache blocks. A block is copied when one of the generators writes to it.
        """
        self._open_decoder()
        other = object.__new__(type(self._without_beams("fork")))
        other.__dict__.update(self.__dict__)
        other._batch, other._shown, other._options = self._batch.fork(), self._shown.copy(), dict(self._options)
        other._active = list(self._active)
        if self._rounds is not None:
            other._rounds = self._rounds.fork(other._batch)
            if len(other._batch.sequences[0].tokens) > other._shown.width:
                other._batch.rewind([other._shown.width])
        return other

    def save_state(self, path: str | Path) -> int:
        """Write the sequence to a file: tokens, KV cache and sampler state. Return the size of the file in bytes.

        An existing file is replaced only when the new file is complete. See docs/how-to/saved-states.md.

        Raises:
            StateError: the batch has several sequences, no tokens, or beams, or adapters changed after tokens were
                computed.
            StateFileError: the file cannot be written.
        """
        self._open_decoder()
        (sequence,) = self._only("save_state")
        if not sequence.tokens:
            raise StateError("there are no tokens yet", "there is no state to save", "call append_tokens first")
        self._drop_ahead()
        self._batch.settle()
        (row,) = self._batch.rows
        notes = {"ended": self._batch.ended[0], "prompt": row.prompt_length}
        weights = {name: 1.0 for one in self._active for name in one.weights}
        saved = SavedState(weights, self._adapter_key(sequence), SamplerState.of(row), notes)
        return write_state(state_path(path), self._batch.decoder, sequence, self._model.identity(), saved)

    def load_state(self, path: str | Path) -> None:
        """Replace this generator's sequence with the sequence in a file. All options except the seed are kept.

        The generator then generates the tokens that the saved generator would have generated with these options. Files
        that LLM saved may be loaded if their tokens fit in max_length.

        Raises:
            StateFileError: the file does not exist, is damaged, or is not a state.
            StateMismatchError: the state belongs to another model, format, cache type or set of adapters, or has more
                tokens than max_length.
            StateError: the batch has several sequences, or beams.
            CacheCapacityError: the KV cache is full.
        """
        decoder = self._open_decoder()
        (before,) = self._only("load_state")
        mix = before.adapters if self._active else None
        sequence, saved = read_state(state_path(path), decoder, self._model.identity(), lambda found: mix)
        if len(sequence.tokens) > self.max_length:
            count = len(sequence.tokens)
            sequence.close()
            raise StateMismatchError(
                f"{path}: the state has {count} tokens", f"max_length is {self.max_length} tokens", "raise max_length"
            )
        if sequence.num_computed == len(sequence.tokens):
            sequence.rewind(len(sequence.tokens))  # the last logits are needed again
        state, (own,) = saved.sampler, self._batch.rows
        seed, number = (own.seed, 0) if state is None else (state.seed, state.row)
        length = len(sequence.tokens) if state is None else state.prompt_length
        row = RowSampler(own.plan, sequence.tokens, seed=seed, row=number, prompt_length=length)
        if state is not None:
            state.put_into(row)
        if self._rounds is not None:
            self._rounds.reset()
        self._batch.replace(sequence, row)
        self._batch.ended = [saved.notes.get("ended") is True]
        self._next_tokens = None
        self._shown = PaddedRows(1, self._pad_token())
        self._shown.append([sequence.tokens])

    def _only(self, call: str) -> list[DecoderSequence]:
        """Return the only sequence, in a list."""
        self._without_beams(call)
        if len(self._sequences) != 1:
            raise StateError(
                f"{call} cannot be used with {len(self._sequences)} sequences",
                "a state contains one sequence",
                "use batch_size = 1",
            )
        return self._sequences

    def _without_beams(self, call: str) -> Generator:
        """Return this generator. The subclass with beams raises StateError."""
        return self

    @staticmethod
    def _adapter_key(sequence: DecoderSequence) -> str:
        return "" if sequence.adapters is None else sequence.adapters.key.hex()

    # --- lifetime ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the KV cache. Garbage collection of the generator also does this."""
        sequences = self._batch.sequences
        if self._rounds is not None and sequences:
            self._rounds.reset()
        self._batch.close()
        for sequence in sequences if self._active else ():
            sequence.adapt(None)
        self._active = []

    def __exit__(self, *_: object) -> None:
        self.close()

    set_inputs = refusing_method("set_inputs", "text models need tokens; use append_tokens()", GENERATING_PAGE)
    set_hidden_states = refusing_method("set_hidden_states", REASONS["MtpGenerator"], GENERATING_PAGE)
    snapshot_state = refusing_method("snapshot_state", "recurrent models are not supported yet", GENERATING_PAGE)

    def get_speculative_stats(self) -> dict[str, Any]:
        """Return counters of speculative decoding, with onnxruntime-genai's names; all are 0 without speculation.

        The counters are sums since the generator was created. tokens_buffered, active_rounds, effective_k,
        cooldown_remaining and adaptive_k_throughput describe the current state. docs/reference/generator.md lists all
        of them.
        """
        return RoundCounts().stats() if self._rounds is None else self._rounds.stats()


def _as_floats(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, bool) else float(value) for name, value in options.items()}


def _check_beams(options: Mapping[str, Any], *, guided: bool) -> None:
    """Raise if beams are combined with options that exclude them."""
    beams, wanted = options["num_beams"], options["num_return_sequences"]
    if beams > 1 and guided:
        raise OptionError(
            f"guidance cannot be used with num_beams = {beams}",
            "a beam search does not apply a grammar to candidates",
            "remove one of the two options",
        )
    if wanted > beams:
        raise OptionError(
            f"num_return_sequences = {wanted}",
            f"num_beams = {beams} is the maximum number of outputs",
            "raise num_beams",
        )
    if beams > 1 and options["diversity_penalty"]:
        raise NotSupportedYetError(
            f"diversity_penalty = {options['diversity_penalty']} is not supported with num_beams = {beams}",
            "the beams of a prompt are not divided into groups (onnxruntime-genai ignores this option)",
            "omit diversity_penalty",
        )
    if beams > 1 and options["do_sample"]:
        raise OptionError(
            f"do_sample cannot be used with num_beams = {beams}",
            "a beam search does not sample tokens",
            "remove one of the two options",
        )


STEP = "do_sample {do_sample}, top_k {top_k}, top_p {top_p}, temperature {temperature}, token_count {width}"
_TERMINATE = "use 'terminate_session' with '1' or '0', or omit the call"
