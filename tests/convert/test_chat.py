"""`genai chat CHECKPOINT`, for every architecture: builds the first time, starts at once the second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genai.cli.app import run
from genai.convert.build import resolve_model_folder
from genai.kernels.cpu.jit.native import LIBRARY

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
NAMES = sorted(path.stem for path in (Path(__file__).parent / "goldens").glob("*.safetensors"))
FAST = ("llama_tied", "gemma2", "qwen2_moe")
DRAWN = pytest.mark.slow, pytest.mark.drawn(4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else DRAWN) for n in NAMES])
def test_chat_with_a_checkpoint(
    name: str,
    golden: Any,
    letter_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    folder = golden(name).write_checkpoint(tmp_path / name, letter_tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    command = ["chat", str(folder), "-p", "hi", "--max-tokens", "4", "--greedy"]
    assert run([*command, "--no-build"]) == 1
    assert "has not been built" in capsys.readouterr().err
    assert run(command) == 0
    first = capsys.readouterr()
    assert f"{name} is a checkpoint" in first.err
    assert run([*command, "--no-build"]) == 0
    again = capsys.readouterr()
    assert "checkpoint" not in again.err
    assert first.out == again.out
    assert first.out.strip()
    built = resolve_model_folder(folder, build=False)
    assert built.parent == tmp_path / "cache" / "genai" / "models"
    assert {"model.onnx", "model.onnx.data", "genai_config.json"} <= {path.name for path in built.iterdir()}
