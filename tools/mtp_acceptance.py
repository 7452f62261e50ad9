"""Measure how often a model accepts the proposals of its MTP head: `python -m tools.mtp_acceptance FOLDER`.

The prompts are questions of the bundled model's training, with another seed. The head proposes a fixed number of tokens
at every step, so that the figures do not depend on the speed of the machine. The tool exits with 1 if a reply differs
from the reply without the head. With --speed, it also measures the durations of steps of one sequence.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from genai.engine.decoder import Decoder, compute
from genai.engine.sequence import DecoderSequence
from genai.engine.speculation.mtp import MtpProposer
from genai.engine.speculation.speculator import StepOutcome, takes_guesses
from genai.llm.llm import LLM
from genai.models.model import Model

from .arguments import positive
from .bundled_model.mixture import short_conversation
from .speculation_agreement import guessing

_ROUNDS = 200


class FixedDepth:
    """A replacement for Speculator that proposes the same number of tokens at every step.

    Args:
        head: drafts the tokens.
        depth: the number of tokens.

    Attributes:
        tested: number of steps that compared the proposal, by its place in the step.
        kept: number of steps that accepted it.
        steps, tokens: number of steps with proposals, per request, and of the tokens that they generated.
    """

    def __init__(self, head: MtpProposer, depth: int) -> None:
        self._head, self._depth = head, depth
        self.tested, self.kept = [0] * depth, [0] * depth
        self.steps = self.tokens = 0

    def propose(self, requests: Sequence[Any]) -> bool:
        """Propose tokens to every request that decodes; replaces Speculator.propose."""
        self._head.watch(requests)
        ready = [request for request in requests if takes_guesses(request)]
        self._head.read(ready)
        depths = [
            min(self._depth, self._head.room(one), one.max_length - len(one.sequence.tokens) - 1) for one in ready
        ]
        going = [(one, depth) for one, depth in zip(ready, depths, strict=True) if depth > 0]
        found = self._head.draft([one for one, _ in going], [depth for _, depth in going])
        for (request, _), tokens in zip(going, found, strict=True):
            request.sequence.propose(tokens)
        return True

    def settle(self, outcomes: Sequence[StepOutcome]) -> None:
        """Count the accepted tokens; replaces Speculator.settle."""
        for outcome in outcomes:
            if outcome.proposed:
                self.steps, self.tokens = self.steps + 1, self.tokens + outcome.taken
            for place in range(min(outcome.proposed, outcome.taken)):
                self.tested[place] += 1
                self.kept[place] += place < outcome.taken - 1

    def forget(self, request: Any) -> None:
        """Remove a finished request; replaces Speculator.forget."""
        self._head.forget(request)


def main() -> int:
    """Print the acceptance rate by place and the tokens per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=positive, default=40)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--depth", type=positive, default=3)
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    rng = random.Random(1234)
    with LLM(args.folder, speculation="mtp", threads=1) as llm, LLM(llm.model) as plain:
        prompts = [llm.render(short_conversation(rng).messages()[:-1]) for _ in range(args.prompts)]
        same = True
        for temperature in (0.0, 0.8):
            options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": args.tokens}
            name = f"temperature {temperature:g}"
            expected = plain.generate(prompts, **options)
            for depth in range(1, args.depth + 1):
                made = llm._speculation.speculator()
                assert made is not None and isinstance(made._draft, MtpProposer)
                fixed = FixedDepth(made._draft, depth)
                with guessing(cast(Any, llm), cast(Any, fixed)):
                    found = [llm.generate(prompt, **options)[0] for prompt in prompts]
                same = same and [one.token_ids for one in found] == [one.token_ids for one in expected]
                rates = ", ".join(
                    f"{kept / max(tested, 1):.0%}" for kept, tested in zip(fixed.kept, fixed.tested, strict=True)
                )
                print(
                    f"{name}, depth {depth}: accepted {rates}; {fixed.tokens / fixed.steps:.2f} tokens per step",
                    flush=True,
                )
        if args.speed:
            _print_steps(llm.model, args.depth + 1)
    print("all replies are those without the head" if same else "REPLIES DIFFER")
    return 0 if same else 1


def _print_steps(model: Model, most: int) -> None:
    """Print the median durations of steps of the model with 1 to `most` rows, and of the head."""
    seconds: dict[str, list[float]] = {}
    head = model.head
    assert head is not None
    main, own = model.decoder.open(), head.open()
    main.append(range(10, 110))
    own.feed(range(11, 110), np.zeros((99, head.program.types[head.program.given[0]].width), np.float32))
    for decoder, sequence in ((model.decoder, main), (head, own)):
        compute(decoder, [sequence])
    for _ in range(_ROUNDS):
        for rows in range(1, most + 1):
            main.append([10])
            main.propose(range(11, 10 + rows))
            seconds.setdefault(f"model, {rows} rows", []).append(_timed(model.decoder, main))
            main.take_back()
            main.rewind(100)
            compute(model.decoder, [main])
        own.feed([10], np.zeros((1, head.program.types[head.program.given[0]].width), np.float32))
        seconds.setdefault("head", []).append(_timed(head, own))
        own.cut(99)
    for name, found in seconds.items():
        print(f"{name}: {1e3 * statistics.median(found):.2f} ms")


def _timed(decoder: Decoder, sequence: DecoderSequence) -> float:
    began = time.perf_counter()
    compute(decoder, [sequence])
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
