"""Python logits processors: called in order, checked, and named when they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.errors import LogitsProcessorError

ALONE = open_executor(threads=1)

LOGITS = np.array([[1.0, 2.0, 3.0, 0.0]], np.float32)


def pick(*processors: Callable[..., Any], **options: Any) -> int:
    params = SamplingParams(temperature=0, logits_processors=processors, **options)
    sampler = RowSampler(plan_sampling(params, vocab_size=4), [3, 2], seed=0)
    return int(BatchSampler(4, ALONE).sample(LOGITS, [sampler]).tokens[0])


def test_in_place_and_returned() -> None:
    def in_place(tokens: tuple[int, ...], logits: np.ndarray) -> None:
        assert tokens == (3, 2)
        logits[2] = -np.inf

    def returned(tokens: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        return logits * np.float32(-1)

    assert pick() == 2
    assert pick(in_place) == 1
    assert pick(returned) == 3
    assert pick(in_place, lambda tokens, logits: np.where(np.isinf(logits), logits, -logits)) == 3
    assert LOGITS[0, 2] == 3.0


def test_options_apply_after_processors() -> None:
    def favour(tokens: tuple[int, ...], logits: np.ndarray) -> None:
        logits[2] = 9.0

    assert pick(favour, logit_bias={2: -np.inf}) == 1


def test_rows_with_and_without_processors_share_a_batch() -> None:
    def forbid(tokens: tuple[int, ...], logits: np.ndarray) -> None:
        logits[2] = -np.inf

    plain = plan_sampling(SamplingParams(temperature=0), vocab_size=4)
    processed = plan_sampling(SamplingParams(temperature=0, logits_processors=[forbid]), vocab_size=4)
    rows = [RowSampler(plan, [0], seed=0) for plan in (plain, processed, plain, processed)]
    assert BatchSampler(4, ALONE).sample(np.tile(LOGITS, (4, 1)), rows).tokens.tolist() == [2, 1, 2, 1]


class Faulty:
    """Returns or raises a given object."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, tokens: tuple[int, ...], logits: np.ndarray) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (ZeroDivisionError("division"), "raised ZeroDivisionError: division"),
        ("text", "returned str"),
        (np.zeros(4), r"returned float64 \[4\]"),
        (np.zeros(3, np.float32), r"returned float32 \[3\]"),
        (np.array([0, np.nan, 0, 0], np.float32), "set the logit of token 1 to nan"),
        (np.array([0, 0, 0, np.inf], np.float32), "set the logit of token 3 to inf"),
    ],
)
def test_faults_name_the_processor(result: Any, message: str) -> None:
    with pytest.raises(LogitsProcessorError, match=f"logits processor Faulty {message}") as raised:
        pick(Faulty(result))
    assert raised.value.why and raised.value.fix
    assert (raised.value.__cause__ is result) == isinstance(result, Exception)


def test_an_interrupt_passes_through() -> None:
    def interrupted(tokens: tuple[int, ...], logits: np.ndarray) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pick(interrupted)
