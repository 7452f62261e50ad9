"""`genai eval ppl`, `kld` and `diff` as processes: their output, its place, and their failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genai import Model
from genai.cli.app import run as run_here
from genai.cli.evaluate import _tell
from genai.common.progress import Task
from genai.evaluate import ScoringProgress, kl_divergence, perplexity
from genai.evaluate.model_diff import DEFAULT_TOLERANCE
from genai.models import kv_quality


def run(*arguments: str, text: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "genai", "eval", *arguments],
        input=text,
        capture_output=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def ok(*arguments: str, text: bytes = b"") -> str:
    result = run(*arguments, text=text)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


@pytest.fixture(scope="session")
def text_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_ppl_as_json_from_a_file_and_as_text_from_stdin(text_file: Path, text: str, exact: Model) -> None:
    options = ["--accuracy", "fp32", "-w", "128", "--stride", "100", "--no-bos", "-t", "2"]
    # This comes first, so that the command finds compiled kernels; compiling would add a message.
    expected = perplexity(exact, text, window=128, stride=100)
    result = run("ppl", "-f", str(text_file), "--json", *options)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["perplexity"] == expected.perplexity
    assert (figures["tokens"], figures["window"], figures["stride"], figures["bos"]) == (
        expected.tokens,
        128,
        100,
        False,
    )
    # Not a terminal: one line, at the end.
    assert re.fullmatch(
        rf"{expected.tokens}/{expected.tokens} tokens scored · \d+ tok/s in [\d.]+ s\n", result.stderr.decode()
    )
    table = ok("ppl", "-f", "-", *options, text=text.encode())
    assert f"perplexity      {expected.perplexity:.4f} ± " in table
    assert f"bits per byte   {expected.bits_per_byte:.5f}\n" in table
    assert f"{expected.windows} of up to 128 tokens, stride 100, no BOS" in table


def test_ppl_has_no_standard_error_of_one_token(text_file: Path) -> None:
    figures = json.loads(ok("ppl", "-f", "-", "--bos", "--json", text=b"a"))
    assert figures["tokens"] == 1 and figures["nats_error"] is None and figures["bos"] is True


def test_ppl_of_a_context_that_shifts(text_file: Path, exact: Model, text: str) -> None:
    expected = perplexity(exact, text, window=128, ctx_shift=40)
    options = ["-f", str(text_file), "--accuracy", "fp32", "-w", "128", "-t", "2", "--ctx-shift"]
    assert json.loads(ok("ppl", *options, "--ctx-keep", "40", "--json"))["perplexity"] == expected.perplexity
    assert "1 of up to" not in (shown := ok("ppl", *options)) and "one pass" in shown
    assert (
        b"--ctx-keep 3 cannot be used without --ctx-shift" in run("ppl", "-f", str(text_file), "--ctx-keep", "3").stderr
    )


def test_plots(text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ok("kld", "-f", str(text_file), "--other-accuracy", "fp32", "--plot", str(tmp_path / "kld.svg"))
    ok("diff", "--other-accuracy", "fp32", "--plot", str(tmp_path / "diff.svg"))
    assert all(f">{word}<" in (tmp_path / "kld.svg").read_text() for word in ("median", "99 %", "nats"))
    assert all(f">{layer}<" in (tmp_path / "diff.svg").read_text() for layer in range(6))


def test_kld_of_one_folder_computed_in_two_ways(text_file: Path, text: str, exact: Model, bundled: Any) -> None:
    figures = json.loads(ok("kld", "-f", str(text_file), "--other-accuracy", "fp32", "--json", "-t", "2"))
    assert figures["mean"] == kl_divergence(bundled, exact, text).mean > 0
    assert "mean KLD " in ok("kld", "-f", str(text_file), "--accuracy", "fp32", "--other-kv-type", "fp16")


def test_kld_of_int4_decides_whether_it_is_refused(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_quality, "cache_root", lambda: tmp_path)
    command = ["eval", "ppl", "-f", str(text_file), "--kv-type", "int4"]
    assert run_here(command) == 2
    assert "has not been measured" in capsys.readouterr().err
    assert run_here(["eval", "kld", "-f", str(text_file), "--accuracy", "fp32", "--other-kv-type", "int4"]) == 0
    assert "int4 KV cache: " in capsys.readouterr().err
    (kept,) = (tmp_path / "kv_quality").iterdir()
    figures = json.loads(kept.read_text())
    assert figures["mean"] > 0 and figures["tokens"] > 0
    kept.write_text(json.dumps(figures | {"mean": 0.5, "tokens": 5000}))
    assert run_here(command) == 2
    assert "0.5000 nats, above the limit of 0.01 nats" in capsys.readouterr().err
    assert run_here([*command, "--kv-force"]) == 0
    kept.write_text(json.dumps(figures | {"mean": 0.005, "tokens": 5000}))
    assert run_here(command) == 0
    assert run_here(["eval", "ppl", "-f", str(text_file), "--kv-force"]) == 2
    assert "allowed only with --kv-type 'int4'" in capsys.readouterr().err


def test_kld_of_equal_sides_is_zero(text_file: Path, bundled_folder: Path) -> None:
    folder = str(bundled_folder)
    figures = json.loads(ok("kld", folder, folder, "-f", str(text_file), "--json"))
    assert figures["mean"] == figures["maximum"] == 0 and figures["top1_agreement"] == 1


def test_kld_of_other_vocabularies(text_file: Path, bundled_folder: Path, form_folder: Callable[[str], Path]) -> None:
    result = run("kld", str(bundled_folder), str(form_folder("small-vocabulary")), "-f", str(text_file))
    assert result.returncode == 1
    assert b"1536 logits per token" in result.stderr and result.stdout == b""


def test_diff_of_two_folders(form_folder: Callable[[str], Path]) -> None:
    folders = str(form_folder("fp32")), str(form_folder("int4"))
    shown = ok("diff", *folders, "-p", "What is 12 + 7?", "--isolate")
    marked = [line for line in shown.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert "first difference: " in shown and "(each operator alone; at most " in shown
    everything = ok("diff", *folders, "-p", "-", "--all", text=b"What is 12 + 7?")
    assert len(everything.splitlines()) > len(shown.splitlines()) and "…" not in everything
    figures = json.loads(ok("diff", *folders, "-p", "What is 12 + 7?", "--isolate", "--json"))
    first = figures["values"][figures["first"]]
    assert first["name"] in marked[0] and first["relative_rms"] > figures["tolerance"] == DEFAULT_TOLERANCE
    assert figures["layers_only_in_base"] == figures["layers_only_in_other"] == []


def test_diff_names_layers_of_one_side(form_folder: Callable[[str], Path]) -> None:
    shown = ok("diff", str(form_folder("fp32")), str(form_folder("three-layers")))
    assert "layers only in OTHER: 3\n" in shown and "values only in OTHER: " in shown


@pytest.mark.oracle
def test_diff_against_onnxruntime() -> None:
    shown = ok("diff", "--against", "onnxruntime")
    assert "no value differs: relative RMS error ≤ 0.05 in all 68 values (errors accumulate)" in shown
    assert not [line for line in shown.splitlines() if line.startswith(">")]
    tight = json.loads(ok("diff", "--against", "onnxruntime", "--isolate", "--tolerance", "1e-5", "--json"))
    assert tight["values"][tight["first"]]["op_type"] == "PagedAttention"
    assert tight["base"].startswith("onnxruntime on ")


def test_diff_against_the_reference() -> None:
    figures = json.loads(ok("diff", "--against", "reference", "--accuracy", "fp32", "--json", "-t", "1"))
    assert figures["base"].startswith("reference on ") and figures["other"].startswith("genai on ")
    assert 0 < max(value["relative_rms"] for value in figures["values"]) < 1e-4


def test_diff_where_onnxruntime_is_missing(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')")
    result = run("diff", "--against", "onnxruntime", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert result.returncode == 1
    assert b"onnxruntime cannot be imported" in result.stderr and b"fix: pip install onnxruntime" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ppl"], 2, "--file"),
        (["ppl", "-f", "{tmp}/missing"], 1, "cannot be read"),
        (["ppl", "-f", "{tmp}/empty"], 1, "empty is empty"),
        (["ppl", "-f", "{tmp}/short"], 1, "1 token"),
        (["ppl", "-f", "{tmp}/latin1"], 1, "is not UTF-8"),
        (["ppl", "{tmp}/nomodel", "-f", "{tmp}/text"], 1, "nomodel"),
        (["ppl", "-f", "{tmp}/text", "--window", "64", "--stride", "65"], 2, "--stride 65"),
        (["ppl", "-f", "{tmp}/text", "--window", "4096"], 2, "context_length is 1024"),
        (["ppl", "-f", "{tmp}/text", "--accuracy", "int2"], 2, "int2"),
        (["kld", "-f", "{tmp}/text", "--other-kv-type", "int2"], 2, "int2"),
        (["diff"], 2, "compared with itself"),
        (["diff", "--other-accuracy", "auto"], 2, "compared with itself"),
        (["diff", "--against", "tvm"], 2, "allowed: onnxruntime, reference"),
        (["diff", "--against", "onnxruntime", "--other-accuracy", "fp32"], 2, "contradicts"),
        (
            ["diff", "--against", "reference", "--device", "reference", "--accuracy", "fp32"],
            2,
            "compared with itself",
        ),
        (["diff", "--other-accuracy", "fp32", "--tolerance", "0"], 2, "--tolerance 0"),
        (["diff", "--other-accuracy", "fp32", "--tolerance", "nan"], 2, "--tolerance nan"),
        (["diff", "--other-accuracy", "fp32", "-p", ""], 1, "no tokens"),
    ],
)
def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    """Run in this process, because starting a process for each case would take most of the time."""
    for name, content in {"empty": b"", "short": b"a", "latin1": b"caf\xe9", "text": b"What is 12 + 7?"}.items():
        (tmp_path / name).write_bytes(content)
    assert run_here(["eval", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)]) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""
    assert code == 2 or "  why: " in shown.err


def test_progress_and_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[float, float, str]] = []

    class Line(Task):
        def show(self, done: float, total: float, counted: str = "") -> None:
            shown.append((done, total, counted))

    for scored, seconds in ((10, 0.2), (11, 0.21), (20, 0.22)):
        _tell(Line(), ScoringProgress(scored, 20, 2 * scored, seconds))
    assert shown[0] == (10, 20, "10/20 tokens scored · 100 tok/s") and shown[-1][:2] == (20, 20)
    assert capsys.readouterr().err == "20/20 tokens scored · 182 tok/s in 0.2 s\n"


def test_bytes_that_are_not_utf8_on_stdin() -> None:
    result = run("ppl", "-f", "-", text=b"caf\xe9")
    assert result.returncode == 1 and b"stdin is not UTF-8" in result.stderr
