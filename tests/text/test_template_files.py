"""The template files of a folder: read once, and again after one of them has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from genai.errors import ChatTemplateError
from genai.text import chat_template
from genai.text.chat_template import ChatTemplates


def test_templates_are_read_again_when_a_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str) -> None:
        (tmp_path / "chat_template.jinja").write_text(text)
        os.utime(tmp_path / "chat_template.jinja", (1_000_000_000, 1_000_000_000))

    write("{{ messages[0].content }}!")
    templates, said = ChatTemplates(tmp_path), [{"role": "user", "content": "Hi"}]
    assert templates.render(said) == "Hi!"
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "read_text", None)  # would raise
        assert templates.render(said) == "Hi!"
    write("{{ messages[0].content }}?")  # as long, and of the same time
    assert templates.render(said) == "Hi?"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    write("{{ bos_token }}{{ messages[0].content }}")
    assert templates.render(said) == "<s>Hi"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match="no chat template"):
        templates.render(said)


def test_a_file_written_just_now_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may not change when it is written again."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    templates, said = ChatTemplates(tmp_path), [{"role": "user", "content": "Hi"}]
    assert templates.render(said) == "Hi!"
    monkeypatch.setattr(chat_template, "read_text", lambda path: "{{ messages[0].content }}?")
    assert templates.render(said) == "Hi?"
