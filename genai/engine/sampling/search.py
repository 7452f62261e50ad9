"""Sampling by the search options of onnxruntime-genai, for rows that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ...sampling_params import SamplingParams
from ..decoder import Logits
from .batch import BatchSampler
from .plan import plan_sampling, request_seed
from .row import RowSampler


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens.

    Attributes:
        do_sample: False = the most likely token (the lowest id among equals).
        temperature: divides the logits; 0 = greedy.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 0 or 1 = all.
        repetition_penalty: > 1 makes tokens that already occur less likely (Keskar et al. 2019).
        min_length: total length below which EOS is not chosen.
        no_repeat_ngram_size: no n-gram of this size occurs twice; 0 = any may.
        seed: of the request's random numbers; counts modulo 2 ** 64.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    min_length: int = 0
    no_repeat_ngram_size: int = 0
    seed: int = 0

    @property
    def params(self) -> SamplingParams:
        """The same as SamplingParams."""
        return SamplingParams.from_search_options({**asdict(self), "random_seed": self.seed % 2**64})


def sample(
    logits: Logits, histories: Sequence[Sequence[int]], rows: Sequence[int], sampling: Sampling, eos: Sequence[int]
) -> NDArray[np.int64]:
    """The next token per row; for a loop, keep a BatchSampler and RowSamplers instead.

    Args:
        logits: float32 [B, vocab_size]; not modified.
        histories: each row's tokens so far, prompt and output.
        rows: each row's number inside its request (for the random numbers).
        sampling: how to pick.
        eos: end-of-sequence ids.

    Returns:
        int64 [B].

    Raises:
        SamplingError: see BatchSampler.sample.
    """
    plan = plan_sampling(sampling.params, vocab_size=logits.shape[1], eos_token_ids=eos)
    seed = request_seed(plan.params)
    samplers = [RowSampler(plan, history, seed=seed, row=row) for row, history in zip(rows, histories, strict=True)]
    return BatchSampler(logits.shape[1]).sample(np.ascontiguousarray(logits), samplers).tokens
