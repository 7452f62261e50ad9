"""What the engine asks for proposals, and tells how they fared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..sampling.plan import RowSampler
from .draft import DraftModel
from .lookup import LookupText, Match, match_history
from .policy import Acceptance, Account, Prospect, StepCosts, choose_depths

DEFAULT_MOST_TOKENS = 16
DRAFT = "draft"
# What to expect of proposals before there is experience, by how many tokens agreed; and of a draft model's.
_CHANCES = {2: 0.2, 3: 0.4, 5: 0.6, 9: 0.8}
_DRAFT_CHANCE = 0.7
# So many times what was expected is the most that a step is taken to have lasted.
_MOST_SURPRISE = 1.5


def first_chance(kind: str, step: int = 0) -> float:
    """The probability that a proposal is kept, before there is experience."""
    return _DRAFT_CHANCE if kind == DRAFT else _CHANCES[int(kind)]


class Speculated(Protocol):
    """What is seen of a job, see engine.Job."""

    sequence: Any
    row: RowSampler
    wants_prompt_logits: bool

    @property
    def max_length(self) -> int:
        """See engine.Job."""


class StepOutcome(NamedTuple):
    """A step's proposals to one job.

    Attributes:
        proposed: how many were computed. taken: tokens that the job was given.
    """

    job: Any
    proposed: int
    taken: int

    def with_more(self, kept: int) -> StepOutcome:
        """The same with so many more tokens taken."""
        return StepOutcome(self.job, self.proposed, self.taken + kept)


class _Offer(NamedTuple):
    kind: str
    match: Match | None
    most: int


class Speculator:
    """Proposes tokens to the sequences of a decoder, as far as that is expected to be faster.

    Args:
        lookup: whether the prompt and the reply are looked through. text: one to look through as well.
        draft: a draft model.
        most_tokens: to propose to a sequence in one step, at least 1.
        most_rows: of a step.
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

    def propose(self, jobs: Sequence[Speculated]) -> bool:
        """Set the proposals of the jobs' sequences; none where the step also reads prompts, or nothing is gained.

        Returns:
            Whether it wants to hear how the step went, see settle.
        """
        if self._pause:
            self._pause -= 1
            return False
        if not jobs or not all(map(takes_guesses, jobs)):
            return False
        self._began = time.perf_counter()
        self._kinds = {}
        self._spent = 0.0
        if self._costs.knows(len(jobs)):
            if self._draft is not None:
                self._draft.read(jobs)
                self._began += self._draft.read_seconds
            offers = [self._offer(job) for job in jobs]
            if any(offer.most for offer in offers):
                self._choose(jobs, offers)
            self._spent = time.perf_counter() - self._began
        return True

    def settle(self, outcomes: Sequence[StepOutcome]) -> None:
        """A step is over, for all its jobs."""
        taken = rows = 0
        self._step += 1
        for job, proposed, tokens in outcomes:
            taken, rows = taken + tokens, rows + 1 + proposed
            if (kind := self._kinds.get(job)) is not None:
                kept = tokens - 1
                for acceptance in (self._of(job), self._everywhere):
                    acceptance.note(kind, self._step, kept, rejected=kept < proposed)
        if outcomes:
            self._reckon(len(outcomes), rows, taken)

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        """A step took so long, from its proposals to its tokens, without looking for proposals."""
        self._costs.note(sequences, rows, seconds)

    def _reckon(self, sequences: int, rows: int, taken: int) -> None:
        """What the step took, and what it saved."""
        seconds = time.perf_counter() - self._began - self._spent
        plain = self._costs.plain(sequences)
        saved = 0.0
        if plain and rows > sequences:
            # Something else may have had the processor meanwhile: that is no reason to stop.
            most = _MOST_SURPRISE * self._costs.seconds(sequences, rows)
            saved = plain * taken / sequences - min(seconds, most)
        self.note(sequences, rows, seconds)
        if plain:
            self._account.settle(plain, saved - self._spent)
            self._pause = self._account.wait(plain)

    def forget(self, job: Speculated) -> None:
        """A job is over."""
        self._acceptance.pop(job, None)
        self._kinds.pop(job, None)
        if self._draft is not None:
            self._draft.forget(job)

    def _chance(self, job: Speculated, kind: str) -> float:
        return self._of(job).chance(kind, self._step)

    def _of(self, job: Speculated) -> Acceptance:
        found = self._acceptance.get(job)
        if found is None:
            found = self._acceptance[job] = Acceptance(self._everywhere)
        return found

    def _offer(self, job: Speculated) -> _Offer:
        """The best that could be proposed to a job."""
        most = min(self._most_tokens, job.max_length - len(job.sequence.tokens) - 1)
        if most < 1:
            return _Offer("", None, 0)
        match = self._match(job, most)
        room = min(most, self._draft.room(job)) if self._draft is not None else 0
        if match is None:
            return _Offer(DRAFT, None, room)
        kind = str(max(least for least in _CHANCES if least <= match.length))
        if room and self._chance(job, DRAFT) > self._chance(job, kind):
            return _Offer(DRAFT, None, room)
        return _Offer(kind, match, len(match.tokens))

    def _match(self, job: Speculated, most: int) -> Match | None:
        if not self._lookup and self._text is None:
            return None
        history = job.row.history()
        own = _allowed(job, match_history(history, most)) if self._lookup else None
        other = _allowed(job, self._text.match(history, most)) if self._text is not None else None
        if own is None or (other is not None and other.length > own.length):
            return other
        return own

    def _choose(self, jobs: Sequence[Speculated], offers: Sequence[_Offer]) -> None:
        prospects = [
            Prospect(offer.most, self._chance(job, offer.kind) if offer.most else 0.0, offer.kind == DRAFT)
            for job, offer in zip(jobs, offers, strict=True)
        ]
        depths = choose_depths(prospects, self._most_rows, self._costs.seconds, self._draft_seconds)
        drafted = [index for index, depth in enumerate(depths) if depth and prospects[index].drafted]
        drafts: dict[int, Sequence[int]] = {}
        if self._draft is not None and drafted:
            found = self._draft.draft([jobs[index] for index in drafted], [depths[index] for index in drafted])
            drafts = dict(zip(drafted, found, strict=True))
        for index, (job, offer, depth) in enumerate(zip(jobs, offers, depths, strict=True)):
            tokens = drafts.get(index, ())
            if offer.match is not None:
                tokens = offer.match.tokens[:depth].tolist()
            elif tokens and job.row.matcher is not None:
                tokens = tokens[: job.row.matcher.num_allowed(tokens)]
            if tokens:
                job.sequence.propose(tokens)
                self._kinds[job] = offer.kind

    def _draft_seconds(self, rows: int) -> float:
        """Of a step of the draft model; what was never measured is tried."""
        return 0.0 if self._draft is None else self._draft.costs.plain(rows)


def _allowed(job: Speculated, match: Match | None) -> Match | None:
    """As much of a match as the job's grammar allows."""
    if match is None or job.row.matcher is None:
        return match
    count = job.row.matcher.num_allowed(match.tokens.tolist())
    return match._replace(tokens=match.tokens[:count]) if count else None


def takes_guesses(job: Speculated) -> bool:
    """Whether its last token alone is to be computed, and is not the prompt's: what that gives is shared."""
    run = job.sequence.pending()
    return run.num_tokens == 1 and not run.prefill and job.row.num_generated > 0 and not job.wants_prompt_logits
