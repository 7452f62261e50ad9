"""Numbers with more digits than Python parses, wherever text becomes a number: refused like other invalid numbers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genai
from genai.cli.run import extents
from genai.cli.wrapping import width_of
from genai.compat.onnxruntime.options import MAX_VALUE_BYTES, WEIGHTS_LEAST_BYTES, check_entries
from genai.engine.sampling.grammar import _with_held_values
from genai.errors import InputError, OptionError, whole_number
from genai.evaluate.model_diff import layer_of
from genai.evaluate.tasks import _question
from genai.hub.download import _continues
from genai.models import kv_quality
from genai.models.model_options import gpu_name
from genai.quantize.compare import parse_variants
from genai.quantize.options import parse_size
from genai.session.cuda_partition import CudaProvider

LONG = "9" * (sys.get_int_max_str_digits() + 700)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: genai.Model("any", device=f"cuda:{LONG}"), "device"),
        (lambda: extents([f"batch={LONG}"]), "--dim"),
        (lambda: extents(["batch=²"]), "--dim"),
        (lambda: check_entries({MAX_VALUE_BYTES: LONG}), MAX_VALUE_BYTES),
        (lambda: check_entries({WEIGHTS_LEAST_BYTES: LONG}), WEIGHTS_LEAST_BYTES),
        (lambda: CudaProvider(device_id=LONG), "device_id"),
        (lambda: CudaProvider(device_id="x"), "device_id"),
        (lambda: CudaProvider(gpu_mem_limit=LONG), "gpu_mem_limit"),
        (lambda: CudaProvider(gpu_mem_limit=10**5000), "gpu_mem_limit"),
        (lambda: CudaProvider(gpu_mem_limit=-1), "gpu_mem_limit"),
        (lambda: parse_variants(f"rtn/4/{LONG},rtn/4/32"), "variant"),
        (lambda: parse_variants(f"rtn/{LONG}/32,rtn/4/32"), "variant"),
        (lambda: parse_size(f"{LONG}GB"), "target size"),
        (lambda: parse_size(f"1.{LONG}GB"), "target size"),
    ],
)
def test_options(call: Callable[[], object], what: str) -> None:
    with pytest.raises(OptionError) as refused:
        call()
    assert what in refused.value.what and refused.value.why and refused.value.fix


def test_numbers() -> None:
    assert [whole_number(text) for text in ("0", "12", str(2**64 - 1))] == [0, 12, 2**64 - 1]
    assert {whole_number(text) for text in ("", "-1", "+1", " 1", "1.0", "1_0", "²", "٣", "x", LONG)} == {None}
    assert gpu_name("cuda:12") == "cuda" and not gpu_name(f"cuda:{LONG}")


def test_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = SimpleNamespace(isatty=lambda: True, fileno=lambda: 1)
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: SimpleNamespace(columns=70))
    for told, width in {"90": 90, "0": 70, "": 70, LONG: 70}.items():
        monkeypatch.setenv("COLUMNS", told)
        assert width_of(terminal) == width


def test_what_others_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names in a model, a server's headers, grammars, task files, and cached measurements."""
    assert layer_of(f"/model/layers.{LONG}/mlp") is None and layer_of("/model/layers.3/mlp") == 3
    response: Any = SimpleNamespace(status_code=206, headers={"content-range": f"bytes {LONG}-"})
    assert not _continues(response, 0)
    grammar = f'start: %json {{"minimum": {LONG}}}'
    assert _with_held_values(grammar) == grammar
    task = {"task": "a", "messages": ["b"], "answer": "c", "match": "exact"}
    for most in ("1e999", LONG):
        with pytest.raises(InputError):
            _question(tmp_path / "tasks", 1, json.dumps(task)[:-1] + f', "max_tokens": {most}}}')
    monkeypatch.setattr(kv_quality, "_file", lambda config: tmp_path / "kept")
    for kept in ('{"mean": 1, "mean_error": 1, "tokens": 1e999}', "{}", f'{{"tokens": {LONG}}}'):
        (tmp_path / "kept").write_text(kept)
        assert kv_quality.recorded(None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["--device=cuda:", "--dim=N=", "--logit-bias=", "--seed="])
def test_the_command_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    from genai.cli.app import run

    command = ["run", "x.onnx"] if "dim" in option else ["generate", "-p", "hi"]
    assert run([*command, option + LONG]) in (1, 2)
    said = capsys.readouterr().err
    assert "Traceback" not in said and "  why: " in said and "  fix: " in said
