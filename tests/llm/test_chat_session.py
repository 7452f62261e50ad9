"""Conversations: messages, policies for a full context, files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import ContextOverflowError, InputError, OptionError, StateError
from genai.llm.chat import ChatSession

STORY = "Tell me a story about Luna and Tom. "


@pytest.fixture(scope="module")
def small(bundled_folder: Path) -> genai.LLM:
    return genai.LLM(bundled_folder, context_size=192)


def test_turns_undo_and_retry(small: genai.LLM) -> None:
    chat = ChatSession(small)
    assert chat.ask("What is 12 + 7?").text == "19"
    assert "".join(event.raw for event in chat.retry()) == "19"
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.undo() == "What is 12 + 7?"
    assert chat.messages == []
    for call in (chat.undo, chat.retry):
        with pytest.raises(StateError, match="no message"):
            call()
    with pytest.raises(InputError, match="empty"):
        chat.ask("  ")
    with pytest.raises(InputError, match="the message is empty"):
        small.chat(" ")
    assert chat.messages == []


def test_the_chat_in_the_readme(bundled: genai.Model) -> None:
    """Replies and numbers of tokens are those of this version; speeds depend on the machine."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    turns = re.findall(
        r"^>>> (.*)\n(.*)\n(\d+) tok · .* · prompt (\d+) \(0 cached\) · ctx (\d+)/1024 · eos", text, re.M
    )
    assert len(turns) == 2
    with genai.LLM(bundled) as llm:
        chat = ChatSession(llm, draws=True)
        for question, answer, *numbers in turns:
            reply = chat.ask(question)
            figures = [len(reply.completion.token_ids), reply.completion.prompt_tokens, chat.context_used]
            assert (reply.text, figures) == (answer, [*map(int, numbers)])


def test_a_full_context_is_an_error_by_default(small: genai.LLM) -> None:
    chat = ChatSession(small, max_tokens=60)
    chat.ask(STORY)
    chat.ask(STORY)
    messages = list(chat.messages)
    with pytest.raises(ContextOverflowError, match=r"^the message has more than"):
        ChatSession(small).ask("word " * 20_000)
    with pytest.raises(ContextOverflowError, match="prompt and reply together are limited to 192 tokens"):
        chat.ask(STORY * 5)
    assert chat.messages == messages


def test_a_retry_that_gives_no_reply_loses_nothing(small: genai.LLM) -> None:
    chat = ChatSession(small)
    reply = chat.ask("What is 12 + 7?")
    messages = list(chat.messages)
    chat.system = STORY * 40
    with pytest.raises(ContextOverflowError):
        list(chat.retry())
    assert chat.messages == messages and chat.last_reply is reply


def test_truncate_leaves_out_the_oldest_and_says_so(small: genai.LLM) -> None:
    chat = ChatSession(small, max_tokens=40, on_overflow="truncate")
    for number in range(6):
        chat.ask(f"{STORY}Number {number}.")
    assert chat.num_left_out > 0
    assert len(chat.messages) == 12
    assert "Number 0." not in chat.prompt()
    assert "Number 5." in chat.prompt()
    with pytest.raises(ContextOverflowError):
        chat.ask(STORY * 40)


def test_auto_continues_in_a_full_context(small: genai.LLM) -> None:
    """Messages are left out, and a reply drops tokens; without max_tokens, it has as many tokens as the context."""
    chat = ChatSession(small, on_overflow="auto", ignore_eos=True, system="Be brief.")
    reply = chat.ask(STORY)
    assert len(reply.completion.token_ids) == 192 and reply.completion.forgotten_tokens > 0
    assert chat.was_limited and not chat.was_cut and chat.shift_problem is None
    chat.set_options(max_tokens=250)
    assert len(chat.ask(STORY).completion.token_ids) == 250
    assert not chat.was_limited and chat.num_left_out > 0
    assert chat.prompt().startswith("<|im_start|>system\nBe brief.")
    chat.set_options(max_tokens=20)
    for number in range(6):
        chat.ask(f"{STORY}Number {number}.")
    assert "Number 5." in chat.prompt() and "Number 0." not in chat.prompt()


def test_auto_ends_a_reply_where_tokens_cannot_be_dropped(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, context_size=64) as llm:
        chat = ChatSession(llm, on_overflow="auto", ignore_eos=True)
        chat.ask("Tell me a story.")
        assert chat.was_cut and not chat.was_limited
        assert chat.shift_problem is not None and "at least 96 tokens" in chat.shift_problem.why
        with pytest.raises(ContextOverflowError, match="the part of the conversation that cannot be left out"):
            chat.ask(STORY * 20)


def test_shift_goes_on_within_a_reply(small: genai.LLM) -> None:
    options = {"ignore_eos": True, "max_tokens": 150}
    cut = ChatSession(small, on_overflow="truncate", **options)
    shifted = ChatSession(small, on_overflow="shift", **options)
    for chat in (cut, shifted):
        chat.set_options(max_tokens=40)
        chat.ask(STORY)
        chat.set_options(max_tokens=150)
    assert len(cut.ask(STORY).completion.token_ids) < 150
    reply = shifted.ask(STORY)
    assert len(reply.completion.token_ids) == 150
    assert shifted.num_left_out == 2
    assert cut.was_cut
    assert shifted.messages[-1]["content"] == reply.text


def test_a_reply_that_is_stopped_is_kept(small: genai.LLM) -> None:
    chat = ChatSession(small, ignore_eos=True)
    events = chat.send(STORY)
    first = next(events)
    assert chat.cancel()
    text = first.raw + "".join(event.raw for event in events)
    assert chat.last_reply is not None
    assert chat.last_reply.completion.finish_reason == "cancelled"
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    assert not chat.cancel()


def test_files(small: genai.LLM, tmp_path: Path) -> None:
    chat = ChatSession(small, system="You are kind.", temperature=0.5)
    chat.ask("What is 12 + 7?")
    chat.save(tmp_path / "chat.json")
    other = ChatSession(small)
    other.load(tmp_path / "chat.json")
    assert (other.messages, other.system, other.options) == (chat.messages, chat.system, chat.options)
    (tmp_path / "bad.json").write_text('{"format": "genai-chat-1", "messages": [1]}')
    for name in ("bad.json", "none.json"):
        with pytest.raises(InputError, match=name):
            other.load(tmp_path / name)
    assert other.messages == chat.messages


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 10**6},
        {"stop_token_ids": [10**6]},
        {"logit_bias": {10**6: 1.0}},
        {"logprobs": 10**6},
        {"prompt_logprobs": 10**6},
        {"min_tokens": 10**6},
        {"min_length": 10**6},
        {"dry_multiplier": 1.0, "dry_sequence_breakers": ["\ud800"]},
    ],
    ids=str,
)
def test_what_the_model_does_not_have_is_refused_at_once(small: genai.LLM, options: dict[str, Any]) -> None:
    chat = ChatSession(small)
    with pytest.raises((OptionError, ContextOverflowError), match=str(list(options)[-1])):
        chat.set_options(options)
    assert chat.options == {}
    with pytest.raises((OptionError, ContextOverflowError)):
        ChatSession(small, **options)  # type: ignore[misc]


def test_bad_options(small: genai.LLM) -> None:
    with pytest.raises(OptionError, match="on_overflow = 'never'"):
        ChatSession(small, on_overflow="never")
    with pytest.raises(OptionError, match="n = 2"):
        ChatSession(small, n=2)
    chat = ChatSession(small, temperature=0.5)
    with pytest.raises(OptionError, match="top_p"):
        chat.set_options(top_p=3)
    assert chat.options == {"temperature": 0.5}


@pytest.mark.parametrize("on_overflow", ["truncate", "shift", "auto"])
def test_a_message_that_leaves_little_room_is_answered(small: genai.LLM, on_overflow: str) -> None:
    """The message leaves little space, but nothing before it can be left out."""
    words = 150
    while len(small.encode(small.render(long := "a b " * words))) > small.context_size - 8:
        words -= 1
    chat = ChatSession(small, on_overflow=on_overflow, max_tokens=4)
    chat.ask("Hello")
    assert chat.ask(long).completion.prompt_tokens > small.context_size - 30 and chat.num_left_out > 0


@pytest.mark.parametrize("on_overflow", ["error", "truncate", "shift", "auto"])
def test_a_message_that_is_too_long_is_told_so(small: genai.LLM, on_overflow: str) -> None:
    """The error does not suggest a policy that is already set."""
    chat = ChatSession(small, on_overflow=on_overflow)
    with pytest.raises(ContextOverflowError, match="tokens") as caught:
        chat.ask("word " * 3000)
    assert ("on_overflow" in caught.value.fix) == (on_overflow == "error")
