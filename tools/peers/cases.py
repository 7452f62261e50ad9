"""The measured cases: a prompt and a number of new tokens, for one or more sequences that decode together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One measurement of prefill speed, decode speed and peak memory.

    Attributes:
        name: name in options and results.
        prompt: tokens of each sequence's prompt.
        new: tokens generated while the time is measured, after the first token.
        batch: number of sequences.
        threads: number of threads; None for the machine's number of cores.
        warm: True to run a shorter warm-up first; False to measure from process start to the first token.
        busy: True if every core also runs another program.
        peers: False to measure only our own engine.
        adapter: True if every sequence uses the same LoRA adapter.
    """

    name: str
    prompt: int
    new: int
    batch: int = 1
    threads: int | None = None
    warm: bool = True
    busy: bool = False
    peers: bool = True
    adapter: bool = False


def cases(cores: int) -> dict[str, Case]:
    """Return all cases for a machine with this number of cores."""
    return {
        case.name: case
        for case in (
            Case("context-128", 128, 128),
            Case("context-512", 512, 64),
            Case("context-2048", 2048, 64),
            *(Case(f"context-{length}", length, 64, peers=False) for length in (1024, 4096, 8192)),
            *(Case(f"batch-{batch}", 128, 64, batch) for batch in (4, 8, 16)),
            *(Case(f"threads-{threads}", 512, 64, threads=threads) for threads in range(1, cores)),
            Case("busy", 128, 64, busy=True),
            Case("cold", 128, 1, warm=False),
            Case("adapter-batch-1", 128, 128, adapter=True),
            Case("adapter-batch-16", 128, 64, 16, adapter=True),
        )
    }


@dataclass(frozen=True)
class Job:
    """A case in the form that a worker receives.

    Attributes:
        model: folder or file of the engine's model.
        vocab_size: exclusive upper limit of the random tokens in prompts.
        adapter: folder or file of the adapter in the engine's format; "" for no adapter.
    """

    model: str
    vocab_size: int
    prompt: int
    new: int
    batch: int
    threads: int
    warm: bool
    adapter: str = ""

    @classmethod
    def of(cls, case: Case, model: str, vocab_size: int, cores: int, adapter: str = "") -> Job:
        """Return the job for a case, with a model and the number of this machine's cores."""
        return cls(model, vocab_size, case.prompt, case.new, case.batch, case.threads or cores, case.warm, adapter)


@dataclass(frozen=True)
class Measured:
    """The measurements of one process; a value that the case does not measure is None.

    Attributes:
        prefill: prompt tokens per second, over all sequences.
        decode: generated tokens per second, over all sequences.
        first_token: seconds from the start of the process to the first token.
        peak_bytes: peak resident memory (VmHWM).
    """

    prefill: float | None
    decode: float | None
    first_token: float | None
    peak_bytes: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """Return the measurements from a dictionary with these names."""
        return cls(values["prefill"], values["decode"], values["first_token"], values["peak_bytes"])
