"""Special tokens that are markers reach the parser: the stream keeps them and omits other special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import genai
from genai.text.parsing import PARSERS, Reply, ReplySplitter, Text, detect, split_reply


def call(inside: str) -> str:
    """A call with one of the format's markers in a string."""
    return '{"name": "f", "arguments": {"x": "Zürich 🏔 %s"}}' % inside  # noqa: UP031 (braces)


HEADER = "<|start|>assistant<|channel|>"
REPLIES = {
    "think": "<think>hm 🏔</think>yes",
    "hermes": f"<think>hm</think>ok<tool_call>{call('</tool_call>')}</tool_call>",
    "llama3": f"<|python_tag|>{call('<|eom_id|>')}",
    "mistral": f"[THINK]hm[/THINK]ok[TOOL_CALLS][{call('[/THINK]')}]",
    "gpt_oss": f"<|channel|>analysis<|message|>hm<|end|>{HEADER}final<|message|>yes 🏔<|end|>",
    "qwen3_coder": "<think>hm</think>ok<tool_call><function=f><parameter=x>Zürich 🏔</parameter></function></tool_call>",
    "glm": "<think>hm</think>ok<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>Zürich 🏔</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="x">🏔</parameter></invoke></minimax:tool_call>',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "🏔"}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "🏔"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "none": "yes",
}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_streamed_reply_is_split_as_its_text(tokenizer: genai.Tokenizer, name: str) -> None:
    assert name in REPLIES, f"tests/text/parsing/test_with_tokenizer.py: REPLIES has no {name!r}"
    ids = tokenizer.encode(REPLIES[name] + "<pad>").tolist()
    assert len(ids) < len(REPLIES[name].encode()) or name == "none"
    splitter = ReplySplitter(name)
    stream = tokenizer.create_stream(keep=PARSERS[name].markers)
    events = [event for id_ in ids for event in splitter.feed(stream.decode(id_))]
    events += [*splitter.feed(stream.flush()), *splitter.finish()]
    assert "".join(event.raw for event in events) == REPLIES[name]
    assert Reply.from_events(events) == split_reply(REPLIES[name], name)


def test_without_keep_the_markers_are_gone(tokenizer: genai.Tokenizer) -> None:
    stream = tokenizer.create_stream()
    text = "".join([*map(stream.decode, tokenizer.encode(REPLIES["hermes"]).tolist()), stream.flush()])
    assert split_reply(text, "hermes").tool_calls == ()


def test_the_parser_is_chosen_by_the_chat_template(tokenizer: genai.Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer.folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<think>{{ m.content }}{% endfor %}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>{{ tools }}")
    named = genai.Tokenizer(tmp_path)
    assert detect(named.chat_template) == "think"
    assert detect(named.template_text(with_tools=True)) == "hermes"


def test_long_replies_in_one_piece_are_split_alike() -> None:
    """A long piece is processed in parts; their boundaries make no difference."""
    reply = ("x" * 1357 + REPLIES["hermes"]) * 20
    splitter = ReplySplitter("hermes")
    events = [event for character in reply for event in splitter.feed(character)] + splitter.finish()
    assert Reply.from_events(events) == split_reply(reply, "hermes")
    assert any(isinstance(event, Text) for event in events)
