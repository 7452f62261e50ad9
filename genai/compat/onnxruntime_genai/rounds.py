"""Speculative decoding in a Generator: in rounds, as onnxruntime-genai counts them, with one visible token per call.

A round proposes tokens, verifies them in one step, and buffers all tokens that it has chosen. Each call then shows one
of them. The buffered tokens are already part of the batch's sequence, which is therefore ahead of the tokens that are
shown. To discard the buffer, the sequence is cut to the shown tokens. Since a token depends only on its position, its
sequence and the seed, the same tokens are chosen again, and every token is the same as without speculation.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.sampling.plan import RowSampler
from ...engine.sequence import DecoderSequence, Logits
from ...engine.speculation.draft import DraftModel
from ...engine.speculation.lookup import match_ngram
from ...engine.static_batch import StaticBatch, Verified
from ...errors import OptionError, UnsupportedModelError
from ...models.draft_block import slides
from ...models.model import Model
from .draft_width import Cooldown, DraftWidth
from .round_counts import RoundCounts


class Rounds:
    """The rounds of a batch of one sequence, and their counters.

    Args:
        batch: the batch.
        options: the values of all SPECULATIVE_OPTIONS.
        max_length: maximum number of tokens in the sequence.
        draft: the draft model; None = the n-gram lookup proposes tokens.
        appends_forced: True if tokens that the grammar determines are appended without being chosen.
        switch: a length at which a round ends, because the model switches to other RoPE tables; None = none.

    Attributes:
        follows_prompt: True if tokens were appended since the last chosen token.
    """

    def __init__(
        self,
        batch: StaticBatch,
        options: Mapping[str, Any],
        *,
        max_length: int,
        draft: Model | None = None,
        appends_forced: bool = False,
        switch: int | None = None,
    ) -> None:
        self._batch, self._options, self._max_length = batch, options, max_length
        self._draft_model, self._appends_forced, self._switch = draft, appends_forced, switch
        self._draft = None
        if draft is not None:
            limits = {"context_size": draft.context_size, "vocab_size": batch.decoder.vocab_size}
            self._draft = DraftModel(draft.decoder, draft.sampler, **limits)
        self._width = DraftWidth(options["max_draft_tokens"], options["min_adaptive_k"])
        self._cooldown = Cooldown(options["cooldown"])
        self.follows_prompt = False
        self._counts = RoundCounts()
        self._buffer: deque[int] = deque()
        # The current round: its number of proposed tokens, or 0 if the buffered tokens belong to no round; the result
        # of its verification; True if its proposals filled the width; its number of shown tokens; and its milliseconds.
        self._num_proposed, self._verified = 0, _NOTHING
        self._is_full, self._num_shown, self._ms = False, 0, 0.0
        self._widths: Counter[int] = Counter()
        self._had_grammar = False
        self._num_known = 0  # the number of tokens in the text that the lookup searches

    def fork(self, batch: StaticBatch) -> Rounds:
        """Return the rounds of a fork of the batch, which is cut to the shown tokens; its counters start at 0."""
        options: dict[str, Any] = {"max_length": self._max_length, "appends_forced": self._appends_forced}
        return Rounds(batch, self._options, draft=self._draft_model, switch=self._switch, **options)

    # --- the part of a request that a draft model reads --------------------------------------------------------------

    @property
    def sequence(self) -> DecoderSequence:
        """The sequence, with all buffered tokens."""
        return self._batch.sequences[0]

    @property
    def row(self) -> RowSampler:
        """The sampler of the sequence."""
        return self._batch.rows[0]

    # --- calls of the Generator ---------------------------------------------------------------------------------------

    def next(self, length: int) -> int:
        """Return the next token, after computing a round if no token is buffered. A stop token ends the sequence.

        Args:
            length: number of shown tokens.

        Raises:
            The same errors as StaticBatch.step.
        """
        # The tokens that were computed last without speculation.
        start = length - 1 if self._buffer else min(self.sequence.num_computed, length - 1)
        ranges = self._batch.ranges if self.follows_prompt else {0: (start, length)}
        self.follows_prompt = False
        if not self._buffer:
            self._begin(length)
        token = self._take(length)
        self._batch.ranges = ranges
        return token

    def _take(self, length: int) -> int:
        """Take the next token from the buffer."""
        token = self._buffer.popleft()
        if token in self.row.plan.stop_ids:
            self._counts.tokens_discarded += bool(self._num_proposed)
            self._interrupt()
            self._cut(length)
            self._batch.ended = [True]
            return token
        self._num_shown += 1
        self._counts.tokens_emitted += bool(self._num_proposed)
        if self._buffer and length + 1 in (self._max_length, self._switch):
            self.discard(length + 1)
        elif not self._buffer:
            self._complete(length + 1)
        return token

    def discard(self, length: int) -> bool:
        """Discard the buffered tokens, of which none are shown yet, and return True if there were any.

        Args:
            length: number of shown tokens.
        """
        if not self._buffer:
            return False
        self._interrupt()
        self._cut(length)
        self._num_known = min(self._num_known, length)
        return True

    def _cut(self, length: int) -> None:
        """Cut the sequence to the shown tokens, which does not change what was computed last."""
        ranges = self._batch.ranges
        self._batch.rewind([length])
        self._batch.ranges = ranges

    def settle(self, length: int) -> None:
        """Discard the buffered tokens, if any, and compute the logits after the shown tokens if they are not known."""
        discarded, ranges = self.discard(length), self._batch.ranges
        with self.reconciling() if discarded else nullcontext():
            self._batch.logits([0])
        self._batch.ranges = ranges

    @contextmanager
    def reconciling(self) -> Iterator[None]:
        """Count a step that also computes tokens again after the buffer was discarded."""
        began = time.perf_counter()
        yield
        self._counts.target_reconciliation_forward_passes += 1
        self._counts.total_reconciliation_ms += _since(began)

    def reset(self) -> None:
        """Start again after the sequence was cut or replaced: drop the buffer, and everything that was learnt."""
        if self._buffer:
            self._interrupt()
        self._width.reset()
        self._cooldown.reset()
        self._num_known, self.follows_prompt = 0, False
        if self._draft is not None:
            self._draft.forget(self)

    def interrupt(self) -> None:
        """Cancel the draft model's current step, from any thread."""
        if self._draft is not None:
            self._draft.interrupt()

    def logits(self, length: int) -> Logits | None:
        """Return the logits after the shown tokens, [1, V], if the current round has computed them."""
        at = length - self._verified.first_length
        if not self._buffer or not 0 <= at < len(self._verified.logits):
            return None
        self._batch.ranges = {0: (length - 1, length)}
        return self._verified.logits[at : at + 1]

    def stats(self) -> dict[str, Any]:
        """Return the counters; see Generator.get_speculative_stats."""
        width, cooldown = self._width, self._cooldown
        counts = replace(
            self._counts,
            active_rounds=int(self._num_proposed > 0),
            tokens_buffered=len(self._buffer) if self._num_proposed else 0,
            draft_forward_passes=self._draft.num_drafted if self._draft is not None else 0,
            effective_k=width.current,
            adaptive_k_increases=width.increases,
            adaptive_k_decreases=width.decreases,
            adaptive_k_observations=width.observations,
            adaptive_k_probes=width.probes,
            cooldown_entries=cooldown.entries,
            cooldown_steps=cooldown.steps,
            cooldown_remaining=cooldown.remaining,
        )
        return counts.stats(speed=width.speed, widths=None if self._had_grammar else self._widths)

    # --- a round ------------------------------------------------------------------------------------------------------

    def _begin(self, length: int) -> None:
        """Fill the buffer with the tokens of a round, or with the token of a step without proposals."""
        room = self._max_length - length
        forced = self._batch.append_forced(room) if self._appends_forced else []
        self._buffer.extend(forced)
        if len(forced) == room:
            return
        if self._cooldown.remaining:
            self._step()
            self._cooldown.complete_step()
            return
        width = min(self._width.current, room - len(forced))
        if self._switch is not None and (ahead := self._switch - length - len(forced)) > 0:
            width = min(width, max(ahead - 1, 1))
        if self._draft is not None:
            self._draft.catch_up(self)
        began = time.perf_counter()
        proposed = self._drafted(width) if self._draft is not None else self._found(width)
        self._counts.total_draft_ms += _since(began)
        if proposed:
            self._verify(proposed, began)
        else:
            self._step()

    def _step(self) -> None:
        """Choose one token without proposals."""
        found = self._batch.verify([])
        self._counts.standard_fallback_steps += 1
        self._counts.target_reanchor_forward_passes += found.num_steps
        self._counts.total_target_reanchor_ms += 1e3 * found.seconds
        self._buffer.extend(found.tokens)

    def _verify(self, proposed: list[int], began: float) -> None:
        """Choose the tokens of a round."""
        found, counts = self._batch.verify(proposed, appends_forced=self._appends_forced), self._counts
        self._buffer.extend(found.tokens)
        rejected = found.num_evaluated - found.num_accepted
        more = len(found.tokens) - found.num_forced - found.num_accepted
        counts.rounds += 1
        counts.draft_tokens_proposed += len(proposed)
        counts.draft_tokens_evaluated += found.num_evaluated
        counts.draft_tokens_accepted += found.num_accepted
        counts.correction_tokens += rejected
        counts.bonus_tokens += more - rejected
        counts.tokens_queued += len(self._buffer)
        counts.target_verify_forward_passes += found.num_steps
        counts.total_target_verify_ms += 1e3 * found.seconds
        self._widths[len(proposed)] += 1
        self._had_grammar |= self.row.matcher is not None
        self._num_proposed, self._verified, self._num_shown = len(proposed), found, 0
        self._is_full, self._ms = len(proposed) == self._width.current, _since(began)

    def _complete(self, length: int) -> None:
        """Record that all tokens of the round are shown."""
        proposed, found, counts = self._num_proposed, self._verified, self._counts
        self._num_proposed, self._verified = 0, _NOTHING
        if not proposed:
            return
        counts.completed_rounds += 1
        if found.num_evaluated:
            counts.zero_accept_rounds += found.num_accepted == 0
            counts.full_accept_rounds += found.num_accepted == found.num_evaluated
            counts.partial_accept_rounds += 0 < found.num_accepted < found.num_evaluated
        taken = {"evaluated": found.num_evaluated, "accepted": found.num_accepted}
        self._cooldown.note(is_least=proposed == self._width.least, **taken)
        if self._is_full:
            self._width.note(proposed, tokens=self._num_shown, milliseconds=self._ms, **taken)
        if self._draft is None and length < self._max_length:
            self._read_history()
        if self._switch == length + 1:  # a round from here would compute tokens on both sides of the switch
            began = time.perf_counter()
            self._batch.logits([0])
            counts.target_reanchor_forward_passes += 1
            counts.total_target_reanchor_ms += _since(began)

    def _interrupt(self) -> None:
        """Empty the buffer, whose tokens are not shown."""
        if self._num_proposed:
            self._counts.interrupted_rounds += 1
            self._counts.tokens_discarded += len(self._buffer)
        self._buffer.clear()
        self._num_proposed, self._verified = 0, _NOTHING

    # --- proposals ----------------------------------------------------------------------------------------------------

    def _drafted(self, width: int) -> list[int]:
        """Return up to `width` tokens of the draft model; none if it has no room."""
        assert self._draft is not None
        room = min(width, self._draft.room(self))
        (tokens,) = self._draft.draft([self], [room]) if room else [[]]
        return tokens[: self._num_allowed(tokens)]

    def _found(self, width: int) -> list[int]:
        """Return up to `width` tokens of the n-gram lookup, up to the first one that the grammar forbids."""
        counts, history = self._counts, self._read_history()
        began = time.perf_counter()
        chained = self._options["ngram_chained_lookup"]
        candidates = match_ngram(history, self._options["ngram_size"], width, chained=chained)
        tokens = candidates[: self._num_allowed(candidates)]
        counts.total_ngram_lookup_ms += _since(began)
        counts.ngram_lookup_hits += bool(candidates)
        counts.ngram_lookup_misses += not candidates
        counts.ngram_lookup_tokens_proposed += len(tokens)
        counts.ngram_chained_tokens_proposed += max(len(tokens) - 1, 0) if chained else 0
        counts.ngram_grammar_candidate_rejections += len(tokens) < len(candidates)
        return tokens

    def _num_allowed(self, tokens: list[int]) -> int:
        """Return the number of leading tokens that the grammar allows."""
        matcher = self.row.matcher
        return len(tokens) if matcher is None else matcher.num_allowed(tokens)

    def _read_history(self) -> NDArray[np.int32]:
        """Return the text that the lookup searches, int32 [n], after adding new tokens to it."""
        began, counts = time.perf_counter(), self._counts
        history = self.row.history()
        if added := len(history) - self._num_known:
            counts.ngram_history_syncs += 1
            counts.ngram_history_tokens_synced += added
            counts.total_ngram_history_sync_ms += _since(began)
        self._num_known = len(history)
        return history


def is_speculative(model: Model, search: Mapping[str, Any], speculative: Mapping[str, Any]) -> bool:
    """Return True if a Generator with these options decodes speculatively.

    Raises:
        OptionError: options contradict each other.
        UnsupportedModelError: proposed tokens cannot be verified with this model.
    """
    size, has_draft = speculative["ngram_size"], model.draft is not None
    if speculative["ngram_chained_lookup"] and not size:
        raise OptionError(
            "ngram_chained_lookup = True requires ngram_size",
            "ngram_size = 0 turns the n-gram lookup off",
            "set ngram_size, or remove ngram_chained_lookup",
        )
    if not size and not has_draft:
        return False
    if size and has_draft:
        raise OptionError(
            f"ngram_size = {size} cannot be combined with draft-model speculative decoding",
            "the model's folder has a draft model (model.draft), and only one of the two proposes tokens",
            "remove ngram_size, or load the model with Model(folder, draft=False)",
        )
    what = "Speculative decoding with a draft model" if has_draft else "N-gram decoding"
    off = "load the model with Model(folder, draft=False)" if has_draft else "remove ngram_size"
    for name, why in (
        ("batch_size", "rounds of several sequences have different lengths"),
        ("num_beams", "a beam search compares candidates of the same length"),
    ):
        if search[name] > 1:
            raise OptionError(
                f"{what} does not support {name} = {search[name]}{' (beam search)' if name == 'num_beams' else ''}",
                why,
                f"use {name} = 1, or {off}",
            )
    decoder = model.config.raw["model"]["decoder"]
    if slides(decoder):
        raise UnsupportedModelError(
            f"{what} requires a rewindable KV cache",
            "sliding_window.slide_key_value_cache in genai_config.json says that the cache drops tokens, so rejected "
            "tokens could not be removed",
            f"{off}, or export the model without slide_key_value_cache",
        )
    if not model.decoder.verifies:
        raise UnsupportedModelError(
            f"{what} cannot be used with this model: it requires target logits for every verified token",
            "pruned last-token-only logits, and graphs that run as exported, one sequence at a time, are not supported "
            f"({model.info.reason})",
            f"{off}, or export a graph that can be flattened",
        )
    return True


_NOTHING = Verified([], 0, 0, 0, 0, 0.0, np.zeros((0, 0), np.float32), 0)


def _since(began: float) -> float:
    """Return the milliseconds since a time on the clock of time.perf_counter()."""
    return 1e3 * (time.perf_counter() - began)
