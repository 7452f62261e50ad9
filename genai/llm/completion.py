"""The results of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..common.html_parts import escaped, folded, note, passage

if TYPE_CHECKING:
    from ..engine.sampling.batch import TokenLogprob
    from ..text.parsing import Reply, ToolCall
    from .states import TextState  # a circular import: states also create completions

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True)
class Timings:
    """Durations of a completion, in seconds.

    Attributes:
        time_to_first_token: time from the call to the first token, which includes queueing and prefill.
        decode_seconds: time from the first token to the last.
        compile_seconds: time spent compiling kernels, once per kernel; the other durations exclude it.
        queue_seconds: the part of time_to_first_token until the engine started the request.
    """

    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    queue_seconds: float = 0.0

    def followed_by(self, *later: Timings) -> Timings:
        """Return the total of this part and later parts. The later parts' times to first token count as decode time."""
        more = sum(one.time_to_first_token + one.decode_seconds for one in later)
        compiled = self.compile_seconds + sum(one.compile_seconds for one in later)
        return Timings(self.time_to_first_token, self.decode_seconds + more, compiled, self.queue_seconds)

    def tokens_per_second(self, num_tokens: int) -> float:
        """Return the decode speed: the number of tokens after the first, per second; 0 if there are none."""
        return (num_tokens - 1) / self.decode_seconds if num_tokens > 1 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that the prefix cache supplied.
        completion_tokens: tokens of the completion.
        proposed_tokens: tokens that speculative decoding proposed.
        accepted_tokens: proposed tokens that are part of the completion.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The number of tokens in the prompt and the completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """A sample for a prompt.

    Attributes:
        text: the generated text, without stop strings; whole characters only.
        token_ids: the generated tokens, without the stop token. If a stop string ended the output, its tokens are
            included.
        finish_reason: "stop" (EOS, a stop token or a stop string), "length" (max_tokens, or the context is full),
            "cancelled", or "timeout" (the request's timeout expired; the output has the tokens generated until then).
        stopped_by: the token id or stop string if finish_reason is "stop"; None otherwise.
        prompt_tokens: number of prompt tokens.
        cached_tokens: number of prompt tokens that the prefix cache supplied.
        logprobs: one entry per token of token_ids; None if not requested.
        prompt_logprobs: one entry per prompt token, None for the first token; None if not requested.
        timings: durations.
        seed: seed of the random numbers. The same request with this seed generates the same tokens.
        score: for a beam search, the sum of the tokens' log-probabilities, adjusted by the length penalty; else None.
        state: a state from which the generation can continue, if keep_state=True; else None.
        prompt_index: index of the prompt in the call.
        sample_index: index among the n samples for the prompt.
        proposed_tokens: number of tokens that speculative decoding proposed.
        accepted_tokens: number of proposed tokens that were accepted.
        forgotten_tokens: number of tokens in prompt and completion that context shifts dropped (ctx_shift).

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
        """The token counts."""
        return Usage(
            self.prompt_tokens, self.cached_tokens, len(self.token_ids), self.proposed_tokens, self.accepted_tokens
        )

    @property
    def tokens_per_second(self) -> float:
        """The decode speed."""
        return self.timings.tokens_per_second(len(self.token_ids))

    def _facts(self) -> list[str]:
        """Return the counts and times as short texts."""
        count, proposed = len(self.token_ids), self.proposed_tokens
        return [
            f"{count:,} token{'s' * (count != 1)}",
            *([f"{self.tokens_per_second:,.1f} tokens/s"] if self.tokens_per_second else []),
            f"first token after {self.timings.time_to_first_token:.2f} s",
            f"prompt {self.prompt_tokens:,} ({self.cached_tokens:,} cached)",
            *([f"accepted {self.accepted_tokens:,} of {proposed:,}"] if proposed else []),
            self.finish_reason,
        ]

    def _repr_html_(self) -> str:
        """Return the text and its figures for a notebook."""
        return passage(self.text) + note(self._facts())


@dataclass(frozen=True)
class ChatReply:
    """A model's reply in a conversation, split into parts by the format of the chat template (genai.text.parsing).

    Attributes:
        text: the text of the reply.
        reasoning: the reasoning before the text.
        tool_calls: the tools that the model calls.
        reply: the parts, and the problems found in them.
        completion: the raw text, tokens and figures.
    """

    reply: Reply
    completion: Completion

    @property
    def text(self) -> str:
        """The text of the reply, without reasoning and tool calls."""
        return self.reply.text

    @property
    def reasoning(self) -> str:
        """The model's reasoning before the text; "" if there is none."""
        return self.reply.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls in order."""
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

    def _repr_html_(self) -> str:
        """Return the parts of the reply and its figures for a notebook."""
        parts = [folded("Reasoning", passage(self.reasoning))] if self.reasoning else []
        parts += [passage(self.text)] if self.text or not self.tool_calls else []
        parts += [f"<pre>{escaped(f'{call.name}({call.arguments_text})')}</pre>" for call in self.tool_calls]
        return "".join([*parts, note(self.completion._facts())])


@dataclass(frozen=True)
class Done:
    """The last event of a streamed chat: the complete reply, as `chat` would return it."""

    reply: ChatReply

    @property
    def completion(self) -> Completion:
        """The raw text, tokens, figures and finish_reason."""
        return self.reply.completion

    @property
    def usage(self) -> Usage:
        """The token counts."""
        return self.completion.usage

    @property
    def raw(self) -> str:
        """Always "": this event has no generated text."""
        return ""
