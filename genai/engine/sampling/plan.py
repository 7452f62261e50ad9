"""A request's options as numbers for the sampling kernel."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.sampling_steps import codes

from ...errors import OptionError
from ...sampling_params import SamplingParams

_STEPS = {
    "penalties": codes.PENALTIES,
    "dry": codes.DRY,
    "top_n_sigma": codes.TOP_N_SIGMA,
    "top_k": codes.TOP_K,
    "typical_p": codes.TYPICAL_P,
    "top_p": codes.TOP_P,
    "min_p": codes.MIN_P,
    "xtc": codes.XTC,
    "temperature": codes.TEMPERATURE,
}
# No vocabulary and no sequence has more; machine code could not count further.
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class SamplingPlan:
    """What a request asks for, made ready once; all its rows share it. Made by `plan_sampling`.

    Attributes:
        params: the options.
        vocab_size: logits per row.
        steps: int64 [MAX_STEPS]. settings: float64 [NUM_SETTINGS]. See `genai.kernels.cpu.sampling_steps.codes`.
        stop_ids: tokens that end the output, EOS included.
        breakers: sequences of tokens that DRY does not reach across.
        edit_ids, edit_values: int32 and float32, the logit bias.
        held_back: int32, the tokens that may not be chosen before the output is long enough.
        most_history: how many tokens back the steps look; infinite = all.
    """

    params: SamplingParams
    vocab_size: int
    steps: NDArray[np.int64]
    settings: NDArray[np.float64]
    stop_ids: frozenset[int]
    breakers: tuple[tuple[int, ...], ...]
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]
    held_back: NDArray[np.int32]
    most_history: float

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.params.temperature == 0


def plan_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    breakers: Sequence[Sequence[int]] = (),
) -> SamplingPlan:
    """Make a request's options ready.

    Args:
        params: the options.
        vocab_size: logits per row.
        eos_token_ids: tokens that end a sequence of this model.
        breakers: DRY's sequence breakers as tokens, see `breakers.breaker_tokens`.

    Raises:
        OptionError: a token id, or a number of alternatives, that the vocabulary does not have.
    """
    _check_ids("logit_bias", [token for token, _ in _pairs(params)], vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            what = f"the vocabulary has {vocab_size} tokens"
            raise OptionError(f"{name} = {count}", what, f"use 0 to {vocab_size}")
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    held_back = sorted(token for token in stop_ids | frozenset(eos_token_ids) if 0 <= token < vocab_size)
    steps = _steps(params)
    return SamplingPlan(
        params=params,
        vocab_size=vocab_size,
        steps=np.asarray(steps + [codes.END] * (codes.MAX_STEPS - len(steps)), np.int64),
        settings=_settings(params),
        stop_ids=stop_ids,
        breakers=tuple(tuple(breaker) for breaker in breakers),
        edit_ids=np.asarray([token for token, _ in _pairs(params)], np.int32),
        edit_values=np.asarray([bias for _, bias in _pairs(params)], np.float32),
        held_back=np.asarray(held_back, np.int32),
        most_history=_most_history(params, steps),
    )


def request_seed(params: SamplingParams) -> int:
    """The seed that all samples of a request share: its own, or a new one."""
    return secrets.randbits(64) if params.seed is None else params.seed


def _pairs(params: SamplingParams) -> list[tuple[int, float]]:
    return list(dict(params.logit_bias).items())


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise OptionError(
                f"{name} names token {token}", f"the vocabulary has {vocab_size} tokens", f"use 0 to {vocab_size - 1}"
            )


def _steps(params: SamplingParams) -> list[int]:
    """Codes of the samplers that do something, in order."""
    active = {
        "penalties": (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0),
        "dry": params.dry_multiplier > 0,
        "top_n_sigma": params.top_n_sigma > 0,
        "top_k": params.top_k > 0,
        "typical_p": params.typical_p < 1,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
        "xtc": params.xtc_probability > 0,
        "temperature": params.temperature not in (0, 1),
    }
    if params.temperature == 0:
        # Only what changes the order of the tokens matters to the most likely one.
        active = {name: active[name] and name in ("penalties", "dry") for name in active}
    steps = [_STEPS[name] for name in params.samplers if active[name]]
    return [*steps, codes.MIROSTAT] if params.mirostat else steps


def _settings(params: SamplingParams) -> NDArray[np.float64]:
    settings = np.zeros(codes.NUM_SETTINGS)
    values = {
        codes.GREEDY: float(params.temperature == 0),
        codes.DIVISOR: params.temperature,
        codes.KEPT_TOKENS: min(params.top_k, _MOST_TOKENS),
        codes.NUCLEUS: params.top_p,
        codes.RELATIVE_PROBABILITY: params.min_p,
        codes.TYPICAL_MASS: params.typical_p,
        codes.NUM_SIGMAS: params.top_n_sigma,
        codes.EXCLUSION_PROBABILITY: params.xtc_probability,
        codes.EXCLUSION_THRESHOLD: params.xtc_threshold,
        codes.REPETITION: params.repetition_penalty,
        codes.PRESENCE: params.presence_penalty,
        codes.FREQUENCY: params.frequency_penalty,
        codes.PENALTY_LAST: _reach(params.penalty_last_n),
        codes.DRY_MULTIPLIER: params.dry_multiplier,
        codes.DRY_BASE: params.dry_base,
        codes.DRY_ALLOWED_LENGTH: min(params.dry_allowed_length, _MOST_TOKENS),
        codes.DRY_LAST: _reach(params.dry_last_n),
        codes.NGRAM_SIZE: min(params.no_repeat_ngram_size, _MOST_TOKENS),
    }
    for column, value in values.items():
        settings[column] = value
    return settings


def _reach(last_n: int | None) -> float:
    """How many tokens back an option looks."""
    return math.inf if last_n is None else float(min(last_n, _MOST_TOKENS))


def _most_history(params: SamplingParams, steps: Sequence[int]) -> float:
    windows = [0.0]
    if codes.PENALTIES in steps:
        windows.append(_reach(params.penalty_last_n))
    if codes.DRY in steps:
        windows.append(_reach(params.dry_last_n))
    if params.no_repeat_ngram_size:
        windows.append(math.inf)
    return max(windows)
