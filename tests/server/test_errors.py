"""The words of errors: names of options become names of fields."""

from __future__ import annotations

from genai.errors import InputError, OptionError
from genai.server.errors import reply_of


def test_options_are_named_as_fields() -> None:
    option = OptionError("template = 3", "a mapping is expected", "pass template as a mapping")
    found = reply_of(option, context_size=8, hidden={})
    assert found.message == "chat_template_kwargs = 3: a mapping is expected; pass chat_template_kwargs as a mapping"
    assert found.param == "chat_template_kwargs"


def test_a_chat_template_is_not_an_option() -> None:
    error = InputError("the chat template omits the tools", "it is old", "use a model whose template supports tools")
    said = reply_of(error, context_size=8, hidden={}).message
    assert said == "the chat template omits the tools: it is old; use a model whose template supports tools"
