"""BatchSampler: rows with different requests, minimum lengths, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.errors import OptionError, SamplingError

EOS = 1
ALONE = open_executor(threads=1)


def row(size: int = 4, tokens: list[int] | None = None, prompt_length: int | None = None, **options: Any) -> RowSampler:
    plan = plan_sampling(SamplingParams(**options), vocab_size=size, eos_token_ids=(EOS,))
    return RowSampler(plan, [0] if tokens is None else tokens, seed=0, prompt_length=prompt_length)


def pick(logits: list[float], sampler: RowSampler) -> int:
    return int(BatchSampler(len(logits), ALONE).sample(np.array([logits], np.float32), [sampler]).tokens[0])


GREEDY: dict[str, Any] = {"temperature": 0}


def test_rows_that_are_absent_get_no_token() -> None:
    logits = np.array([[0, 0, 5, 0], [0, 0, 0, 5], [9, 0, 0, 0]], np.float32)
    given = logits.copy()
    result = BatchSampler(4, ALONE).sample(logits, [row(**GREEDY), None, row(**GREEDY)])
    assert result.tokens.tolist() == [2, -1, 0]
    assert result.logprobs == (None, None, None)
    np.testing.assert_array_equal(logits, given)


def test_an_empty_batch() -> None:
    assert BatchSampler(4, ALONE).sample(np.empty((0, 4), np.float32), []).tokens.tolist() == []
    assert BatchSampler(4, ALONE).sample(np.empty((2, 4), np.float32), [None, None]).tokens.tolist() == [-1, -1]


def test_logits_may_be_read_only_and_stay_as_they_are(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(1, 3000)).astype(np.float32)
    given = logits.copy()
    logits.flags.writeable = False
    sampler = row(3000, [5, 6, 5], repetition_penalty=1.5, top_p=0.99, logit_bias={1: 2.0}, xtc_probability=1.0)
    BatchSampler(3000, ALONE).sample(logits, [sampler])
    np.testing.assert_array_equal(logits, given)


def test_min_tokens_and_min_length_hold_back_every_stop_token() -> None:
    logits = [0.0, 9.0, 8.0, 1.0]
    assert pick(logits, row(tokens=[0, 0], prompt_length=1, **GREEDY)) == EOS
    assert pick(logits, row(tokens=[0, 0], prompt_length=1, min_tokens=2, **GREEDY)) == 2
    assert pick(logits, row(tokens=[0, 0], prompt_length=1, min_tokens=2, stop_token_ids=[2], **GREEDY)) == 3
    assert pick(logits, row(tokens=[0, 0, 0], prompt_length=1, min_tokens=2, stop_token_ids=[2], **GREEDY)) == EOS
    assert pick(logits, row(tokens=[0, 0], min_length=3, **GREEDY)) == 2
    assert pick(logits, row(tokens=[0, 0, 0], min_length=3, **GREEDY)) == EOS


def test_finish_reasons() -> None:
    sampler = row(tokens=[0, 3, 3], prompt_length=1, max_tokens=3, stop_token_ids=[2])
    assert [sampler.finish_reason(token) for token in (0, EOS, 2)] == ["length", "stop", "stop"]
    sampler = row(tokens=[0, 3], prompt_length=1, max_tokens=3, ignore_eos=True)
    assert [sampler.finish_reason(token) for token in (0, EOS, 2)] == [None, None, None]


def test_forbidden_tokens_count_at_their_place_until_the_next_rewind() -> None:
    logits, tokens = [0.0, 1.0, 9.0, 5.0], [0, 2, 2]
    sampler = row(tokens=tokens, **GREEDY)
    del tokens[1:]
    sampler.rewind(1, forbidden=[2])
    assert pick(logits, sampler) == 3
    tokens.append(3)
    assert pick(logits, sampler) == 2
    del tokens[1:]
    sampler.rewind(1, forbidden=[2, 3])
    assert pick(logits, sampler) == 1
    sampler.rewind(1)
    assert pick(logits, sampler) == 2


def test_penalties_follow_a_rewind() -> None:
    logits, tokens = [0.5, 1.0, 2.0, 0.0], [2]
    sampler = row(tokens=tokens, repetition_penalty=100.0, **GREEDY)
    assert pick(logits, sampler) == 1
    tokens.append(1)
    assert pick(logits, sampler) == 0
    del tokens[0:]
    sampler.rewind(0)
    tokens.append(1)
    assert pick(logits, sampler) == 2


@pytest.mark.parametrize("size", [5, 200, 3000])
@pytest.mark.parametrize("options", [GREEDY, {}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("value", "place", "words"),
    [(np.nan, 0, "NaN"), (np.nan, -1, "NaN"), (np.inf, 2, "infinity"), (-np.inf, slice(None), "all -inf")],
)
def test_bad_logits_raise_and_name_the_row(
    size: int, options: dict[str, Any], value: float, place: Any, words: str
) -> None:
    logits = np.zeros((3, size), np.float32)
    logits[1, place] = value
    rows = [row(size, **options) for _ in range(3)]
    with pytest.raises(SamplingError, match="row 1: no next token can be chosen") as raised:
        BatchSampler(size, ALONE).sample(logits, rows)
    assert words in raised.value.why and raised.value.fix


@pytest.mark.parametrize("size", [3, 3000])
def test_nothing_left_to_choose(size: int) -> None:
    banned = dict.fromkeys(range(size), -np.inf)
    with pytest.raises(SamplingError, match=r"^no next token can be chosen"):
        pick([0.0] * size, row(size, logit_bias=banned))
    tokens = list(range(size))
    with pytest.raises(SamplingError, match="are all -inf"):
        pick([0.0] * size, row(size, tokens, no_repeat_ngram_size=1))


def test_inputs_that_do_not_fit() -> None:
    sampler = BatchSampler(4, ALONE)
    wide = np.zeros((1, 8), np.float32)
    for logits in (wide, wide[:, ::2], np.zeros((1, 4))):
        with pytest.raises(ValueError, match="logits is"):
            sampler.sample(logits, [row()])
    for token in (4, -1):
        with pytest.raises(ValueError, match="tokens range from"):
            sampler.sample(np.zeros((1, 4), np.float32), [row(tokens=[0, token], repetition_penalty=2.0)])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logit_bias": {4: 1.0}}, "logit_bias contains token 4"),
        ({"stop_token_ids": [9]}, "stop_token_ids contains token 9"),
        ({"logprobs": 5}, "logprobs = 5"),
        ({"prompt_logprobs": 5}, "prompt_logprobs = 5"),
    ],
)
def test_options_beyond_the_vocabulary(options: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError, match=name):
        row(4, **options)


def test_more_tokens_than_the_vocabulary_has_are_all_of_them() -> None:
    probabilities = BatchSampler(4, ALONE).distributions(np.zeros((1, 4), np.float32), [row(top_k=50)])
    np.testing.assert_array_equal(probabilities, 0.25)
