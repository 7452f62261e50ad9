"""What a request asks for besides how tokens are drawn: its turn, its time, its beams, and what it leaves behind."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.beams import BeamOptions
from ..engine.sampling.params import SamplingOptions
from ..engine.sequence import ContextShift
from ..errors import OptionError

_MOST_PRIORITY = 2**31


class CallOptions(SamplingOptions, total=False):
    """Options of one request as keywords of calls: those of sampling, and those of `RequestOptions`."""

    priority: int
    timeout: float | None
    keep_state: bool
    ctx_shift: bool | int


class BeamCallOptions(CallOptions, total=False):
    """The same for calls that can search with beams, see `BeamOptions`."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    num_return_sequences: int


@dataclass(frozen=True)
class RequestOptions:
    """See above.

    Attributes:
        priority: requests of a higher one are started sooner; those that run go on.
        timeout: seconds from the call on. What there is then is the completion, with finish_reason "timeout"; with no
            token at all a DeadlineError is raised. None = no limit.
        keep_state: give each completion its `state`, from which it can go on.
        ctx_shift: where the context is full, forget the older half of what lies behind the first tokens, and go on:
            so many of the first tokens are kept (True: a block of them), up to whole blocks. False = it ends there.
        beams: of a beam search; None = tokens are drawn.

    Raises:
        OptionError: a value out of range.
    """

    priority: int = 0
    timeout: float | None = None
    keep_state: bool = False
    ctx_shift: bool | int = False
    beams: BeamOptions | None = None

    def __post_init__(self) -> None:
        priority, timeout = self.priority, self.timeout
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MOST_PRIORITY:
            raise OptionError(f"priority = {priority!r:.40}", "a whole number is expected; higher is sooner", "use 0")
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and math.isfinite(timeout) and timeout > 0):
            raise OptionError(f"timeout = {timeout!r:.40}", "seconds above 0, or None, are expected", "leave it out")
        if not isinstance(self.keep_state, bool):
            raise OptionError(f"keep_state = {self.keep_state!r:.40}", "True or False is expected", "leave it out")
        keeps = self.ctx_shift
        if not isinstance(keeps, int) or (keeps is not False and keeps < 1):
            raise OptionError(
                f"ctx_shift = {keeps!r:.40}", "True, False or a number of tokens to keep is expected", "leave it out"
            )
        for name, other in (("keep_state", self.keep_state), ("num_beams", self.beams)):
            if self.ctx_shift is not False and other:
                raise OptionError(
                    f"ctx_shift with {name}", "what forgets tokens is one sequence that nobody goes on from",
                    "leave one of them out",
                )  # fmt: skip

    def shift(self, context_size: int) -> ContextShift | None:
        """What becomes of a sequence that fills the context."""
        if self.ctx_shift is False:
            return None
        return ContextShift(1 if self.ctx_shift is True else self.ctx_shift, context_size)

    @property
    def deadline(self) -> float | None:
        """When the time is over, of time.monotonic(), if the request begins now."""
        return None if self.timeout is None else time.monotonic() + self.timeout


_CALL_OPTIONS = ("priority", "timeout", "keep_state", "ctx_shift")
_BEAMS = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")


def split_options(options: Mapping[str, Any]) -> tuple[RequestOptions, dict[str, Any]]:
    """The terms among the options of a request, and the others: those of sampling.

    Raises:
        OptionError: a value out of range, or a beam option without beams.
    """
    sampling = {name: value for name, value in options.items() if name not in (*_CALL_OPTIONS, *_BEAMS)}
    call_options = {name: options[name] for name in _CALL_OPTIONS if name in options}
    beams = {name: options[name] for name in _BEAMS if name in options}
    return RequestOptions(**call_options, beams=BeamOptions.from_options(beams) if beams else None), sampling
