"""Speculative decoding in a Generator: the counters of each round, by hand and as onnxruntime-genai counts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
import pytest

import genai

from ...table_models import EOS, VOCAB, after, drafted_model, table_model

# Tokens 1 and 2 follow each other.
SWAP = {1: 2, 2: 1}


def begin(og: Any, folder: Path, prompt: Sequence[int], room: int, **options: Any) -> Any:
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + room)
    params.set_speculative_options(**options)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    return generator


def shown(generator: Any) -> list[int]:
    return [int(token) for token in generator.get_sequence(0)]


def counters(generator: Any, *names: str) -> dict[str, Any]:
    """The counters that are not 0, or the given ones."""
    stats = generator.get_speculative_stats()
    return {name: stats[name] for name in names} if names else {name: value for name, value in stats.items() if value}


ROUND = ("rounds", "draft_tokens_proposed", "draft_tokens_evaluated", "draft_tokens_accepted", "correction_tokens",
         "bonus_tokens", "tokens_queued", "tokens_emitted", "tokens_discarded", "tokens_buffered",
         "completed_rounds", "interrupted_rounds", "active_rounds", "target_verify_forward_passes")  # fmt: skip


def of_round(generator: Any) -> list[int]:
    return [counters(generator, *ROUND)[name] for name in ROUND]


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_rounds_of_the_lookup_by_hand(tmp_path: Path) -> None:
    """After 1 2 1 2, the lookup for two tokens finds 1 2 at the start, which 1 2 follows; the model says 1 2 1."""
    folder = table_model(tmp_path / "swap", after(SWAP))
    generator = begin(genai, folder, [1, 2, 1, 2], 8, ngram_size=3, max_draft_tokens=4)
    expected = [
        # rounds, proposed, evaluated, accepted, corrections, bonus, queued, emitted, discarded, buffered, completed,
        # interrupted, active, passes
        [1, 2, 2, 2, 0, 1, 3, 1, 0, 2, 0, 0, 1, 1],
        [1, 2, 2, 2, 0, 1, 3, 2, 0, 1, 0, 0, 1, 1],
        [1, 2, 2, 2, 0, 1, 3, 3, 0, 0, 1, 0, 0, 1],
        # The last 2 1 before the end of 1 2 1 2 1 2 1 is followed by 2 1, and the model goes on with 2.
        [2, 4, 4, 4, 0, 2, 6, 4, 0, 2, 1, 0, 1, 2],
        [2, 4, 4, 4, 0, 2, 6, 5, 0, 1, 1, 0, 1, 2],
        [2, 4, 4, 4, 0, 2, 6, 6, 0, 0, 2, 0, 0, 2],
        # Two more tokens fit, so two are proposed, and the third chosen token does not fit.
        [3, 6, 6, 6, 0, 3, 9, 7, 0, 2, 2, 0, 1, 3],
        [3, 6, 6, 6, 0, 3, 9, 8, 1, 0, 2, 1, 0, 3],
    ]
    found = []
    while not generator.is_done():
        generator.generate_next_token()
        found.append(of_round(generator))
    assert found == expected
    assert shown(generator) == [1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert counters(generator, "full_accept_rounds", "ngram_lookup_hits", "ngram_lookup_misses") == {
        "full_accept_rounds": 2, "ngram_lookup_hits": 3, "ngram_lookup_misses": 0,
    }  # fmt: skip


def test_a_round_ends_at_the_first_wrong_proposal(tmp_path: Path) -> None:
    """The lookup proposes 3 4 after 1 2. The model says 3, and then 7."""
    folder = table_model(tmp_path / "partial", after({3: 7}))
    generator = begin(genai, folder, [1, 2, 3, 4, 1, 2], 2, ngram_size=3, max_draft_tokens=2)
    generator.generate_next_token()
    assert of_round(generator) == [1, 2, 2, 1, 1, 0, 2, 1, 0, 1, 0, 0, 1, 1]
    generator.generate_next_token()
    assert shown(generator)[-2:] == [3, 7]
    assert counters(generator, "partial_accept_rounds", "acceptance_rate") == {
        "partial_accept_rounds": 1, "acceptance_rate": 0.5,
    }  # fmt: skip


def test_a_first_wrong_proposal_costs_no_pass(tmp_path: Path) -> None:
    """The logits after the prompt are known, so the first proposal is judged without the model."""
    folder = table_model(tmp_path / "zero", after({2: 5}))
    generator = begin(genai, folder, [1, 2, 3, 4, 1, 2], 4, ngram_size=3, max_draft_tokens=2)
    generator.generate_next_token()
    assert shown(generator)[-1] == 5
    assert of_round(generator) == [1, 2, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert counters(generator, "zero_accept_rounds", "target_forward_passes") == {
        "zero_accept_rounds": 1, "target_forward_passes": 0,
    }  # fmt: skip


def test_rounds_of_a_draft_model_by_hand(tmp_path: Path) -> None:
    """The draft counts on, and the model goes from 3 to 6: 1 2 3 is right, 4 is wrong."""
    folder = drafted_model(tmp_path / "drafted", after({3: 6}), after(), speculative={"max_draft_tokens": 4})
    generator = begin(genai, folder, [0], 12)
    generator.generate_next_token()
    assert of_round(generator) == [1, 4, 4, 3, 1, 0, 4, 1, 0, 3, 0, 0, 1, 1]
    for _ in range(3):
        generator.generate_next_token()
    # 1 2 3 6; the draft then proposes 7 8 0 1, which is right, and 2 follows.
    for _ in range(5):
        generator.generate_next_token()
    assert shown(generator) == [0, 1, 2, 3, 6, 7, 8, 0, 1, 2]
    assert of_round(generator) == [2, 8, 8, 7, 1, 1, 9, 9, 0, 0, 2, 0, 0, 2]
    assert counters(generator, "draft_forward_passes", "full_accept_rounds", "partial_accept_rounds") == {
        "draft_forward_passes": 8, "full_accept_rounds": 1, "partial_accept_rounds": 1,
    }  # fmt: skip


def test_the_draft_model_reads_a_long_prompt(tmp_path: Path) -> None:
    folder = drafted_model(tmp_path / "long", after(), after(), context_length=512)
    prompt = [token % 9 for token in range(300)]
    generator = begin(genai, folder, prompt, 6, max_draft_tokens=3)
    while not generator.is_done():
        generator.generate_next_token()
    assert shown(generator)[300:] == [3, 4, 5, 6, 7, 8]
    assert counters(generator, "draft_tokens_proposed", "draft_tokens_accepted", "draft_forward_passes") == {
        "draft_tokens_proposed": 5, "draft_tokens_accepted": 5, "draft_forward_passes": 5,
    }  # fmt: skip


def test_a_stop_token_among_the_proposals(tmp_path: Path) -> None:
    """EOS is proposed and chosen. What was verified after it is counted, and never shown."""
    folder = table_model(tmp_path / "stop", after({2: EOS, EOS: 5}))
    generator = begin(genai, folder, [1, 2, EOS, 4, 1, 2], 4, ngram_size=3, max_draft_tokens=2)
    generator.generate_next_token()
    assert generator.is_done() and shown(generator) == [1, 2, EOS, 4, 1, 2]
    assert generator.get_next_tokens().tolist() == [EOS]
    assert of_round(generator) == [1, 2, 2, 1, 1, 0, 2, 0, 2, 0, 0, 1, 0, 1]
    assert np.argmax(generator.get_logits()) == EOS
    generator.append_tokens([3])
    generator.generate_next_token()
    assert shown(generator)[-2:] == [3, 4] and not generator.is_done()


def test_pauses_by_hand(tmp_path: Path) -> None:
    """The draft proposes nothing but 4: three rounds without an accepted token, a step without proposals, and again."""
    fours = np.zeros((VOCAB, VOCAB), np.float32)
    fours[:, 4] = 1
    folder = drafted_model(tmp_path / "pauses", after({1: 2, 2: 1}), fours)
    generator = begin(genai, folder, [1], 20, max_draft_tokens=2, cooldown=True)
    found = []
    for _ in range(8):
        generator.generate_next_token()
        names = ("rounds", "cooldown_entries", "cooldown_remaining", "cooldown_steps", "standard_fallback_steps")
        found.append([*counters(generator, *names).values()])
    assert found == [
        [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [3, 1, 1, 0, 0], [3, 1, 0, 1, 1],
        [4, 1, 0, 1, 1], [5, 1, 0, 1, 1], [6, 2, 1, 1, 1], [6, 2, 0, 2, 2],
    ]  # fmt: skip


def test_figures_that_follow_from_the_counters(tmp_path: Path) -> None:
    folder = table_model(tmp_path / "figures", after(SWAP))
    generator = begin(genai, folder, [1, 2, 1, 2, 3, 4, 2], 8, ngram_size=2, max_draft_tokens=2)
    while not generator.is_done():
        generator.generate_next_token()
    stats = generator.get_speculative_stats()
    assert stats["standard_fallback_steps"] == 0 and stats["rounds"] > 2
    rate = stats["draft_tokens_accepted"] / stats["draft_tokens_evaluated"]
    assert stats["acceptance_rate"] == pytest.approx(rate) and 0 < rate < 1
    assert stats["total_target_ms"] == stats["total_target_verify_ms"] + stats["total_target_reanchor_ms"] > 0
    assert stats["avg_draft_tokens_per_round"] == stats["draft_tokens_proposed"] / stats["rounds"]
    assert stats["mean_emitted_tokens_per_round"] == stats["tokens_emitted"] / stats["rounds"]
    # Without a step of one token, there is no base line, and so no speedup.
    assert stats["formula_supported"] and stats["estimated_speedup"] == stats["target_baseline_ms_per_token"] == 0
    assert 1 + rate <= stats["expected_tokens_per_round"] <= 1 + rate + rate**2


def test_the_speedup_by_formula(tmp_path: Path) -> None:
    """A miss of the lookup runs a step of one token, which is the base line."""
    folder = table_model(tmp_path / "speedup", after(SWAP))
    generator = begin(genai, folder, [3, 5, 1, 2], 9, ngram_size=3, max_draft_tokens=1)
    while not generator.is_done():
        generator.generate_next_token()
    stats = generator.get_speculative_stats()
    assert stats["standard_fallback_steps"] == 2 and stats["target_reanchor_forward_passes"] == 1
    plain = stats["total_target_reanchor_ms"] / 1
    assert stats["target_baseline_ms_per_token"] == plain > 0
    target = stats["total_target_ms"] / stats["rounds"]
    draft = stats["total_draft_ms"] / stats["draft_tokens_proposed"]
    cost = 1 + draft / plain + target / plain - 1
    assert stats["expected_tokens_per_round"] == 2.0
    assert stats["estimated_speedup"] == pytest.approx(2 / cost)
    assert stats["observed_speedup"] == pytest.approx(stats["tokens_emitted"] / stats["rounds"] / cost)


# --- as onnxruntime-genai counts -------------------------------------------------------------------------------------

# Passes differ: the last token of a round is computed together with the next proposals, and a proposal is judged
# without a pass if the logits are known.
_OTHER = ("forward_passes", "_ms", "speedup", "ratio", "throughput")


def history(og: Any, folder: Path, prompt: Sequence[int], room: int, **options: Any) -> Any:
    generator = begin(og, folder, prompt, room, **options)
    found = []
    while not generator.is_done():
        generator.generate_next_token()
        stats = generator.get_speculative_stats()
        kept = {name: value for name, value in stats.items() if not any(part in name for part in _OTHER)}
        rounded = {name: value if isinstance(value, list) else round(value, 4) for name, value in kept.items()}
        found.append((shown(generator), rounded))
    return found


TABLES = {
    "swap": after(SWAP),
    "chain": after({2: 3, 3: 4, 4: 5, 5: 6}),
    "wrong": after({2: 3, 3: 7, 7: 2}),
    "stop": after({2: EOS, EOS: 2}),
    "late stop": after({5: 6, 6: EOS}),
    "loop": after({1: 2, 2: 3, 3: 1}),
}
PROMPTS = [[1, 2, 1, 2], [1, 2, 3, 8, 2, 3, 4, 8, 3, 4, 5, 8, 1, 2], [1, 4, 2, 4, 3, 4, 1], [1, 3, 5], [2, EOS, 2]]
OPTIONS = [
    {"ngram_size": 2, "max_draft_tokens": 4},
    {"ngram_size": 3, "max_draft_tokens": 3, "ngram_chained_lookup": True},
    {"ngram_size": 2, "max_draft_tokens": 16, "ngram_chained_lookup": True},
    {"ngram_size": 4, "max_draft_tokens": 2},
    {"ngram_size": 2, "max_draft_tokens": 2, "cooldown": True},
    {"ngram_size": 2, "max_draft_tokens": 1},
]


@pytest.mark.oracle
@pytest.mark.parametrize("name", TABLES)
def test_the_lookup_counts_as_onnxruntime_genai_does(name: str, tmp_path: Path) -> None:
    """After every call: the tokens and the counters."""
    folder = table_model(tmp_path / "model", TABLES[name])
    for prompt in PROMPTS:
        for options in OPTIONS:
            theirs = history(onnxruntime_genai, folder, prompt, 11, **options)
            assert history(genai, folder, prompt, 11, **options) == theirs, (prompt, options)


@pytest.mark.oracle
@pytest.mark.parametrize("width", [1, 2, 4, 16])
def test_a_draft_model_counts_as_in_onnxruntime_genai(width: int, tmp_path: Path) -> None:
    for index, (table, draft) in enumerate([
        (after(), after()), (after({3: 6}), after()), (after({2: EOS}), after()), (after(), after({4: 4})),
        (after(SWAP), after()),
    ]):  # fmt: skip
        folder = drafted_model(tmp_path / f"{index}", table, draft)
        for cooldown in (False, True):
            options = {"max_draft_tokens": width, "cooldown": cooldown}
            theirs = history(onnxruntime_genai, folder, [1], 13, **options)
            assert history(genai, folder, [1], 13, **options) == theirs, (index, options)


@pytest.mark.oracle
def test_the_same_names_in_the_same_order(tmp_path: Path) -> None:
    folder = table_model(tmp_path / "names", after())
    ours, theirs = (begin(og, folder, [1], 4) for og in (genai, onnxruntime_genai))
    for generator in (ours, theirs):
        generator.generate_next_token()
    assert list(ours.get_speculative_stats()) == list(theirs.get_speculative_stats())
    assert ours.get_speculative_stats() == theirs.get_speculative_stats()  # 0, because nothing is proposed
    kinds = [{name: type(value) for name, value in one.get_speculative_stats().items()} for one in (ours, theirs)]
    assert kinds[0] == kinds[1]
