"""Every format that can be asked for: the folder has the operators that it should, and runs here and in onnxruntime."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from genai.cli.app import run
from genai.convert.spec import ExpertsSpec
from genai.errors import InputError, OptionError
from genai.onnx.reader import read_model
from genai.quant.methods import METHODS
from genai.quantize import Report, quantize_model
from genai.quantize.choices import FORMATS, FormatChoice, read_recipe
from genai.quantize.compare import Variant
from genai.quantize.options import QuantizeOptions
from genai.quantize.report import NAME as REPORT, read_report

from .conftest import CHECKPOINT, quick, small_folder
from .test_float_models import engine_logits
from .test_quantize import divergence_of_folders

OWN, OWN_TABLE, TABLE = "genai::QuantizedMatMul", "genai::QuantizedGather", "com.microsoft::GatherBlockQuantized"
# Options, what a product and the table become, and whether onnxruntime has kernels for both.
CASES: dict[str, tuple[dict[str, Any], str, str, bool]] = {
    "2 bits": ({"bits": 2}, "com.microsoft::MatMulNBits", TABLE, True),
    "2 bits, table of 2": ({"bits": 2, "embedding_bits": 2}, "com.microsoft::MatMulNBits", OWN_TABLE, False),
    "2 bits, table of 4": ({"bits": 2, "embedding_bits": 4}, "com.microsoft::MatMulNBits", TABLE, True),
    "2 bits by 16, zero points": (
        {"bits": 2, "block_size": 16, "symmetric": False}, "com.microsoft::MatMulNBits", TABLE, True
    ),
    "3 bits": ({"bits": 3, "method": "gptq", "embedding_bits": 3}, OWN, OWN_TABLE, False),
    "4 bits by 128, zero points": (
        {"block_size": 128, "symmetric": False, "method": "hqq"}, "com.microsoft::MatMulNBits", TABLE, True
    ),
    "4 bits by row": ({"block_size": 0, "method": "distill", "embedding_bits": 4}, OWN, OWN_TABLE, False),
    "5 bits, zero points": ({"bits": 5, "symmetric": False, "embedding_bits": 5}, OWN, OWN_TABLE, False),
    "6 bits by 256": ({"bits": 6, "block_size": 256}, OWN, TABLE, False),
    "8 bits by 16": ({"bits": 8, "block_size": 16}, "com.microsoft::MatMulNBits", TABLE, True),
    "NF4": ({"format": "nf4", "block_size": 32}, "com.microsoft::MatMulBnb4", TABLE, True),
    "FP4 in blocks that do not fill rows": ({"format": "fp4"}, OWN, TABLE, False),
    "QDQ": ({"qdq": True, "method": "gptq"}, "::MatMul", TABLE, True),
    "QDQ of 8 bits, zero points": ({"qdq": True, "bits": 8, "symmetric": False}, "::MatMul", TABLE, True),
    "QDQ by row": ({"qdq": True, "bits": 8, "block_size": 0, "embedding_bits": 0}, "::MatMul", "::Gather", True),
    **{name: ({"format": name}, OWN, TABLE, False) for name in FORMATS[1:] if name not in ("nf4", "fp4")},
}  # fmt: skip


def operators(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in read_model(folder / "model.onnx").graph.nodes:
        found[f"{node.domain}::{node.op_type}"] = found.get(f"{node.domain}::{node.op_type}", 0) + 1
    return found


def onnxruntime_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Of the last token of one sequence; products behind DequantizeLinear do not round activations."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"input_ids": tokens[:1], "attention_mask": np.ones_like(tokens[:1])}
    for given in session.get_inputs():
        if given.name not in feeds:
            feeds[given.name] = np.zeros((1, 2, 0, 16), np.float32)
    return np.asarray(session.run(["logits"], feeds)[0])[0, -1]


def onnxruntime_genai_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The same, by onnxruntime-genai."""
    og = pytest.importorskip("onnxruntime_genai")
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=100)
    generator = og.Generator(model, params)
    generator.append_tokens(tokens[:1].astype(np.int32))
    return np.asarray(generator.get_output("logits"))[0, -1]


def agree(folder: Path, tokens: np.ndarray, tolerance: float = 3e-4) -> None:
    theirs = onnxruntime_logits(folder, tokens)
    ours = engine_logits(folder, tokens[:1])[0, -1]
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("untied") / "model", num_layers=1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("tied") / "model", num_layers=1, tie_word_embeddings=True)


def made(source: Path, folder: Path, options: dict[str, Any]) -> Report:
    return quantize_model(source, folder, quick(evaluate=False, accuracy_level=1, **options))


@pytest.mark.oracle
@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CASES)
def test_runs_here_and_in_onnxruntime(name: str, untied: Path, tmp_path: Path, tokens: np.ndarray) -> None:
    options, product, table, foreign = CASES[name]
    report = made(untied, tmp_path / "out", options)
    found = operators(tmp_path / "out")
    assert found[product] >= 5 and found[table] >= 1  # o_proj's rows of 64 are whole blocks of FP4
    assert ("onnxruntime" in report.readers) == foreign
    assert foreign or "float32" in report.readers[-1]
    assert sum(row.nbytes for row in report.matrices) == pytest.approx(report.nbytes, abs=0.02 * report.nbytes + 60_000)
    agree(tmp_path / "out", tokens)
    theirs = onnxruntime_genai_logits(tmp_path / "out", tokens)
    ours = onnxruntime_logits(tmp_path / "out", tokens)
    # Its sessions let activations be rounded behind DequantizeLinear.
    np.testing.assert_allclose(ours, theirs, atol=(0.05 if options.get("qdq") else 3e-4) * np.abs(theirs).max())


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["2 bits", "4 bits by 128, zero points", "5 bits, zero points", "q4_k", "nl3", "QDQ"])
def test_head_and_embedding_in_one_are_stored_once(name: str, tied: Path, tmp_path: Path, tokens: np.ndarray) -> None:
    options, *_ = CASES[name]
    report = made(tied, tmp_path / "out", options)
    stored = sum(row.nbytes for row in report.matrices)
    beside = report.parts["norms and tables"]["nbytes"]
    assert report.nbytes == stored + beside and 0 < beside < 60_000
    agree(tmp_path / "out", tokens)


@pytest.mark.parametrize("format", ["NF4", "q6_k", "2 bits, table of 2"])
def test_what_is_measured_is_what_is_written(format: str, small: Path, tmp_path: Path) -> None:
    report = quantize_model(small, tmp_path / "out", quick(**CASES[format][0]))
    assert report.quality is not None
    assert report.quality.kld == pytest.approx(divergence_of_folders(small, tmp_path / "out"), rel=0.02)


MIXTURE = {"model_type": "mixtral", "experts": ExpertsSpec(count=4, per_token=2, intermediate_size=64)}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("mixture") / "model", num_layers=1, **MIXTURE)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "options",
    [{"bits": 4}, {"bits": 4, "symmetric": False, "method": "gptq"}, {"bits": 2, "embedding_bits": 4}, {"bits": 8}],
    ids=str,
)
def test_mixtures_of_experts(options: dict[str, Any], mixture: Path, tmp_path: Path, tokens: np.ndarray) -> None:
    """Experts have no statistics of their own, so methods that need some search their scales instead."""
    report = quantize_model(mixture, tmp_path / "out", quick(accuracy_level=1, **options))
    assert operators(tmp_path / "out")["com.microsoft::QMoE"] == 1
    experts = [row for row in report.matrices if row.part == "experts"]
    assert [(row.rows, row.columns) for row in experts] == [(4 * 2 * 64, 96), (4 * 96, 64)]
    needs = METHODS[options.get("method", "search")].needs != "nothing"
    assert all(row.notes.get("method") == ("search" if needs else None) for row in experts)
    assert report.quality is not None and 0 < report.quality.kld < (0.5 if options["bits"] == 2 else 0.1)
    # onnxruntime's experts of 2 and 8 bits round activations.
    agree(tmp_path / "out", tokens, 3e-4 if options["bits"] == 4 else 0.02)
    assert report.quality.kld == pytest.approx(divergence_of_folders(mixture, tmp_path / "out"), rel=0.02)


def test_nan_names_the_expert_and_its_row(mixture: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mixture, tmp_path / "model"))
    model = onnx.load(folder / "model.onnx", load_external_data=True)
    tensor = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [4, 96, 64])
    array = numpy_helper.to_array(tensor).copy()
    array[2, 5, 7] = np.inf
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(InputError, match="row 5 of expert 2, column 7"):
        quantize_model(folder, tmp_path / "out", quick())


def test_experts_that_do_not_fit_their_operator(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text('rules:\n  - {match: "*experts.down*", block_size: 16}')
    for options, message in (
        ({"bits": 3}, "experts.* 3 bits"),
        ({"format": "q4_k"}, "experts.* q4_k"),
        ({"block_size": 0}, "experts.* scale per row"),
        ({"recipe": tmp_path / "recipe.yaml"}, "blocks of 32 and of 16"),
    ):
        with pytest.raises(OptionError, match=message):
            quantize_model(mixture, tmp_path / "out", quick(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "q4k"}, "format is 'q4k'.*"),
        ({"format": "q4_k", "bits": 8}, "bits is 8"),
        ({"format": "q4_k", "block_size": 64}, "block_size is 64"),
        ({"format": "nl4", "block_size": 128}, "block_size is 128"),
        ({"format": "nf4", "symmetric": False}, "nf4 cannot be stored with zero points"),
        ({"format": "iq4_nl", "qdq": True}, "iq4_nl cannot be stored as QDQ"),
        ({"qdq": True, "bits": 3}, "qdq cannot be used with 3 bits"),
        ({"bits": 7}, "bits is 7"),
        ({"block_size": 48}, "block_size is 48"),
    ],
    ids=str,
)
def test_forms_that_there_are_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        FormatChoice(**options)
    assert "fix:" in str(caught.value)


def test_changes_of_a_form() -> None:
    """New bits alone mean uniform ones; a new format has its own bits."""
    start = FormatChoice(format="q4_k", method="gptq")
    assert start.changed({"bits": 8}) == FormatChoice(bits=8, method="gptq")
    assert start.changed({"format": "q6_k"}) == FormatChoice(format="q6_k", method="gptq")
    assert start.changed({"method": "rtn"}) == FormatChoice(format="q4_k", method="rtn")
    assert FormatChoice(format="nf4").changed({"block_size": 128}).bits == 4
    assert FormatChoice(symmetric=False).changed({"format": "nl3"}).symmetric


def test_the_earlier_name_of_the_argument() -> None:
    for kind in (QuantizeOptions, FormatChoice, Variant):
        make: Any = kind
        with pytest.warns(DeprecationWarning, match=r"form=…\) is now .*format=…"):
            made = make(**({"method": "rtn"} | {"form": "nl3"}))
        assert made.format == "nl3"


def test_the_earlier_name_of_the_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["quantize", str(CHECKPOINT), "-o", "nowhere/out"]
    assert run([*command, "--form", "nl9"]) == 2
    assert "--form (GENAI_FORM) was renamed to --format (GENAI_FORMAT)" in (said := capsys.readouterr().err)
    assert "--format is 'nl9'" in said
    assert run([*command, "--form", "nl3", "--format", "nl4"]) == 2
    assert "--form is the earlier name of --format" in capsys.readouterr().err
    monkeypatch.setenv("GENAI_FORM", "nl9")
    assert run(command) == 2
    assert "format is 'nl9' (set by GENAI_FORM)" in capsys.readouterr().err
    monkeypatch.setenv("GENAI_FORMAT", "nl3")  # for this command, as the other one says
    assert run(command) == 2
    assert "format is 'nl9'" in capsys.readouterr().err
    assert run([*command, "--format", "nl8"]) == 2
    assert "format is 'nl8'" in capsys.readouterr().err
    assert run(["quantize", "--help"]) == 0 and "--form " not in capsys.readouterr().out


def test_a_variable_that_is_for_other_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GENAI_FORMAT also says how `genai batch` reads files and `genai quantize-onnx` writes graphs."""
    command = ["quantize", str(CHECKPOINT), "-o", "nowhere/out", "--bits", "9"]
    for other in ("QDQ", "jsonl"):
        monkeypatch.setenv("GENAI_FORMAT", other)
        assert run(command) == 2
        assert "bits is 9" in (said := capsys.readouterr().err) and "format" not in said
    monkeypatch.setenv("GENAI_FORMAT", "q9_k")
    assert run(command) == 2
    assert "'q9_k' (set by GENAI_FORMAT)" in capsys.readouterr().err


def test_the_earlier_name_of_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("default: {form: q4_k}\nrules:\n  - {match: '*o_proj*', form: nl3}\n")
    recipe = read_recipe(path, FormatChoice())
    assert (recipe.default.format, recipe.rules) == ("q4_k", (("*o_proj*", {"format": "nl3"}),))
    assert "recipe.yaml: the key form is now format" in caplog.text
    path.write_text("default: {form: q4_k, format: q4_k}\n")
    with pytest.raises(InputError, match="earlier name"):
        read_recipe(path, FormatChoice())


def test_a_report_of_an_earlier_version(tmp_path: Path) -> None:
    (tmp_path / f"{REPORT}.json").write_text('{"options": {"form": "nl3", "bits": 3}}')
    assert read_report(tmp_path)["options"] == {"format": "nl3", "bits": 3}
