"""Reusable states of prompts: text that is processed once, continued many times and optionally saved to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..common.single import Single
from ..engine.adapter_mix import AdapterMix
from ..engine.sampling.params import SamplingParams
from ..engine.sampling.state import SamplerState
from ..engine.sequence import DecoderSequence
from ..engine.state_file import SavedState, read_state, state_path, write_state
from ..errors import InputError, OptionError, StateError
from ..lora.store import AdapterChoice, NamedChoice, PinnedAdapters
from .completion import Completion
from .generation import Generation
from .request_options import BeamCallOptions, CallOptions
from .requests import Prompt
from .streaming import CompletionStream, Progress, wait_for

if TYPE_CHECKING:  # LLM creates states, and states use their LLM to continue
    from .llm import LLM


class TextState(Single, AbstractContextManager["TextState"]):
    """Tokens that a model has computed, with their keys and values.

    LLM.read, LLM.load_state and keep_state=True create states. A state never changes: continuations share its cache
    blocks, and a shared block is copied before it is written. The blocks stay allocated until the state is closed or
    garbage-collected, and they count towards the model's cache_bytes.

    Attributes:
        tokens: token ids, including generated tokens.
        adapter: the adapters that the tokens were computed with; continuations use the same adapters.
        notes: JSON values that the caller saved with the state.

    Examples:
        >>> document = llm.read("Luna has a red ball. Tom has a blue kite. " * 3)
        >>> [len(one.token_ids) for one in document.generate(["Luna", "Tom has"], max_tokens=4, ignore_eos=True)]
        [4, 4]
    """

    def __init__(
        self,
        llm: LLM,
        sequence: DecoderSequence,
        *,
        adapter: NamedChoice = None,
        mix: AdapterMix | None = None,
        sampler: SamplerState | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self._llm, self._mix, self._sampler = llm, mix, sampler
        self._open: DecoderSequence | None = sequence
        self.adapter = adapter
        self._adapters = PinnedAdapters(adapter, mix=mix)  # not only the names, which other adapters may take
        self.notes = dict(notes or {})

    @property
    def _sequence(self) -> DecoderSequence:
        if self._open is None:
            raise StateError("the state is closed", "close() released its cache blocks", "read the text again")
        _ = self._llm.model.decoder  # raises if the model was closed
        return self._open

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids, including generated tokens."""
        return tuple(self._sequence.tokens)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._sequence.tokens)

    # --- continuing --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion]:
        """Complete each prompt as a continuation of this state's text. Otherwise this method is like LLM.generate.

        Each prompt's text is tokenised separately from the state's text, and gets no special tokens, such as BOS.

        Raises:
            OptionError: prompt_logprobs was set, but the state's tokens are already computed.
            Others: the same errors as LLM.generate.
        """
        return self._llm._completed(self._generations_(prompts, params, options), options, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> CompletionStream:
        """Stream the completion of a prompt as a continuation of this state's text; see LLM.stream."""
        rest = dict(options)
        row = self._after(prompt, rest.pop("literal", None))
        generations = self._llm._requests.single(row, params, rest, adapter=self._adapters)
        return self._llm._streamed(self._from_here(generations))

    def resume(self, **options: Unpack[CallOptions]) -> Completion:
        """Resume a generation that was saved before its end (keep_state=True, CompletionStream.fork).

        The tokens are the same as without the interruption. The request's options and seed apply, unless `options`
        replaces them. max_tokens counts only new tokens, and the result contains only new text.

        Raises:
            StateError: this state is not an unfinished generation.
            Others: the same errors as LLM.generate.
        """
        generations = self._resumed(options)
        (completion,) = self._llm._completed(generations, options)
        return completion

    def read(self, prompt: Prompt, progress: Progress | None = None, *, literal: bool | None = None) -> TextState:
        """Return the state after additional text; for `literal`, see RequestOptions."""
        return self._llm._read(self._after(prompt, literal), self._adapters, self, progress)

    def fork(self) -> TextState:
        """Return another state with the same tokens; the two states share their blocks."""
        sequence = self._sequence.fork()
        attributes = {"adapter": self.adapter, "mix": self._mix, "sampler": self._sampler, "notes": self.notes}
        return TextState(self._llm, sequence, **attributes)  # type: ignore[arg-type]

    def _after(self, prompt: Prompt, literal: Any = None) -> list[int]:
        before = list(self._sequence.tokens)
        return [*before, *self._llm._requests.continuation(prompt, literal)]

    def _generations_(
        self, prompts: Any, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> list[Generation]:
        rest = dict(options)
        literal = rest.pop("literal", None)
        rows = [self._after(prompt, literal) for prompt in self._llm._requests.prompt_list(prompts)]
        batch = self._llm._requests.batch(rows, params, rest, adapter=self._adapters, with_beams=True)
        return self._from_here(batch)

    def _from_here(self, generations: list[Generation]) -> list[Generation]:
        for generation in generations:
            if generation.plan.params.prompt_logprobs is not None:
                raise OptionError(
                    "prompt_logprobs cannot be used with a state", "the logits of the state's tokens were not stored",
                    "leave prompt_logprobs out, or pass the whole text as a prompt",
                )  # fmt: skip
            generation.origin = self._sequence
        return generations

    def _resumed(self, options: Mapping[str, Any]) -> list[Generation]:
        if self._sampler is None:
            raise StateError(
                "there is nothing to resume", "this state was read, not generated", "call generate with a prompt"
            )
        if options.get("num_beams", 1) != 1:
            raise OptionError(
                "resume cannot be used with num_beams", "resume continues a single sequence", "use generate"
            )
        generations = self._llm._requests.resumed(self._sampler, list(self._sequence.tokens), options)
        generations[0].adapters, generations[0].adapter = self._mix, self.adapter
        return self._from_here(generations)

    # --- files -------------------------------------------------------------------------------------------------------

    def save_state(self, path: str | Path, notes: Mapping[str, Any] | None = None) -> int:
        """Write the state to a file, and return the file's size in bytes. LLM.load_state restores the state exactly.

        The write is atomic: if the process is killed, an existing file is unchanged.

        Args:
            path: the file.
            notes: JSON values to save with the state; None = the notes that the state already has.

        Raises:
            StateFileError: the file cannot be written.
            StateError: the state is an unfinished generation that has logits_processors.
        """
        notes = self.notes if notes is None else notes
        weights = {} if self._mix is None else self._adapters.weights
        saved = SavedState(weights, "" if self._mix is None else self._mix.key.hex(), self._sampler, notes)
        model = self._llm.model
        return write_state(state_path(path), model.decoder, self._sequence, model.identity(), saved)

    def close(self) -> None:
        """Release the state's cache blocks. Running continuations retain their blocks."""
        if self._open is not None:
            sequence, self._open = self._open, None
            with suppress(StateError):  # in a forked child process, the cache belongs to the parent
                self._llm._worker.ask(sequence.close)  # on the engine's thread, which may be forking the sequence now

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "TextState(closed)" if self._open is None else f"TextState({len(self._open.tokens)} tokens)"


def load_state(llm: LLM, path: str | Path, adapter: AdapterChoice, *, for_all: bool = False) -> TextState:
    """Load a saved state; see LLM.load_state.

    Args:
        for_all: True to publish the state's blocks in the prefix cache, as if this process had computed them. Use True
            only for files from a trusted source: nothing in a file proves that the keys and values match its tokens.
    """
    file_path = state_path(path)
    chosen: NamedChoice = None
    mixes: list[AdapterMix | None] = []

    def adapters(saved: SavedState) -> AdapterMix | None:
        nonlocal chosen
        pinned = llm.adapters.pin(adapter if adapter is not None else (dict(saved.adapter) or None))
        chosen = pinned.choice
        mixes.append(llm.adapters.mix(pinned))
        return mixes[-1]

    decoder = llm.model.decoder
    sequence, saved = read_state(file_path, decoder, llm.model.identity(), adapters)
    if for_all:
        sequence.share()
    return TextState(llm, sequence, adapter=chosen, mix=mixes[-1], sampler=saved.sampler, notes=saved.notes)


def read(llm: LLM, generation: Generation, before: TextState | None, progress: Progress | None = None) -> TextState:
    """Process a request's prompt without generating tokens, and return the state."""
    generation.keeps_sequence = generation.reads_only = True
    if before is not None:
        before._from_here([generation])
    wait_for(
        [generation],
        llm._worker,
        None if progress is None else lambda done, total: progress(*generation.prompt_progress),
    )
    state, generation.retained = retained_state(llm, generation), None
    if state is None:
        raise InputError(
            "the text was not read", "the model was closed in the meantime", "load the model, and read the text again"
        )
    state._sampler = None
    return state


def retained_state(llm: LLM, generation: Generation) -> TextState | None:
    """Return the state that a finished request retained, or None if it retained no state."""
    if generation.retained is None:
        return None
    sequence, mix = generation.retained
    return TextState(llm, sequence, adapter=generation.adapter, mix=mix, sampler=SamplerState.of(generation.row))


def running_state(llm: LLM, generation: Generation) -> TextState:
    """Return the state of a running request. Call this function on the engine's thread.

    Raises:
        StateError: the request has not started, or it ended without keeping its sequence.
    """
    if (state := retained_state(llm, generation)) is not None:
        return state
    if not generation.has_sequence:
        over = generation.is_over
        raise StateError(
            "there is no sequence to fork",
            "the generation is over, and its cache blocks were released" if over else "the request is still queued",
            "fork before the end, or pass keep_state=True" if over else "fork after the first piece of text",
        )
    sequence = generation.sequence.fork()
    return TextState(
        llm, sequence, adapter=generation.adapter, mix=generation.adapters, sampler=SamplerState.of(generation.row)
    )
