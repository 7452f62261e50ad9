"""Replies of random bytes that follow a JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from genai.engine.sampling.grammar import Grammar, schema_text
from genai.engine.sampling.guidance import Guidance, Matcher, TokenBytes

END = 256
Walk = Callable[..., str | None]
Takes = Callable[[Any, str], bool]


def byte_guidance() -> Guidance:
    """A compiler of grammars for a vocabulary of bytes and an end."""
    known = TokenBytes([bytes([i]) for i in range(256)], [], lambda text: list(text.encode()))
    return Guidance(lambda: known, END + 1, [END])


def matcher_of(guidance: Guidance, schema: Any) -> Matcher:
    """A matcher at the start of the schema."""
    text = schema_text("json_schema", schema)
    assert text is not None
    return guidance.matcher(Grammar("json_schema", text))


def walked(guidance: Guidance, schema: Any, seed: int, usual: bytes = b'"\\/u0') -> str | None:
    """A reply of random bytes, often from `usual`, that the grammar allows; None if it did not end."""
    matcher, random, reply = matcher_of(guidance, schema), Random(seed), b""
    mask = np.zeros((1, 9), np.int32)
    for count in range(400):
        if matcher.is_over:
            return reply.decode()
        fill_next_token_bitmask(matcher.automaton, mask)
        matcher.restrict(mask.view(np.uint32)[0])
        allowed = [int(one) for one in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]
        assert allowed, f"no token may follow {reply!r}"
        if END in allowed and (random.random() < 0.3 or count > 60 or len(allowed) == 1):
            return reply.decode()
        allowed = [one for one in allowed if one < END]
        # Escapes, and the characters that end a string, are where a grammar can be wrong.
        often = [one for one in allowed if one in usual and random.random() < 0.5] or allowed
        reply += bytes([token := random.choice(often)])
        matcher.follow(token)
    return None


def taken(guidance: Guidance, schema: Any, text: str) -> bool:
    """True if the text is a whole reply."""
    matcher = matcher_of(guidance, schema)
    data = list(text.encode())
    if matcher.num_allowed(data) < len(data):
        return False
    for token in data:
        matcher.follow(token)
    return matcher.is_complete
