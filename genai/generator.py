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

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .engine.decoder import compute, stacked
from .engine.sampling.plan import plan_sampling, request_seed
from .engine.sampling.row import RowSampler
from .errors import ContextOverflowError, InputError, NotSupportedYetError, OptionError, StateError
from .model import Model
from .sampling_params import SamplingParams
from .search import SEARCH_OPTIONS, checked
from .token_input import token_rows


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

    def set_search_options(self, **options: Any) -> None:
        """Set search options; see `genai.search.SEARCH_OPTIONS` for names, types and ranges.

        Raises:
            OptionError: unknown, of the wrong type or out of range; then none of the options is set.
            NotSupportedYetError: beams or several sequences per prompt.
        """
        new = {name: checked(name, value) for name, value in options.items()}
        context, vocab = self.model.context_size, self.model.config.model.vocab_size
        if new.get("max_length", 0) > context:
            raise OptionError(
                f"max_length = {new['max_length']}",
                f"the context holds {context}; the model's context_length is {self.model.config.model.context_length}",
                f"use at most {context}",
            )
        if new.get("top_k", 0) > vocab:
            raise OptionError(
                f"top_k = {new['top_k']}", f"the model's vocabulary has {vocab} tokens", f"use 0 (all) to {vocab}"
            )
        self._options.update(new)

    def get_search_options(self) -> dict[str, Any]:
        """The options as they stand."""
        return dict(self._options)

    def set_guidance(self, type: str, data: str, enable_ff_tokens: bool = False) -> None:
        """Constrained output: not supported yet."""
        raise NotSupportedYetError(
            f"guidance {type!r} is not supported yet", "there is no grammar engine here", "generate without it"
        )

    def set_speculative_options(self, **options: Any) -> None:
        """Speculative decoding: not supported yet."""
        raise NotSupportedYetError(
            "speculative decoding is not supported yet", "there is no drafter here", "leave the options out"
        )


class Generator:
    """Generates tokens for one sequence, or for a batch that advances together.

    Args:
        model: the model.
        params: its options; batch_size sequences are kept.

    Raises:
        OptionError: options that contradict each other.
    """

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
        self._options = params.get_search_options()
        if self._options["min_length"] > self._options["max_length"]:
            low, high = self._options["min_length"], self._options["max_length"]
            raise OptionError(
                f"min_length = {low} is greater than max_length = {high}",
                "no sequence can satisfy both",
                "lower min_length or raise max_length",
            )
        self._model = model
        self._eos = model.config.model.eos_token_ids
        self._decoder, self._sampler = model.decoder, model.sampler
        self._sequences = [self._decoder.open() for _ in range(self._options["batch_size"])]
        sampling = SamplingParams.from_search_options(self._options)
        plan = plan_sampling(sampling, vocab_size=self._decoder.vocab_size, eos_token_ids=self._eos)
        seed = request_seed(sampling)
        self._rows = [
            RowSampler(plan, sequence.tokens, seed=seed, row=row) for row, sequence in enumerate(self._sequences)
        ]
        self._finished = [False] * len(self._sequences)
        self._next_tokens: NDArray[np.int32] | None = None
        self._logits = np.zeros((len(self._sequences), self._decoder.vocab_size), np.float32)

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

        Args:
            tokens: token ids as a list, array or Tensor: [L] for one sequence; [batch_size, L] (rows may end in
                pad_token_id, which is dropped), a list of lists of any lengths, or a flat [batch_size * L].

        Raises:
            InputError: not whole numbers, ids outside the vocabulary, a number of rows that is not batch_size, empty.
            ContextOverflowError: more tokens than max_length allows.
        """
        config = self._model.config.model
        rows = token_rows(tokens, len(self._sequences), config.vocab_size, config.pad_token_id)
        limit = self._options["max_length"]
        for index, (row, sequence) in enumerate(zip(rows, self._sequences, strict=True)):
            if len(sequence.tokens) + len(row) > limit:
                raise ContextOverflowError(
                    f"{len(row)} tokens after {len(sequence.tokens)} (sequence {index}) exceed max_length {limit}",
                    f"the model's context_length is {config.context_length}",
                    "shorten the prompt, or raise max_length if the context allows",
                )
        lengths = [len(sequence.tokens) for sequence in self._sequences]
        for row, sequence in zip(rows, self._sequences, strict=True):
            sequence.append(row)
        self._finished = [len(sequence.tokens) >= limit for sequence in self._sequences]
        try:
            self._compute(range(len(self._sequences)))
        except BaseException:
            for length, sequence, sampler in zip(lengths, self._sequences, self._rows, strict=True):
                sequence.rewind(length)
                sampler.rewind(length)
            raise

    def rewind_to(self, length: int) -> None:
        """Forget all tokens from `length` on; what remains stays cached.

        Raises:
            InputError: negative, or longer than a sequence.
        """
        if not isinstance(length, (int, np.integer)) or isinstance(length, bool):
            raise InputError(
                f"rewind_to({length!r})", "a whole number is expected", "pass the number of tokens to keep"
            )
        shortest = min(len(sequence.tokens) for sequence in self._sequences)
        if not 0 <= length <= shortest:
            raise InputError(
                f"rewind_to({length}) is outside 0..{shortest}",
                "a rewind can only shorten every sequence",
                f"use 0 to {shortest}",
            )
        for sequence, sampler in zip(self._sequences, self._rows, strict=True):
            sequence.rewind(int(length))
            sampler.rewind(int(length))
        self._finished = [False] * len(self._sequences)
        self._next_tokens = None

    # --- generation ----------------------------------------------------------------------------------------------

    def generate_next_token(self) -> None:
        """Choose and append the next token of every unfinished sequence. A chosen EOS ends it and is not appended.

        Raises:
            StateError: nothing was appended yet, or generation is done.
        """
        if self.is_done():
            raise StateError(
                "generate_next_token: generation is done",
                f"every sequence ended or holds max_length {self._options['max_length']} tokens",
                "check is_done() first, append tokens, or raise max_length",
            )
        active = [i for i, finished in enumerate(self._finished) if not finished]
        rows = [None if finished else row for row, finished in zip(self._rows, self._finished, strict=True)]
        picked = self._sampler.sample(self._compute(active), rows).tokens
        next_tokens = np.full(len(self._sequences), self._pad_token(), np.int32)
        next_tokens[active] = picked[active]
        for index in active:
            self._accept(index, int(picked[index]))
        self._next_tokens = next_tokens

    def _accept(self, index: int, token: int) -> None:
        if token in self._eos:
            self._finished[index] = True
            return
        sequence = self._sequences[index]
        sequence.append([token])
        self._finished[index] = len(sequence.tokens) >= self._options["max_length"]

    def _pad_token(self) -> int:
        config = self._model.config.model
        if config.pad_token_id is not None:
            return config.pad_token_id
        return self._eos[0] if self._eos else 0

    def _compute(self, indices: Sequence[int]) -> NDArray[np.float32]:
        """Logits [B, V], brought up to date for the sequences `indices` by computing their pending tokens."""
        if any(not self._sequences[i].tokens for i in indices):
            raise StateError("there are no tokens yet", "logits follow from tokens", "call append_tokens first")
        behind = [i for i in indices if self._sequences[i].num_computed < len(self._sequences[i].tokens)]
        if behind:
            budget = self._options["chunk_size"] or None
            computed = compute(self._decoder, [self._sequences[i] for i in behind], token_budget=budget)
            if len(behind) == len(self._sequences):
                self._logits = stacked([logits[-1] for logits in computed])
            else:
                self._logits[behind] = [logits[-1] for logits in computed]
        return self._logits

    def is_done(self) -> bool:
        """Whether every sequence has ended (EOS or max_length)."""
        return all(self._finished)

    # --- results -------------------------------------------------------------------------------------------------

    def get_next_tokens(self) -> NDArray[np.int32]:
        """The tokens chosen last, int32 [B]; finished sequences show pad_token_id.

        Raises:
            StateError: no token was generated since the start or the last rewind.
        """
        if self._next_tokens is None:
            raise StateError(
                "no token was generated yet", "there is nothing to return", "call generate_next_token first"
            )
        return self._next_tokens.copy()

    def get_sequence(self, index: int) -> NDArray[np.int32]:
        """Prompt and output of one sequence, int32 [L], without the EOS that ended it.

        Raises:
            InputError: index outside 0..batch_size - 1.
        """
        if not isinstance(index, (int, np.integer)) or isinstance(index, bool) or not 0 <= index < len(self._sequences):
            raise InputError(
                f"get_sequence({index!r})",
                f"the batch has {len(self._sequences)} sequences",
                f"use 0 to {len(self._sequences) - 1}",
            )
        return np.asarray(self._sequences[int(index)].tokens, np.int32)

    def token_count(self) -> int:
        """Tokens in the longest sequence, prompt included."""
        return max(len(sequence.tokens) for sequence in self._sequences)

    def get_logits(self) -> NDArray[np.float32]:
        """Logits of the next token, float32 [B, 1, V]; computed now if they are not known yet.

        Raises:
            StateError: nothing was appended yet.
        """
        return self._compute(range(len(self._sequences)))[:, None, :].copy()

    def set_logits(self, logits: Any) -> None:
        """Replace the logits from which the next token is chosen.

        Args:
            logits: float array of B * V values, such as [B, 1, V].

        Raises:
            InputError: another number of values, or not numbers.
        """
        array = np.asarray(logits.as_numpy() if hasattr(logits, "as_numpy") else logits)
        size = len(self._sequences) * self._decoder.vocab_size
        if array.dtype.kind not in "fiu" or array.size != size:
            raise InputError(
                f"set_logits: got {array.dtype} {list(array.shape)}",
                f"{len(self._sequences)} x {self._decoder.vocab_size} = {size} numbers are expected",
                "change the array that get_logits returned and pass it back",
            )
        self._compute(range(len(self._sequences)))
        self._logits[:] = array.reshape(len(self._sequences), -1)

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Generate until done, yielding the tokens of each step, int32 [B]."""
        while not self.is_done():
            self.generate_next_token()
            yield self.get_next_tokens()

    # --- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the cached state back; also done when the generator is dropped."""
        for sequence in self._sequences:
            sequence.close()
        self._sequences = []

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        for sequence in getattr(self, "_sequences", ()):
            sequence.close()

    def __getattr__(self, name: str) -> Any:
        if name in _LATER:
            raise NotSupportedYetError(f"Generator.{name} is not supported yet", _LATER[name], "leave the call out")
        raise AttributeError(f"'Generator' object has no attribute {name!r}")


_LATER = {
    "get_input": "inputs live on a flat batch inside the engine",
    "get_output": "only logits leave the engine: get_logits()",
    "set_inputs": "text models take tokens: append_tokens()",
    "set_model_input": "text models take tokens: append_tokens()",
    "set_active_adapter": "adapters come later",
    "set_hidden_states": "multi-token prediction comes later",
    "set_runtime_option": "there is no onnxruntime session to steer",
    "snapshot_state": "recurrent models come later",
    "get_speculative_stats": "speculative decoding comes later",
}
