"""`genai build`, `chat` and `pull` with checkpoints that are quantised already, in folders and on a hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import genai
from genai.cli.app import run
from genai.convert import resolve_model_folder
from genai.kernels.cpu.jit.native import LIBRARY
from tools.local_hub import LocalHub
from tools.quantised_checkpoints import convert, write

Capture = pytest.CaptureFixture[str]
PEBBLE = Path(__file__).resolve().parents[2] / "tools" / "bundled_model" / "checkpoint"
QUESTION = ["-p", "What is 12 + 7?"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert LIBRARY.folder  # chosen now: compiled kernels stay where they are
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "cache"


@pytest.mark.parametrize("form", ["awq", "gptq_act_order", "mlx_8"])
def test_build_says_what_was_kept(form: str, tmp_path: Path, capsys: Capture) -> None:
    source, _ = write(tmp_path, form)
    assert run(["build", str(source), "-o", str(tmp_path / "model")]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(tmp_path / "model")
    kind = {"awq": "4 bits by 32 with zero points", "mlx_8": "8 bits by 32 with minimum values"}.get(
        form, "4 bits by 32"
    )
    assert f"matrices are kept exactly: {kind}" in shown.err and "read by this package" in shown.err
    assert "architecture ignores" not in shown.err


def test_floats_of_8_bits_become_integers_and_it_is_said(tmp_path: Path, capsys: Capture) -> None:
    source, _ = write(tmp_path, "fp8")
    assert run(["build", str(source), "-o", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().err
    assert "14 of 14 FP8 matrices are converted to floats" in said and "no block format supports 8-bit floats" in said
    assert "kept exactly" not in said


def test_another_precision(tmp_path: Path, capsys: Capture) -> None:
    source, _ = write(tmp_path, "awq")
    assert run(["build", str(source), "-o", str(tmp_path / "model"), "--precision", "int8"]) == 0
    assert "kept exactly" not in capsys.readouterr().err


def test_chat_builds_once(cache: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(PEBBLE, tmp_path / "pebble-awq", "awq")
    assert run(["chat", str(source), *QUESTION]) == 0
    first = capsys.readouterr()
    assert first.out.strip() == "19" and "with unchanged weights" in first.err and "kept exactly" in first.err
    folder = resolve_model_folder(source, build=False)
    assert f"stored in {folder}" in first.err
    assert run(["chat", str(source), "--no-build", *QUESTION]) == 0
    assert capsys.readouterr().out == first.out


def test_a_name_on_a_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Beside the float checkpoint's pickles, and code that nobody runs."""
    source = convert(PEBBLE, tmp_path / "pebble-gptq", "gptq_act_order")
    config = json.loads((source / "config.json").read_text())
    settings = config.pop("quantization_config")  # as older tools had it: in a file of its own
    (source / "quantize_config.json").write_text(json.dumps(settings))
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "modeling.Tiny"}}))
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    files |= {"modeling.py": b"raise SystemExit('run')", "pytorch_model.bin": b"x" * 999}
    with LocalHub() as hub:
        hub.add("org/pebble-gptq", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert run(["chat", "org/pebble-gptq", "--yes", *QUESTION]) == 0
        shown = capsys.readouterr()
        assert shown.out.strip() == "19" and "kept exactly" in shown.err
        assert not any("modeling" in path or "pytorch_model" in path for path in hub.paths())
        built = genai.pull("org/pebble-gptq", precision="int8", quiet=True)
        assert "int8" in built.name


def test_a_format_that_is_not_read_is_refused_before_it_is_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    files = {path.name: path.read_bytes() for path in PEBBLE.iterdir()}
    config = {**json.loads(files["config.json"]), "quantization_config": {"quant_method": "aqlm", "nbits": 8}}
    with LocalHub() as hub:
        hub.add("org/pebble-aqlm", {**files, "config.json": json.dumps(config).encode()})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert run(["pull", "org/pebble-aqlm"]) == 1
        said = capsys.readouterr().err
        assert "quant_method is 'aqlm'" in said and "awq, gptq, auto-round" in said
        assert not any(path.endswith("model.safetensors") for path in hub.paths())
