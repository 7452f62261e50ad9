"""Paths in the user's home folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import genai
from genai.common.paths import expanded
from genai.errors import ModelFolderError


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/a") == tmp_path / "a" and expanded(Path("b")) == Path("b")


def test_users_that_are_not_known() -> None:
    """Path.expanduser would raise RuntimeError; the toolkit treats such a path as one that does not exist."""
    assert expanded("~nobody-of-this-name/a") == Path("~nobody-of-this-name/a")
    for load in (genai.LLM, genai.Config, genai.Tokenizer):
        with pytest.raises(ModelFolderError, match="nobody-of-this-name"):
            load("~nobody-of-this-name/a")
