"""The tool that runs onnxruntime-genai's tests, on a checkout made here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import api_tests
from tools.api_tests import FILES, WAITING, WAITING_FILES, Case

API = """
import onnxruntime_genai as og
import pytest


def test_module(request):
    assert og.__name__ == "genai"
    assert request.config.getoption("--test_models")


def test_whisper():
    og.Audios(None)


def test_new():
    assert og is None


def test_far():
    pytest.skip("far away")
"""
CONFTEST = 'def pytest_addoption(parser):\n    parser.addoption("--test_models")\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    python = tmp_path / "test" / "python"
    (python / "models").mkdir(parents=True)
    (tmp_path / "test" / "models").mkdir()
    (python / "conftest.py").write_text(CONFTEST)
    (python / FILES[0]).write_text(API)
    (python / FILES[1]).write_text("def test_decoder_state():\n    pass\n")
    guess = (
        "class TestGuess:\n    def test_stats(self):\n        assert False\n\n    def test_none(self):\n        pass\n"
    )
    (python / "models" / "test_n_gram_decoding.py").write_text(guess)
    return tmp_path


def test_outcomes(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {case.name: case for case in api_tests.run(checkout)}
    assert [(case.name, case.outcome) for case in cases.values()] == [
        ("test_module", "passed"),
        ("test_whisper", "waits"),
        ("test_new", "failed"),
        ("test_far", "skipped"),
        ("test_decoder_state", "passed"),
        ("test_stats", "waits"),
        ("test_none", "passed"),
    ]
    assert cases["test_whisper"] == Case("test_whisper", "waits", WAITING["test_whisper"], "test_onnxruntime_genai_api")
    waits = WAITING_FILES["test_n_gram_decoding"]
    assert cases["test_stats"] == Case("test_stats", "waits", waits, "test_n_gram_decoding")
    assert cases["test_far"].reason == "far away"
    assert "is None" in cases["test_new"].reason
    (checkout / "test" / "python" / FILES[0]).write_text("def test_module():\n    pass\n")
    monkeypatch.setattr(sys, "argv", ["api_tests", str(checkout)])
    with pytest.raises(SystemExit) as ended:
        api_tests.main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "3 passed, 1 waits" in printed and "test_n_gram_decoding: 1 waits, 1 passed" in printed
    monkeypatch.setattr(sys, "argv", ["api_tests", str(checkout / "test")])
    with pytest.raises(SystemExit):
        api_tests.main()
    assert "is not a checkout" in capsys.readouterr().err
