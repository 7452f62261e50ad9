"""Request options other than sampling: priority, timeout, special tokens, beams, context shift, kept states."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..engine.beams import BeamOptions
from ..engine.sampling.params import SamplingOptions
from ..engine.sequence import ContextShift
from ..errors import OptionError

_MOST_PRIORITY = 2**31
OnError: TypeAlias = Literal["raise", "return"]


class LineOptions(SamplingOptions, total=False):
    """The sampling options and the options of a prompt's text, which the lines of a batch can also set."""

    add_special_tokens: bool | None
    literal: bool | None


PROMPT_OPTIONS = ("add_special_tokens", "literal")
"""The names of the options of a prompt's text."""


class CallOptions(LineOptions, total=False):
    """Keyword options of a request: the sampling options and the fields of `RequestOptions`."""

    priority: int
    timeout: float | None
    keep_state: bool
    ctx_shift: bool | int
    cache_salt: str | None
    reuse_replies: bool


class BeamCallOptions(CallOptions, total=False):
    """CallOptions plus the options of a beam search; see `BeamOptions`."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    num_return_sequences: int


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request other than sampling.

    Attributes:
        priority: requests with a higher priority start sooner; running requests are not affected. The cached blocks of
            requests with a negative priority are evicted before those of other requests.
        timeout: maximum number of seconds from the call. When it expires, the tokens so far are the completion, with
            finish_reason "timeout"; if there are no tokens, DeadlineError is raised. None = no limit.
        keep_state: set `state` in each completion, so that the generation can be resumed.
        ctx_shift: when the context is full, drop the older half of the tokens after the first ones, and continue. The
            value is the number of first tokens to keep (True: one block), rounded up to whole blocks. False = the
            request ends when the context is full.
        cache_salt: a text that becomes part of the keys of the prefix cache, so that only requests with the same text
            share cached blocks. None = the blocks that all requests without a salt share.
        reuse_replies: False to reuse only cached blocks with the numerics of a whole prompt. Blocks that were computed
            as part of a reply are then computed again, and the tokens of the reply do not depend on earlier requests.
        add_special_tokens: True to add the special tokens that the tokenizer adds to texts, such as BOS, unless the
            prompt already begins with them; False to add none. None = True for a raw text; False for a conversation,
            because the chat template writes them.
        literal: True to encode special tokens in the prompt, such as "<|im_end|>", as ordinary text; False to encode
            them as their ids; None = False, unless tokenizer_config.json sets split_special_tokens. In a conversation,
            the option applies to the texts of the messages; see docs/how-to/untrusted-text.md.
        beams: options of a beam search; None = sampling.

    Raises:
        OptionError: a value is out of range.
    """

    priority: int = 0
    timeout: float | None = None
    keep_state: bool = False
    ctx_shift: bool | int = False
    cache_salt: str | None = None
    reuse_replies: bool = True
    add_special_tokens: bool | None = None
    literal: bool | None = None
    beams: BeamOptions | None = None

    def __post_init__(self) -> None:
        priority, timeout = self.priority, self.timeout
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MOST_PRIORITY:
            raise OptionError(
                f"priority = {priority!r:.40}",
                "a whole number is expected; higher priorities start sooner",
                "use 0 for the default priority",
            )
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and math.isfinite(timeout) and timeout > 0):
            raise OptionError(
                f"timeout = {timeout!r:.40}", "a positive number of seconds, or None, is expected", "leave timeout out"
            )
        for name, flag in (("keep_state", self.keep_state), ("reuse_replies", self.reuse_replies)):
            if not isinstance(flag, bool):
                raise OptionError(f"{name} = {flag!r:.40}", "True or False is expected", f"leave {name} out")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise OptionError(
                f"cache_salt = {self.cache_salt!r:.40}", "a text, or None, is expected", "leave cache_salt out"
            )
        for name, value in (("add_special_tokens", self.add_special_tokens), ("literal", self.literal)):
            if value is not None and not isinstance(value, bool):
                raise OptionError(f"{name} = {value!r:.40}", "True, False or None is expected", f"leave {name} out")
        keeps = self.ctx_shift
        if not isinstance(keeps, int) or (keeps is not False and keeps < 1):
            raise OptionError(
                f"ctx_shift = {keeps!r:.40}",
                "True, False or a number of tokens to keep is expected",
                "leave ctx_shift out",
            )
        for name, other in (("keep_state", self.keep_state), ("num_beams", self.beams)):
            if self.ctx_shift is not False and other:
                raise OptionError(
                    f"ctx_shift cannot be used with {name}", "a sequence that drops tokens cannot be kept or forked",
                    "leave one of the two out",
                )  # fmt: skip

        if self.beams and (self.cache_salt is not None or not self.reuse_replies):
            name = "reuse_replies = False" if self.cache_salt is None else "cache_salt"
            raise OptionError(
                f"{name} cannot be used with num_beams", "beam searches support only the default",
                "leave one of the two out",
            )  # fmt: skip

    def shift(self, context_size: int) -> ContextShift | None:
        """Return the context shift for a sequence when its context is full; None if the request does not set one."""
        if self.ctx_shift is False:
            return None
        return ContextShift(1 if self.ctx_shift is True else self.ctx_shift, context_size)

    @property
    def deadline(self) -> float | None:
        """The deadline of a request that starts now, in time.monotonic() seconds; None = no limit."""
        return None if self.timeout is None else time.monotonic() + self.timeout


_CALL_OPTIONS = ("priority", "timeout", "keep_state", "ctx_shift", "cache_salt", "reuse_replies", *PROMPT_OPTIONS)
_BEAMS = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")


def split_options(options: Mapping[str, Any]) -> tuple[RequestOptions, dict[str, Any]]:
    """Split a request's options into RequestOptions and sampling options.

    Raises:
        OptionError: a value is out of range, or a beam option is set without num_beams.
    """
    sampling = {name: value for name, value in options.items() if name not in (*_CALL_OPTIONS, *_BEAMS)}
    call_options = {name: options[name] for name in _CALL_OPTIONS if name in options}
    beams = {name: options[name] for name in _BEAMS if name in options}
    return RequestOptions(**call_options, beams=BeamOptions.from_options(beams) if beams else None), sampling


def check_on_error(on_error: str, schema: object, options: Mapping[str, Any]) -> bool:
    """Return True if errors are to be returned. Raise OptionError if other options contradict `on_error`."""
    if on_error not in ("raise", "return"):
        raise OptionError(f"on_error = {on_error!r:.40}", "allowed: raise, return", "use one of these values")
    if on_error == "raise":
        return False
    for name in ("num_beams", "schema"):
        if (schema if name == "schema" else options.get(name)) is not None:
            raise OptionError(
                f"{name} with on_error='return'",
                "errors are returned only in place of sampled completions",
                f"leave {name} or on_error out",
            )
    return True
