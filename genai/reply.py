"""One streamed reply: tokens to text pieces, with timings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import ContextOverflowError, InputError, OptionError

if TYPE_CHECKING:
    from .generator import Generator
    from .tokenizer import Tokenizer


@dataclass
class ReplyStats:
    """What a reply cost.

    Attributes:
        prompt_tokens, cached_tokens: tokens of the prompt, and how many of them were still in the cache.
        new_tokens: tokens generated.
        time_to_first_token, decode_seconds: seconds from the start to the first token, and from there to the last.
        finish_reason: "eos", "length" (max_tokens or the context), or "interrupted".
        context_used, context_length: tokens in the sequence now, and the most it can hold.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = "interrupted"
    context_used: int = 0
    context_length: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first one, per second."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 and self.decode_seconds > 0 else 0.0


def feed_prompt(generator: Generator, prompt: Sequence[int], stats: ReplyStats) -> None:
    """Bring a generator (batch 1) to `prompt`, recomputing only what its cache does not hold yet.

    Raises:
        InputError: the prompt is empty.
        ContextOverflowError: the prompt leaves no room for a reply.
    """
    limit = generator.max_length
    if not prompt:
        raise InputError("the prompt is empty", "there is nothing to answer", "write something")
    if len(prompt) >= limit:
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens",
            f"the context holds {limit}, the reply included",
            "shorten it, or start a new chat",
        )
    current = generator.get_sequence(0).tolist()
    shared = 0
    for old, new in zip(current, prompt[:-1], strict=False):
        if old != new:
            break
        shared += 1
    if shared < len(current):
        generator.rewind_to(shared)
    generator.append_tokens(prompt[shared:])
    stats.prompt_tokens, stats.cached_tokens, stats.context_length = len(prompt), shared, limit


def stream_reply(
    generator: Generator, tokenizer: Tokenizer, prompt: Sequence[int], stats: ReplyStats, max_tokens: int | None = None
) -> Iterator[str]:
    """Generate after `prompt` and yield text pieces, whole characters only.

    `stats` is filled as the reply grows, so it is right also when the caller stops early.

    Raises:
        OptionError: max_tokens below 1.
        InputError, ContextOverflowError: see feed_prompt.
    """
    if max_tokens is not None and max_tokens < 1:
        raise OptionError(
            f"max_tokens = {max_tokens}", "at least 1 is expected", "leave it out for no limit but the context"
        )
    begin = time.perf_counter()
    feed_prompt(generator, prompt, stats)
    stream = tokenizer.create_stream()
    first = begin
    while not generator.is_done() and (max_tokens is None or stats.new_tokens < max_tokens):
        generator.generate_next_token()
        now = time.perf_counter()
        if stats.new_tokens == 0:
            first, stats.time_to_first_token = now, now - begin
        stats.decode_seconds = now - first
        token = int(generator.get_next_tokens()[0])
        stats.context_used = generator.token_count()
        if token in generator.eos_token_ids:
            stats.finish_reason = "eos"
            break
        stats.new_tokens += 1
        stats.token_ids.append(token)
        if piece := stream.decode(token):
            yield piece
    else:
        stats.finish_reason = "length"
    if tail := stream.flush():
        yield tail
