"""A request's options, made ready for the sampling kernel; and what one sequence remembers from token to token."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from genai.kernels.sampling import ASKED, LIMIT_PLACE, MAX_STEPS, Setting, Step, is_plain

from ...errors import OptionError
from .guidance import Matcher
from .option_rules import MOST_TOKENS, SAMPLERS
from .params import NEUTRAL, SamplingParams


@dataclass(frozen=True)
class SamplingPlan:
    """What a request asks for, made ready once; all its rows share it. Made by `plan_sampling`.

    Attributes:
        params: the options.
        asked: its steps and settings, as in `genai.kernels.sampling.ROW`. is_plain: see there.
        stop_ids: tokens that end the output, EOS included.
        breakers: sequences of tokens that DRY does not reach across, by their last token.
        edit_ids, edit_values: int32 and float32, the logit bias.
        held_back: int32, the tokens that may not be chosen before the output is long enough.
        most_history: how many tokens back the steps look; infinite = all.
        matcher: at the beginning of the grammar, if there is one. skips_forced: whether tokens that it leaves no
            choice about are appended without being sampled; not where something else is asked about each token.
    """

    params: SamplingParams
    asked: bytes
    is_plain: bool
    stop_ids: frozenset[int]
    breakers: Mapping[int, Sequence[tuple[int, ...]]]
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]
    held_back: NDArray[np.int32]
    most_history: float
    matcher: Matcher | None = None
    skips_forced: bool = False


def plan_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    breakers: Sequence[Sequence[int]] = (),
    matcher: Matcher | None = None,
) -> SamplingPlan:
    """Make a request's options ready.

    Args:
        params: the options.
        vocab_size: logits per row.
        eos_token_ids: tokens that end a sequence of this model.
        breakers: DRY's sequence breakers as tokens, see `breakers.breaker_tokens`.
        matcher: at the beginning of the grammar that the output matches, if there is one.

    Raises:
        OptionError: a token id, or a number of alternatives, that the vocabulary does not have.
    """
    biases = dict(params.logit_bias)
    _check_ids("logit_bias", biases, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            what = f"the vocabulary has {vocab_size} tokens"
            raise OptionError(f"{name} = {count}", what, f"use 0 to {vocab_size}")
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    held_back = sorted(token for token in stop_ids | frozenset(eos_token_ids) if 0 <= token < vocab_size)
    steps, settings = _steps(params), _settings(params)
    by_last: dict[int, list[tuple[int, ...]]] = {}
    for breaker in breakers:
        by_last.setdefault(breaker[-1], []).append(tuple(breaker))
    return SamplingPlan(
        params=params,
        asked=ASKED.pack(*steps, *[Step.END] * (MAX_STEPS - len(steps)), *settings),
        is_plain=is_plain(steps, settings),
        stop_ids=stop_ids,
        breakers=by_last,
        edit_ids=np.asarray([*biases], np.int32),
        edit_values=np.asarray([*biases.values()], np.float32),
        held_back=np.asarray(held_back, np.int32),
        most_history=_most_history(steps, settings),
        matcher=matcher,
        skips_forced=_skips_forced(params),
    )


def _skips_forced(params: SamplingParams) -> bool:
    """Whether nothing but the token itself comes of choosing one that is the only one left."""
    asks = params.logprobs is not None or params.mirostat or params.logits_processors or params.no_repeat_ngram_size
    forbids = params.banned_strings or -math.inf in dict(params.logit_bias).values()
    return not (asks or forbids)


def request_seed(params: SamplingParams) -> int:
    """The seed that all samples of a request share: its own, or a new one."""
    return secrets.randbits(64) if params.seed is None else params.seed


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise OptionError(
                f"{name} names token {token}", f"the vocabulary has {vocab_size} tokens", f"use 0 to {vocab_size - 1}"
            )


def _steps(params: SamplingParams) -> list[int]:
    """The samplers that do something, in order."""
    asked = {name for name, value in params.as_dict().items() if value != NEUTRAL[name]}
    active = {name for name, options in SAMPLERS.items() if not asked.isdisjoint(options)}
    if params.temperature == 0:
        active &= {"penalties", "dry"}  # only what changes the order of the tokens matters to the most likely one
    steps: list[int] = [Step[name.upper()] for name in params.samplers if name in active]
    return [*steps, Step.MIROSTAT] if params.mirostat else steps


def _settings(params: SamplingParams) -> NDArray[np.float64]:
    options = {**params.as_dict(), "mirostat_limit": 0.0}
    return np.array([_number(options[setting.name.lower()]) for setting in Setting])


def _number(option: float | None) -> float:
    """An option as machine code takes it."""
    if option is None:
        return math.inf
    return float(min(option, MOST_TOKENS)) if isinstance(option, int) else option


def _most_history(steps: Sequence[int], settings: NDArray[np.float64]) -> float:
    last: dict[int, float] = {Step.PENALTIES: settings[Setting.PENALTY_LAST_N], Step.DRY: settings[Setting.DRY_LAST_N]}
    if settings[Setting.NO_REPEAT_NGRAM_SIZE]:
        return math.inf
    return max([0.0, *(last[step] for step in steps if step in last)])


def breaker_tokens(
    breakers: Sequence[str], vocabulary: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens in which a sequence breaker may appear, as llama.cpp finds them.

    A token whose text holds the breaker is one by itself. A token that ends with a beginning of it is one together with
    the tokens of the rest.

    Args:
        breakers: texts, see SamplingParams.dry_sequence_breakers.
        vocabulary: the text of each token id, as it appears in the output.
        encode: tokens of a text, without special tokens.

    Raises:
        OptionError: a breaker that no token can begin, so that it would never take effect.
    """
    found: dict[tuple[int, ...], None] = {}
    for breaker in breakers:
        before = len(found)
        rests: dict[str, tuple[int, ...]] = {}
        for token, text in enumerate(vocabulary):
            if breaker in text:
                found[(token,)] = None
                continue
            for length in range(min(len(text), len(breaker) - 1), 0, -1):
                if text.endswith(breaker[:length]):
                    rest = breaker[length:]
                    if rest not in rests:
                        rests[rest] = tuple(encode(rest))
                    if rests[rest]:
                        found[(token, *rests[rest])] = None
        if len(found) == before and not any(breaker in text for text in vocabulary):
            raise OptionError(
                f"dry_sequence_breakers holds {breaker!r}", "no token of the vocabulary begins it", "leave it out"
            )
    return tuple(found)


FinishReason = Literal["stop", "length"]
_NO_IDS = np.empty(0, np.int32)
_NO_CHANGE = 2**62


class RowSampler:
    """One sequence's side of sampling.

    Args:
        plan: what its request asks for.
        tokens: the sequence's own list, prompt and output, read at every step. Its owner appends to it, and says so
            when it takes tokens back (`rewind`).
        seed: of the request's random numbers, 0 to 2 ** 64 - 1.
        row: the sample's number inside the request.
        prompt_length: how many tokens at the start are the prompt; None = all that are there now.

    Attributes:
        changes: counts what changed besides the tokens that were appended.
        matcher: its place in the grammar; its owner says what is appended (`follow`).
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
        # An int32 copy of the tokens, as many as `_length`, and the places in it where sequence breakers end.
        self._copy, self._length = _NO_IDS, 0
        self._breaker_ends: list[int] = []
        self._forbidden: tuple[int, NDArray[np.int32]] = (-1, _NO_IDS)
        # Mirostat's limit from a position on. It depends on the tokens before, so that later ones are dropped when the
        # sequence is shorter again.
        self._limits: list[tuple[int, float]] = []

    @property
    def padding(self) -> int:
        """Places of a padded row that hold no token, and count in min_length."""
        return self._padding

    @padding.setter
    def padding(self, count: int) -> None:
        self._padding = count
        self.changes += 1

    @property
    def num_generated(self) -> int:
        """Output tokens so far; 0 also where the sequence was cut inside the prompt."""
        return max(0, len(self.tokens) - self.prompt_length)

    def rewind(self, length: int, forbidden: Collection[int] = ()) -> None:
        """The sequence was cut to `length` tokens.

        Args:
            forbidden: token ids that may not be chosen at that place (until the next rewind).
        """
        self.changes += 1
        self._forget(length)
        if self.matcher is not None:
            self._grammar_start = min(self._grammar_start, length)
            self.matcher.rewind(length - self._grammar_start)
        self._forbidden = (length, np.asarray(sorted(forbidden), np.int32))

    @property
    def forbidden_now(self) -> tuple[int, ...]:
        """Token ids that a rewind forbids at the next place."""
        return tuple(self._forbidden[1].tolist()) if self._forbidden[0] == len(self.tokens) else ()

    def restore(self, surprise_limit: float | None, forbidden: Collection[int]) -> None:
        """Go on as a row did that had the same tokens: Mirostat's limit and forbidden ids of the next place."""
        self.changes += 1
        if surprise_limit is not None:
            self._limits = [(len(self.tokens), surprise_limit)]
        self._forbidden = (len(self.tokens), np.asarray(sorted(forbidden), np.int32))

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether the output ends with `token`, just chosen and not appended yet: at a stop token, or being full."""
        if token in self.plan.stop_ids:
            return "stop"
        most = self.plan.params.max_tokens
        return "length" if most is not None and self.num_generated + 1 >= most else None

    def begin_grammar(self, num_tokens: int = 0) -> None:
        """Let the grammar, where there is one, begin in front of the last `num_tokens` of those that are there now.

        Raises:
            GrammarError: it does not allow these.
        """
        self.changes += 1
        self.matcher = None if self.plan.matcher is None else self.plan.matcher.fork()
        self._grammar_start = len(self.tokens) - num_tokens
        for token in self.tokens[self._grammar_start :] if self.matcher is not None else ():
            self.follow(token)

    def follow(self, token: int) -> bool:
        """A token was appended; whether the grammar allows nothing behind it.

        Raises:
            GrammarError: it does not allow the token, or took more than its limits.
        """
        if self.matcher is None:
            return False
        self.matcher.follow(token)
        return self.matcher.is_over

    def forced(self) -> Sequence[int]:
        """Tokens that must come next and need not be sampled."""
        return self.matcher.forced() if self.matcher is not None and self.plan.skips_forced else ()

    def history(self) -> NDArray[np.int32]:
        """All tokens, int32 [n]: a view that is good until the next token."""
        self._sync()
        return self._copy[: self._length]

    # --- for BatchSampler ----------------------------------------------------------------------------------------

    def same_until(self) -> int:
        """As long as there are fewer tokens than this, and `changes` stays, the next ones are asked for in the same way
        but for their position; 0 = every token is asked for in its own way.
        """
        params, length = self.plan.params, len(self.tokens)
        is_own = self.matcher is not None or params.logits_processors or params.mirostat or self.plan.most_history
        if is_own or self._forbidden[0] == length:
            return 0
        changes = [_NO_CHANGE] if self._forbidden[0] < length else [self._forbidden[0]]
        # Where min_tokens and min_length are reached.
        reached = max(self.prompt_length + params.min_tokens, params.min_length - self.padding)
        if length < reached:
            changes.append(reached)
        return min(changes)

    def window(self) -> tuple[NDArray[np.int32], int]:
        """The tokens that the steps look at (int32), and the index of the first generated one among them."""
        if self.plan.most_history == 0:
            return _NO_IDS, 0
        self._sync()
        window = self._copy[int(max(0, self._length - self.plan.most_history)) : self._length]
        return window, self.prompt_length - (len(self.tokens) - len(window))

    def _sync(self) -> None:
        """Copy what is new."""
        self._forget(len(self.tokens))
        new = np.asarray(self.tokens[self._length :], np.int32)
        length = self._length + len(new)
        if length > len(self._copy):
            self._copy = np.concatenate([self._copy, np.empty(max(64, length), np.int32)])
        self._copy[self._length : length] = new
        if self.plan.breakers:
            for end, token in enumerate(new.tolist(), self._length + 1):
                if self._ends_breaker(token, end):
                    self._breaker_ends.append(end)
        self._length = length

    def _ends_breaker(self, token: int, end: int) -> bool:
        return any(
            end >= len(breaker) and tuple(self._copy[end - len(breaker) : end].tolist()) == breaker
            for breaker in self.plan.breakers.get(token, ())
        )

    def _forget(self, length: int) -> None:
        """Forget the copies of all tokens from `length` on."""
        if length < self._length:
            self._length = length
            while self._breaker_ends and self._breaker_ends[-1] > length:
                self._breaker_ends.pop()

    @property
    def since_breaker(self) -> int:
        """How many of the window's last tokens DRY may match: those that follow the last sequence breaker."""
        return self._length - (self._breaker_ends[-1] if self._breaker_ends else 0)

    def edits(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and what is added to their logits: the bias, and -inf for tokens that may not come here."""
        masked = []
        params = self.plan.params
        if self.num_generated < params.min_tokens or len(self.tokens) + self.padding < params.min_length:
            masked.append(self.plan.held_back)
        if self._forbidden[0] == len(self.tokens):
            masked.append(self._forbidden[1])
        if not masked:
            return self.plan.edit_ids, self.plan.edit_values
        ids = np.concatenate([self.plan.edit_ids, *masked])
        values = np.full(len(ids), -np.inf, np.float32)
        values[: len(self.plan.edit_values)] = self.plan.edit_values
        return ids, values

    @property
    def asked(self) -> bytes:
        """The plan's, with Mirostat's limit."""
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
        """Set Mirostat's limit for the token after the next, whose probability among those kept was this."""
        params, limit = self.plan.params, self.surprise_limit
        limit -= params.mirostat_eta * (-float(np.log2(probability)) - params.mirostat_tau)
        self._limits.append((len(self.tokens) + 1, limit))
