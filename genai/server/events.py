"""The events of a running turn. Every wire format encodes the same events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..engine.sampling.batch import TokenLogprob
from ..llm.completion import Completion


@dataclass(frozen=True)
class Text:
    """A piece of the text of a sample.

    Attributes:
        sample: index of the sample.
        text: the piece.
    """

    sample: int
    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning of a sample. See Text."""

    sample: int
    text: str


@dataclass(frozen=True)
class ToolCall:
    """The beginning of a tool call.

    Attributes:
        sample: index of the sample.
        index: index of the call in the sample.
        id: identifier of the call, unique in a conversation.
        name: name of the tool.
    """

    sample: int
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """A piece of the arguments of a tool call, as JSON text. See ToolCall."""

    sample: int
    index: int
    text: str


@dataclass(frozen=True)
class Logprobs:
    """The log-probabilities of the next tokens of a sample. The event precedes the text of the tokens."""

    sample: int
    entries: Sequence[TokenLogprob]


@dataclass(frozen=True)
class Finish:
    """The end of a sample.

    Attributes:
        sample: index of the sample.
        has_calls: True if the sample calls tools.
        completion: the result, with the reason of the end and the token counts.
        eos: the tokens that end a reply.
    """

    sample: int
    has_calls: bool
    completion: Completion
    eos: Sequence[int] = ()


Event: TypeAlias = Text | Reasoning | ToolCall | ToolArguments | Logprobs | Finish


@dataclass(frozen=True)
class TokenCounts:
    """The token counts of a whole turn.

    Attributes:
        prompt: tokens of the prompts.
        cached: prompt tokens that the prefix cache supplied.
        completion: generated tokens of all samples.
        reasoning: generated tokens of the reasoning.
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0

    @property
    def total(self) -> int:
        """The number of tokens in prompts and completions."""
        return self.prompt + self.completion


def token_counts(completions: Sequence[Completion]) -> TokenCounts:
    """Return the token counts of the samples of one or more prompts."""
    firsts = [one for one in completions if one.sample_index == 0]
    return TokenCounts(
        sum(one.prompt_tokens for one in firsts),
        sum(one.cached_tokens for one in firsts),
        sum(len(one.token_ids) for one in completions),
    )
