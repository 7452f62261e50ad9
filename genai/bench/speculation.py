"""The speedup from speculative decoding: the same replies with and without speculation, measured in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ContextOverflowError, OptionError
from ..llm.llm import LLM
from ..models.model import Model
from .speculation_cases import built_in_cases
from .speed import BenchRow, Progress, silent


class Case(NamedTuple):
    """A prompt, and the reply that the model is forced to generate; None = the model's own reply."""

    name: str
    prompt: str
    reply: str | None = None


class _ForcedReply:
    """A logits processor that allows only the tokens of a fixed reply."""

    def __init__(self, length: int, reply: Sequence[int]) -> None:
        self._length, self._reply = length, reply

    def __call__(self, token_ids: tuple[int, ...], logits: NDArray[np.float32]) -> None:
        logits[:] = -np.inf
        logits[self._reply[len(token_ids) - self._length]] = 0


def bench_speculation(
    model: Model,
    speculation: Any,
    *,
    cases: Sequence[Case] = (),
    tokens: int = 256,
    batch: int = 1,
    repeat: int = 5,
    progress: Progress = silent,
) -> Iterator[BenchRow]:
    """Yield one row of figures per case; runs without and with speculation alternate.

    A forced reply takes the same time as the model's own reply. Models that copy badly or have random weights can
    therefore also be measured.

    Args:
        speculation: as in genai.LLM.
        cases: prompts to measure; () = the prompts of `built_in_cases`.
        tokens: maximum number of tokens of a reply.
        batch: number of sequences that decode together, all with the same prompt.
        repeat: measured runs per case.

    Returns:
        Per case: tok/s of decoding without and with speculation over the batch, the speedup (median and min), and the
        numbers of proposed and accepted tokens in the last run.

    Raises:
        OptionError: speculation is "off".
        ContextOverflowError: a prompt does not fit.
    """
    if speculation == "off":
        raise OptionError(
            'speculation = "off"', "this benchmark needs a source of proposals", 'use "lookup" or a draft model'
        )
    with LLM(model, max_sequences=batch) as plain, LLM(model, max_sequences=batch, speculation=speculation) as guessing:
        chosen = cases or [Case(name, *texts) for name, texts in built_in_cases().items()]
        total, done = len(chosen) * (repeat + 1), 0
        for case in chosen:
            prompt, options = _request(plain, case, tokens)
            rounds: list[tuple[float, float]] = []
            proposed = accepted = count = 0
            for turn in range(repeat + 1):
                progress(done, total)
                done += 1
                speeds = []
                for llm in (plain, guessing) if turn % 2 else (guessing, plain):
                    seconds, completions = _timed(llm, [prompt] * batch, options)
                    speeds.append(sum(len(completion.token_ids) - 1 for completion in completions) / seconds)
                    if llm is guessing:
                        proposed = sum(completion.proposed_tokens for completion in completions)
                        accepted = sum(completion.accepted_tokens for completion in completions)
                        count = len(completions[0].token_ids)
                if turn:
                    rounds.append((speeds[0], speeds[1]) if turn % 2 else (speeds[1], speeds[0]))
            ratios = [fast / slow for slow, fast in rounds]
            yield {
                "reply": case.name,
                "tokens": count,
                "plain tok/s": statistics.median(slow for slow, _ in rounds),
                "guessing tok/s": statistics.median(fast for _, fast in rounds),
                "times": statistics.median(ratios),
                "least times": min(ratios),
                "guesses": proposed,
                "kept": accepted,
            }


def _request(llm: LLM, case: Case, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Return a case's prompt and options."""
    prompt = llm.encode(case.prompt)
    if len(prompt) + 2 > llm.context_size:
        raise ContextOverflowError(
            f"the prompt {case.name!r} has {len(prompt)} tokens",
            f"the context size is {llm.context_size}",
            "use a shorter prompt, or load the model with a larger context",
        )
    options: dict[str, Any] = {"max_tokens": min(tokens, llm.context_size - len(prompt)), "ignore_eos": True}
    if case.reply is not None:
        reply = llm.encode(case.reply, add_special_tokens=False)
        options["max_tokens"] = min(options["max_tokens"], len(reply))
        options |= {"logits_processors": [_ForcedReply(len(prompt), reply)], "temperature": 0}
    return prompt, options


def _timed(llm: LLM, prompts: Sequence[list[int]], options: Mapping[str, Any]) -> tuple[float, Any]:
    """Return the longest time from first to last token in the batch, in seconds, and the completions."""
    time.sleep(0.01)  # the threads of the other LLM stop spinning in this time
    completions = llm.generate(prompts, **options)
    return max(completion.timings.decode_seconds for completion in completions), completions
