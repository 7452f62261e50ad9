"""Biases of token sequences, and tokens that an output cannot begin with, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.params import SamplingParams, with_defaults
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.engine.sampling.sequence_biases import SequenceBiases
from genai.engine.sampling.state import SamplerState
from genai.errors import OptionError

INF = float("inf")
ALONE = open_executor(threads=1)


def row(tokens: list[int], prompt_length: int | None = None, size: int = 40, **options: Any) -> RowSampler:
    plan = plan_sampling(SamplingParams(**options), vocab_size=size, eos_token_ids=(1,))
    return RowSampler(plan, tokens, seed=0, prompt_length=prompt_length)


def edited(sampler: RowSampler, logits: np.ndarray) -> np.ndarray:
    """The logits of a row with its edits."""
    ids, values = sampler.edits()
    found = logits.astype(np.float64)
    np.add.at(found, ids, values)
    return found


def defined(logits: np.ndarray, tokens: list[int], biases: dict[tuple[int, ...], float]) -> np.ndarray:
    """The definition in transformers' SequenceBiasLogitsProcessor, one sequence after another."""
    found = logits.astype(np.float64)
    for ids, bias in biases.items():
        if len(ids) - 1 <= len(tokens) and tokens[len(tokens) - len(ids) + 1 :] == [*ids[:-1]]:
            found[ids[-1]] += bias
    return found


def test_random_sequences(rng: np.random.Generator) -> None:
    """Short sequences of few tokens, of which many match; also the context is shorter than some."""
    applied = 0
    for _ in range(300):
        lengths = rng.integers(1, 6, int(rng.integers(1, 30)))
        biases = {tuple(rng.integers(0, 3, n).tolist()): float(rng.choice([-INF, rng.normal()])) for n in lengths}
        tokens = rng.integers(0, 3, int(rng.integers(0, 7))).tolist()
        logits = rng.normal(size=40).astype(np.float32)
        found, expected = edited(row(tokens, sequence_bias=biases), logits), defined(logits, tokens, biases)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        applied += not np.array_equal(expected, logits)
    assert applied > 100


def test_every_matching_sequence_counts() -> None:
    tokens = [3, 4, 5]
    biases = {(7,): 1.0, (5, 7): 2.0, (4, 5, 7): 4.0, (3, 4, 5, 7): 8.0, (2, 3, 4, 5, 7): 16.0, (4, 7): 32.0}
    sampler = row(tokens, sequence_bias=biases, logit_bias={7: 64.0})
    assert edited(sampler, np.zeros(40, np.float32))[7] == 1 + 2 + 4 + 8 + 64
    tokens[:] = [5, 4]
    assert edited(sampler, np.zeros(40, np.float32))[7] == 1 + 32 + 64


def test_the_first_token_only() -> None:
    tokens = [5, 6]
    sampler = row(tokens, begin_suppress_tokens=[7, 8])
    assert np.flatnonzero(np.isneginf(edited(sampler, np.zeros(40, np.float32)))).tolist() == [7, 8]
    tokens.append(9)
    assert np.isfinite(edited(sampler, np.zeros(40, np.float32))).all()
    tokens.pop()
    sampler.rewind(2, forbidden=[9])  # as after a banned string
    assert np.flatnonzero(np.isneginf(edited(sampler, np.zeros(40, np.float32)))).tolist() == [7, 8, 9]
    assert np.isfinite(edited(row(tokens, prompt_length=1, begin_suppress_tokens=[7]), np.zeros(40, np.float32))).all()


@pytest.mark.parametrize(
    "options", [{"sequence_bias": {(2, 3): -INF, (3, 2): -INF}}, {"begin_suppress_tokens": [2]}], ids=str
)
def test_steps_whose_rows_are_cached(options: dict[str, Any]) -> None:
    """Batches are reused while only the position changes; these options change more than that."""
    tokens, sampler = [0], BatchSampler(4, ALONE)
    logits = np.array([[0.0, 0.0, 9.0, 8.0]], np.float32)
    asked, chosen = row(tokens, size=4, temperature=0, **options), []
    for _ in range(6):
        tokens.append(int(sampler.sample(logits, [asked]).tokens[0]))
        chosen.append(tokens[-1])
    assert chosen == ([2, 2, 2, 2, 2, 2] if "sequence_bias" in options else [3, 2, 2, 2, 2, 2])


def test_a_smaller_vocabulary() -> None:
    biases = SequenceBiases([([1, 2], 1.0), ([1, 9], 2.0), ([9, 2], 3.0)]).within(5)
    assert biases.after([1])[0].tolist() == [2] and not len(biases.after([9])[0])


def test_a_state_keeps_the_options() -> None:
    sampler = row([3, 4], 1, sequence_bias={(3, 4): -1.5, (2,): -INF}, begin_suppress_tokens=[7])
    state = SamplerState.of(sampler)
    assert SamplerState.from_json(state.as_json(), 2) == state


@pytest.mark.parametrize(
    "value",
    [{1: 2.0}, {(): 1.0}, {(1, -2): 1.0}, {(1, 2): INF}, {(1, 2): float("nan")}, {("a",): 1.0}, {(1, 2.5): 1.0}, 3,
     [(1, 2, 3)], {(1, 2): "3"}, {"ab": 1.0}, [[[1, 2], True]], {(True, 1): 1.0}],
    ids=str,
)  # fmt: skip
def test_values_that_are_no_biases(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^sequence_bias = ") as raised:
        SamplingParams(sequence_bias=value)
    assert "token ids -> number" in raised.value.why and raised.value.fix


def test_ids_outside_the_vocabulary() -> None:
    for name, value in (("sequence_bias", {(3, 99): 1.0}), ("begin_suppress_tokens", [99])):
        with pytest.raises(OptionError, match=f"{name} contains token 99") as raised:
            row([0], **{name: value})
        assert "40 tokens" in raised.value.why


def test_forms_of_a_value() -> None:
    stored = SamplingParams(sequence_bias={(3, 4): 1, (2, 2): -INF}).sequence_bias
    assert stored == (((2, 2), -INF), ((3, 4), 1.0))
    assert SamplingParams(sequence_bias=stored).sequence_bias == stored
    assert SamplingParams(sequence_bias=[[[3, 4], 1.0], [[np.int64(2), 2], -INF]]).sequence_bias == stored


def test_a_stop_token_that_is_forbidden() -> None:
    with pytest.raises(OptionError, match="stop_token_ids = 5 contradicts sequence_bias"):
        SamplingParams(stop_token_ids=[5], sequence_bias={(5,): -INF})
    SamplingParams(stop_token_ids=[5], sequence_bias={(4, 5): -INF}, begin_suppress_tokens=[5])


def test_defaults_and_requests() -> None:
    defaults = {"sequence_bias": {(1, 2): -INF, (3, 4): 1.0}, "begin_suppress_tokens": [7]}
    found = with_defaults(defaults, {"sequence_bias": {(3, 4): 2.0}})
    assert dict(found.sequence_bias) == {(1, 2): -INF, (3, 4): 2.0} and found.begin_suppress_tokens == (7,)
    found = with_defaults(defaults, {"sequence_bias": {}, "begin_suppress_tokens": ()})
    assert found.sequence_bias == () and found.begin_suppress_tokens == ()
