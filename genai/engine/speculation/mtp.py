"""An MTP head: a layer that proposes tokens from the hidden states that the model has computed for a step.

A head predicts the token after the next one. For more than one token, the head is applied to its own hidden states and
proposals. These rows are computed again after the step, with the hidden states of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..hidden_rows import HiddenRows
from ..mtp import HeadSequence
from ..sampling.plan import RowSampler
from .draft import DraftModel, Followed, Follower, common, narrowed, refuse


@dataclass
class _HeadFollower(Follower):
    """A request's sequence in the head.

    Attributes:
        history: all tokens of the request, and the tokens drafted after them; read by `row`.
        start: index of the model's token whose hidden state is the first row of the sequence.
        num_known: number of tokens of the sequence that have hidden states of the model.
        is_ready: True if the sequence has all tokens of the request.
        may_resume: True until the sequence has tokens; its first tokens may be in the prefix cache.
    """

    history: list[int] = field(default_factory=list)
    start: int = 0
    num_known: int = 0
    is_ready: bool = False
    may_resume: bool = True

    @property
    def head(self) -> HeadSequence:
        """The sequence."""
        assert isinstance(self.sequence, HeadSequence)
        return self.sequence


class MtpProposer(DraftModel):
    """Drafts tokens with an MTP head.

    Requests whose hidden states are missing, such as those of a cached prefix, are drafted for with the later ones.

    Args:
        decoder, sampler: the head's decoder and sampler.
        context_size: maximum number of tokens in a sequence of the head.
        vocab_size: vocabulary size of the model.
    """

    def watch(self, requests: Sequence[Followed]) -> None:
        for request in requests:
            if request.sequence.hidden is None:
                request.sequence.hidden = HiddenRows()

    def _note_read(self, own: Follower) -> None:
        # `draft` computes the last token again, because it needs its logits.
        own.sequence.truncate(len(own.sequence.tokens) - 1)

    def forget(self, request: Followed) -> None:
        own = self._followers.get(request)
        if isinstance(own, _HeadFollower):
            own.head.cut(own.num_known)  # the rows of drafted tokens have hidden states of the head
        super().forget(request)

    def room(self, request: Followed) -> int:
        own = self._followers.get(request)
        return super().room(request) if isinstance(own, _HeadFollower) and own.is_ready else 0

    def _extend(self, one: Follower, token: int) -> None:
        assert isinstance(one, _HeadFollower)
        last = len(one.head.tokens)
        assert one.head.hidden is not None
        one.history.append(token)
        one.head.feed([token], one.head.hidden.take(last - 1, last))

    def _follow(self, request: Followed) -> Follower:
        own = self._followers.get(request)
        if own is None:
            own = self._followers[request] = self._begin(request)
        assert isinstance(own, _HeadFollower)
        if own.refused:
            return own
        target = request.sequence
        rows, want = target.hidden, target.tokens
        same = common(own.history, want)
        if same < len(own.history):
            del own.history[same:]
            own.row.rewind(same)
        own.history += want[same:]
        own.head.cut(min(own.num_known, max(same - own.start - 1, 0)))
        if rows is not None:
            self._feed(own, rows, want, min(int(target.num_computed), len(want) - 1, rows.end))
        own.num_known = len(own.head.tokens)
        own.is_ready = own.start + own.num_known == len(want) - 1
        return own

    def _feed(self, own: _HeadFollower, rows: HiddenRows, want: Sequence[int], end: int) -> None:
        """Append the tokens of the model's hidden states up to `end` to the head's sequence."""
        first = own.start + len(own.head.tokens)
        if rows.first > first or not own.head.tokens:
            own.head.cut(0)
            first = own.start = rows.first
            own.head.is_whole = False
            if own.may_resume and rows.first < end < self._context_size:
                own.may_resume = False
                if own.head.feed_first(want[1 : end + 1], rows):
                    own.start, first = 0, end
                    own.head.is_whole = True
                    rows.drop(end)
        if end - own.start >= self._context_size:
            refuse([own])
        elif first < end:
            own.head.feed(want[first + 1 : end + 1], rows.take(first, end))
            rows.drop(end)

    def _begin(self, request: Followed) -> Follower:
        row, history = request.row, list[int]()
        plan = narrowed(row.plan, self._decoder.vocab_size)
        mine = RowSampler(plan, history, seed=row.seed, row=row.row, prompt_length=row.prompt_length)
        own = _HeadFollower(self._decoder.open(), mine, history=history)
        target = request.sequence
        adapters = b"" if target.adapters is None else target.adapters.key
        own.sequence.cache_salt = b"%d/%s/%s" % (target.tokens[0], adapters, target.cache_salt)
        return own
