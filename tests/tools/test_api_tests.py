"""The tool that runs onnxruntime-genai's tests, on a checkout made here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import api_tests
from tools.api_tests import DIFFERS, FILES, WAITING, WAITING_FILES, Case

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
OTHER = "test_get_logits_after_rewind_matches_reappend"
CONFTEST = 'def pytest_addoption(parser):\n    parser.addoption("--test_models")\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    python = tmp_path / "test" / "python"
    (python / "models").mkdir(parents=True)
    (tmp_path / "test" / "models").mkdir()
    (python / "conftest.py").write_text(CONFTEST)
    (python / FILES[0]).write_text(API)
    (python / FILES[1]).write_text("def test_decoder_state():\n    pass\n")
    images = "class TestI:\n    def test_vision(self):\n        assert 0\n\n    def test_none(self):\n        pass\n"
    (python / "models" / "test_gemma4_models.py").write_text(images)
    (python / "models" / "test_n_gram_decoding.py").write_text(f"def {OTHER}():\n    assert False\n")
    return tmp_path


def test_outcomes(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {case.name: case for case in api_tests.run(checkout)}
    assert [(case.name, case.outcome) for case in cases.values()] == [
        ("test_module", "passed"),
        ("test_whisper", "waits"),
        ("test_new", "failed"),
        ("test_far", "skipped"),
        ("test_decoder_state", "passed"),
        ("test_vision", "waits"),
        ("test_none", "passed"),
        (OTHER, "differs"),
    ]
    assert cases["test_whisper"] == Case("test_whisper", "waits", WAITING["test_whisper"], "test_onnxruntime_genai_api")
    waits = WAITING_FILES["test_gemma4_models"]
    assert cases["test_vision"] == Case("test_vision", "waits", waits, "test_gemma4_models")
    assert cases[OTHER] == Case(OTHER, "differs", DIFFERS[OTHER], "test_n_gram_decoding")
    assert cases["test_far"].reason == "far away"
    assert "is None" in cases["test_new"].reason
    (checkout / "test" / "python" / FILES[0]).write_text("def test_module():\n    pass\n")
    monkeypatch.setattr(sys, "argv", ["api_tests", str(checkout)])
    with pytest.raises(SystemExit) as ended:
        api_tests.main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "3 passed, 1 waits, 1 differs" in printed and "test_gemma4_models: 1 waits, 1 passed" in printed
    monkeypatch.setattr(sys, "argv", ["api_tests", str(checkout / "test")])
    with pytest.raises(SystemExit):
        api_tests.main()
    assert "is not a checkout" in capsys.readouterr().err
