"""Notes on stderr about replies: the reasons why a reply is empty or was cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genai.llm.chat import ChatSession
    from genai.llm.completion import Completion
    from genai.llm.llm import LLM

_MOST_NAMES = 5


def empty_reason(llm: LLM, completion: Completion, text: str, *, has_other_parts: bool = False) -> str | None:
    """Return the reason why a reply shows no text; None if it shows text, or was cancelled.

    Args:
        text: the text that stdout shows.
        has_other_parts: True if the reply also has reasoning or tool calls.
    """
    ended = completion.stopped_by
    if text.strip() or completion.finish_reason == "cancelled":
        return None
    if isinstance(ended, str) and not completion.text:
        return f"the reply is empty, because it begins with the stop text {ended!r}"
    if not completion.token_ids:
        name = "" if ended is None else f" with {llm.tokenizer.token_text(int(ended))!r}"
        return f"the reply is empty, because the model ended it at once{name}"
    if has_other_parts:
        return "the reply has no text after its reasoning" + _limit(completion)
    if completion.text:
        return "the reply has only white space" + _limit(completion)
    names = [repr(llm.tokenizer.token_text(token)) for token in dict.fromkeys(completion.token_ids)]
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"the reply has only special tokens, which are not shown: {', '.join(names[:_MOST_NAMES])}{more}"


def empty_reply_reason(session: ChatSession) -> str | None:
    """Return the reason why the last reply of a chat shows no text; None if it shows text or tool calls."""
    reply = session.last_reply
    if reply is None or reply.tool_calls:
        return None
    return empty_reason(session.llm, reply.completion, reply.text, has_other_parts=bool(reply.reasoning))


def full_context_notes(session: ChatSession, limit_option: str, advice: str = "") -> Iterator[str]:
    """Yield the notes about a reply that the full context ended.

    Args:
        limit_option: the option that sets the maximum number of tokens of a reply.
        advice: a part of the note that begins with a semicolon.
    """
    size = session.llm.context_size
    if session.was_limited:
        why = f"it has as many tokens as the context, {size:,}"
        yield f"(the reply was stopped, because {why}; {limit_option} sets another limit)"
    elif session.was_cut:
        yield f"(the context of {size} tokens is full, so the reply was cut off{advice})"
        if session.shift_problem is not None:
            yield f"(old text cannot be dropped: {session.shift_problem.why})"


def _limit(completion: Completion) -> str:
    """Return the reason why a reply ended before its text, if a limit ended it."""
    return ", because the limit of tokens ended it" if completion.finish_reason == "length" else ""
