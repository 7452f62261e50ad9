"""What is asked and told while a model is fetched."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from genai.errors import ModelFolderError

from .terminal import agreed, say

if TYPE_CHECKING:
    from genai.hub.pull import PullHooks, PullPlan


class PullDialog:
    """The hooks of a command, and what was answered.

    Args:
        yes: fetch without asking.
        precision: how a checkpoint's weights will be stored.
    """

    def __init__(self, *, yes: bool = False, precision: str | None = None) -> None:
        self._yes, self._precision = yes, precision

    @property
    def hooks(self) -> PullHooks:
        """What `pull_model` calls."""
        from genai.convert.resolve import pull_task
        from genai.hub.pull import PullHooks

        return PullHooks(ask=self._ask, watch=pull_task, waiting=_waiting, notice=lambda text: say(f"genai: {text}"))

    def agreed(self, question: str) -> bool:
        """Whether whoever is asked to build has said yes already, to the pull."""
        if self._yes:
            say(f"genai: {question.replace('Build a', 'Building a', 1).rstrip('?')}")
        return self._yes

    def _ask(self, plan: PullPlan) -> bool:
        for line in (*described(plan), memory_needed(plan, self._precision)):
            say(f"genai: {line}")
        if self._yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ModelFolderError(
                f"{plan.name} is not in the cache",
                f"{size(plan.missing_bytes)} would be fetched, which is asked for first, and nobody can answer here",
                f"run `genai pull {quote(plan.name)}` first; chat, generate and batch also take --yes",
            )
        self._yes = agreed(f"Fetch {size(plan.missing_bytes)} of {plan.name}?")
        return self._yes


def described(plan: PullPlan) -> list[str]:
    """What a pull fetches, under which licence, and where to."""
    listing, choice = plan.listing, plan.choice
    had_before = f" ({size(plan.total_bytes - plan.missing_bytes)} of it from before)" * (
        plan.missing_bytes < plan.total_bytes
    )
    lines = [f"{plan.name}: {choice.why}, {size(plan.total_bytes)}{had_before}, into {plan.folder.parents[2]}"]
    if listing.commit:
        gate = "; the model is gated: its licence has to be accepted there" if listing.gated else ""
        lines.append(
            f"licence: {listing.license or 'the page names none'} ({listing.page}, {listing.commit[:12]}){gate}"
        )
    elif not choice.files[0].digest:
        lines.append("no checksum is known for this file; #sha256=… behind the address would have it compared")
    return lines


# Of a checkpoint in 16 bits, what its weights take in memory as they are stored; int4 and int8 with their scales.
_SHARES = {"int4": 0.32, "int8": 0.56, "fp16": 2.0, "fp32": 2.0}


def memory_needed(plan: PullPlan, precision: str | None) -> str:
    """How much memory it will take, roughly, and whether there is so much."""
    from genai.common.memory_limits import available_memory

    share = _SHARES.get(precision or "int4", 1.0) if plan.choice.kind == "checkpoint" else 1.0
    needed, free = int(plan.total_bytes * share), available_memory()
    verdict = "" if needed < free else "it will not fit into memory: "
    return f"{verdict}its weights will take about {size(needed)} of memory, {size(free)} are free"


def size(count: int) -> str:
    """Such as 2.5 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _waiting(folder: Path) -> None:
    say(f"genai: another process is pulling into {folder}; waiting for it (Ctrl-C ends this)")
