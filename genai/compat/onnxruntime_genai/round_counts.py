"""The counters of onnxruntime-genai's Generator.get_speculative_stats, and the figures that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

# The number of accepted lengths that onnxruntime-genai's Engine counts.
_LENGTHS = 8


@dataclass
class RoundCounts:
    """Counters, by the names of onnxruntime-genai. Times are in milliseconds.

    Counters that a Generator never changes describe other proposers of onnxruntime-genai's Engine.
    """

    rounds: int = 0
    completed_rounds: int = 0
    interrupted_rounds: int = 0
    active_rounds: int = 0
    draft_tokens_proposed: int = 0
    draft_tokens_evaluated: int = 0
    draft_tokens_accepted: int = 0
    correction_tokens: int = 0
    bonus_tokens: int = 0
    tokens_queued: int = 0
    tokens_emitted: int = 0
    tokens_discarded: int = 0
    tokens_buffered: int = 0
    draft_forward_passes: int = 0
    target_forward_passes: int = 0
    effective_k: int = 0
    adaptive_k_increases: int = 0
    adaptive_k_decreases: int = 0
    adaptive_k_observations: int = 0
    adaptive_k_probes: int = 0
    cooldown_entries: int = 0
    cooldown_steps: int = 0
    cooldown_remaining: int = 0
    standard_fallback_steps: int = 0
    mtp_failures: int = 0
    dflash2_failures: int = 0
    dflash2_disables: int = 0
    dflash2_admission_misses: int = 0
    full_accept_rounds: int = 0
    partial_accept_rounds: int = 0
    zero_accept_rounds: int = 0
    target_verify_forward_passes: int = 0
    target_reanchor_forward_passes: int = 0
    target_reconciliation_forward_passes: int = 0
    ngram_lookup_hits: int = 0
    ngram_lookup_misses: int = 0
    ngram_lookup_tokens_proposed: int = 0
    ngram_chained_tokens_proposed: int = 0
    ngram_grammar_candidate_rejections: int = 0
    ngram_history_syncs: int = 0
    ngram_history_tokens_synced: int = 0
    formula_supported: bool = False
    total_draft_ms: float = 0.0
    total_target_ms: float = 0.0
    total_reconciliation_ms: float = 0.0
    total_target_verify_ms: float = 0.0
    total_target_reanchor_ms: float = 0.0
    total_ngram_history_sync_ms: float = 0.0
    total_ngram_lookup_ms: float = 0.0

    def stats(self, *, speed: float = 0.0, widths: Counter[int] | None = None) -> dict[str, Any]:
        """Return the counters and the figures that follow from them, in onnxruntime-genai's order.

        Args:
            speed: tokens per millisecond that the adaptive width is based on; 0 = unknown.
            widths: number of rounds by their number of proposed tokens; None = no figures from the formula that derives
                the speedup from the acceptance rate.
        """
        self.formula_supported = bool(self.rounds and widths)
        self.target_forward_passes = (
            self.target_verify_forward_passes
            + self.target_reanchor_forward_passes
            + self.target_reconciliation_forward_passes
        )
        self.total_target_ms = self.total_target_verify_ms + self.total_target_reanchor_ms
        draft_ms = _ratio(self.total_draft_ms, self.draft_tokens_proposed)
        rate = _ratio(self.draft_tokens_accepted, self.draft_tokens_evaluated)
        width = _ratio(self.draft_tokens_proposed, self.rounds)
        emitted = _ratio(self.tokens_emitted, self.rounds)
        target_ms = _ratio(self.total_target_ms, self.rounds)
        plain_ms = _ratio(self.total_target_reanchor_ms, self.target_reanchor_forward_passes)
        expected = overhead = cost = 0.0
        if widths and self.draft_tokens_evaluated:
            sums = {one: sum(rate**exponent for exponent in range(one + 1)) for one in widths}
            expected = sum(count * sums[one] for one, count in widths.items()) / widths.total()
        if widths and plain_ms and self.rounds:
            overhead = target_ms / plain_ms - 1
            cost = 1 + width * draft_ms / plain_ms + overhead
        return {
            **asdict(self),
            "avg_draft_ms_per_token": draft_ms,
            "acceptance_rate": rate,
            "avg_draft_tokens_per_round": width,
            "mean_emitted_tokens_per_round": emitted,
            "expected_tokens_per_round": expected,
            "avg_target_ms_per_round": target_ms,
            "target_baseline_ms_per_token": plain_ms,
            "target_overhead_ratio": overhead,
            "estimated_speedup": _ratio(expected, cost),
            "observed_speedup": _ratio(emitted, cost),
            "adaptive_k_throughput": speed,
            "acceptance_length_histogram": [0] * _LENGTHS,
        }


def _ratio(number: float, of: float) -> float:
    """Return a quotient; 0 if nothing was counted."""
    return number / of if of else 0.0
