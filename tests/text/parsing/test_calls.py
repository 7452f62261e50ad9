"""Grammars of calls with special-token markers: they accept the texts that the parsers read, and nothing else."""

from __future__ import annotations

import json

import pytest

import genai
from genai.engine.sampling.grammar import Grammar
from genai.engine.sampling.guidance import Guidance
from genai.errors import GrammarError
from genai.text.parsing import PARSERS, split_reply
from genai.text.parsing.calls import CalledTool, ReplyGrammar
from genai.text.vocabulary import token_bytes

TEMPLATES = {"hermes": "<think>", "llama3": "", "mistral": "", "mistral-named": "[ARGS]", "gpt_oss": "",
             "qwen3_coder": "<think>", "glm": "<think>", "glm-named": "</arg_key><arg_value>", "minimax": "<think>",
             "kimi": "", "deepseek": "<think>", "deepseek-named": "```json"}  # fmt: skip
TOOL = CalledTool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                          "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}})  # fmt: skip
ARGUMENTS = '{"a":-3}'


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_grammars_take_is_what_parsers_read(name: str, tokenizer: genai.Tokenizer) -> None:
    parser = PARSERS[name.removesuffix("-named")]
    assert parser.calls is not None
    form = parser.calls(TEMPLATES[name])
    special = {marker: tokenizer.to_token_id(marker) for marker in parser.markers}
    eos = tokenizer.to_token_id("<pad>")
    writer = ReplyGrammar(special, form.thought)
    guidance = Guidance(lambda: token_bytes(tokenizer), tokenizer.vocab_size, [eos])

    def takes(text: str, *, is_free: bool = False) -> bool:
        grammar = Grammar("tools", writer.of_calls(form, [TOOL], most=2, is_free=is_free))
        matcher = guidance.matcher(grammar)
        ids = tokenizer.encode(text).tolist()
        try:
            for token in ids:
                matcher.follow(token)
        except GrammarError:
            return False
        return matcher.is_complete

    number = f"{form.before_number}0" if form.before_number else ""
    xml = form.parameters
    arguments = ARGUMENTS if xml is None else f"{xml.before_name}a{xml.before_value}-3{xml.after}"
    one = form.before_name + TOOL.name + number + form.before_arguments + arguments + form.after
    thought = "" if form.thought is None else f"{form.thought[0]}hm{form.thought[1]}"
    for text, count in ((one, 1), (one + form.between + one, 2), (one + 2 * (form.between + one), 3)):
        reply = form.opening + form.start + text + form.end
        assert takes(reply) == takes(thought + reply) == (count <= 2)
        calls = split_reply(reply, parser, tools=[{"name": "add", "parameters": TOOL.schema}]).tool_calls
        assert [(call.name, call.arguments) for call in calls] == [("add", json.loads(ARGUMENTS))] * count
    assert not takes(form.opening + form.start + one.replace("-3", '"x"') + form.end)
    assert not takes(form.opening + form.start + one.replace("add", "sub") + form.end)
    assert not takes("An answer.")
    if form.is_free:
        assert takes("An answer.", is_free=True) and takes("", is_free=True)
        assert not takes(form.opening + "no call", is_free=True)


def test_markers_are_no_part_of_an_answer(tokenizer: genai.Tokenizer) -> None:
    """Texts in a schema contain no special tokens, even if they look the same."""
    guidance = Guidance(lambda: token_bytes(tokenizer), tokenizer.vocab_size, [tokenizer.to_token_id("<pad>")])
    matcher = guidance.matcher(Grammar("regex", ".*"))
    with pytest.raises(GrammarError):
        matcher.follow(tokenizer.to_token_id("<tool_call>"))
