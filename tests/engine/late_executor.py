"""A device that runs asynchronously, built on one that computes at once, for tests of steps that run ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from genai.kernels.device import StepContext
from genai.kernels.sampling import SamplingBatch


@dataclass
class Log:
    """The calls so far: "step", "ahead", "begin", "wait", "sample"; `fails` is called with each and may raise."""

    asked: list[str]
    fails: Callable[[str], object] = str
    runs_ahead: bool = True

    def note(self, what: str) -> None:
        self.asked.append(what)
        self.fails(what)


@dataclass
class LateChoice:
    """See `genai.kernels.device.TokenChoice`."""

    found: tuple[Any, Any, Any]
    log: Log
    was_read: bool = False

    def wait(self) -> tuple[Any, Any, Any]:
        assert not self.was_read
        self.was_read = True
        self.log.note("wait")
        return self.found


class LateSampler:
    """A sampler whose results are only available after `wait`."""

    most_begun = 64

    def __init__(self, inner: Any, log: Log) -> None:
        self._inner, self._log = inner, log

    def sample(self, logits: Any, batch: SamplingBatch, distributions: Any = None) -> Any:
        self._log.note("sample")
        return self._inner.sample(logits, batch, distributions)

    def begin(self, logits: Any, batch: SamplingBatch) -> LateChoice:
        self._log.note("begin")
        return LateChoice(self._inner.sample(logits, batch), self._log)

    def log_normalizers(self, logits: Any, rows: Any, top: int) -> Any:
        return self._inner.log_normalizers(logits, rows, top)


class LateStep:
    """A step function that accepts tokens that are still being chosen."""

    def __init__(self, inner: Any, log: Log) -> None:
        self._inner, self._log = inner, log

    @property
    def takes_choices(self) -> bool:
        return self._log.runs_ahead

    def run(self, step: StepContext, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if step.choice is None:
            self._log.note("step")
        else:
            self._log.note("ahead")
            assert isinstance(step.choice, LateChoice) and not step.choice.was_read
            assert not step.tokens.any()
            tokens = np.maximum(step.choice.found[0][step.chosen], 0)
            step = replace(step, tokens=tokens, choice=None)
        return {name: np.array(value) for name, value in self._inner.run(step, given).items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LateExecutor:
    """See `genai.kernels.device.Executor`."""

    def __init__(self, inner: Any, log: Log) -> None:
        self._inner, self.log = inner, log

    def compile(self, *args: Any) -> LateStep:
        return LateStep(self._inner.compile(*args), self.log)

    def sampler(self, vocab_size: int) -> LateSampler:
        return LateSampler(self._inner.sampler(vocab_size), self.log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
