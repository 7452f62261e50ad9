from __future__ import annotations

from typing import Any

import pytest

import genai
from genai.errors import NotSupportedYetError


@pytest.mark.parametrize("name", genai.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(genai, name) is not None
    assert name in dir(genai)


@pytest.mark.parametrize(
    "action",
    [
        lambda: genai.Images.open("x.png"),
        lambda: genai.Audios.open("x.wav"),
        lambda: genai.Adapters(None),
        lambda: genai.Engine(None),
        lambda: genai.MtpGenerator(None, None, None),
        lambda: genai.set_log_options(enabled=True),
        lambda: genai.register_execution_provider_library("x", "y"),
    ],
)
def test_what_is_not_there_yet_says_so(action: Any) -> None:
    with pytest.raises(NotSupportedYetError, match="not supported yet") as caught:
        action()
    assert caught.value.why
    assert caught.value.fix


def test_cuda_is_not_available() -> None:
    assert genai.is_cuda_available() is False
