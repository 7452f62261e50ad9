"""GeneratorParams and Generator: the token-by-token API of onnxruntime-genai, with its indices checked.

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
from contextlib import AbstractContextManager
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
from ...engine.state_file import SavedState, read_state, state_path, write_state
from ...engine.static_batch import StaticBatch, check_batch_size
from ...errors import (
    ContextOverflowError,
    InputError,
    NotSupportedYetError,
    OptionError,
    StateError,
    StateMismatchError,
)
from ...lora.store import Adapters
from ...models.model import Model
from ...text.vocabulary import guidance_of
from ..refused import GENERATING_PAGE, REASONS, refusing_method
from .guidance import guidance_grammar
from .log import log
from .token_rows import LastRun, PaddedRows, token_rows

_GUESSES = "a Generator takes a token per step; LLM(speculation=…) guesses ahead"


class GeneratorParams:
    """Search options of a generation.

    Starts from the "search" block of the model's genai_config.json.

    Args:
        model: the model that will generate.
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, Model):
            raise InputError(
                f"GeneratorParams needs a Model, not {type(model).__name__}", "options depend on it", "pass a Model"
            )
        self.model = model
        self._grammar: Grammar | None = None
        self._appends_forced = False
        self._options = {name: option.default for name, option in SEARCH_OPTIONS.items()}
        self._options["max_length"] = model.context_size
        configured = {name: value for name, value in model.config.search.items() if name in SEARCH_OPTIONS}
        # A folder's own default, often 50, may exceed a tiny vocabulary; a caller's may not.
        if "top_k" in configured:
            configured["top_k"] = min(configured["top_k"], model.config.model.vocab_size)
        # So may its max_length, usually the model's whole context, exceed the context that there is memory for.
        if model.context_size < configured.get("max_length", 0) <= model.config.model.context_length:
            configured["max_length"] = model.context_size
        self.set_search_options(**configured)

    def set_search_options(self, **options: Unpack[SearchOptions]) -> None:
        """Set search options; see `SEARCH_OPTIONS` for names, types and ranges.

        Raises:
            OptionError: unknown, of the wrong type or out of range; then none of the options is set.
        """
        new = {name: checked(name, value) for name, value in options.items()}
        context, vocab = self.model.context_size, self.model.config.model.vocab_size
        for name in ("max_length", "min_length"):
            if new.get(name, 0) > context:
                length = self.model.config.model.context_length
                why = f"the context holds {context}; the model's context_length is {length}"
                raise OptionError(f"{name} = {new[name]}", why, f"use at most {context}")
        if new.get("top_k", 0) > vocab:
            raise OptionError(
                f"top_k = {new['top_k']}", f"the model's vocabulary has {vocab} tokens", f"use 0 (all) to {vocab}"
            )
        self._options.update(new)

    def get_search_options(self) -> dict[str, Any]:
        """The options as they stand; numbers are floats, as in onnxruntime-genai."""
        return {name: value if isinstance(value, bool) else float(value) for name, value in self._options.items()}

    get_speculative_options = refusing_method("get_speculative_options", _GUESSES, GENERATING_PAGE)

    def set_guidance(self, type: str, data: str, enable_ff_tokens: bool = False) -> None:
        """Let the output match a grammar. It begins behind the tokens that were appended last.

        Args:
            type: "json_schema", "regex" or "lark_grammar"; "" with data "" = none.
            data: the schema as JSON text, the expression, or the grammar. JSON may have blanks anywhere.
            enable_ff_tokens: tokens that the grammar leaves no choice about are appended together, in front of the one
                that generate_next_token chooses; with a batch_size of 1 only, as in onnxruntime-genai.

        Raises:
            OptionError: another type, or only one of the two. Generator raises GrammarError: a grammar that cannot be
                used.
        """
        self._grammar = guidance_grammar(type, data)
        self._appends_forced = bool(enable_ff_tokens)

    set_speculative_options = refusing_method("set_speculative_options", _GUESSES, GENERATING_PAGE)


class Generator(Single, AbstractContextManager["Generator"]):
    """Generates tokens for one sequence, or for a batch that advances together.

    Args:
        model: the model.
        params: its options; batch_size sequences are kept.

    Raises:
        OptionError: options that contradict each other.
        CacheCapacityError: a batch_size for which there is no memory.
    """

    def __new__(cls, model: Model, params: GeneratorParams) -> Generator:
        """One with num_beams above 1 is a BeamGenerator."""
        if cls is Generator and isinstance(params, GeneratorParams) and params._options["num_beams"] > 1:
            from .beams import BeamGenerator  # a Generator that num_beams asks for; derives from this one

            cls = BeamGenerator
        return super().__new__(cls)

    def __init__(self, model: Model, params: GeneratorParams) -> None:
        if not isinstance(model, Model) or not isinstance(params, GeneratorParams):
            raise InputError(
                f"Generator needs (Model, GeneratorParams), not ({type(model).__name__}, {type(params).__name__})",
                "it generates with that model and those options",
                "pass both in this order",
            )
        if params.model is not model:
            raise InputError(
                "params were made for another model", "their limits come from it", "make GeneratorParams(model) anew"
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
        count = self._options["batch_size"]
        check_batch_size(model.decoder, count * self._options["num_beams"])
        sampling = SamplingParams.from_search_options(self._options)
        matcher = None if params._grammar is None else guidance_of(model).matcher(params._grammar)
        vocab_size = model.decoder.vocab_size
        plan = plan_sampling(sampling, vocab_size=vocab_size, eos_token_ids=self._eos, matcher=matcher)
        self._appends_forced = params._appends_forced and count == 1
        seed, budget = request_seed(sampling), self._options["chunk_size"] or None
        self._batch = StaticBatch(model.decoder, model.sampler, plan, count, seed=seed, token_budget=budget)
        self._shown = PaddedRows(count, self._pad_token())
        self._next_tokens: NDArray[np.int32] | None = None
        self._terminated = False
        self._adapters: Adapters | None = None
        self._active: list[str] = []

    @property
    def _sequences(self) -> list[DecoderSequence]:
        if not self._batch.is_open:
            raise StateError("the generator is closed", "close() gave its cached state back", "make a new Generator")
        return self._batch.sequences

    @property
    def _last_run(self) -> LastRun:
        names, inputs = self._model.config.model.decoder.names, self._model.info.inputs
        return LastRun(self._batch, names, inputs, self._pad_token())

    @property
    def max_length(self) -> int:
        """Most tokens a sequence may hold."""
        return int(self._options["max_length"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        return self._eos

    # --- input ---------------------------------------------------------------------------------------------------

    def append_tokens(self, tokens: Any) -> None:
        """Append prompt tokens and compute them.

        Rows of different lengths are shown filled on the right with pad_token_id, and count in max_length and
        min_length with their fill, as in onnxruntime-genai; computed are a row's own tokens only.

        Args:
            tokens: token ids as a list, array or Tensor: [L] for one sequence; what Tokenizer.encode_batch returned; a
                list of lists of any lengths; or [batch_size, L], or flat [batch_size * L], where ids at the end of a
                row that equal pad_token_id are taken for fill, but for as many as end every row.

        Raises:
            InputError: not whole numbers, ids outside the vocabulary, a number of rows that is not batch_size, empty.
            ContextOverflowError: more tokens than max_length allows.
        """
        self._check_running()
        config = self._model.config.model
        rows = token_rows(tokens, len(self._sequences), config.vocab_size, config.pad_token_id)
        longest, before, limit = max(map(len, rows)), self._shown.width, self.max_length
        if before + longest > limit:
            raise ContextOverflowError(
                f"{longest} tokens after {before} exceed max_length {limit}",
                f"the model's context_length is {config.context_length}, and shorter rows count as the longest one",
                "shorten the prompt, or raise max_length if the context allows",
            )
        self._shown.append(rows)
        try:
            self._batch.append_tokens(rows)
        except BaseException:
            self._shown.rewind(before)
            raise
        self._next_tokens = self._shown.last()
        log("append_next_tokens", "{count}, token_count {width}", count=longest, width=self._shown.width)
        self._note_padding()
        for row in self._batch.rows:
            row.begin_grammar()

    def rewind_to(self, length: int) -> None:
        """Forget all tokens from `length` on; what remains stays cached.

        Raises:
            InputError: negative, or longer than the sequences.
        """
        self._open_decoder()
        width = self._shown.width
        if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or not 0 <= length <= width:
            why = f"a rewind only shortens, and the sequences have {width} tokens"
            raise InputError(f"rewind_to({length!r})", why, f"pass how many to keep, a whole number from 0 to {width}")
        self._batch.rewind(self._shown.rewind(int(length)))
        self._note_padding()
        self._next_tokens = None

    def _note_padding(self) -> None:
        """What is shown of a row, fill included, counts in min_length."""
        for index, row in enumerate(self._batch.rows):
            row.padding = self._shown.padding(index)

    # --- generation ----------------------------------------------------------------------------------------------

    def generate_next_token(self) -> None:
        """Choose and append the next token of every sequence that has not ended; after the end of all, do nothing.

        A chosen EOS ends its sequence. While others go on it is shown, with pad_token_id behind it; the EOS that ends
        the last of them is not.

        Raises:
            StateError: nothing was appended yet.
        """
        self._check_running()
        log("generate_next_token", _STEP, width=self._shown.width, **self._options)
        if self.is_done():
            self._next_tokens = np.full(len(self._sequences), self._pad_token(), np.int32)
            return
        if self._appends_forced and not self._append_forced():
            return
        picked, pad = self._batch.step(is_last=self._shown.width + 1 >= self.max_length), self._pad_token()
        shown = [picked.get(index, pad) for index in range(len(self._batch.ended))]
        self._next_tokens = np.array(shown, np.int32)
        if ended := [index for index in picked if self._batch.ended[index]]:
            log("hit_eos", "sequences {ended}", ended=ended)
        if going_on := picked.keys() - ended:
            self._shown.append_column(shown, going_on)
            if self._shown.width >= self.max_length:
                log("hit_max_length", "{length}", length=self.max_length)

    def _append_forced(self) -> bool:
        """Append the tokens that the grammar leaves no choice about behind a chosen one.

        Returns:
            Whether another one is to be chosen.
        """
        (row,), (sequence,) = self._batch.rows, self._sequences
        for token in row.matcher.forced() if row.matcher is not None and row.matcher.num_followed else ():
            sequence.append([token])
            row.follow(token)
            self._shown.append_column([token], {0})
            self._next_tokens = np.array([token], np.int32)
            if self._shown.width >= self.max_length:
                return False
        return True

    def _pad_token(self) -> int:
        config = self._model.config.model
        if config.pad_token_id is not None:
            return config.pad_token_id
        return self._eos[0] if self._eos else 0

    def _compute(self, indices: Sequence[int]) -> Logits:
        """Logits [B, V]; see StaticBatch.logits."""
        self._open_decoder()
        return self._batch.logits(indices)

    def is_done(self) -> bool:
        """Whether every sequence has ended (EOS), or they have max_length tokens."""
        return all(self._batch.ended) or self._shown.width >= self.max_length

    # --- results -------------------------------------------------------------------------------------------------

    def get_next_tokens(self) -> NDArray[np.int32]:
        """The tokens chosen or appended last, int32 [B]; sequences that had ended before show pad_token_id.

        Raises:
            StateError: there is none since the start or the last rewind.
        """
        if self._next_tokens is None:
            raise StateError(
                "no token was generated yet", "there is nothing to return", "call generate_next_token first"
            )
        return self._next_tokens.copy()

    def get_sequence(self, index: int) -> NDArray[np.int32]:
        """Prompt and output of one sequence, int32 [L] with L = token_count().

        Rows that are shorter than others are filled with pad_token_id: behind the prompt, and behind the EOS that ended
        the row. The EOS that ended the whole batch is not there.

        Raises:
            InputError: index outside 0..batch_size - 1.
        """
        count = len(self._batch.rows)
        if not isinstance(index, (int, np.integer)) or isinstance(index, bool) or not 0 <= index < count:
            raise InputError(f"get_sequence({index!r})", f"the batch has {count} sequences", f"use 0 to {count - 1}")
        return self._shown.row(int(index))

    def token_count(self) -> int:
        """Tokens in each sequence, prompt and fill included."""
        return self._shown.width

    def get_logits(self) -> NDArray[np.float32]:
        """Logits of the next token, float32 [B, 1, V]; computed now if they are not known yet.

        Raises:
            StateError: nothing was appended yet, or the generator or its model was closed.
        """
        return np.array(self._compute(range(len(self._sequences))))[:, None, :]

    def get_output(self, name: str) -> NDArray[np.float32]:
        """An output of the graph in the last computation: "logits", or others that it gives for each token.

        Returns:
            float32 [B, T, width]: T tokens of the prompt after append_tokens, else 1. It is computed anew when asked
            for. Zeros stand where a row is shorter than others or had ended.

        Raises:
            StateError: nothing was appended yet.
            InputError: there is no such output; keys and values are not shown.
        """
        return self._last_run.output(name)

    def get_input(self, name: str) -> NDArray[Any]:
        """An input of the graph in the last computation: token ids, attention mask or position ids, [B, T].

        Raises:
            StateError: nothing was appended yet.
            InputError: the graph has no such input; keys and values are not shown.
        """
        return self._last_run.input(name)

    def set_model_input(self, name: str, value: Any) -> None:
        """Set an input of the graph that is neither tokens nor state, for all computations from now on.

        Raises:
            InputError: the graph has no such input, or the value is no array or Tensor.
        """
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            raise InputError(f"set_model_input: got {array.dtype}", "an array of numbers is expected", "pass one")
        for sequence in self._sequences:
            sequence.give(name, array)

    def set_active_adapter(self, adapters: Adapters, name: str) -> None:
        """Let the tokens that are computed from now on go through an adapter; what is computed stays as it is.

        Several may be active. As in onnxruntime-genai, one takes the place of those that change the same projections.

        Raises:
            OptionError: there is none of that name.
            StateError: another container than before.
            InputError: not an Adapters of this model; or it changes some projections of an active adapter, but not all.
        """
        if not isinstance(adapters, Adapters) or adapters.model is not self._model:
            raise InputError(
                f"set_active_adapter needs the Adapters of this model, not {type(adapters).__name__}",
                "adapters change the products of the model that they were loaded for",
                "make Adapters(model) and load the adapter into it",
            )
        if self._adapters not in (None, adapters):
            raise StateError(
                "Generator state can only register a single Adapters container.",
                "names mean something in one container only",
                "load all adapters of a generator into one Adapters",
            )
        self._open_decoder()
        self._batch.settle()
        # What was computed before stays as it is, and so do the last logits of sequences that have ended.
        if lost := [
            i for i, one in enumerate(self._sequences) if self._batch.ended[i] and one.num_computed < len(one.tokens)
        ]:
            self._compute(lost)
        if adapters.values(name):
            self._give_values(adapters, name)
            return
        active = [one for one in self._active if not adapters.modules(one) <= adapters.modules(name)]
        for one in active:
            if shared := adapters.modules(one) & adapters.modules(name):
                raise InputError(
                    f"adapters {one!r} and {name!r} both change {min(shared)!r}, and {one!r} others besides",
                    "the later one would take the place of a part of the earlier one",
                    "use one of them, or LLM with adapter={name: weight}, which adds several up",
                )
        mix = adapters.mix(dict.fromkeys([*active, name], 1.0))
        for sequence in self._sequences:
            sequence.adapt(mix)
        self._adapters, self._active = adapters, [*active, name]

    def _give_values(self, adapters: Adapters, name: str) -> None:
        """Go on with the graph as it was exported, whose inputs the adapter's arrays are."""
        if self._active:
            raise InputError(
                f"adapter {name!r} replaces inputs of the graph, and {self._active[0]!r} is active",
                "the one runs in the graph as it was exported, the other beside the base's products",
                "use them in two generators",
            )
        self._batch.move_to(self._model.decoder_as_exported())
        for sequence in self._sequences:
            for input_name, value in adapters.values(name).items():
                sequence.give(input_name, value)
        self._adapters = adapters

    def set_runtime_option(self, key: str, value: str) -> None:
        """`terminate_session` = "1" ends what is computed now, from any thread, and refuses more until it is "0".

        Raises:
            OptionError: another option or value.
        """
        if key != "terminate_session" or value not in ("0", "1"):
            raise OptionError(
                f"runtime option {key!r} = {value!r}", "there is no onnxruntime session to steer", _TERMINATE
            )
        self._terminated = value == "1"
        if self._terminated:
            self._batch.decoder.interrupt(self._sequences)

    def _open_decoder(self) -> Decoder:
        """The decoder, or StateError where the generator or its model was closed."""
        _ = self._sequences, self._model.decoder
        return self._batch.decoder

    def _check_running(self) -> None:
        self._open_decoder()
        if self._terminated:
            why = "set_runtime_option('terminate_session', '1') was called"
            raise StateError("Session in Terminated state", why, "call it with '0' to go on")

    def set_logits(self, logits: Any) -> None:
        """Replace the logits from which the next token is chosen.

        Args:
            logits: float array of B * V values, such as [B, 1, V].

        Raises:
            InputError: another number of values, or not numbers.
        """
        array = np.asarray(logits)
        size = len(self._sequences) * self._batch.decoder.vocab_size
        if array.dtype.kind not in "fiu" or array.size != size:
            raise InputError(
                f"set_logits: got {array.dtype} {list(array.shape)}",
                f"{len(self._sequences)} x {self._batch.decoder.vocab_size} = {size} numbers are expected",
                "change the array that get_logits returned and pass it back",
            )
        self._open_decoder()
        self._batch.set_logits(array.reshape(len(self._sequences), -1))

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Generate until done, yielding the tokens of each step, int32 [B]."""
        while not self.is_done():
            self.generate_next_token()
            yield self.get_next_tokens()

    # --- states --------------------------------------------------------------------------------------------------

    def fork(self) -> Generator:
        """Another generator with the same sequences, options and random numbers, which shares their blocks.

        Blocks are copied where one of the two writes into them.
        """
        self._open_decoder()
        other = object.__new__(type(self._without_beams("fork")))
        other.__dict__.update(self.__dict__)
        other._batch, other._shown, other._options = self._batch.fork(), self._shown.copy(), dict(self._options)
        other._active = list(self._active)
        return other

    def save_state(self, path: str | Path) -> int:
        """Write the sequence to a file: tokens, keys and values, what its sampler remembers; returns its bytes.

        The file is written whole and takes its place at the end. See docs/states.md.

        Raises:
            StateError: a batch of several sequences, none, beams, or adapters that changed after tokens were computed.
            StateFileError: it cannot be written.
        """
        self._open_decoder()
        (sequence,) = self._only("save_state")
        if not sequence.tokens:
            raise StateError("there are no tokens yet", "there is nothing to save", "call append_tokens first")
        self._batch.settle()
        (row,) = self._batch.rows
        notes = {"ended": self._batch.ended[0], "prompt": row.prompt_length}
        weights = dict.fromkeys(self._active, 1.0)
        saved = SavedState(weights, self._adapter_key(sequence), SamplerState.of(row), notes)
        return write_state(state_path(path), self._batch.decoder, sequence, self._model.identity(), saved)

    def load_state(self, path: str | Path) -> None:
        """Take the sequence of a file in the place of this generator's own; its options stay, but for the seed.

        What it generates then is what the saved generator would have generated with these options. A file that LLM
        saved may be loaded, too, where its tokens fit max_length.

        Raises:
            StateFileError: there is none, it is damaged, or none of ours.
            StateMismatchError: it is of another model, format or type of cache; of other adapters than are active here;
                or has more tokens than max_length.
            StateError: a batch of several sequences, or beams. CacheCapacityError: the cache has no room.
        """
        decoder = self._open_decoder()
        (before,) = self._only("load_state")
        mix = before.adapters if self._active else None
        sequence, saved = read_state(state_path(path), decoder, self._model.identity(), lambda found: mix)
        if len(sequence.tokens) > self.max_length:
            count = len(sequence.tokens)
            sequence.close()
            raise StateMismatchError(
                f"{path}: the state has {count} tokens", f"max_length is {self.max_length}", "raise max_length"
            )
        if sequence.num_computed == len(sequence.tokens):
            sequence.rewind(len(sequence.tokens))  # the last logits are needed again
        state, (own,) = saved.sampler, self._batch.rows
        seed, number = (own.seed, 0) if state is None else (state.seed, state.row)
        length = len(sequence.tokens) if state is None else state.prompt_length
        row = RowSampler(own.plan, sequence.tokens, seed=seed, row=number, prompt_length=length)
        if state is not None:
            state.put_into(row)
        self._batch.replace(sequence, row)
        self._batch.ended = [saved.notes.get("ended") is True]
        self._next_tokens = None
        self._shown = PaddedRows(1, self._pad_token())
        self._shown.append([sequence.tokens])

    def _only(self, call: str) -> list[DecoderSequence]:
        """The sequence, in a list."""
        self._without_beams(call)
        if len(self._sequences) != 1:
            raise StateError(
                f"{call} of {len(self._sequences)} sequences", "a state is one sequence", "use batch_size = 1"
            )
        return self._sequences

    def _without_beams(self, call: str) -> Generator:
        """This one; one with beams refuses."""
        return self

    @staticmethod
    def _adapter_key(sequence: DecoderSequence) -> str:
        return "" if sequence.adapters is None else sequence.adapters.key.hex()

    # --- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the cached state back; also done when the generator is dropped."""
        sequences = self._batch.sequences
        self._batch.close()
        for sequence in sequences if self._active else ():
            sequence.adapt(None)
        self._active = []

    def __exit__(self, *_: object) -> None:
        self.close()

    set_inputs = refusing_method("set_inputs", "text models take tokens: append_tokens()", GENERATING_PAGE)
    set_hidden_states = refusing_method("set_hidden_states", REASONS["MtpGenerator"], GENERATING_PAGE)
    snapshot_state = refusing_method("snapshot_state", "recurrent models come later", GENERATING_PAGE)
    get_speculative_stats = refusing_method("get_speculative_stats", _GUESSES, GENERATING_PAGE)


def _check_beams(options: Mapping[str, Any], *, guided: bool) -> None:
    """Whether beams and what is asked for besides go together."""
    beams, wanted = options["num_beams"], options["num_return_sequences"]
    if beams > 1 and guided:
        raise OptionError(
            f"guidance with num_beams = {beams}",
            "a search weighs whole beams, and its candidates go through no grammar",
            "leave one of them out",
        )
    if wanted > beams:
        raise OptionError(
            f"num_return_sequences = {wanted}", f"num_beams = {beams}: there are no more outputs", "raise num_beams"
        )
    if beams > 1 and options["diversity_penalty"]:
        raise NotSupportedYetError(
            f"diversity_penalty = {options['diversity_penalty']} with num_beams = {beams}",
            "beams of one prompt form one group (onnxruntime-genai reads this option and ignores it)",
            "leave it out",
        )
    if beams > 1 and options["do_sample"]:
        raise OptionError(
            f"do_sample with num_beams = {beams}", "a beam search draws no tokens", "leave one of them out"
        )


_STEP = "do_sample {do_sample}, top_k {top_k}, top_p {top_p}, temperature {temperature}, token_count {width}"
_TERMINATE = "use 'terminate_session' with '1' or '0', or leave the call out"
