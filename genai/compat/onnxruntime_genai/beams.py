"""BeamGenerator: a Generator with num_beams above 1, with onnxruntime-genai's behaviour."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...engine.beam_batch import BeamOutput, BeamSearch, advance_all
from ...engine.beams import BeamOptions, OrtGenaiBeams
from ...engine.sampling.params import SamplingParams
from ...engine.sampling.plan import plan_sampling
from ...errors import ContextOverflowError, InputError, StateError
from ...models.model import Model
from .generator import STEP, Generator, GeneratorParams
from .log import log, log_values
from .token_rows import token_rows


class BeamGenerator(Generator):
    """A beam search for each prompt of the batch. Generator(model, params) creates it if num_beams is above 1.

    After the search ends, get_sequence(i) returns the outputs: num_return_sequences per prompt, the best first. An
    earlier call ends the search, as in onnxruntime-genai, and the running beams then count as finished.

    Raises:
        OptionError: num_return_sequences exceeds num_beams, or do_sample is set.
    """

    def __init__(self, model: Model, params: GeneratorParams) -> None:
        super().__init__(model, params)
        options = self._options
        self._beam_options = BeamOptions(
            options["num_beams"], options["length_penalty"], options["early_stopping"], options["num_return_sequences"]
        )
        # Sampling options and the seed do not apply to a beam search.
        sampling = SamplingParams.from_search_options({**options, "do_sample": False, "random_seed": -1})
        self._plan = plan_sampling(sampling, vocab_size=model.decoder.vocab_size, eos_token_ids=self._eos)
        self._searches: list[BeamSearch] = []
        self._prompts: list[list[int]] = []
        self._beam_tokens: NDArray[np.int32] | None = None

    def append_tokens(self, tokens: Any) -> None:
        """Append the prompts. May be called only once. Drops trailing padding in an array's rows."""
        self._check_running()
        if self._searches:
            raise StateError(
                "append_tokens was called after the search began", "the beams have diverged", "create a new Generator"
            )
        config = self._model.config.model
        rows = token_rows(tokens, len(self._sequences), config.vocab_size, config.pad_token_id)
        longest = max(map(len, rows))
        if longest > self.max_length:
            raise ContextOverflowError(
                f"{longest} tokens exceed max_length {self.max_length}",
                f"the model's context_length is {config.context_length}",
                "shorten the prompt, or raise max_length if the context allows",
            )
        for row, sequence in zip(rows, self._sequences, strict=True):
            sequence.append(row)
        self._prompts = rows
        self._searches = [self._search(row, sequence) for row, sequence in zip(rows, self._sequences, strict=True)]
        last = [row[-1] for row in rows for _ in range(self._beam_options.num_beams)]
        self._beam_tokens = np.array(last, np.int32)
        log("append_next_tokens", "{count}, token_count {width}", count=longest, width=longest)

    def _search(self, prompt: list[int], sequence: Any) -> BeamSearch:
        # onnxruntime-genai pads shorter prompts to the longest one and counts the padding.
        room = self.max_length - max(map(len, self._prompts)) + len(prompt)
        policy = OrtGenaiBeams[BeamOutput](self._beam_options, len(prompt), room, self._plan.stop_ids)
        return BeamSearch(self._batch.decoder, self._model.sampler, sequence, self._plan, policy)

    def generate_next_token(self) -> None:
        """Advance all beams by one step. Do nothing after the end.

        Raises:
            StateError: no tokens were appended yet.
        """
        self._check_running()
        self._begun()
        log("generate_next_token", STEP, width=self.token_count(), **self._options)
        if self.is_done():
            return
        budget = self._options["chunk_size"] or None
        chosen = advance_all(self._batch.decoder, self._searches, budget, partial(log_values, "model_logits"))
        self._batch.sequences = [beam.sequence for search in self._searches for beam in search.beams]
        pad, count = self._pad_token(), self._beam_options.num_beams
        shown = [[one.token for one in row] + [pad] * (count - len(row)) for row in chosen]
        self._beam_tokens = np.array(shown, np.int32).reshape(-1)
        if self.token_count() >= self.max_length:
            log("hit_max_length", "{length}", length=self.max_length)

    def is_done(self) -> bool:
        """Return True if every search has ended: its outputs cannot improve, or its beams have max_length tokens."""
        return bool(self._searches) and all(
            search.policy.is_done or search.policy.length >= search.policy.max_length for search in self._searches
        )

    def _begun(self) -> list[BeamSearch]:
        if not self._searches:
            raise StateError("there are no tokens yet", "logits are computed from tokens", "call append_tokens first")
        return self._searches

    def get_next_tokens(self) -> NDArray[np.int32]:
        """Return the last token of each beam, int32 [B * num_beams], the best beam of each prompt first.

        Raises:
            StateError: no tokens were appended yet.
        """
        self._begun()
        assert self._beam_tokens is not None
        return self._beam_tokens.copy()

    def get_sequence(self, index: int) -> NDArray[np.int32]:
        """Return output i after its prompt, without EOS, int32 [L].

        The output has rank i % num_return_sequences among the outputs of its prompt.

        Raises:
            InputError: the index is outside 0..B * num_return_sequences - 1.
            StateError: no tokens were appended yet.
        """
        searches, wanted = self._begun(), self._beam_options.num_return_sequences
        most = len(searches) * wanted
        if not isinstance(index, (int, np.integer)) or isinstance(index, bool) or not 0 <= index < most:
            raise InputError(
                f"get_sequence({index!r})", f"the search has {most} outputs", f"use an index from 0 to {most - 1}"
            )
        prompt, rank = divmod(int(index), wanted)
        self._conclude()
        finished = searches[prompt].policy.finished
        if rank >= len(finished):
            why = "masks or a small vocabulary allowed no more beams"
            raise StateError(f"prompt {prompt} has only {len(finished)} outputs", why, "use a smaller index")
        output = finished[rank][1]
        return np.array([*self._prompts[prompt], *output.tokens], np.int32)

    def get_scores(self) -> NDArray[np.float64]:
        """Return the scores, float64 [B * num_return_sequences]: log-probability / length ** length_penalty."""
        self._begun()
        self._conclude()
        wanted = self._beam_options.num_return_sequences
        return np.array([score for search in self._searches for score, _ in search.policy.finished[:wanted]])

    def _conclude(self) -> None:
        for search in self._searches:
            if not search.policy.is_done:
                search.conclude()

    def token_count(self) -> int:
        """Return the number of tokens of each running beam, including the prompt; 0 before the prompt is appended."""
        return max((search.policy.length for search in self._searches), default=0)

    def close(self) -> None:
        """See Generator.close."""
        for search in getattr(self, "_searches", ()):
            search.close()
        super().close()

    def _refuse(self, call: str) -> NoReturn:
        raise StateError(
            f"{call} cannot be used with num_beams = {self._beam_options.num_beams}",
            "a beam search does not give access to individual beams",
            "omit the call, or use num_beams = 1",
        )

    def _without_beams(self, call: str) -> Generator:
        self._refuse(call)

    def rewind_to(self, length: int) -> None:
        """Raises StateError: beams cannot be rewound."""
        self._refuse("rewind_to")

    def get_logits(self) -> NDArray[np.float32]:
        """Raises StateError: the logits of a step are not available after beams are selected."""
        self._refuse("get_logits")

    def set_logits(self, logits: Any) -> None:
        """Raises StateError: see get_logits."""
        self._refuse("set_logits")

    def get_output(self, name: str) -> NDArray[np.float32]:
        """Raises StateError: see get_logits."""
        self._refuse("get_output")

    def get_input(self, name: str) -> NDArray[Any]:
        """Raises StateError: see get_logits."""
        self._refuse("get_input")
