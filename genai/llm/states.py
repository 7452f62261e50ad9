"""States: texts that were read once and are gone on from many times, also by another process, from a file."""

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
from ..lora.store import AdapterChoice
from .completion import Completion
from .generation import Generation
from .request_options import BeamCallOptions, CallOptions
from .requests import Prompt
from .streaming import CompletionStream, Progress, wait_for

if TYPE_CHECKING:  # an LLM makes states, which go on by it
    from .llm import LLM


class TextState(Single, AbstractContextManager["TextState"]):
    """Tokens that a model has read, with their keys and values; made by LLM.read, LLM.load_state, or keep_state=True.

    It does not change: whatever goes on from it shares its blocks of the cache, which are copied where they are written
    to. They are held until it is closed or dropped, and count in the model's cache_bytes.

    Attributes:
        tokens: ids. text that was generated is part of them.
        adapter: the adapters that they went through; what goes on does so too.
        notes: what the caller saved beside them.

    >>> document = llm.read("Luna has a red ball. Tom has a blue kite. " * 3)
    >>> [len(one.token_ids) for one in document.generate(["Luna", "Tom has"], max_tokens=4, ignore_eos=True)]
    [4, 4]
    """

    def __init__(
        self,
        llm: LLM,
        sequence: DecoderSequence,
        *,
        adapter: AdapterChoice = None,
        mix: AdapterMix | None = None,
        sampler: SamplerState | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self._llm, self._mix, self._sampler = llm, mix, sampler
        self._open: DecoderSequence | None = sequence
        self.adapter = adapter
        self.notes = dict(notes or {})

    @property
    def _sequence(self) -> DecoderSequence:
        if self._open is None:
            raise StateError("the state is closed", "close() gave its part of the cache back", "read the text again")
        _ = self._llm.model.decoder  # raises if the model was closed
        return self._open

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids, those generated included."""
        return tuple(self._sequence.tokens)

    def __len__(self) -> int:
        """How many tokens."""
        return len(self._sequence.tokens)

    # --- going on ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[BeamCallOptions],
    ) -> list[Completion]:
        """Complete prompts, each as if this state's text stood before it; as LLM.generate otherwise.

        A prompt's text is made into tokens by itself.

        Raises:
            As LLM.generate. OptionError: prompt_logprobs, as the state's tokens have been read.
        """
        return self._llm._completed(self._generations_(prompts, params, options), options, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> CompletionStream:
        """The same, piece by piece; see LLM.stream."""
        generations = self._llm._requests.single(self._after(prompt), params, options, adapter=self.adapter)
        return self._llm._streamed(self._from_here(generations))

    def resume(self, **options: Unpack[CallOptions]) -> Completion:
        """Go on with a generation that was kept in its middle (keep_state=True, CompletionStream.state).

        The tokens are those that would have come without the pause: the request's options and seed apply, unless
        `options` replace them; max_tokens counts new tokens. Text that was given already is not part of the result.

        Raises:
            StateError: nothing was being generated. Otherwise as LLM.generate.
        """
        generations = self._resumed(options)
        (completion,) = self._llm._completed(generations, options)
        return completion

    def read(self, prompt: Prompt, progress: Progress | None = None) -> TextState:
        """The state after more text."""
        return self._llm._read(self._after(prompt), self.adapter, self, progress)

    def fork(self) -> TextState:
        """Another state with the same tokens, which shares their blocks."""
        sequence = self._sequence.fork()
        attributes = {"adapter": self.adapter, "mix": self._mix, "sampler": self._sampler, "notes": self.notes}
        return TextState(self._llm, sequence, **attributes)  # type: ignore[arg-type]

    def _after(self, prompt: Prompt) -> list[int]:
        before = list(self._sequence.tokens)
        return [*before, *self._llm._requests.ids(prompt)]

    def _generations_(
        self, prompts: Any, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> list[Generation]:
        rows = [self._after(prompt) for prompt in self._llm._requests.prompt_list(prompts)]
        return self._from_here(self._llm._requests.batch(rows, params, options, adapter=self.adapter, with_beams=True))

    def _from_here(self, generations: list[Generation]) -> list[Generation]:
        for generation in generations:
            if generation.plan.params.prompt_logprobs is not None:
                raise OptionError(
                    "prompt_logprobs with a state", "its tokens have been read, and their logits are gone",
                    "leave prompt_logprobs out, or give the whole text as a prompt",
                )  # fmt: skip
            generation.origin = self._sequence
        return generations

    def _resumed(self, options: Mapping[str, Any]) -> list[Generation]:
        if self._sampler is None:
            raise StateError(
                "there is nothing to resume", "this state was read, not generated", "use generate with a prompt"
            )
        if options.get("num_beams", 1) != 1:
            raise OptionError("resume with beams", "one sequence goes on", "use generate")
        generations = self._llm._requests.resumed(self._sampler, list(self._sequence.tokens), options)
        generations[0].adapters, generations[0].adapter = self._mix, self.adapter
        return self._from_here(generations)

    # --- files -------------------------------------------------------------------------------------------------------

    def save_state(self, path: str | Path, notes: Mapping[str, Any] | None = None) -> int:
        """Write it to a file, from which LLM.load_state goes on to the bit; returns its bytes.

        The file is written whole and takes its place at the end: whoever is killed meanwhile leaves what was there.

        Args:
            notes: JSON values to be kept beside it; None = those that it has.

        Raises:
            StateFileError: it cannot be written. StateError: what was to be resumed has logits_processors.
        """
        notes = self.notes if notes is None else notes
        choice = self._llm.adapters.check(self.adapter) if self._mix is not None else {}
        saved = SavedState(choice, "" if self._mix is None else self._mix.key.hex(), self._sampler, notes)
        model = self._llm.model
        return write_state(state_path(path), model.decoder, self._sequence, model.identity(), saved)

    def close(self) -> None:
        """Give its part of the cache back. What goes on from it does so."""
        if self._open is not None:
            sequence, self._open = self._open, None
            with suppress(StateError):  # in a process that was forked the cache is another's
                self._llm._worker.ask(sequence.close)  # it may be forked there at this moment

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "TextState(closed)" if self._open is None else f"TextState({len(self._open.tokens)} tokens)"


def load_state(llm: LLM, path: str | Path, adapter: AdapterChoice, *, for_all: bool = False) -> TextState:
    """See LLM.load_state; `for_all`: whatever has the same tokens goes on from it, as from what this process computed.

    Whoever asks for that must know where the file comes from: nothing in it proves that its keys and values are those
    of its tokens.
    """
    file_path = state_path(path)
    chosen = adapter
    mixes: list[AdapterMix | None] = []

    def adapters(saved: SavedState) -> AdapterMix | None:
        nonlocal chosen
        chosen = adapter if adapter is not None else (dict(saved.adapter) or None)
        mixes.append(llm.adapters.mix(chosen))
        return mixes[-1]

    decoder = llm.model.decoder
    sequence, saved = read_state(file_path, decoder, llm.model.identity(), adapters)
    if for_all:
        sequence.share()
    return TextState(llm, sequence, adapter=chosen, mix=mixes[-1], sampler=saved.sampler, notes=saved.notes)


def read(llm: LLM, generation: Generation, before: TextState | None, progress: Progress | None = None) -> TextState:
    """Compute the prompt of a request, and nothing more."""
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
        raise InputError("the text was not read", "the model was closed meanwhile", "read it again")
    state._sampler = None
    return state


def retained_state(llm: LLM, generation: Generation) -> TextState | None:
    """What a request that is over left behind, if it was asked to."""
    if generation.retained is None:
        return None
    sequence, mix = generation.retained
    return TextState(llm, sequence, adapter=generation.adapter, mix=mix, sampler=SamplerState.of(generation.row))


def running_state(llm: LLM, generation: Generation) -> TextState:
    """That of a request in its middle: on the engine's thread.

    Raises:
        StateError: it has not begun, or is over and left nothing behind.
    """
    if (state := retained_state(llm, generation)) is not None:
        return state
    if not generation.has_sequence:
        over = generation.is_over
        raise StateError(
            "there is no sequence to fork",
            "the generation is over, and its part of the cache was given back" if over else "it waits for its turn",
            "fork before the end, or ask for it with keep_state=True" if over else "fork after the first piece",
        )
    sequence = generation.sequence.fork()
    return TextState(
        llm, sequence, adapter=generation.adapter, mix=generation.adapters, sampler=SamplerState.of(generation.row)
    )
