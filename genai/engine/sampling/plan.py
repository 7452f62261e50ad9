"""Sampling plans, which hold a request's options in the sampling kernel's format, and the state of one sequence."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from genai.kernels.sampling import ASKED, LIMIT_PLACE, MAX_STEPS, Setting, Step, is_plain

from ...errors import OptionError
from .breakers import NO_BREAKERS, Breakers
from .guidance import Matcher
from .option_rules import MOST_TOKENS, SAMPLERS
from .params import NEUTRAL, SamplingParams
from .sequence_biases import SequenceBiases


@dataclass(frozen=True)
class SamplingPlan:
    """A request's sampling options, converted once and shared by all its rows. Created by `plan_sampling`.

    Attributes:
        params: the options.
        asked: steps and settings in the format of `genai.kernels.sampling.ROW`.
        is_plain: see `genai.kernels.sampling.is_plain`.
        stop_ids: tokens that end the output, including EOS.
        breakers: token sequences that DRY does not extend across.
        edit_ids, edit_values: the biases of single tokens, int32 and float32.
        held_back: int32, the tokens that may not be chosen before the output has its minimum length.
        not_first: int32, the tokens that the output must not begin with.
        most_history: number of past tokens that the steps use; infinite = all.
        matcher: a matcher at the start of the grammar; None = no grammar.
        skips_forced: True if tokens that the grammar forces are appended without sampling; False if another option has
            to process every token.
        sequences: the biases of sequences of several tokens; None = there are none.
    """

    params: SamplingParams
    asked: bytes
    is_plain: bool
    stop_ids: frozenset[int]
    breakers: Breakers
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]
    held_back: NDArray[np.int32]
    not_first: NDArray[np.int32]
    most_history: float
    matcher: Matcher | None = None
    skips_forced: bool = False
    sequences: SequenceBiases | None = None


def plan_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    breakers: Breakers = NO_BREAKERS,
    matcher: Matcher | None = None,
) -> SamplingPlan:
    """Convert a request's options to a plan.

    Args:
        params: the options.
        vocab_size: number of logits per row.
        eos_token_ids: tokens that end a sequence of this model.
        breakers: DRY's sequence breakers as tokens; see `BreakerFinder`.
        matcher: a matcher at the start of the grammar for the output; None = no grammar.

    Raises:
        OptionError: a token id or a number of alternatives exceeds the vocabulary.
    """
    biases, sequences = [*dict(params.logit_bias).items()], dict(params.sequence_bias)
    _check_ids("logit_bias", dict(biases), vocab_size)
    _check_ids("sequence_bias", (token for ids in sequences for token in ids), vocab_size)
    _check_ids("begin_suppress_tokens", params.begin_suppress_tokens, vocab_size)
    biases += [(ids[0], bias) for ids, bias in sequences.items() if len(ids) == 1]
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            what = f"the vocabulary has {vocab_size} tokens"
            raise OptionError(f"{name} = {count}", what, f"use a number from 0 to {vocab_size}")
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    held_back = sorted(token for token in stop_ids | frozenset(eos_token_ids) if 0 <= token < vocab_size)
    steps, settings = _steps(params), _settings(params)
    return SamplingPlan(
        params=params,
        asked=ASKED.pack(*steps, *[Step.END] * (MAX_STEPS - len(steps)), *settings),
        is_plain=is_plain(steps, settings),
        stop_ids=stop_ids,
        breakers=breakers,
        edit_ids=np.asarray([token for token, _ in biases], np.int32),
        edit_values=np.asarray([bias for _, bias in biases], np.float32),
        held_back=np.asarray(held_back, np.int32),
        not_first=np.asarray(params.begin_suppress_tokens, np.int32),
        most_history=_most_history(steps, settings),
        matcher=matcher,
        skips_forced=_skips_forced(params),
        sequences=SequenceBiases(several)
        if (several := [pair for pair in sequences.items() if len(pair[0]) > 1])
        else None,
    )


def _skips_forced(params: SamplingParams) -> bool:
    """Return True if choosing a forced token has no effect other than the token itself."""
    asks = params.logprobs is not None or params.mirostat or params.logits_processors or params.no_repeat_ngram_size
    biases = {*dict(params.logit_bias).values(), *dict(params.sequence_bias).values()}
    return not (asks or params.banned_strings or params.begin_suppress_tokens or -math.inf in biases)


def request_seed(params: SamplingParams) -> int:
    """Return the seed that all samples of a request share: the requested seed, or a new seed."""
    return secrets.randbits(64) if params.seed is None else params.seed


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise OptionError(
                f"{name} contains token {token}",
                f"the vocabulary has {vocab_size} tokens",
                f"use token ids from 0 to {vocab_size - 1}",
            )


def _steps(params: SamplingParams) -> list[int]:
    """Return the samplers that have an effect, in order."""
    asked = {name for name, value in params.as_dict().items() if value != NEUTRAL[name]}
    active = {name for name, options in SAMPLERS.items() if not asked.isdisjoint(options)}
    if params.temperature == 0:
        active &= {
            "penalties",
            "dry",
        }  # greedy decoding is only affected by samplers that change the order of the tokens
    steps: list[int] = [Step[name.upper()] for name in params.samplers if name in active]
    return [*steps, Step.MIROSTAT] if params.mirostat else steps


def _settings(params: SamplingParams) -> NDArray[np.float64]:
    options = {**params.as_dict(), "mirostat_limit": 0.0}
    return np.array([_number(options[setting.name.lower()]) for setting in Setting])


def _number(option: float | None) -> float:
    """Convert an option to a number for the kernel."""
    if option is None:
        return math.inf
    return float(min(option, MOST_TOKENS)) if isinstance(option, int) else option


def _most_history(steps: Sequence[int], settings: NDArray[np.float64]) -> float:
    last: dict[int, float] = {Step.PENALTIES: settings[Setting.PENALTY_LAST_N], Step.DRY: settings[Setting.DRY_LAST_N]}
    if settings[Setting.NO_REPEAT_NGRAM_SIZE]:
        return math.inf
    return max([0.0, *(last[step] for step in steps if step in last)])


FinishReason = Literal["stop", "length"]
_NO_IDS = np.empty(0, np.int32)
_NO_CHANGE = 2**62


class RowSampler:
    """The sampling state of one sequence.

    Args:
        plan: the request's plan.
        tokens: the sequence's own list of prompt and output tokens, read at every step. The list's owner appends tokens
            to it, and calls `rewind` after removing tokens.
        seed: seed of the request's random numbers, 0 to 2 ** 64 - 1.
        row: index of the sample in the request.
        prompt_length: number of prompt tokens; None = all tokens currently in the list.

    Attributes:
        changes: number of changes other than appended tokens.
        matcher: the position in the grammar; the owner reports appended tokens with `follow`.
    """

    __slots__ = (
        "_breaker_ends", "_copy", "_forbidden", "_grammar_start", "_length", "_limits", "_padding",
        "changes", "matcher", "plan", "prompt_length", "row", "seed", "tokens",
    )  # fmt: skip

    def __init__(
        self, plan: SamplingPlan, tokens: Sequence[int], *, seed: int, row: int = 0, prompt_length: int | None = None
    ) -> None:
        self.plan = plan
        self.tokens = tokens
        self.seed = seed
        self.row = row
        self._padding = self.changes = 0
        self.matcher: Matcher | None = None
        self._grammar_start = 0
        self.begin_grammar()
        self.prompt_length = len(tokens) if prompt_length is None else prompt_length
        # An int32 copy of the first `_length` tokens, and the positions in it at which sequence breakers end.
        self._copy, self._length = _NO_IDS, 0
        self._breaker_ends: list[int] = []
        self._forbidden: tuple[int, NDArray[np.int32]] = (-1, _NO_IDS)
        # Mirostat's limits, each with the position at which it starts to apply. A limit depends on the preceding
        # tokens, so the limits of later positions are dropped when the sequence is cut.
        self._limits: list[tuple[int, float]] = []

    @property
    def padding(self) -> int:
        """The number of padding positions in a padded row; they count towards min_length."""
        return self._padding

    @padding.setter
    def padding(self, count: int) -> None:
        self._padding = count
        self.changes += 1

    @property
    def num_generated(self) -> int:
        """The number of output tokens so far; 0 if the sequence was cut to a length inside the prompt."""
        return max(0, len(self.tokens) - self.prompt_length)

    def rewind(self, length: int, forbidden: Collection[int] = ()) -> None:
        """Update the state after the sequence was cut to `length` tokens.

        Args:
            length: number of remaining tokens.
            forbidden: token ids that may not be chosen at the next position (until the next rewind).
        """
        self.changes += 1
        self._forget(length)
        if self.matcher is not None:
            self._grammar_start = min(self._grammar_start, length)
            self.matcher.rewind(length - self._grammar_start)
        self._forbidden = (length, np.asarray(sorted(forbidden), np.int32))

    @property
    def forbidden_now(self) -> tuple[int, ...]:
        """The token ids that a rewind forbids at the next position."""
        return tuple(self._forbidden[1].tolist()) if self._forbidden[0] == len(self.tokens) else ()

    def restore(self, surprise_limit: float | None, forbidden: Collection[int]) -> None:
        """Restore Mirostat's limit and the ids forbidden at the next position; the row must have the same tokens."""
        self.changes += 1
        if surprise_limit is not None:
            self._limits = [(len(self.tokens), surprise_limit)]
        self._forbidden = (len(self.tokens), np.asarray(sorted(forbidden), np.int32))

    def finish_reason(self, token: int) -> FinishReason | None:
        """Return the reason why the output ends with the chosen, not yet appended token; None if it continues."""
        if token in self.plan.stop_ids:
            return "stop"
        most = self.plan.params.max_tokens
        return "length" if most is not None and self.num_generated + 1 >= most else None

    def begin_grammar(self, num_tokens: int = 0) -> None:
        """Start the grammar, if there is one, before the last `num_tokens` tokens of the sequence.

        Raises:
            GrammarError: the grammar does not allow these tokens.
        """
        self.changes += 1
        self.matcher = None if self.plan.matcher is None else self.plan.matcher.fork()
        self._grammar_start = len(self.tokens) - num_tokens
        for token in self.tokens[self._grammar_start :] if self.matcher is not None else ():
            self.follow(token)

    def follow(self, token: int) -> bool:
        """Advance the grammar by an appended token; return True if the grammar allows no further token.

        Raises:
            GrammarError: the grammar does not allow the token, or exceeded its limits.
        """
        if self.matcher is None:
            return False
        self.matcher.follow(token)
        return self.matcher.is_over

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next and need no sampling."""
        return self.matcher.forced() if self.matcher is not None and self.plan.skips_forced else ()

    def history(self) -> NDArray[np.int32]:
        """Return all tokens, int32 [n]: a view that is valid until the next token."""
        self._sync()
        return self._copy[: self._length]

    # --- for BatchSampler ----------------------------------------------------------------------------------------

    def same_until(self) -> int:
        """Return the length up to which only the position changes in the row's sampling inputs.

        The result is valid for as long as `changes` stays the same; it is 0 if the inputs change with every token.
        """
        params, length = self.plan.params, len(self.tokens)
        reads = self.plan.most_history or self.plan.sequences is not None
        is_own = self.matcher is not None or params.logits_processors or params.mirostat or reads
        if is_own or self._forbidden[0] == length:
            return 0
        changes = [_NO_CHANGE] if self._forbidden[0] < length else [self._forbidden[0]]
        # The length at which min_tokens and min_length are reached.
        reached = max(self.prompt_length + params.min_tokens, params.min_length - self.padding)
        if length < reached:
            changes.append(reached)
        if params.begin_suppress_tokens and self.num_generated == 0:
            changes.append(self.prompt_length + 1)
        return min(changes)

    def window(self) -> tuple[NDArray[np.int32], int]:
        """Return the tokens that the steps use (int32), and the index in them of the first generated token."""
        if self.plan.most_history == 0:
            return _NO_IDS, 0
        self._sync()
        window = self._copy[int(max(0, self._length - self.plan.most_history)) : self._length]
        return window, self.prompt_length - (len(self.tokens) - len(window))

    def _sync(self) -> None:
        """Copy new tokens."""
        self._forget(len(self.tokens))
        new = np.asarray(self.tokens[self._length :], np.int32)
        length = self._length + len(new)
        if length > len(self._copy):
            self._copy = np.concatenate([self._copy, np.empty(max(64, length), np.int32)])
        self._copy[self._length : length] = new
        if self.plan.breakers is not NO_BREAKERS:
            self._breaker_ends += self.plan.breakers.ends(self._copy[:length], self._length)
        self._length = length

    def _forget(self, length: int) -> None:
        """Drop the copies of all tokens from index `length`."""
        if length < self._length:
            self._length = length
            while self._breaker_ends and self._breaker_ends[-1] > length:
                self._breaker_ends.pop()

    @property
    def since_breaker(self) -> int:
        """The number of most recent tokens that DRY may match: those after the last sequence breaker."""
        return self._length - (self._breaker_ends[-1] if self._breaker_ends else 0)

    def edits(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return token ids and the values to add to their logits: the biases, and -inf for tokens not allowed here."""
        masked = []
        plan, params = self.plan, self.plan.params
        edits = [(plan.edit_ids, plan.edit_values)]
        if plan.sequences is not None:
            edits.append(plan.sequences.after(self.tokens))
        if len(plan.not_first) and self.num_generated == 0:
            masked.append(plan.not_first)
        if self.num_generated < params.min_tokens or len(self.tokens) + self.padding < params.min_length:
            masked.append(plan.held_back)
        if self._forbidden[0] == len(self.tokens):
            masked.append(self._forbidden[1])
        edits += [(ids, np.full(len(ids), -np.inf, np.float32)) for ids in masked]
        if len(edits) == 1:
            return edits[0]
        return np.concatenate([ids for ids, _ in edits]), np.concatenate([values for _, values in edits])

    @property
    def asked(self) -> bytes:
        """The plan's steps and settings, with Mirostat's current limit."""
        asked = self.plan.asked
        if not self.plan.params.mirostat:
            return asked
        return asked[:LIMIT_PLACE] + struct.pack("=d", self.surprise_limit) + asked[LIMIT_PLACE + 8 :]

    @property
    def surprise_limit(self) -> float:
        """Mirostat's limit for the next token, in bits."""
        while self._limits and self._limits[-1][0] > len(self.tokens):
            self._limits.pop()
        return self._limits[-1][1] if self._limits else 2.0 * self.plan.params.mirostat_tau

    def steer(self, probability: float) -> None:
        """Update Mirostat's limit for the token after the next, from the next token's probability among those kept."""
        params, limit = self.plan.params, self.surprise_limit
        limit -= params.mirostat_eta * (-float(np.log2(probability)) - params.mirostat_tau)
        self._limits.append((len(self.tokens) + 1, limit))
