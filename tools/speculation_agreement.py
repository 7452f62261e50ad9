"""Check that speculative decoding produces bit-identical outputs: `python -m tools.speculation_agreement`.

A script proposes the draft tokens instead of a policy. The tokens are right (as in the known output), wrong or random,
and their number varies from step to step. Therefore every combination of accepted and rejected tokens occurs, including
combinations that do not speed up decoding.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine.engine import Engine
from genai.engine.speculation.speculator import StepOutcome, takes_guesses
from genai.engine.worker import Worker
from genai.llm.completion import Completion
from genai.models.folders import bundled_model

from .arguments import positive
from .random_weights import RandomWeights

MOST_GUESSES = 9
WAYS = ("right", "wrong", "random", "mixed")


class ScriptedGuesses:
    """A replacement for Speculator that proposes scripted tokens.

    Args:
        known: known output tokens, by the prompt's ids and the number of the sample.
        vocab_size: size of the vocabulary.
        way: one of WAYS.
    """

    def __init__(self, known: Mapping[tuple[tuple[int, ...], int], Sequence[int]], vocab_size: int, way: str) -> None:
        self._known, self._vocab_size, self._way = known, vocab_size, way
        self._random = random.Random(way)
        self.proposed = self.kept = 0

    def propose(self, jobs: Sequence[Any]) -> bool:
        """Propose tokens for every job that decodes; replaces Speculator.propose."""
        for job in jobs:
            job.sequence.take_back()
            room = min(MOST_GUESSES, job.max_length - len(job.sequence.tokens) - 1)
            if room < 1 or not takes_guesses(job):
                continue
            job.sequence.propose(self._guesses(job, self._random.randint(0, room)))
        return True

    def _guesses(self, job: Any, count: int) -> list[int]:
        tokens = job.sequence.tokens
        prompt, done = tuple(tokens[: job.num_prompt]), len(tokens) - job.num_prompt
        known = self._known.get((prompt, job.row.row), ())
        guesses = []
        for place in range(done, done + count):
            way = self._random.choice(WAYS[:3]) if self._way == "mixed" and self._random.random() < 0.4 else self._way
            right = known[place] if place < len(known) else 0
            other = self._random.randrange(self._vocab_size)
            wrong = (right + 1 + other) % self._vocab_size if other != self._vocab_size - 1 else right
            guesses.append({"right": right, "mixed": right, "wrong": wrong, "random": other}[way])
        return guesses

    def settle(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count proposed and accepted tokens; replaces Speculator.settle."""
        for _, proposed, taken in outcomes:
            self.proposed += proposed
            self.kept += taken - 1

    def forget(self, job: Any) -> None:
        """Do nothing; replaces Speculator.forget."""


@contextmanager
def guessing(llm: genai.LLM, guesses: ScriptedGuesses, max_sequences: int = 32) -> Iterator[genai.LLM]:
    """Yield the same LLM with an engine that proposes the scripted tokens."""
    before = llm._worker
    llm._worker = Worker(lambda: Engine(llm.model.decoder, llm.model.sampler, max_sequences, guesses))  # type: ignore[arg-type]
    try:
        yield llm
    finally:
        llm._worker.close()
        llm._worker = before


def known_of(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> dict[Any, tuple[int, ...]]:
    """Return the outputs in the form that ScriptedGuesses expects."""
    return {(tuple(prompts[one.prompt_index]), one.sample_index): one.token_ids for one in completions}


def facts(completion: Completion) -> tuple[Any, ...]:
    """Return all facts about a completion that must be equal."""
    return (
        completion.text, completion.token_ids, completion.finish_reason, completion.stopped_by, completion.logprobs,
        completion.prompt_logprobs, completion.prompt_index, completion.sample_index,
    )  # fmt: skip


def _folders(root: Path) -> dict[str, Path]:
    """Return the bundled model, and two models with random weights and the bundled tokenizer."""
    common: dict[str, Any] = {
        "vocab_size": 1536, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_size": 16, "context_length": 512, "eos_token_ids": (2, 0),
    }  # fmt: skip
    found = {"pebble": bundled_model()}
    forms: dict[str, dict[str, Any]] = {
        "llama fp32": {"model_type": "llama"}, "mistral int4": {"model_type": "mistral", "sliding_window": 7}
    }  # fmt: skip
    for name, changes in forms.items():
        spec = DecoderSpec(**common, **changes)
        found[name] = root / name.replace(" ", "-")
        options = ExportOptions(precision=name.split()[1])
        write_model_folder(found[name], spec, options, RandomWeights(spec, seed=1), tokenizer_dir=bundled_model())
    return found


def _prompts(llm: genai.LLM, count: int) -> list[list[int]]:
    """Return questions, texts and random tokens, of 1 to 150 tokens each."""
    rng = random.Random(0)
    words = "the cat and dog a story of days numbers one two seven Monday Luna Tom sat on".split()
    made = []
    for index in range(count):
        if index % 3 == 0:
            a, b = rng.randrange(100), rng.randrange(100)
            text = rng.choice([f"What is {a} + {b}?", f"Count from {a} to {a + 9}.", f"Tell me a story about Tom {a}."])
            made.append(llm.encode(llm.render(text)))
        elif index % 3 == 1:
            made.append(llm.encode(" ".join(rng.choices(words, k=rng.randint(1, 60)))) or [5])
        else:
            made.append([rng.randrange(3, 1500) for _ in range(rng.randint(1, 150))])
    return made


_SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"mirostat": 2},
    {"temperature": 1.0, "dry_multiplier": 0.8, "top_k": 50, "min_tokens": 12},
    {"temperature": 0.7, "banned_strings": ["the", " a"], "stop": ["ing"]},
]


def main() -> None:
    """Compare outputs with and without draft tokens; exit with 1 if any differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=positive, default=500)
    parser.add_argument("--models", nargs="*", help="some of: pebble, 'llama fp32', 'mistral int4'")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--tokens", type=positive, default=32)
    arguments = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as root:
        for name, folder in _folders(Path(root)).items():
            if arguments.models and name not in arguments.models:
                continue
            with genai.LLM(folder, quiet=True) as llm:
                different += _compare(name, llm, arguments)
    sys.exit(1 if different else 0)


def _compare(name: str, llm: genai.LLM, arguments: argparse.Namespace) -> int:
    prompts, different = _prompts(llm, arguments.prompts), 0
    for seed in range(arguments.seeds):
        options: dict[str, Any] = {"max_tokens": arguments.tokens, "seed": seed, "ignore_eos": seed == 2}
        for greedy in (True, False):
            params = [
                genai.SamplingParams(**options, **({"temperature": 0} if greedy else _SAMPLED[index % len(_SAMPLED)]))
                for index in range(len(prompts))
            ]
            began = time.perf_counter()
            plain = llm.generate(prompts, params)
            guesses = ScriptedGuesses(known_of(prompts, plain), 1536, WAYS[seed % 3] if seed % 4 < 2 else "mixed")
            with guessing(llm, guesses):
                found = llm.generate(prompts, params)
            bad = [one.prompt_index for one, other in zip(plain, found, strict=True) if facts(one) != facts(other)]
            different += len(bad)
            how = "greedy" if greedy else "sampled"
            print(
                f"{name}, seed {seed}, {how}: {len(bad)} of {len(plain)} differ {bad[:5]}; {guesses.kept:,} of "
                f"{guesses.proposed:,} draft tokens accepted; {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return different


if __name__ == "__main__":
    main()
