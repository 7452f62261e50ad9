"""The policy of beam search: it decides which candidates continue, which outputs are finished, and when to stop.

There are two sets of rules: those of transformers (Wolf et al. 2020; `_beam_search` in version 5) and those of
onnxruntime-genai (`BeamSearchScorer`). They differ in the definition of a length and in when penalties apply. This
module handles only token ids and scores; `beam_batch` handles the sequences and logits.
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
        num_beams: number of parallel beams, at least 2.
        length_penalty: exponent of the length by which scores are divided; values above 0 favour long outputs.
        early_stopping: True = stop when num_beams outputs are finished. False = stop when the best running beam, at its
            current length, would not beat the worst finished output. "never" = stop only when the best running beam
            could not beat the worst finished output even at the maximum length.
        num_return_sequences: number of outputs to return, at most num_beams.

    Raises:
        OptionError: a value is out of range.
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
                raise OptionError(f"{name} = {value!r:.40}", f"allowed: 1 to {said}", "use a value in this range")
        penalty = self.length_penalty
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not math.isfinite(penalty) or abs(penalty) > 50:
            raise OptionError(
                f"length_penalty = {penalty!r:.40}",
                "allowed: numbers from -50 to 50",
                "use a number in this range, such as 1.0",
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise OptionError(
                f"early_stopping = {self.early_stopping!r:.40}",
                'allowed: True, False and "never"',
                "use one of these values",
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> BeamOptions | None:
        """Create options from a mapping of option names to values; return None if there is only one beam.

        Raises:
            OptionError: an option is out of range, or has no effect without beams.
        """
        found = cls(**{"num_beams": 1, **options})
        if found.num_beams > 1:
            return found
        for name, value in options.items():
            if name != "num_beams" and not (name == "num_return_sequences" and value == 1):
                raise OptionError(
                    f"{name} = {value!r:.40} without beams",
                    "the option only affects beam search",
                    "set num_beams above 1, or remove this option",
                )
        return None


class Continuation(NamedTuple):
    """A possible next token of a running beam, and the beam's sum of log-probabilities including that token."""

    score: float
    beam: int
    token: int


class BeamPolicy(Generic[T]):
    """The state of one search.

    Args:
        options: the options of the search.
        prompt_length: number of prompt tokens.
        max_length: maximum number of tokens of an output, including the prompt.
        stop_ids: tokens that end an output.

    Attributes:
        length: number of tokens of each running beam, including the prompt.
        finished: the best finished outputs, at most num_beams, each with its score, best first.
        is_done: True if no better output is possible.
    """

    # True if penalties and masks apply to logits; False if they apply to log-probabilities, which are not renormalised.
    processes_logits = False

    def __init__(self, options: BeamOptions, prompt_length: int, max_length: int, stop_ids: Collection[int]) -> None:
        self.options, self.stop_ids = options, stop_ids
        self.prompt_length = self.length = prompt_length
        self.max_length = max_length
        self.finished: list[tuple[float, T]] = []
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """The number of candidates per step: enough that at least num_beams of them do not end."""
        return max(2, 1 + len(self.stop_ids)) * self.options.num_beams

    def advance(
        self, candidates: Sequence[Continuation], output: Callable[[Continuation], T]
    ) -> Sequence[Continuation]:
        """Perform one step.

        Args:
            candidates: the best continuations of the running beams, best first.
            output: creates the finished output for a continuation that ends, either with a stop token or at the maximum
                length.

        Returns:
            The beams that continue, best first; ignore them if `is_done` is True.
        """
        raise NotImplementedError

    def conclude(self, running: Sequence[tuple[float, T]]) -> None:
        """Consider the running beams, each with its sum of log-probabilities, as outputs because the search ends."""

    @property
    def is_full(self) -> bool:
        """True if num_beams outputs are finished."""
        return len(self.finished) == self.options.num_beams

    def _finish(self, score: float, output: T) -> None:
        """Insert an output into the sorted list of the best outputs; of equal scores, the older output comes first."""
        index = next((i for i, (other, _) in enumerate(self.finished) if score > other), len(self.finished))
        self.finished.insert(index, (score, output))
        del self.finished[self.options.num_beams :]

    def _divided(self, score: float, length: int) -> float:
        return score / math.pow(length, self.options.length_penalty)


class TransformersBeams(BeamPolicy[T]):
    """The rules of transformers: the length is the number of output tokens, including the stop token."""

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
    """The rules of onnxruntime-genai: the length is that of the whole sequence, without its stop token.

    In a batch without early_stopping, onnxruntime-genai also considers the best candidates of other prompts. Here the
    result for each prompt is independent of the other prompts.
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
