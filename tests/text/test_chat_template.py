"""Chat templates: their sources, valid messages, and the same text as transformers."""

import json
import re
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import ClassVar

import jinja2
import numpy as np
import pytest

from genai.errors import ChatTemplateError, InputError, kind_of
from genai.llm.llm import LLM
from genai.text.chat_template import ChatTemplates
from genai.text.tokenizer import Tokenizer

TURNS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": 'Be <kind> & "brief".'}, {"role": "user", "content": "  Grüße 你好 😀\n"}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3?\n\nSay 'three'."},
    ],
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather <now> & later: 'ü'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if not (tools and message.role == 'system') %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}
        {{- '\\n' ~ message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if not date_string is defined else date_string %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today: {{ date }}
{% if tools is not none %}
{%- for t in tools %}
{{ t | tojson(indent=4) }}

{% endfor %}
{% endif %}
{{- system }}<|eot_id|>
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """
{%- if messages[0]["role"] == "system" %}{% set system = messages[0]["content"] %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate: user, assistant, user, ...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{ "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{ "[INST] " + message["content"] + "[/INST]" }}{% endif %}
    {%- else %}{{ " " + message["content"] | trim + eos_token }}{% endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set prefix = messages[0]['content'] | trim + '\n\n' %}
{% set loop_messages = messages[1:] %}{% else %}{% set prefix = '' %}{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') -}}
{% if message['content'] is string %}{{ message['content'] | trim -}}
{% elif message['content'] is iterable %}
{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<image>' }}{% continue %}{% endif %}
{{ item['text'] | trim -}}{% endfor %}
{% endif %}
{{ '<end_of_turn>\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PHI3 = """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{% generation %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""
ODDITIES = """
    {# a comment #}
    {% macro turn(message, depth=0) %}
    {{ message.role | upper | center(20, ) }}|{{ message.content | length }}|{{ '%5.1f|%s' % (depth, message.role) }}
    {% if depth < 2 %}{{ turn(message, depth + 1) }}{% endif %}
    {% endmacro %}
{% for message in messages recursive %}
    {{ loop.index }}/{{ loop.length }} {{ loop.previtem.role if loop.previtem is defined else '-' }}
    {{ loop.nextitem }}
    {{ turn(message) }}
    {% if loop.index == 2 %}{% break %}{% endif %}
{% else %}
    nobody
{% endfor %}
{% for c in undefined_name %}x{% endfor %}
{% set text %}  block {{ messages | map(attribute='role') | join(', ') }} {{ none }} {{ 3.0 }}{% endset %}
{{ text | replace('block', 'Block') }}{{ "{:>6}|{}".format(1, {'a': 2}) }}
{{ messages | selectattr('role', 'eq', 'user') | list | count }}{{ messages[0].content.split('i') }}
{{ [1, 2, 'a'][::-1] }}{{ dict(a=1) }}{{ {'b': [1, none, true]} | tojson(sort_keys=true) }}
{%- for key, value in {'x': 1, 'y': 2} | items %}{{ key ~ value ~ loop.last }}{% endfor %}{{ 7 // 2 * 2 ** 3 }}
"""


@pytest.fixture
def tokenizer(model_folder) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(model_folder)


def again(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of the files as they are now."""
    return Tokenizer(tokenizer.folder)


def configure(tokenizer: Tokenizer, template: object) -> Tokenizer:
    (tokenizer.folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    return again(tokenizer)


@pytest.fixture(scope="module")
def theirs(folder_of):
    transformers = pytest.importorskip("transformers")
    path = str(folder_of("byte_level") / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=path, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def templates(tokenizer) -> ChatTemplates:
    return ChatTemplates(tokenizer.folder)


class TestToolCallArguments:
    """Arguments reach a template in the form that it reads, whatever form the caller has."""

    ARGUMENTS: ClassVar = {"city": "Köln", "days": 2}
    WIRE = '{"days": 2,  "city": "K\\u00f6ln"}'

    @pytest.mark.parametrize(
        "template, expected_of_objects, expected_of_text",
        [
            ("{{ call.arguments | tojson }}", '{"city": "Köln", "days": 2}', '{"days": 2, "city": "Köln"}'),
            (
                "{% for k, v in call.arguments | items %}<{{ k }}>{{ v }}{% endfor %}",
                "<city>Köln<days>2",
                "<days>2<city>Köln",
            ),
            ("{{ '[' + call.arguments + ']' }}", '[{"city": "Köln", "days": 2}]', f"[{WIRE}]"),
            ("{{ call.arguments }}", '{"city": "Köln", "days": 2}', WIRE),
            (
                "{% set a = call.arguments %}{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
                '{"city": "Köln", "days": 2}',
                '{"days": 2, "city": "Köln"}',
            ),
        ],
        ids=["tojson", "items", "concatenation", "print", "either"],
    )
    @pytest.mark.parametrize("nested", [True, False])
    @pytest.mark.parametrize("complete", [True, False])
    def test_tool_call_arguments(self, templates, template, expected_of_objects, expected_of_text, nested, complete):
        loop = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set call = c.function or c %}"
        text = loop + template + "{% endfor %};{% endfor %}"
        for arguments, expected in [(self.ARGUMENTS, expected_of_objects), (self.WIRE, expected_of_text)]:
            call = {"name": "weather", "arguments": arguments}
            call = {"type": "function", "function": call} if nested else call
            # The user's text looks like Python's form of the arguments, which must not mislead.
            question = {"role": "user", "content": str(json.loads(self.WIRE)) + str(self.ARGUMENTS)}
            messages = [question, {"role": "assistant", "content": "So:", "tool_calls": [call]}]
            rendered = templates.render(messages, template_str=text, add_generation_prompt=False, complete=complete)
            assert rendered == question["content"] + ";So:" + expected + ";"

    @pytest.mark.parametrize("arguments", [{}, "{}", "", " ", None, "null", "missing"])
    @pytest.mark.parametrize(
        "template", ["{{ a | tojson }}", "{{ a }}", "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}"]
    )
    def test_tool_calls_without_arguments(self, templates, arguments, template):
        function = {"name": "clock"} if arguments == "missing" else {"name": "clock", "arguments": arguments}
        messages = [TURNS[0][0], {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]
        text = "{% set a = messages[1].tool_calls[0].function.arguments %}" + template
        assert templates.render(messages, template_str=text, add_generation_prompt=False) == "{}"

    @pytest.mark.parametrize("arguments", ['{"city": ', "[1]", '"x"', "7"])
    def test_arguments_that_are_no_object_stay_texts(self, templates, arguments):
        call = {"function": {"name": "clock", "arguments": arguments}}
        messages = [TURNS[0][0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        text = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
        assert templates.render(messages, template_str=text, add_generation_prompt=False) == json.dumps(arguments)

    def test_a_tool_call_that_is_no_object(self, templates):
        messages = [TURNS[0][0], {"role": "assistant", "content": None, "tool_calls": ["clock"]}]
        with pytest.raises(
            InputError, match=r"messages\[1\] has a string in its tool_calls(?s:.)*an object with a function"
        ):
            templates.render(messages, template_str="{{ messages }}")


class TestMissingContent:
    """A message with tool calls and no content, as in OpenAI's API."""

    CALL: ClassVar = {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]}
    MESSAGES: ClassVar = [TURNS[0][0], {**CALL, "content": None}, {"role": "tool", "content": "None"}]

    @pytest.mark.parametrize("call", [CALL, MESSAGES[1]])
    @pytest.mark.parametrize("test", ["is none", "is not none", "== none", "is defined", "is string"])
    @pytest.mark.parametrize("complete", [False, True])
    def test_templates_that_test_it(self, templates, call, test, complete):
        text = "{% for m in messages %}{{ m.content " + test + " }}{{ m.tool_calls or m.content }};{% endfor %}"
        messages = [self.MESSAGES[0], call, self.MESSAGES[2]]
        rendered = templates.render(messages, template_str=text, add_generation_prompt=False, complete=complete)
        assert rendered == jinja2.Environment().from_string(text).render(messages=self.MESSAGES)

    def test_the_calls_of_a_template_that_writes_them_instead(self, templates):
        text = (
            "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
            "{{ m['tool_calls'][0]['function']['name'] }}{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
        )
        for call in (self.CALL, self.MESSAGES[1]):
            messages = [self.MESSAGES[0], call, self.MESSAGES[2]]
            assert templates.render(messages, template_str=text, complete=True).endswith(";clock;None;")

    @pytest.mark.parametrize("written", ["{{ m.content }}", "{{ m.content | trim }}", "{{ '' ~ m.content }}"])
    def test_it_is_not_written_as_none(self, templates, written):
        text = "{% for m in messages %}" + written + ";{% endfor %}"
        for call in (self.CALL, self.MESSAGES[1]):
            rendered = templates.render([call, self.MESSAGES[2]], template_str=text, add_generation_prompt=False)
            assert rendered == ";None;"


class TestAgainstTransformers:
    def both(self, tokenizer, theirs, template, messages, **options):
        expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        assert tokenizer.apply_chat_template(messages, template_str=template, **options) == expected
        assert tokenizer.apply_chat_template(json.dumps(messages), template_str=template, **options) == expected
        return expected

    @pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA, PHI3, ODDITIES])
    @pytest.mark.parametrize("messages", TURNS)
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    def test_conversations(self, tokenizer, theirs, template, messages, add_generation_prompt):
        text = self.both(tokenizer, theirs, template, messages, add_generation_prompt=add_generation_prompt)
        assert text

    @pytest.mark.parametrize("template", [CHATML, LLAMA3])
    def test_tools(self, tokenizer, theirs, template):
        text = self.both(tokenizer, theirs, template, TURNS[1], tools=TOOLS, add_generation_prompt=True)
        assert "<now> & later: 'ü'" in text

    def test_tool_calls_without_content(self, tokenizer, theirs):
        call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
        messages = [*TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert "Köln" in self.both(tokenizer, theirs, CHATML, messages, add_generation_prompt=False)

    def test_content_in_parts(self, tokenizer, theirs):
        parts = [{"type": "text", "text": " Hi "}, {"type": "text", "text": "you"}]
        text = self.both(tokenizer, theirs, GEMMA, [{"role": "user", "content": parts}], add_generation_prompt=True)
        assert "user\nHiyou<end_of_turn>" in text

    @pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, PHI3, ODDITIES])
    @pytest.mark.parametrize("messages", TURNS)
    def test_content_in_parts_for_templates_that_know_texts_only(self, tokenizer, theirs, template, messages):
        in_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
        options = {"template_str": template, "add_generation_prompt": False}
        assert tokenizer.apply_chat_template(in_parts, **options) == expected
        # A part of the messages is enough.
        assert tokenizer.apply_chat_template([*messages[:-1], in_parts[-1]], **options) == expected

    def test_further_variables(self, tokenizer, theirs):
        off = self.both(tokenizer, theirs, CHATML, TURNS[0], add_generation_prompt=True, enable_thinking=False)
        assert off.endswith("</think>\n\n")
        text = self.both(
            tokenizer, theirs, LLAMA3, TURNS[0], add_generation_prompt=True, date_string="1 Jan", bos_token="B"
        )
        assert text.startswith("B") and "1 Jan" in text
        self.both(
            tokenizer, theirs, "{{ documents }}{{ tools }}", TURNS[0], add_generation_prompt=True, documents=[{"a": 1}]
        )


GOLDEN = {
    CHATML: "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> \n<|im_end|>\n<|im_start|>assistant\n",
    LLAMA3: "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 1 May\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi <b><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    MISTRAL: "<s>[INST] Be brief.\n\nHi <b> \n[/INST]",
    GEMMA: "<s><start_of_turn>user\nBe brief.\n\nHi <b><end_of_turn>\n<start_of_turn>model\n",
    PHI3: "<|system|>\nBe brief.<|end|>\n<|user|>\nHi <b> \n<|end|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("template", GOLDEN)
def test_the_text_each_family_expects(tokenizer, template):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b> \n"}]
    text = tokenizer.apply_chat_template(messages, template_str=template, date_string="1 May")
    assert text == GOLDEN[template]


class TestSources:
    def test_the_jinja_file_comes_before_tokenizer_config(self, tokenizer):
        tokenizer = configure(tokenizer, "config")
        assert tokenizer.apply_chat_template(TURNS[0]) == "config"
        (tokenizer.folder / "chat_template.jinja").write_text("file {{ bos_token }}")
        tokenizer = again(tokenizer)
        assert tokenizer.apply_chat_template(TURNS[0]) == "file <s>"
        assert tokenizer.apply_chat_template(TURNS[0], template_str="mine") == "mine"

    def test_named_templates(self, tokenizer):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
        tokenizer = configure(tokenizer, named)
        assert tokenizer.apply_chat_template(TURNS[0]) == "plain"
        assert tokenizer.apply_chat_template(TURNS[0], tools=TOOLS) == "with tools"
        assert tokenizer.apply_chat_template(TURNS[0], tools=json.dumps(TOOLS)) == "with tools"
        tokenizer = configure(tokenizer, named[:1])
        assert tokenizer.apply_chat_template(TURNS[0], tools=TOOLS) == "plain"

    def test_names_without_a_default(self, tokenizer):
        tokenizer = configure(tokenizer, [{"name": "rag", "template": "x"}])
        with pytest.raises(ChatTemplateError, match="no chat template named 'default'") as caught:
            tokenizer.apply_chat_template(TURNS[0])
        assert "rag" in caught.value.why

    def test_names_are_chosen_by_the_caller_too(self, tokenizer):
        tokenizer = configure(
            tokenizer, [{"name": "default", "template": "plain"}, {"name": "rag", "template": "{{ documents }}"}]
        )
        assert tokenizer.apply_chat_template(TURNS[0], template_name="rag", documents=[]) == "[]"
        with pytest.raises(ChatTemplateError, match=r"'x'(?s:.)*default, rag"):
            tokenizer.apply_chat_template(TURNS[0], template_name="x")
        with pytest.raises(InputError, match="template_str and template_name"):
            tokenizer.apply_chat_template(TURNS[0], template_name="rag", template_str="x")
        with pytest.raises(InputError, match="template_name is a number"):
            tokenizer.apply_chat_template(TURNS[0], template_name=5)

    def test_template_files_replace_those_of_the_config(self, tokenizer):
        tokenizer = configure(tokenizer, [{"name": "default", "template": "c"}, {"name": "rag", "template": "c rag"}])
        folder = tokenizer.folder / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text("file tools")
        tokenizer = again(tokenizer)
        with pytest.raises(ChatTemplateError, match=r"'default'(?s:.)*tool_use"):
            tokenizer.apply_chat_template(TURNS[0])
        (tokenizer.folder / "chat_template.jinja").write_text("file")
        tokenizer = again(tokenizer)
        assert tokenizer.apply_chat_template(TURNS[0]) == "file"
        assert tokenizer.apply_chat_template(TURNS[0], tools=TOOLS) == "file tools"
        with pytest.raises(ChatTemplateError, match="'rag'"):
            tokenizer.apply_chat_template(TURNS[0], template_name="rag")

    def test_the_text_of_a_template(self, tokenizer):
        tokenizer = configure(
            tokenizer, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "<tool_call>"}]
        )
        assert tokenizer.chat_template == "plain"
        assert tokenizer.template_text(with_tools=True) == "<tool_call>"
        assert tokenizer.template_text(template_name="tool_use") == "<tool_call>"
        (tokenizer.folder / "tokenizer_config.json").unlink()
        tokenizer = again(tokenizer)
        assert tokenizer.chat_template == ""
        with pytest.raises(ChatTemplateError, match="no chat template"):
            tokenizer.template_text()

    @pytest.mark.parametrize("template", [5, [5], [{"name": "default"}], {"template": "x"}])
    def test_a_template_entry_of_another_form(self, tokenizer, template):
        tokenizer = configure(tokenizer, template)
        with pytest.raises(ChatTemplateError, match="not a named template"):
            tokenizer.apply_chat_template(TURNS[0])

    def test_the_template_of_a_processor(self, tokenizer):
        path = tokenizer.folder / "chat_template.json"
        path.write_text(json.dumps({"chat_template": "of the processor"}))
        assert again(tokenizer).apply_chat_template(TURNS[0]) == "of the processor"
        assert configure(tokenizer, "of the tokenizer").apply_chat_template(TURNS[0]) == "of the tokenizer"
        (tokenizer.folder / "tokenizer_config.json").unlink()
        path.write_text(json.dumps({"chat_template": 5}))
        with pytest.raises(ChatTemplateError, match=r"chat_template\.json: .*not a named template"):
            again(tokenizer).apply_chat_template(TURNS[0])

    def test_no_template(self, tokenizer):
        with pytest.raises(ChatTemplateError, match="there is no chat template") as caught:
            tokenizer.apply_chat_template(TURNS[0])
        assert caught.value.why and "template_str" in caught.value.fix

    def test_special_tokens_map_fills_in(self, tokenizer):
        (tokenizer.folder / "special_tokens_map.json").write_text(
            '{"eos_token": "map", "sep_token": {"content": "sep"}}'
        )
        tokenizer = again(tokenizer)
        template = "{{ bos_token }}|{{ eos_token }}|{{ sep_token }}|{{ pad_token }}"
        assert tokenizer.apply_chat_template(TURNS[0], template_str=template) == "<s>|map|sep|"  # as in transformers 5

    def test_a_file_that_changes_later_has_no_effect(self, tokenizer):
        (tokenizer.folder / "chat_template.jinja").write_text("one")
        first = again(tokenizer)
        (tokenizer.folder / "chat_template.jinja").write_text("two")
        assert first.apply_chat_template(TURNS[0]) == "one"
        assert again(tokenizer).apply_chat_template(TURNS[0]) == "two"

    def test_a_template_that_is_not_text(self, tokenizer):
        (tokenizer.folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
        tokenizer = again(tokenizer)
        with pytest.raises(ChatTemplateError.__mro__[1], match="is not UTF-8"):
            tokenizer.apply_chat_template(TURNS[0])


class Role(str, Enum):  # noqa: UP042 (StrEnum would already print as plain text)
    USER = "user"


class TestMessages:
    ECHO = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"

    def test_subclasses_of_plain_types_become_plain(self, tokenizer):
        messages = ({"role": Role.USER, "content": "x", "score": np.float64(0.5)},)
        assert tokenizer.apply_chat_template(messages, template_str="{{ messages }}") == (
            "[{'role': 'user', 'content': 'x', 'score': 0.5}]"
        )

    def test_the_messages_are_not_changed(self, tokenizer):
        messages = [{"role": "user", "content": "x", "name": None}]
        template = "{% for m in messages %}{{ 'name' in m }}{% endfor %}"
        assert tokenizer.apply_chat_template(messages, template_str=template) == "False"
        assert messages == [{"role": "user", "content": "x", "name": None}]

    @pytest.mark.parametrize(
        ("messages", "what"),
        [
            ([], "messages is empty"),
            ("[]", "messages is empty"),
            ("not json", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('{"role": "user"}', "messages is an object"),
            (None, "messages is null"),
            (5, "messages is a number"),
            (["Hi"], r"messages\[0\] is a string"),
            ([{"content": "Hi"}], "role None"),
            ([{"role": "", "content": "Hi"}], "role ''"),
            ([{"role": 5, "content": "Hi"}], "role 5"),
            ([{"role": "user"}], "no content"),
            ([{"role": "user", "content": None}], "no content"),
            ([{"role": "user", "content": 5}], "a number as its content"),
            ([{"role": "user", "content": {"text": "x"}}], "an object as its content"),
            ([{"role": "user", "content": "x", "image": object()}], r"messages\[0\]\.image contains an object"),
            ([{"role": "user", "content": [np.zeros(1)]}], r"content\[0\] is a part of type 'ndarray'"),
            ([{"role": "user", "content": ["x"]}], r"content\[0\] is a part of type 'str'"),
            ([{"role": "user", "content": [{"type": "text"}]}], "of type 'text' without text"),
            ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "of type 'text' without text"),
            (
                [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
                r"messages\[0\]\.content\[1\] is a part of type 'image_url'",
            ),
            ([{"role": "user", "content": "x", 5: 1}], "the key 5"),
        ],
    )
    def test_bad_messages(self, tokenizer, messages, what):
        with pytest.raises(InputError, match=what) as caught:
            tokenizer.apply_chat_template(messages, template_str=self.ECHO)
        assert caught.value.why
        assert caught.value.fix

    def test_messages_that_contain_themselves(self, tokenizer):
        message = {"role": "user", "content": "x"}
        message["self"] = message
        with pytest.raises(InputError, match="nested too deeply"):
            tokenizer.apply_chat_template([message], template_str=self.ECHO)

    @pytest.mark.parametrize("tools", ["not json", "{}", 5, ["weather"], {"a": 1}, [print]])
    def test_bad_tools(self, tokenizer, tools):
        with pytest.raises(InputError, match="tool"):
            tokenizer.apply_chat_template(TURNS[0], template_str=self.ECHO, tools=tools)

    def test_the_tool_that_is_none_is_named(self, tokenizer):
        with pytest.raises(InputError, match=r"^tools\[1\] is a number\n") as caught:
            tokenizer.apply_chat_template(TURNS[0], template_str=self.ECHO, tools=[{"name": "a"}, 5])
        assert caught.value.why and caught.value.fix

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (None, "null"), (True, "a boolean"), (1, "a number"), (1.5, "a number"), ("", "a string"), ((), "a list"),
            ({}, "an object"), (set(), "a set"), (object(), "an object"), (bytearray(), "a bytearray"),
        ],
    )  # fmt: skip
    def test_values_are_called_by_words_of_json(self, value, said):
        assert kind_of(value) == said

    def test_other_bad_arguments(self, tokenizer):
        with pytest.raises(InputError, match="template_str is a number"):
            tokenizer.apply_chat_template(TURNS[0], template_str=5)
        with pytest.raises(InputError, match="add_generation_prompt"):
            tokenizer.apply_chat_template(TURNS[0], template_str="", add_generation_prompt="yes")
        with pytest.raises(InputError, match="documents contains an object"):
            tokenizer.apply_chat_template(TURNS[0], template_str="", documents=object())


class TestParts:
    """Templates that support lists of parts receive them; others receive a text."""

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages[0].content }}",
            "{{ messages[0].content | trim }}",
            "{{ '' + messages[0].content }}",
            "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}",
            "{% if messages[0].content is not string %}{{ raise_exception('texts only') }}{% endif %}"
            "{{ messages[0].content }}",
        ],
    )
    def test_texts_are_joined_by_lines(self, tokenizer, template):
        parts = [{"type": "text", "text": "a 'b'"}, {"text": '"c"'}]
        for content in (parts, tuple(parts)):
            message = {"role": "user", "content": content}
            assert tokenizer.apply_chat_template([message], template_str=template) == "a 'b'\n\"c\""
        assert parts == [{"type": "text", "text": "a 'b'"}, {"text": '"c"'}]
        assert tokenizer.apply_chat_template([{"role": "user", "content": []}], template_str=template) == ""

    def test_json_is_no_reading(self, tokenizer):
        message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
        assert tokenizer.apply_chat_template([message], template_str="{{ messages[0].content | tojson }}") == '"a"'

    def test_each_message_as_it_is_read(self, tokenizer):
        template = (
            "{% macro of(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}<{{ p.text | trim }}>{% endfor %}"
            "{% endif %}{% endmacro %}{{ messages[0].content }}|{{ of(messages[1].content) }}"
        )
        parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
        messages = [{"role": role, "content": parts} for role in ("system", "user")]
        assert tokenizer.apply_chat_template(messages, template_str=template) == "a \nb|<a><b>"

    def test_a_chat(self, bundled):
        parts = [{"type": "text", "text": "What is 12 + 7?"}]
        with LLM(bundled) as llm:
            assert llm.chat([{"role": "user", "content": parts}]).text == "19"

    def test_a_template_that_ends_its_process(self, tokenizer):
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        with pytest.raises(ChatTemplateError, match="was stopped"):
            tokenizer.apply_chat_template(messages, template_str="{{ 'a' * 10 ** 9 }}")


class TestContinuation:
    PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"

    def test_the_prompt_ends_inside_the_last_message(self, tokenizer):
        messages = [*TURNS[0], {"role": "assistant", "content": "Once upon "}]
        options = {"template_str": self.PLAIN, "continue_final_message": True}
        assert tokenizer.apply_chat_template(messages, **options) == "[Hi][Once upon "
        trimmed = self.PLAIN.replace("content", "content | trim")
        assert tokenizer.apply_chat_template(messages, **{**options, "template_str": trimmed}) == "[Hi][Once upon"
        assert messages[-1] == {"role": "assistant", "content": "Once upon "}

    def test_parts_and_other_fields(self, tokenizer):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        template = "{% for p in messages[0].content %}{{ p.text }},{% endfor %}"
        message = {"role": "assistant", "content": parts}
        options = {"continue_final_message": True}
        assert tokenizer.apply_chat_template([message], template_str=template, **options) == "a,b"
        assert tokenizer.apply_chat_template([message], template_str=self.PLAIN, **options) == "[a\nb"
        message = {"role": "assistant", "thinking": "hm"}
        options = {"continue_final_message": "reasoning_content"}
        for name in ("thinking", "reasoning_content"):
            template = "<think>{{ messages[0].%s }}</think>" % name  # noqa: UP031 (braces)
            assert tokenizer.apply_chat_template([message], template_str=template, **options) == "<think>hm"

    def test_bad_input(self, tokenizer):
        def render(message, template=self.PLAIN, **options):
            tokenizer.apply_chat_template([message], template_str=template, **options)

        reply = {"role": "assistant", "content": "x"}
        with pytest.raises(InputError, match="are both set"):
            render(reply, continue_final_message=True, add_generation_prompt=True)
        for value in (5, "", None):
            with pytest.raises(InputError, match="continue_final_message = "):
                render(reply, continue_final_message=value)
        with pytest.raises(InputError, match="no text in 'thinking'"):
            render(reply, continue_final_message="thinking")
        with pytest.raises(InputError, match="no text in 'thinking'"):
            render({**reply, "thinking": [{"type": "text", "text": "x"}]}, continue_final_message="thinking")
        for template in ("nothing", "{{ messages[0].content[:1] }}", "{{ messages[0].content[1:] }}"):
            with pytest.raises(ChatTemplateError, match="does not appear"):
                render({"role": "user", "content": "hello"}, template, continue_final_message=True)


class TestFailures:
    def failure(self, tokenizer, template: str) -> ChatTemplateError:
        with pytest.raises(ChatTemplateError) as caught:
            tokenizer.apply_chat_template(TURNS[0], template_str=template)
        assert caught.value.what
        assert caught.value.why
        assert caught.value.fix
        return caught.value

    def test_a_syntax_error_names_the_line(self, tokenizer):
        assert "line 3" in self.failure(tokenizer, "a\nb\n{% if %}").what
        assert "has an error" in self.failure(tokenizer, "{% generation %}").what
        assert "has an error" in self.failure(tokenizer, "{{ x | nofilter }}").what

    def test_a_refusal_shows_the_template_s_words(self, tokenizer):
        error = self.failure(tokenizer, "{{ raise_exception('roles must alternate') }}")
        assert error.what == "the chat template rejected these messages: roles must alternate"

    @pytest.mark.parametrize(
        "expression",
        [
            "messages[5].role",
            "nothing.at.all",
            "1 / 0",
            "messages + 1",
            "none()",
            "{} | tojson(5, 5, 5)",
        ],
    )
    def test_an_expression_that_fails_names_its_line(self, tokenizer, expression):
        error = self.failure(tokenizer, f"first\nsecond {{{{ {expression} }}}}")
        assert "line 2" in error.why

    @pytest.mark.parametrize("template", ["{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}"])
    def test_other_files_are_out_of_reach(self, tokenizer, template):
        self.failure(tokenizer, template)

    def test_deep_nesting_is_an_error(self, tokenizer):
        self.failure(tokenizer, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
        self.failure(tokenizer, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")

    def test_a_template_file_of_absurd_size(self, tokenizer):
        assert "characters" in self.failure(tokenizer, "x" * (2**20 + 1)).what

    def test_a_template_that_runs_too_long_is_stopped(self, tokenizer):
        loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        assert "was stopped" in self.failure(tokenizer, loop).what


class TestNothingIsLeftOut:
    """chat_prompt, used by the LLM, raises an error for dropped messages; apply_chat_template does not."""

    KNOWN = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content | trim }}"
        "{% elif m.role == 'assistant' %}A:{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
    )

    def prompt(self, tokenizer, template, messages, **options):
        (tokenizer.folder / "chat_template.jinja").write_text(template)
        return again(tokenizer).chat_prompt(messages, **options)

    @pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA, PHI3])
    @pytest.mark.parametrize("messages", TURNS)
    def test_templates_of_real_models_hear_everything(self, tokenizer, template, messages):
        options = {"date_string": "1 May"} if template == LLAMA3 else {}
        text = self.prompt(tokenizer, template, messages, **options)
        assert text == again(tokenizer).apply_chat_template(messages, **options)

    @pytest.mark.parametrize("template", [CHATML, LLAMA3])
    def test_templates_with_tools_hear_them(self, tokenizer, template):
        assert "weather" in self.prompt(tokenizer, template, TURNS[1], tools=TOOLS)

    @pytest.mark.parametrize("template", [MISTRAL, GEMMA, PHI3, KNOWN])
    def test_a_template_without_tools(self, tokenizer, template):
        assert self.prompt(tokenizer, template, TURNS[0], tools=[]) == self.prompt(tokenizer, template, TURNS[0])
        with pytest.raises(ChatTemplateError, match="omits the tools") as caught:
            self.prompt(tokenizer, template, TURNS[0], tools=TOOLS)
        assert caught.value.why and caught.value.fix

    @pytest.mark.parametrize("role", ["narrator", "system", "tool", "User"])
    @pytest.mark.parametrize("content", ["Hi", "", [{"type": "text", "text": "Hi"}]])
    def test_a_role_that_the_template_does_not_know(self, tokenizer, role, content):
        messages = [*TURNS[0], {"role": role, "content": content}]
        with pytest.raises(ChatTemplateError, match=rf"omits messages\[1\], whose role is '{role}'") as caught:
            self.prompt(tokenizer, self.KNOWN, messages)
        assert caught.value.why and caught.value.fix
        assert again(tokenizer).apply_chat_template(messages) == "U:Hi"

    def test_a_system_message_in_the_wrong_place(self, tokenizer):
        first_only = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + self.KNOWN
        assert self.prompt(tokenizer, first_only, TURNS[1])
        with pytest.raises(ChatTemplateError, match=r"messages\[2\], whose role is 'system'"):
            self.prompt(tokenizer, first_only, [*TURNS[1], {"role": "system", "content": "Be loud."}])

    def test_what_templates_shorten_on_purpose(self, tokenizer):
        call = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        thought = {"role": "assistant", "content": "<think>Hm</think>4"}
        without_words = self.KNOWN.replace("{{ m.content.split", "{{ m.tool_calls or m.content.split")
        assert self.prompt(tokenizer, without_words, [*TURNS[0], call])
        assert self.prompt(tokenizer, self.KNOWN, [*TURNS[0], thought]) == "U:HiA:4"

    @pytest.mark.parametrize("content", ["", None])
    def test_tool_calls_that_the_template_does_not_write(self, tokenizer, content):
        call = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        answer = {"role": "tool", "content": "9 degrees"}
        every_role = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        with pytest.raises(ChatTemplateError, match="omits the tools or their calls"):
            self.prompt(tokenizer, every_role, [*TURNS[0], call, answer])
        calls = every_role.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
        assert "arguments" in self.prompt(tokenizer, calls, [*TURNS[0], call, answer])

    def test_a_refusal_is_no_silence(self, tokenizer):
        with pytest.raises(ChatTemplateError, match="must alternate"):
            self.prompt(tokenizer, MISTRAL, [*TURNS[0], *TURNS[0]])


def test_strftime_now_is_the_current_time(tokenizer):
    before = datetime.now().strftime("%Y")
    assert tokenizer.apply_chat_template(TURNS[0], template_str="{{ strftime_now('%Y') }}") >= before


def test_templates_are_rendered_elsewhere(tokenizer):
    import subprocess
    import sys

    code = (
        "import sys; from genai.text.tokenizer import Tokenizer;"
        f"t = Tokenizer({str(tokenizer.folder)!r}); t.decode(t.encode('Hi')); print('jinja2' in sys.modules);"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}], template_str='x'); print('jinja2' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_unknown_roles(bundled_folder: Path) -> None:
    """The template writes any role, so a typo would not be noticed."""
    tokenizer = Tokenizer(bundled_folder)
    assert "tool" in tokenizer.chat_prompt([{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}])
    for role, fix in (("usr", "did you mean 'user'?"), ("bot", "use one of these roles")):
        messages = [{"role": "user", "content": "x"}, {"role": role, "content": "y"}]
        with pytest.raises(InputError, match=re.escape(f"messages[1] has the role '{role}'")) as raised:
            tokenizer.chat_prompt(messages)
        assert raised.value.fix == fix
    assert "usr" in tokenizer.apply_chat_template([{"role": "usr", "content": "x"}])
