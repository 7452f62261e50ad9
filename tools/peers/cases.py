"""What is measured: a prompt, then so many tokens, by a number of sequences that advance together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One measurement. It gives the speeds of reading the prompt and of generating, and the memory at most.

    Attributes:
        name: as in options and results.
        prompt: tokens of each sequence's prompt.
        new: tokens generated while the clock runs, after the first one.
        batch: sequences.
        threads: None = as many as the machine has cores.
        warm: a shorter run goes before; False measures from the start of the process to the first token.
        busy: every core has something else to do as well.
        peers: False = our own engine alone.
        adapter: every sequence uses the same low-rank adapter.
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
    """All cases for a machine of so many cores."""
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
    """A case as a worker gets it.

    Attributes:
        model: the engine's model: a folder or a file.
        vocab_size: prompts are random tokens below it.
        adapter: the engine's form of an adapter; "" = none.
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
        """The case on this model and machine."""
        return cls(model, vocab_size, case.prompt, case.new, case.batch, case.threads or cores, case.warm, adapter)


@dataclass(frozen=True)
class Measured:
    """What one process gave; None where the case does not tell.

    Attributes:
        prefill: prompt tokens per second, over all sequences.
        decode: generated tokens per second, over all sequences.
        first_token: seconds from the start of the process to the first token.
        peak_bytes: resident memory at most (VmHWM).
    """

    prefill: float | None
    decode: float | None
    first_token: float | None
    peak_bytes: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """From a dictionary with these names."""
        return cls(values["prefill"], values["decode"], values["first_token"], values["peak_bytes"])
