"""The template files of a folder are read once, so that all prompts of a tokenizer have the same template."""

from __future__ import annotations

from pathlib import Path

import pytest

from genai.errors import ChatTemplateError, TokenizerError
from genai.text.chat_template import ChatTemplates

SAID = [{"role": "user", "content": "Hi"}]


def test_templates_are_those_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}!")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("short")
    templates = ChatTemplates(tmp_path)
    key = templates.key()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<t>"}')
    (tmp_path / "additional_chat_templates" / "short.jinja").unlink()
    assert templates.render(SAID) == "<s>Hi!"
    assert templates.render(SAID, template_name="short") == "short"
    assert templates.key() == key != ChatTemplates(tmp_path).key()


def test_an_error_of_the_templates_is_raised_when_one_is_needed(tmp_path: Path) -> None:
    templates = ChatTemplates(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("late")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        templates.render(SAID)
    assert templates.render(SAID, template_str="given") == "given" and templates.text() == ""
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    broken = ChatTemplates(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="not UTF-8"):
        broken.render(SAID)
    assert broken.key() != templates.key()
