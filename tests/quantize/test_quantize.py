"""Whole runs: what they write, that they go on where they were, and what they refuse."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from genai import LLM, Model
from genai.convert import DecoderSpec
from genai.errors import InputError, ModelFolderError, OptionError, StateError, UnsupportedModelError
from genai.evaluate import kl_divergence
from genai.evaluate.prediction import kl_rows, log_softmax, normalizers
from genai.models.folders import bundled_model
from genai.quant.methods import METHODS
from genai.quantize import Report, quantize_model
from genai.quantize.calibration import written_text
from genai.quantize.choices import TABLE_FORMAT, FormatChoice
from genai.quantize.options import QuantizeOptions, parse_size
from genai.quantize.report import read_report
from genai.quantize.sites import LEAST_ELEMENTS
from genai.quantize.source import FloatModel
from genai.quantize.streaming import StreamedDecoder
from genai.quantize.workspace import FinishedMatrices
from genai.text.tokenizer import Tokenizer
from tests.llm.test_speculation import SteadyCosts
from tools.speculation_agreement import facts, guessing

from .conftest import CHECKPOINT, SMALL, quick, small_folder
from .test_float_models import engine_logits


def digest(folder: Path) -> dict[str, str]:
    """Of what runs; reports tell times."""
    files = [path for path in folder.iterdir() if not path.name.startswith("quantization_report")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def divergence_of_folders(float_folder: Path, folder: Path) -> float:
    """What the engine gives for both, with the text that the report's figures come from."""
    with FloatModel(float_folder) as source:
        text = written_text(StreamedDecoder(source, 1), Tokenizer(float_folder), count=4, length=32, seed=1)
    logits = [engine_logits(one, text.tokens)[:, :-1].reshape(4 * 31, -1) for one in (float_folder, folder)]
    p, q = (log_softmax(one, normalizers(one)) for one in logits)
    return float(kl_rows(p, q).mean())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_makes_a_model_that_runs(name: str, small: Path, tmp_path: Path) -> None:
    """The folder's own logits have the divergence that the report says, with zero points and without."""
    report = quantize_model(small, tmp_path / "out", quick(method=name, symmetric=name != "awq"))
    assert report.quality is not None and 0 < report.quality.kld < 0.2
    assert report.quality.kld == pytest.approx(divergence_of_folders(small, tmp_path / "out"), rel=0.02)
    format = f"blocks of 32{', zero points' if name == 'awq' else ''}, {name}"
    assert {row.stored for row in report.matrices if row.part != "embedding"} == {f"4 bits, {format}"}
    assert {row.stored for row in report.matrices if row.part == "embedding"} == {f"8 bits, {format}"}
    assert any("power" in row.notes for row in report.matrices) == METHODS[name].folds


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("bits", "block_size"), [(4, 16), (4, 128), (4, 256), (8, 32), (8, 256)])
def test_what_is_measured_is_what_is_written(bits: int, block_size: int, small: Path, tmp_path: Path) -> None:
    """96 and 160 columns fill no block of 128."""
    report = quantize_model(small, tmp_path / "out", quick(bits=bits, block_size=block_size, method="gptq"))
    assert report.quality is not None
    found = divergence_of_folders(small, tmp_path / "out")
    assert report.quality.kld == pytest.approx(found, rel=0.02, abs=1e-7)


@pytest.mark.oracle
@pytest.mark.parametrize(("tied", "method"), [(True, "search"), (False, "awq")])
def test_onnxruntime_genai_reads_it(tied: bool, method: str, tmp_path: Path, tokens: np.ndarray) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    folder = small_folder(tmp_path / "float", tie_word_embeddings=tied)
    quantize_model(folder, tmp_path / "out", quick(method=method, accuracy_level=1))
    model = og.Model(str(tmp_path / "out"))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=100)
    generator = og.Generator(model, params)
    generator.append_tokens(tokens[:1].astype(np.int32))
    theirs = np.asarray(generator.get_output("logits"))[0, -1]
    ours = engine_logits(tmp_path / "out", tokens[:1])[0, -1]
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * np.abs(theirs).max())


@pytest.mark.slow
def test_the_order_of_methods_on_the_bundled_model(tmp_path: Path) -> None:
    """At 4 bits GPTQ, AWQ and distillation are no worse than rounding to nearest; INT8 is nearly the float model."""
    kld = {}
    for name in ("rtn", "search", "awq", "gptq", "distill"):
        report = quantize_model(CHECKPOINT, tmp_path / name, quick(method=name, samples=48, length=96, eval_samples=60))
        assert report.quality is not None
        kld[name] = report.quality.kld
    assert kld["awq"] <= kld["rtn"] and kld["gptq"] < kld["rtn"] and kld["distill"] < kld["rtn"]
    assert kld["distill"] < kld["gptq"] < 0.7 * kld["rtn"]
    report = quantize_model(CHECKPOINT, tmp_path / "int8", quick(bits=8, method="search", length=96, eval_samples=12))
    assert report.quality is not None and report.quality.kld < 1e-3
    assert report.quality.perplexity == pytest.approx(report.quality.base_perplexity, rel=1e-3)


def test_a_llama_shape_takes_few_bits(tmp_path: Path) -> None:
    """Untied, with the proportions of Llama-3.1-8B, whose embedding the builder leaves in floats."""
    folder = small_folder(tmp_path / "float", hidden_size=256, intermediate_size=896, num_layers=4)
    report = quantize_model(folder, tmp_path / "half", quick(evaluate=False))
    wide = quantize_model(folder, tmp_path / "wide", quick(evaluate=False, half_scales=False))
    for one, scale, most in ((report, 16, 4.85), (wide, 32, 5.35)):
        bits = {name: part["bits_per_weight"] for name, part in one.parts.items()}
        assert bits["embedding"] == pytest.approx(8 + scale / 32)
        assert bits["head"] == bits["attention"] == bits["feed-forward"] == pytest.approx(4 + scale / 32)
        # Llama-3.1-8B's weights by part; norms are of no weight there, its tables of angles take 0.07 bits.
        total = (525_336_576 * (bits["embedding"] + bits["head"]) + 6_979_321_856 * bits["attention"]) / 8_029_995_008
        assert total + 0.07 < most
    assert {row.part for row in report.matrices} == {"embedding", "head", "attention", "feed-forward"}
    assert report.weights == sum(row.rows * row.columns for row in report.matrices)


def test_the_same_run_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    for name, threads in (("one", 1), ("two", 2)):
        quantize_model(small, tmp_path / name, quick(method="gptq", threads=threads))
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


class Stop(Exception):
    """An interrupt of our own."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("method", ["search", "gptq", "awq", "distill"])
def test_an_interrupted_run_goes_on(method: str, small: Path, tmp_path: Path) -> None:
    """Stopped after every third matrix: the same bytes as in one go, and nothing is done twice."""
    options = quick(method=method)
    quantize_model(small, tmp_path / "whole", options)
    seen: list[float] = []

    def stop(phase: str, done: float, total: float) -> None:
        if phase == "Quantising":
            seen.append(done)
            if len(seen) % 3 == 0:
                raise Stop

    for _ in range(20):
        try:
            report = quantize_model(small, tmp_path / "parts", options, progress=stop)
            break
        except Stop:
            assert not (tmp_path / "parts").exists()
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    assert len(seen) == 12 and any("finished by an interrupted run" in remark for remark in report.remarks)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_killed_run_goes_on(small: Path, tmp_path: Path) -> None:
    """SIGKILL at moments that nobody chose."""
    quantize_model(small, tmp_path / "whole", quick(method="gptq", format="nl3"))
    arguments = [
        "--method",
        "gptq",
        "--format",
        "nl3",
        "--samples",
        "8",
        "--length",
        "32",
        "--eval-samples",
        "4",
        "-t",
        "1",
    ]
    command = [sys.executable, "-m", "genai", "quantize", str(small), "-o", str(tmp_path / "parts"), *arguments]
    workspace = tmp_path / ".parts.quantizing"
    for least in (1, 4, 9):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            for _ in range(3000):
                if process.poll() is not None or len(list(workspace.glob("*.done.json"))) >= least:
                    break
                time.sleep(0.01)
            process.kill()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_other_options_begin_anew(small: Path, tmp_path: Path) -> None:
    def stop(phase: str, done: float, total: float) -> None:
        if phase == "Quantising":
            raise Stop

    with pytest.raises(Stop):
        quantize_model(small, tmp_path / "out", quick(block_size=16), progress=stop)
    report = quantize_model(small, tmp_path / "out", quick(block_size=64))
    assert not any("interrupted" in remark for remark in report.remarks)
    assert {row.stored for row in report.matrices if row.layer == 0} == {"4 bits, blocks of 64, search"}


def test_two_at_once_are_refused(small: Path, tmp_path: Path) -> None:
    with FinishedMatrices(tmp_path / "out", {}):
        with pytest.raises(StateError, match="is in use"):
            quantize_model(small, tmp_path / "out", quick())


def test_a_full_disk(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the work where it is foreseen; in the middle what is finished is kept."""
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
        with pytest.raises(ModelFolderError, match=r"1.0 kB free, but .* MB is needed"):
            quantize_model(small, tmp_path / "out", quick())
    saved, count = np.save, 0

    def full(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saved(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(ModelFolderError, match="the disk is full") as caught:
            quantize_model(small, tmp_path / "out", quick())
    assert "which reuses finished matrices" in str(caught.value) and not (tmp_path / "out").exists()
    report = quantize_model(small, tmp_path / "out", quick())
    assert any(remark.startswith("2 matrices were finished") for remark in report.remarks)


def test_files_that_may_not_be_so_large(small: Path, tmp_path: Path) -> None:
    """What the system itself refuses: while a matrix is kept, and while the model is written."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (50_000, 200_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(ModelFolderError, match="larger than the limit") as caught:
                quantize_model(small, tmp_path / "out", quick(evaluate=False))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "which reuses finished matrices" in str(caught.value) and not (tmp_path / "out").exists()
    report = quantize_model(small, tmp_path / "out", quick(evaluate=False))
    assert "12 matrices were finished by an interrupted run" in report.remarks


def test_what_a_run_left_that_was_killed_at_its_end_goes(small: Path, tmp_path: Path) -> None:
    quantize_model(small, tmp_path / "out", quick(evaluate=False))
    (tmp_path / ".out.quantizing").mkdir()
    with pytest.raises(ModelFolderError, match="already exists"):
        quantize_model(small, tmp_path / "out", quick(evaluate=False))
    assert not (tmp_path / ".out.quantizing").exists()


def test_places_that_cannot_be_written(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="already exists"):
        quantize_model(small, tmp_path, quick())
    with pytest.raises(ModelFolderError, match="is not a folder"):
        quantize_model(small, tmp_path / "none" / "out", quick())
    with pytest.raises(ModelFolderError):
        quantize_model(tmp_path / "missing", tmp_path / "out", quick())


def test_a_recipe(small: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        'default: {block_size: 64, method: rtn}\nrules:\n  - {match: "*down_proj*", bits: 8}\n'
        '  - {match: "lm_head*", bits: 0}\n  - {match: "*proj*", symmetric: false}\n'
    )
    report = quantize_model(small, tmp_path / "out", quick(recipe=recipe))
    stored = {row.name: row.stored for row in report.matrices}
    assert stored["model.layers.0.mlp.down_proj.MatMul.weight"] == "8 bits, blocks of 64, rtn"
    assert stored["lm_head.MatMul.weight"] == "floats"
    assert stored["model.layers.1.mlp.up_proj.MatMul.weight"] == "4 bits, blocks of 64, zero points, rtn"
    assert stored["model.embed_tokens.weight"] == "4 bits, blocks of 64, rtn"
    with Model(tmp_path / "out", quiet=True, threads=1):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules:\n  - {match: '*gate_prj*', bits: 8}", "'.*gate_prj.*' matches no matrix"),
        ("rules:\n  - {mach: '*'}", "unknown key 'mach'"),
        ("rules:\n  - {match: '*', bits: 7}", "bits is 7"),
        ("rules:\n  - {match: '*', method: gtpq}", "method is 'gtpq'"),
        ("rules:\n  - {bits: 8}", "has no 'match' pattern"),
        ("rules: 3", "rules is a number"),
        ("rules:\n  - {match: '*', bits: 4.0}", "bits is 4.0"),
        ("rules:\n  - {match: '*', qdq: 1}", "qdq is 1"),
        ("default: {bits: 2, bits: 4}", "bits occurs twice"),
        ("default: {bits: 2}\ndefault: {bits: 4}", "default occurs twice"),
        ("- 1", "is not a valid recipe"),
        ("default: [", "is not valid YAML"),
        ("default: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_bad_recipes(text: str, message: str, small: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises((InputError, OptionError), match=message) as caught:
        quantize_model(small, tmp_path / "out", quick(recipe=tmp_path / "recipe.yaml"))
    if "matches no matrix" in message:
        assert "gate_proj" in str(caught.value)
    assert "fix:" in str(caught.value)


def test_targets(tmp_path: Path) -> None:
    """Bits per weight and size are kept and used; bits go where they help."""
    folder = small_folder(tmp_path / "float", hidden_size=128, intermediate_size=256)
    by_bits = quantize_model(folder, tmp_path / "bits", quick(target_bits=8.0, method="rtn"))
    assert 7.5 < by_bits.bits_per_weight <= 8.0
    assert len({row.stored for row in by_bits.matrices}) > 1
    assert {len(row.sensitivity) for row in by_bits.matrices} == {6, 8}  # onnxruntime looks no 2 bits up
    assert [point.kind for point in by_bits.curve].count("predicted") > 10
    size = 5 * by_bits.nbytes // 6
    by_size = quantize_model(folder, tmp_path / "size", quick(target_size=size, method="rtn"))
    assert 0.95 * size < by_size.nbytes <= size
    assert by_size.quality is not None and by_bits.quality is not None
    assert by_size.quality.kld > by_bits.quality.kld
    report = tmp_path / "bits" / "quantization_report.json"
    again = quantize_model(folder, tmp_path / "again", quick(target_size=size, method="rtn", sensitivity=report))
    assert [row.stored for row in again.matrices] == [row.stored for row in by_size.matrices]
    for content, message in (("[]", "is not a report"), ('{"matrices": []}', "has no sensitivity for")):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(InputError, match=message):
            quantize_model(
                folder, tmp_path / "bad", quick(target_bits=8.0, method="rtn", sensitivity=tmp_path / "report.json")
            )
    middle = 0.5 * (by_size.quality.kld + by_bits.quality.kld)
    by_kld = quantize_model(folder, tmp_path / "kld", quick(target_kld=middle, method="rtn"))
    assert by_kld.quality is not None and by_kld.quality.kld <= middle
    assert by_kld.nbytes < by_bits.nbytes


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"target_bits": 2.0}, "--target-bits"),
        ({"target_size": 50_000}, "--target-size"),
        ({"target_kld": 1e-12}, "--target-kld"),
    ],
    ids=str,
)
def test_targets_that_cannot_be_met_name_the_nearest(
    options: dict[str, Any], nearest: str, small: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=next(iter(options))) as caught:
        quantize_model(small, tmp_path / "out", quick(**options))
    value = str(caught.value).split(f"{nearest} ")[1].split()[0]
    name = next(iter(options))
    wanted = parse_size(value) if name == "target_size" else float(value)
    quantize_model(small, tmp_path / "out", quick(**{name: wanted}))


def test_texts(small: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is 12 + 7? It is 19. " * 200)
    report = quantize_model(small, tmp_path / "one", quick(method="gptq", calib=text))
    assert report.calibration is not None and str(text) in report.calibration
    assert report.evaluation is not None and "held out from calibration" in report.evaluation
    chats = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(60)
    ]
    lines += [{"text": "some text " * 20}, {"prompt": "one and ", "completion": "two"}]
    chats.write_text("\n".join(json.dumps(line) for line in lines))
    report = quantize_model(small, tmp_path / "two", quick(method="importance", calib=chats, eval_file=text))
    assert report.evaluation is not None and "text.txt" in report.evaluation


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "contains no text"),
        ("a.txt", "Short.", "at least 160 tokens are needed, and 384 were requested"),
        ("a.jsonl", "{}", "line 1 is not a valid record"),
        ("a.jsonl", "[1]", "line 1 is not a valid record"),
        ("a.jsonl", '{"messages": 3}', "line 1 is not a valid record"),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": 5}',
            "line 2 is not a valid record\n  why: text is a number, but a string is expected",
        ),
        ("a.jsonl", '{"prompt": "a"}', "the key completion is missing; the keys are prompt"),
        ("a.jsonl", "[" * 100_000, "line 1 is not a valid record\n  why: the JSON is nested too deeply"),
        ("a.jsonl", '{"messages": [5]}', "a.jsonl, line 1: "),
        ("a.jsonl", '{"text": "\\ud800"}', "a.jsonl, line 1: "),
        ("a.jsonl", '{"text": "one\u2028two"', "line 1 is not a valid record\n  why: the line is not JSON"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("b.txt", None, "the file does not exist"),
    ],
)
def test_bad_texts(name: str, content: str | bytes | None, message: str, small: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        quantize_model(small, tmp_path / "out", quick(method="gptq", calib=tmp_path / name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "bits is 7"),
        ({"block_size": 48}, "block_size is 48"),
        ({"method": "gtpq"}, "gptq"),
        ({"samples": 0}, "samples is 0"),
        ({"length": 1}, "length is 1"),
        ({"accuracy_level": 9}, "accuracy_level is 9"),
        ({"threads": 0}, "threads = 0"),
        ({"threads": True}, "threads = True"),
        ({"bits": 4.0}, "bits is 4.0"),
        ({"bits": 0, "symmetric": False}, "symmetric is off, but bits is 0"),
        ({"bits": 0, "half_scales": False}, "half_scales is off, but bits is 0"),
        ({"calib": 5}, "calib is a number"),
        ({"target_bits": 4.0, "target_kld": 0.1}, "target_bits and target_kld"),
        ({"target_bits": float("nan")}, "target_bits is nan"),
        ({"target_size": 0}, "target_size is 0"),
        ({"target_bits": 5.0, "recipe": Path("x")}, "recipe and target_bits"),
        ({"evaluate": False, "eval_file": Path("x")}, "eval_file has no effect without an evaluation"),
        ({"target_bits": 5.0, "bits": 8}, "a target determines the format, the bits and the block size"),
        ({"target_kld": 0.1, "format": "q4_k"}, "a target determines the format, the bits and the block size"),
        ({"target_runtime": "any"}, "there is no target"),
        ({"target_bits": 5.0, "target_runtime": "onnx"}, "target_runtime is 'onnx'"),
        ({"sensitivity": Path("x")}, "there is no target"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        QuantizeOptions(**options)


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("*v_proj*", "v_proj"), ("*v_pro?.MatMul*", "v_proj"), ("*layers.1*v_proj.*", "v_proj"),
     ("*qkv_proj*", ""), ("*_proj*", ""), ("*up_proj*", ""), ("*attn*", "")],
)  # fmt: skip
def test_a_rule_for_a_part_of_a_fused_matrix_is_reported(pattern: str, part: str, small: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"rules:\n  - {{match: '{pattern}', bits: 8}}\n")
    report = quantize_model(small, tmp_path / "out", quick(recipe=tmp_path / "recipe.yaml", evaluate=False))
    assert len(report.remarks) == bool(part)
    for remark in report.remarks:
        count = sum("qkv_proj" in row.name and row.stored.startswith("8 bits") for row in report.matrices)
        assert f"changes {count} fused" in remark and f"{part} is not a separate matrix" in remark


def test_the_evaluation_can_be_repeated_with_eval_kld(small: Path, tmp_path: Path) -> None:
    """Sequences of the report are windows that do not overlap."""
    tokenizer = Tokenizer(small)
    tokens = tokenizer.encode("What is 12 + 7? It is nineteen. " * 40)[: 8 * 32]
    text = tmp_path / "text.txt"
    text.write_text(str(tokenizer.decode(tokens)))
    options = quick(method="rtn", bits=2, eval_file=text, eval_samples=8)
    report = quantize_model(small, tmp_path / "out", options, plain_roundings=False)
    with (
        Model(small, quiet=True, threads=1, accuracy="fp32") as exact,
        Model(tmp_path / "out", quiet=True, threads=1, accuracy="fp32") as model,
    ):
        found = kl_divergence(exact, model, text.read_text(), window=32, stride=32, bos=False)
    assert report.quality is not None and found.tokens == report.quality.tokens == 8 * 31
    assert found.mean == pytest.approx(report.quality.kld, rel=1e-3)
    assert found.top1_agreement == report.quality.top1_agreement


def test_a_recipe_with_a_default_says_all_of_it(small: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("default: {bits: 2}\nrules:\n  - {match: '*o_proj*', bits: 8}\n")
    for given in ({"bits": 8}, {"bits": 4}, {"method": "gptq"}, {"symmetric": False}):
        with pytest.raises(OptionError, match=f"sets a default, and {next(iter(given))} is also set"):
            quantize_model(small, tmp_path / "out", quick(recipe=tmp_path / "recipe.yaml", **given))
    (tmp_path / "recipe.yaml").write_text("rules:\n  - {match: '*o_proj*', bits: 8}\n")
    options = quick(recipe=str(tmp_path / "recipe.yaml"), bits=2, evaluate=False)
    report = quantize_model(small, tmp_path / "out", options)
    found = {row.name: row.stored.split(",")[0] for row in report.matrices if row.layer is not None}
    assert found == {name: "8 bits" if "o_proj" in name else "2 bits" for name in found}


def test_a_refused_run_leaves_nothing(small: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Short.")
    with pytest.raises(InputError, match="has only"):
        quantize_model(small, tmp_path / "out", quick(method="gptq", calib=tmp_path / "text.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_more_tokens_are_wanted_than_there_are(small: Path, tmp_path: Path) -> None:
    """Room on disk is needed for those alone that there can be; a longer sequence than the context says so."""
    text = tmp_path / "text.txt"
    text.write_text("What is 12 + 7? It is 19. " * 200)
    options = quick(method="gptq", calib=text, samples=10**9, length=10_000, evaluate=False)
    report = quantize_model(small, tmp_path / "out", options)
    assert any("128 tokens (the model's context length), not 10000" in remark for remark in report.remarks)
    assert any("requested tokens" in remark for remark in report.remarks)


def test_a_calibration_text_that_nothing_needs(small: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is 12 + 7? It is 19. " * 200)
    with pytest.raises(InputError, match="the file does not exist"):
        quantize_model(small, tmp_path / "out", quick(method="search", calib=tmp_path / "none.txt", evaluate=False))
    report = quantize_model(small, tmp_path / "rtn", quick(method="rtn", calib=text, evaluate=False))
    assert report.remarks == [f"{text} was not used: the method rtn needs no calibration text"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("default: {method: hqq}")
    options = quick(recipe=recipe, calib=text, eval_file=text)
    report = quantize_model(small, tmp_path / "hqq", options, plain_roundings=False)
    assert report.remarks == [f"{text} was not used: the recipe's methods need no calibration text"]
    report = quantize_model(small, tmp_path / "out", quick(method="search", calib=text))
    assert not report.remarks
    assert report.calibration is None and report.evaluation is not None and str(text) in report.evaluation


def test_parameters_are_counted_without_scales(small: Path, tmp_path: Path) -> None:
    report = quantize_model(small, tmp_path / "out", quick(evaluate=False))
    with Model(small, quiet=True, threads=1) as exact, Model(tmp_path / "out", quiet=True, threads=1) as model:
        assert model.info.parameters == exact.info.parameters
        assert model.info.weight_bytes == report.nbytes


@pytest.mark.parametrize("block", ["draft", "mtp"])
def test_proposers_that_are_not_part_of_the_output(block: str, tmp_path: Path) -> None:
    """Otherwise, the output would name a file that it does not have."""
    source = small_folder(tmp_path / "source")
    config = json.loads((source / "genai_config.json").read_text())
    described = {**config["model"]["decoder"], "filename": "draft/model.onnx"}
    config["model"][block] = described if block == "draft" else {"filename": "mtp.onnx", "enabled": False}
    (source / "genai_config.json").write_text(json.dumps(config))
    quantize_model(source, tmp_path / "out", quick(method="rtn", evaluate=False))
    del config["model"][block]
    assert json.loads((tmp_path / "out" / "genai_config.json").read_text()) == config
    with Model(tmp_path / "out", quiet=True, threads=1) as model:
        assert model.draft is None


def head_results(head: str | bytes) -> np.ndarray:
    """Return onnxruntime's logits of an MTP head for some tokens and random hidden states."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(head, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(5)
    feeds = {"input_ids": rng.integers(3, 1500, (1, 12)), "attention_mask": np.ones((1, 12), np.int64)}
    feeds["hidden_states"] = rng.normal(size=(1, 12, SMALL["hidden_size"])).astype(np.float32)
    empty = np.zeros((1, SMALL["num_key_value_heads"], 0, SMALL["head_size"]), np.float32)
    feeds |= {f"past_key_values.0.{kind}": empty for kind in ("key", "value")}
    return np.asarray(session.run(["logits"], feeds)[0])


def rounded_head(folder: Path, choice: FormatChoice, table: FormatChoice) -> bytes:
    """Return the MTP head of a float folder with matrices that are rounded to a format."""
    model = onnx.load(folder / "mtp.onnx")
    for tensor in model.graph.initializer:
        matrix = numpy_helper.to_array(tensor)
        if matrix.size < LEAST_ELEMENTS or matrix.ndim < 2:
            continue
        is_table = tensor.name.startswith("model.embed_tokens")
        rows, form = (matrix, table) if is_table else (matrix.T, choice)
        packed = METHODS["rtn"].quantize(np.ascontiguousarray(rows), form.grid(rows.shape[1]), None).packed
        rounded = packed.dequantize() if is_table else packed.dequantize().T
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(rounded), tensor.name))
    return bytes(model.SerializeToString())


def codes_of_layer(folder: Path) -> dict[str, bytes]:
    """Return the integers of the matrices that only the MTP head has."""
    return {
        re.sub("^(model|mtp)", "", tensor.name): numpy_helper.to_array(tensor).tobytes()
        for tensor in onnx.load(folder / "mtp.onnx").graph.initializer
        if re.search(r"(layers|fc)\..*_Q\d$", tensor.name)
    }


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_mtp_head_is_quantised(tied: bool, bits: int, tmp_path: Path) -> None:
    head = DecoderSpec(**SMALL, tie_word_embeddings=tied).one_layer()
    source = small_folder(tmp_path / "source", mtp=head, tie_word_embeddings=tied)
    out = tmp_path / "out"
    report = quantize_model(source, out, quick(method="rtn", bits=bits, evaluate=False, accuracy_level=1))
    assert not report.remarks
    choice = FormatChoice(bits=bits, method="rtn")
    expected = head_results(rounded_head(source, choice, choice if tied else choice.changed(TABLE_FORMAT)))
    found, exact = head_results(str(out / "mtp.onnx")), head_results(str(source / "mtp.onnx"))
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(exact).max()
    assert np.abs(found - exact).max() > 1e-3 * np.abs(exact).max()
    built = small_folder(tmp_path / "built", precision=f"int{bits}", mtp=head, tie_word_embeddings=tied)
    assert codes_of_layer(out) == codes_of_layer(built)
    rows = [row for row in report.matrices if row.part == "MTP head"]
    assert {row.stored for row in rows} == {f"{bits} bits, blocks of 32, rtn"}
    names = (
        "fc",
        *(
            f"layers.0.{one}"
            for one in ("attn.qkv_proj", "attn.o_proj", *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
        ),
    )
    assert [row.name for row in rows] == [f"mtp.{name}.MatMul.weight" for name in names]
    assert report.parts["MTP head"]["weights"] == sum(row.rows * row.columns for row in rows)


def test_the_mtp_head_shares_the_embeddings_and_proposes(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "source", mtp=DecoderSpec(**SMALL).one_layer())
    out = tmp_path / "out"
    report = quantize_model(source, out, quick(method="awq", evaluate=True), plain_roundings=False)
    assert report.quality is not None
    head = onnx.load(out / "mtp.onnx", load_external_data=False)
    files = {
        tensor.name: entry.value
        for tensor in head.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    shared = {name for name, file in files.items() if file == "model.onnx.data"}
    assert {name for name in files if name.startswith(("lm_head", "model.embed_tokens", "cos", "sin"))} <= shared
    assert {name for name in files if not name.startswith("mtp.")} == shared
    assert (out / "mtp.onnx.data").stat().st_size < (source / "mtp.onnx.data").stat().st_size / 3
    with Model(source, quiet=True, threads=1) as exact:
        parameters = exact.info.parameters
    prompts, options = [list(range(5, 25)), [7, 8]], {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    with LLM(out, quiet=True, threads=1, speculation="mtp") as llm:
        assert llm.model.info.parameters == parameters
        made = llm._speculation.speculator()
        assert made is not None
        with guessing(llm, SteadyCosts(lookup=False)):
            plain = llm.generate(prompts, **options)
        with guessing(llm, SteadyCosts(lookup=False, draft=made._draft, most_tokens=3)):
            found = llm.generate(prompts, **options)
    assert [facts(one) for one in found] == [facts(one) for one in plain]
    assert sum(one.proposed_tokens for one in found) > 20


def test_rules_and_targets_count_the_mtp_head(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "source", mtp=DecoderSpec(**SMALL).one_layer())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("default: {method: rtn}\nrules: [{match: 'mtp.*', bits: 8}]")
    report = quantize_model(source, tmp_path / "ruled", quick(recipe=recipe, evaluate=False))
    assert {row.stored for row in report.matrices if row.part == "MTP head"} == {"8 bits, blocks of 32, rtn"}
    assert {row.stored for row in report.matrices if row.part == "attention"} == {"4 bits, blocks of 32, rtn"}
    report = quantize_model(source, tmp_path / "target", quick(method="rtn", target_bits=6.0), plain_roundings=False)
    assert 5.0 < report.bits_per_weight <= 6.0
    with pytest.raises(OptionError, match="with the fewest bits, the model has"):
        quantize_model(source, tmp_path / "least", quick(method="rtn", target_bits=2.0), plain_roundings=False)


def test_a_quantised_mtp_head_is_requantised(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "source", precision="int8", mtp=DecoderSpec(**SMALL).one_layer())
    with pytest.raises(InputError, match="is already quantised"):
        quantize_model(source, tmp_path / "out", quick(evaluate=False))
    report = quantize_model(source, tmp_path / "out", quick(method="rtn", requantize=True, evaluate=False))
    nodes = [node.op_type for node in onnx.load(source / "mtp.onnx", load_external_data=False).graph.node]
    nodes += [node.op_type for node in onnx.load(source / "model.onnx", load_external_data=False).graph.node]
    count = nodes.count("MatMulNBits")
    assert any(f"its {count} matrices are used as the float model" in remark for remark in report.remarks)
    exact, found = (head_results(str(folder / "mtp.onnx")) for folder in (source, tmp_path / "out"))
    assert 1e-3 < np.abs(found - exact).max() / np.abs(exact).max() < 0.5


def test_head_and_embedding(small: Path, tmp_path: Path) -> None:
    report = quantize_model(small, tmp_path / "out", quick(head_bits=8, embedding_bits=0, evaluate=False))
    stored = {row.part: row.stored for row in report.matrices if row.layer is None}
    assert stored == {"embedding": "floats", "head": "8 bits, blocks of 32, search"}
    tied = small_folder(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(OptionError, match="are one matrix"):
        quantize_model(tied, tmp_path / "no", quick(head_bits=8, embedding_bits=4))


def test_requantising_says_what_it_means(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="already quantised"):
        quantize_model(bundled_model(), tmp_path / "out", quick())
    report = quantize_model(bundled_model(), tmp_path / "out", quick(bits=8, requantize=True))
    assert any("their existing error is not measured" in remark for remark in report.remarks)
    assert report.quality is not None and report.quality.kld < 1e-3


@pytest.mark.parametrize(
    ("format", "reads"),
    [({}, True), ({"bits": 2, "symmetric": False}, True), ({"qdq": True}, False), ({"format": "nl3"}, False)],
    ids=str,
)
def test_what_was_written_here_is_quantised(
    format: dict[str, Any], reads: bool, small: Path, tmp_path: Path, tokens: np.ndarray
) -> None:
    """Scales that a Cast widens are read as well, and weights behind DequantizeLinear are known for what they are."""
    quantize_model(small, tmp_path / "once", quick(evaluate=False, embedding_bits=0, **format))
    with pytest.raises(InputError, match="already quantised: 11 nodes"):
        quantize_model(tmp_path / "once", tmp_path / "out", quick())
    again = quick(bits=8, requantize=True)
    if not reads:
        with pytest.raises(UnsupportedModelError, match="--requantize supports only MatMulNBits"):
            quantize_model(tmp_path / "once", tmp_path / "out", again)
        return
    report = quantize_model(tmp_path / "once", tmp_path / "out", again)
    assert report.quality is not None and report.quality.kld < 1e-3
    before, after = (engine_logits(tmp_path / name, tokens) for name in ("once", "out"))
    assert np.abs(after - before).max() < 0.05 * np.abs(before).max()


def test_sizes() -> None:
    assert [parse_size(text) for text in ("2GB", "1.5 GiB", "700m", "123")] == [2 * 10**9, 3 * 2**29, 700 * 10**6, 123]
    for bad in ("", "GB", "-1GB", "1TB", "1e9"):
        with pytest.raises(OptionError, match="a size is a number and a unit"):
            parse_size(bad)


def test_the_report(small: Path, tmp_path: Path) -> None:
    report: Report = quantize_model(
        small, tmp_path / "out", quick(method="gptq", report=True), command="genai quantize <x> & y"
    )
    plain = read_report(tmp_path / "out")
    assert plain["quality"]["kld"] == report.quality.kld if report.quality else False
    assert plain["command"] == "genai quantize <x> & y"
    weights = sum(part["weights"] for part in plain["parts"].values())
    assert sum(part["nbytes"] for part in plain["parts"].values()) == plain["nbytes"]
    assert plain["bits_per_weight"] == pytest.approx(plain["nbytes"] * 8 / weights)
    assert {point["kind"] for point in plain["curve"]} == {"this output", "measured"}
    replace(report, output="a name that is not UTF-8: \udcff").write(tmp_path)
    assert read_report(tmp_path)["output"].startswith("a name that is not UTF-8: ")
    assert set(plain["seconds"]) >= {"reading", "texts", "quantising", "evaluation", "writing"}
    for row in plain["matrices"]:
        assert 0 < row["weight_error"] < 0.1
        assert (row["output_error"] is None) == (row["part"] == "embedding")
    page = (tmp_path / "out" / "quantization_report.html").read_text()
    assert "<script" not in page and "genai quantize &lt;x&gt; &amp; y" in page
    assert page.count("<svg") == 4
    text = (tmp_path / "out" / "quantization_report.md").read_text()
    assert "mean KLD" in text and "model.layers.1.mlp.down_proj" in text


def test_signals_keep_what_is_finished(small: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "genai",
        "quantize",
        str(small),
        "-o",
        str(tmp_path / "out"),
        "-m",
        "distill",
        "-t",
        "1",
    ]
    workspace = tmp_path / ".out.quantizing"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(6000):
            if process.poll() is not None or len(list(workspace.glob("*.done.json"))) >= 1:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished matrices are kept" in said
    assert list(workspace.glob("*.done.json")) and not (tmp_path / "out").exists()
