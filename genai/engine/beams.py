"""Beam search: the policy alone. Which candidates go on, which are finished, and when no better one can come.

Two sets of rules differ in what a length is, and when penalties apply: those of transformers (Wolf et al. 2020;
`_beam_search` of its version 5) and those of onnxruntime-genai (`BeamSearchScorer`). This module knows token ids and
scores; `beam_batch` has the sequences and logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import OptionError

MOST_BEAMS = 256
T = TypeVar("T")


@dataclass(frozen=True)
class BeamOptions:
    """Options of a beam search.

    Attributes:
        num_beams: beams that go on side by side, at least 2.
        length_penalty: scores are divided by length ** length_penalty; above 0 favours long outputs.
        early_stopping: True = end when num_beams outputs are finished. False = end when the best running beam, as long
            as it is now, would not beat the worst of them. "never" = end when it could not, were it as long as allowed.
        num_return_sequences: how many of the best are wanted, at most num_beams.

    Raises:
        OptionError: a value out of range.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        for name, high in (("num_beams", MOST_BEAMS), ("num_return_sequences", self.num_beams)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                said = "num_beams" if name == "num_return_sequences" else str(high)
                raise OptionError(f"{name} = {value!r:.40}", f"allowed: 1 to {said}", "choose one of these")
        penalty = self.length_penalty
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not math.isfinite(penalty) or abs(penalty) > 50:
            raise OptionError(f"length_penalty = {penalty!r:.40}", "a number from -50 to 50 is expected", "use 1.0")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise OptionError(
                f"early_stopping = {self.early_stopping!r:.40}",
                'allowed: True, False and "never"',
                "choose one of them",
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> BeamOptions | None:
        """From those that were given by name; None where there are to be no beams.

        Raises:
            OptionError: out of range, or one that has no meaning without beams.
        """
        found = cls(**{"num_beams": 1, **options})
        if found.num_beams > 1:
            return found
        for name, value in options.items():
            if name != "num_beams" and not (name == "num_return_sequences" and value == 1):
                raise OptionError(
                    f"{name} = {value!r:.40} without beams", "it steers a beam search", "set num_beams, or leave it out"
                )
        return None


class Continuation(NamedTuple):
    """A token that a running beam could go on with, and the sum of log-probabilities that the beam would have then."""

    score: float
    beam: int
    token: int


class BeamPolicy(Generic[T]):
    """The course of one search.

    Args:
        options: see BeamOptions.
        prompt_length: tokens of the prompt. max_length: most tokens of an output, prompt included.
        stop_ids: tokens that end an output.

    Attributes:
        length: tokens of each running beam, prompt included.
        finished: the best outputs that are finished, at most num_beams, each with its score, the best first.
        is_done: whether nothing better can come.
    """

    # Whether penalties and masks change logits; otherwise log-probabilities, which are no distribution then.
    processes_logits = False

    def __init__(self, options: BeamOptions, prompt_length: int, max_length: int, stop_ids: Collection[int]) -> None:
        self.options, self.stop_ids = options, stop_ids
        self.prompt_length = self.length = prompt_length
        self.max_length = max_length
        self.finished: list[tuple[float, T]] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """How many of the best continuations a step looks at: enough that num_beams of them do not end."""
        return max(2, 1 + len(self.stop_ids)) * self.options.num_beams

    def advance(
        self, candidates: Sequence[Continuation], output: Callable[[Continuation], T]
    ) -> Sequence[Continuation]:
        """One step.

        Args:
            candidates: the best continuations of the running beams, the best first.
            output: makes what `finished` holds of one that ends; its token is a stop token, or the last that fits.

        Returns:
            The beams that go on, the best first; of no meaning once it is done.
        """
        raise NotImplementedError

    def conclude(self, running: Sequence[tuple[float, T]]) -> None:
        """Nothing more is computed: what runs, with its sum of log-probabilities, may be among the best."""

    @property
    def is_full(self) -> bool:
        """Whether num_beams outputs are finished."""
        return len(self.finished) == self.options.num_beams

    def _finish(self, score: float, output: T) -> None:
        """Put an output where it belongs among the best; among equals the older one comes first."""
        index = next((i for i, (other, _) in enumerate(self.finished) if score > other), len(self.finished))
        self.finished.insert(index, (score, output))
        del self.finished[self.options.num_beams :]

    def _divided(self, score: float, length: int) -> float:
        return score / math.pow(length, self.options.length_penalty)


class TransformersBeams(BeamPolicy[T]):
    """As transformers: a length is that of the output, its stop token included."""

    def advance(
        self, candidates: Sequence[Continuation], output: Callable[[Continuation], T]
    ) -> Sequence[Continuation]:
        count, early = self.options.num_beams, self.options.early_stopping
        self.length += 1
        generated, is_last = self.length - self.prompt_length, self.length >= self.max_length
        for one in candidates[:count]:
            if is_last or one.token in self.stop_ids:
                self._finish(self._divided(one.score, generated), output(one))
        running = [one for one in candidates if one.token not in self.stop_ids][:count]
        if early == "never" and self.options.length_penalty > 0:
            generated = self.max_length - self.prompt_length
        self.is_done = is_last or not running
        if self.is_full and not self.is_done:
            can_improve = self._divided(running[0].score, generated) > self.finished[-1][0]
            self.is_done = early is True or not can_improve
        return running


class OrtGenaiBeams(BeamPolicy[T]):
    """As onnxruntime-genai: a length is that of the whole sequence, without its stop token.

    Of a batch it compares the best candidates of other prompts, too, where early_stopping is off; here each prompt's
    result is its own.
    """

    processes_logits = True

    def advance(
        self, candidates: Sequence[Continuation], output: Callable[[Continuation], T]
    ) -> Sequence[Continuation]:
        count = self.options.num_beams
        running: list[Continuation] = []
        for rank, one in enumerate(candidates):
            if one.token not in self.stop_ids:
                running.append(one)
            elif rank < count:
                self._finish(self._divided(one.score, self.length), output(one))
            if len(running) == count:
                break
        if self.is_full and (
            self.options.early_stopping or not self.finished[-1][0] < self._divided(candidates[0].score, self.length)
        ):
            self.is_done = True
        self.length += 1
        return running

    def conclude(self, running: Sequence[tuple[float, T]]) -> None:
        if not self.is_done:
            for score, output in running:
                self._finish(self._divided(score, self.length), output)
