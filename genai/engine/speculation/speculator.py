"""The engine's interface to speculative decoding: it proposes draft tokens and records their acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..request import EngineRequest
from ..sampling.plan import RowSampler
from ..sequence import DecoderSequence
from .draft import DraftModel
from .lookup import LookupText, Match, match_history
from .policy import Acceptance, Account, Prospect, StepCosts, choose_depths

DEFAULT_MOST_TOKENS = 16
DRAFT = "draft"
# The assumed initial acceptance rates, by the length of the match, and the assumed initial rate for a draft model.
_CHANCES = {2: 0.2, 3: 0.4, 5: 0.6, 9: 0.8}
_DRAFT_CHANCE = 0.7
# A step's measured duration is capped at this multiple of the expected duration.
_MOST_SURPRISE = 1.5


def first_chance(kind: str, step: int = 0) -> float:
    """Return the prior probability that a draft token is accepted."""
    return _DRAFT_CHANCE if kind == DRAFT else _CHANCES[int(kind)]


class Speculated(Protocol):
    """The part of a request that a speculator uses; see request.EngineRequest."""

    sequence: DecoderSequence
    row: RowSampler
    wants_prompt_logits: bool

    @property
    def max_length(self) -> int:
        """See request.EngineRequest."""


class StepOutcome(NamedTuple):
    """The result of a step's draft tokens for one request.

    Attributes:
        request: the request.
        proposed: number of draft tokens that were computed.
        taken: number of tokens that the request received.
    """

    request: EngineRequest
    proposed: int
    taken: int

    def with_more(self, kept: int) -> StepOutcome:
        """Return the outcome with `kept` more tokens taken."""
        return StepOutcome(self.request, self.proposed, self.taken + kept)


class _Offer(NamedTuple):
    kind: str
    match: Match | None
    most: int


class Speculator:
    """Proposes draft tokens to the sequences of a decoder if they are expected to increase the speed.

    Args:
        lookup: True to look up continuations in the prompt and the reply.
        text: an additional text to look up continuations in.
        draft: a draft model or an MTP head.
        most_tokens: maximum number of draft tokens per sequence and step, at least 1.
        most_rows: maximum number of rows in a step.
    """

    def __init__(
        self,
        *,
        lookup: bool = True,
        text: LookupText | None = None,
        draft: DraftModel | None = None,
        most_tokens: int = DEFAULT_MOST_TOKENS,
        most_rows: int = 256,
    ) -> None:
        self._lookup, self._text, self._draft = lookup, text, draft
        self._most_tokens, self._most_rows = most_tokens, most_rows
        self._costs = StepCosts()
        self._everywhere = Acceptance(first_chance)
        self._acceptance: dict[Speculated, Acceptance] = {}
        self._kinds: dict[Speculated, str] = {}
        self._account = Account()
        self._began = self._spent = 0.0
        self._step = self._pause = 0

    def propose(self, requests: Sequence[Speculated]) -> bool:
        """Propose draft tokens to the requests' sequences, unless the step includes prompts or no speedup is likely.

        Returns:
            True if `settle` is to be called after the step.
        """
        if self._draft is not None:
            self._draft.watch(requests)
        if self._pause:
            self._pause -= 1
            return False
        if not requests or not all(map(takes_guesses, requests)):
            return False
        self._began = time.perf_counter()
        self._kinds = {}
        self._spent = 0.0
        if self._costs.knows(len(requests)):
            if self._draft is not None:
                self._draft.read(requests)
                self._began += self._draft.read_seconds
            offers = [self._offer(request) for request in requests]
            if any(offer.most for offer in offers):
                self._choose(requests, offers)
            self._spent = time.perf_counter() - self._began
        return True

    def settle(self, outcomes: Sequence[StepOutcome]) -> None:
        """Record the outcomes of a step for all its requests."""
        taken = rows = 0
        self._step += 1
        for request, proposed, tokens in outcomes:
            taken, rows = taken + tokens, rows + 1 + proposed
            if (kind := self._kinds.get(request)) is not None:
                kept = tokens - 1
                for acceptance in (self._of(request), self._everywhere):
                    acceptance.note(kind, self._step, kept, rejected=kept < proposed)
        if outcomes:
            self._reckon(len(outcomes), rows, taken)

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        """Record the duration of a step from its proposals to its tokens, without the time spent finding proposals."""
        self._costs.note(sequences, rows, seconds)

    def _reckon(self, sequences: int, rows: int, taken: int) -> None:
        """Update the costs and the account with a step's duration and the time that the step saved."""
        seconds = time.perf_counter() - self._began - self._spent
        plain = self._costs.plain(sequences)
        saved = 0.0
        if plain and rows > sequences:
            # Another program may have used the processor in the meantime, so the measured duration is capped.
            most = _MOST_SURPRISE * self._costs.seconds(sequences, rows)
            saved = plain * taken / sequences - min(seconds, most)
        self.note(sequences, rows, seconds)
        if plain:
            self._account.settle(plain, saved - self._spent)
            self._pause = self._account.wait(plain)

    def forget(self, request: Speculated) -> None:
        """Remove a finished request."""
        self._acceptance.pop(request, None)
        self._kinds.pop(request, None)
        if self._draft is not None:
            self._draft.forget(request)

    def _chance(self, request: Speculated, kind: str) -> float:
        return self._of(request).chance(kind, self._step)

    def _of(self, request: Speculated) -> Acceptance:
        found = self._acceptance.get(request)
        if found is None:
            found = self._acceptance[request] = Acceptance(self._everywhere)
        return found

    def _offer(self, request: Speculated) -> _Offer:
        """Return the best proposal for a request."""
        most = min(self._most_tokens, request.max_length - len(request.sequence.tokens) - 1)
        if most < 1:
            return _Offer("", None, 0)
        match = self._match(request, most)
        room = min(most, self._draft.room(request)) if self._draft is not None else 0
        if match is None:
            return _Offer(DRAFT, None, room)
        kind = str(max(least for least in _CHANCES if least <= match.length))
        if room and self._chance(request, DRAFT) > self._chance(request, kind):
            return _Offer(DRAFT, None, room)
        return _Offer(kind, match, len(match.tokens))

    def _match(self, request: Speculated, most: int) -> Match | None:
        if not self._lookup and self._text is None:
            return None
        history = request.row.history()
        own = _allowed(request, match_history(history, most)) if self._lookup else None
        other = _allowed(request, self._text.match(history, most)) if self._text is not None else None
        if own is None or (other is not None and other.length > own.length):
            return other
        return own

    def _choose(self, requests: Sequence[Speculated], offers: Sequence[_Offer]) -> None:
        prospects = [
            Prospect(offer.most, self._chance(request, offer.kind) if offer.most else 0.0, offer.kind == DRAFT)
            for request, offer in zip(requests, offers, strict=True)
        ]
        depths = choose_depths(prospects, self._most_rows, self._costs.seconds, self._draft_seconds)
        drafted = [index for index, depth in enumerate(depths) if depth and prospects[index].drafted]
        drafts: dict[int, Sequence[int]] = {}
        if self._draft is not None and drafted:
            found = self._draft.draft([requests[index] for index in drafted], [depths[index] for index in drafted])
            drafts = dict(zip(drafted, found, strict=True))
        for index, (request, offer, depth) in enumerate(zip(requests, offers, depths, strict=True)):
            tokens = drafts.get(index, ())
            if offer.match is not None:
                tokens = offer.match.tokens[:depth].tolist()
            elif tokens and request.row.matcher is not None:
                tokens = tokens[: request.row.matcher.num_allowed(tokens)]
            if tokens:
                request.sequence.propose(tokens)
                self._kinds[request] = offer.kind

    def _draft_seconds(self, rows: int) -> float:
        """Return the duration of a draft model's step; 0 if it is not measured yet, so that the model is tried."""
        return 0.0 if self._draft is None else self._draft.costs.plain(rows)


def _allowed(request: Speculated, match: Match | None) -> Match | None:
    """Return the part of a match that the request's grammar allows."""
    if match is None or request.row.matcher is None:
        return match
    count = request.row.matcher.num_allowed(match.tokens.tolist())
    return match._replace(tokens=match.tokens[:count]) if count else None


def takes_guesses(request: Speculated) -> bool:
    """Return True if exactly one token is pending and it is not part of the prompt, which other requests may share."""
    run = request.sequence.pending()
    return run.num_tokens == 1 and not run.prefill and request.row.num_generated > 0 and not request.wants_prompt_logits
