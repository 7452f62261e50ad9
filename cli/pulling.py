"""Questions and messages about a download."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from genai.common.memory_limits import format_bytes as size
from genai.errors import ModelFolderError

from .terminal import agreed, say

if TYPE_CHECKING:
    from genai.hub.pull import PullHooks, PullPlan


class PullDialog:
    """The hooks of a command's download, and the user's answer.

    Attributes:
        started: True if a download was started.

    Args:
        yes: True to download without asking.
        precision: weight precision of the model that will be built from a checkpoint.
    """

    def __init__(self, *, yes: bool = False, precision: str | None = None) -> None:
        self._yes, self._precision = yes, precision
        self.started = False

    @property
    def hooks(self) -> PullHooks:
        """The hooks for `pull_model`."""
        from genai.hub.pull import PullHooks

        return PullHooks(ask=self._ask, waiting=_waiting, notice=lambda text: say(f"genai: {text}"))

    def agreed(self, question: str) -> bool:
        """Return True if the user already agreed to the download, so that the build needs no confirmation."""
        if self._yes:
            say(f"genai: {question.replace('Build a', 'Building a', 1).rstrip('?')}")
        return self._yes

    def _ask(self, plan: PullPlan) -> bool:
        for line in (*described(plan), memory_needed(plan, self._precision)):
            say(f"genai: {line}")
        if self._yes:
            self.started = True
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ModelFolderError(
                f"{plan.name} is not in the cache",
                f"downloading {size(plan.missing_bytes)} needs confirmation, but stdin or stderr is not a terminal",
                f"run `genai pull {quote(plan.name)}` first, or add --yes (chat, generate, batch, embed, rerank only)",
            )
        self._yes = agreed(f"Download {plan.name} ({size(plan.missing_bytes)})?")
        self.started = self._yes
        return self._yes


def described(plan: PullPlan) -> list[str]:
    """Return lines that state a download's size, licence and destination."""
    listing, choice = plan.listing, plan.choice
    had_before = f" ({size(plan.total_bytes - plan.missing_bytes)} already downloaded)" * (
        plan.missing_bytes < plan.total_bytes
    )
    lines = [f"{plan.name}: {choice.why}, {size(plan.total_bytes)}{had_before}, into {plan.folder.parents[2]}"]
    if listing.commit:
        gate = "; the model is gated: accept its licence on that page" if listing.gated else ""
        lines.append(
            f"licence: {listing.license or 'the page names none'} ({listing.page}, {listing.commit[:12]}){gate}"
        )
    elif not choice.files[0].digest:
        lines.append("no checksum is known for this file; to verify the download, append #sha256=… to the URL")
    return lines


# The memory that weights need, relative to their size in a 16-bit checkpoint. int4 and int8 include scales.
_SHARES = {"int4": 0.32, "int8": 0.56, "fp16": 2.0, "fp32": 2.0}


def memory_needed(plan: PullPlan, precision: str | None) -> str:
    """Return an estimate of the memory that the model needs, with a warning if it does not fit."""
    from genai.common.memory_limits import available_memory

    share = _SHARES.get(precision or "int4", 1.0) if plan.choice.kind == "checkpoint" else 1.0
    needed, free = int(plan.total_bytes * share), available_memory()
    verdict = "" if needed < free else "the model will not fit in memory: "
    # The type of a checkpoint's weights is known after the download: in float32 files, they are half as many.
    about = "at most" if share == _SHARES["fp32"] else "about"
    return f"{verdict}the weights need {about} {size(needed)} of memory; {size(free)} is free"


def _waiting(folder: Path) -> None:
    say(f"genai: waiting for another process that is downloading into {folder} (Ctrl-C to cancel)")
