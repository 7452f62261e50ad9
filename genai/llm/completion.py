"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..engine.sampling.batch import TokenLogprob
    from ..text.parsing import Reply, ToolCall
    from .states import TextState  # a completion holds a state, and a state makes completions

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True)
class Timings:
    """Where the time of one completion went, in seconds.

    Attributes:
        time_to_first_token: from the call to the first token: waiting for a place, and the prompt.
        decode_seconds: from the first token to the last.
        compile_seconds: what kernels took that were compiled meanwhile, once per kernel; the others leave it out.
    """

    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0

    def followed_by(self, *later: Timings) -> Timings:
        """Together with what came after: the later prompts count as decoding."""
        more = sum(one.time_to_first_token + one.decode_seconds for one in later)
        compiled = self.compile_seconds + sum(one.compile_seconds for one in later)
        return Timings(self.time_to_first_token, self.decode_seconds + more, compiled)

    def tokens_per_second(self, num_tokens: int) -> float:
        """Decode speed: the tokens after the first one, per second; 0 where there are none."""
        return (num_tokens - 1) / self.decode_seconds if num_tokens > 1 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Usage:
    """Tokens of one request.

    Attributes:
        prompt_tokens: of the prompt. cached_tokens: how many of them were taken from the prefix cache.
        completion_tokens: of the answer.
        proposed_tokens: how many speculation has guessed. accepted_tokens: how many of these are in the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """One sample of one prompt.

    Attributes:
        text: what was generated, without stop strings; whole characters.
        token_ids: the tokens behind it, without the stop token. Where a stop string ended the output, the tokens that
            hold it are included.
        finish_reason: "stop" (EOS, a stop token or a stop string), "length" (max_tokens, or the context is full),
            "cancelled", or "timeout" (the request's time was over; what there is was generated until then).
        stopped_by: the token id or the stop string of "stop"; None otherwise.
        prompt_tokens: tokens of the prompt. cached_tokens: how many of them were taken from the prefix cache.
        logprobs: one per token of token_ids, where asked for.
        prompt_logprobs: one per prompt token, None for the first, where asked for.
        timings: where the time went.
        seed: of the random numbers; with it the same request gives the same tokens again.
        score: of a beam search, the sum of its tokens' log-probabilities by the length penalty; None otherwise.
        state: what to go on from, where it was asked for (keep_state=True); None otherwise.
        prompt_index, sample_index: which prompt of the call, and which of its n samples.
        proposed_tokens, accepted_tokens: how many tokens speculation has guessed, and how many of these were right.
        forgotten_tokens: of prompt and answer, that the last tokens did not see any more (ctx_shift).

    >>> (completion,) = llm.generate(llm.render("What is 20 - 5?"), logprobs=1)
    >>> completion.text, completion.finish_reason, len(completion.logprobs) == len(completion.token_ids)
    ('15', 'stop', True)
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stopped_by: int | str | None
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_index: int = 0
    sample_index: int = 0
    score: float | None = None
    state: TextState | None = field(default=None, repr=False, compare=False)
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    forgotten_tokens: int = 0

    @property
    def usage(self) -> Usage:
        """Its tokens, counted."""
        return Usage(
            self.prompt_tokens, self.cached_tokens, len(self.token_ids), self.proposed_tokens, self.accepted_tokens
        )

    @property
    def tokens_per_second(self) -> float:
        """Decode speed."""
        return self.timings.tokens_per_second(len(self.token_ids))


@dataclass(frozen=True)
class ChatReply:
    """A model's turn in a conversation, in its parts.

    Attributes:
        text: the answer. reasoning: what came before it, where the model thinks aloud. tool_calls: tools that it wants
            to be called. They are split by the format that the chat template teaches, see genai.text.parsing.
        reply: the parts with what was found wrong in them.
        completion: the raw text, the tokens and the figures.
    """

    reply: Reply
    completion: Completion

    @property
    def text(self) -> str:
        """The answer, without reasoning and tool calls."""
        return self.reply.text

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; "" if it did not."""
        return self.reply.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls in order."""
        return self.reply.tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message that can be appended to the conversation.

        >>> reply = llm.chat("What is 20 - 5?")
        >>> reply.message
        {'role': 'assistant', 'content': '15'}
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | ({"id": call.id} if call.id is not None else {})
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class Done:
    """The last event of a streamed chat: the reply as a whole, as `chat` would have returned it."""

    reply: ChatReply

    @property
    def completion(self) -> Completion:
        """The raw text, the tokens, the figures, and why it ended."""
        return self.reply.completion

    @property
    def usage(self) -> Usage:
        """Its tokens, counted."""
        return self.completion.usage

    @property
    def raw(self) -> str:
        """Nothing was generated for this event."""
        return ""
