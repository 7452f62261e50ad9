"""The words of errors: names of options become names of fields."""

from __future__ import annotations

from genai.errors import DamagedTemplateError, InputError, OptionError
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


def test_a_damaged_chat_template_is_no_error_of_the_request() -> None:
    error = DamagedTemplateError("the chat template (/models/x) has an error in line 1", "no end", "correct it")
    found = reply_of(error, context_size=8, hidden={})
    assert found.status == 500 and found.code == "damaged_template" and "/models" not in found.message
