"""Checkpoints that others have quantised: logits are those of the same numbers as floats; what is kept, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import genai
from genai.convert import ExportOptions, build_model, plan_build
from genai.convert.build import execute, open_checkpoint
from genai.convert.hf_config import HFConfig
from genai.convert.prequantized import fp8
from genai.engine.decoder import compute
from genai.engine.paged import PagedDecoder
from genai.errors import UnsupportedModelError
from genai.kernels.ir import HostNode, SelectColumns
from genai.quant.block_types import dequantize, type_of
from genai.weight_files.safetensors import SafetensorsFile
from tools.quantised_checkpoints import FAMILIES, FORMATS, VOCAB, write, write_gpt_oss
from tools.random_weights import random_tensor

TOKENS = [1, *np.random.Generator(np.random.PCG64(5)).integers(3, VOCAB, 39).tolist()]
TOLERANCE = 2e-5
CORE = {("awq", "llama"), ("gptq_act_order", "llama"), ("nf4", "llama"), ("mlx", "qwen2"), ("w4a16", "phi3"),
        ("awq", "qwen3_moe"), ("mlx", "mixtral"), ("fp8", "llama")}  # fmt: skip
DRAWN = (pytest.mark.drawn(8),)


def logits(folder: Path, accuracy: str = "fp32", adapter: Path | None = None, device: str = "cpu") -> Any:
    with genai.Model(folder, accuracy=accuracy, lora=adapter is not None, device=device) as model:
        assert isinstance(model.decoder, PagedDecoder)
        adapters = genai.Adapters(model)
        if adapter is not None:
            adapters.load(adapter, "a")
        sequence = model.decoder.open()
        sequence.adapt(adapters.mix("a" if adapter else None))
        sequence.append(TOKENS)
        rows = compute(model.decoder, [sequence], all_rows=True)[0]
        sequence.close()
    return np.asarray(rows)


# Formats whose experts are no whole numbers of a scale, or have their columns in orders of their own.
ROUNDED = {"gptq_act_order", "nf4", "hqq", "mlx", "mlx_8"}
MIXTURES = {"qwen3_moe", "mixtral"}


@pytest.mark.parametrize(
    ("form", "family"),
    [
        pytest.param(form, family, marks=() if (form, family) in CORE else DRAWN)
        for form in FORMATS
        for family in FAMILIES
    ],
)
def test_logits_are_those_of_the_same_numbers_as_floats(form: str, family: str, tmp_path: Path) -> None:
    source, floats = write(tmp_path, form, family)
    wide = logits(build_model(floats, tmp_path / "wide", ExportOptions(precision="fp32")))
    anew = logits(build_model(source, tmp_path / "anew", ExportOptions(precision="fp32")))
    np.testing.assert_allclose(anew, wide, atol=TOLERANCE * np.abs(wide).max())
    plan = plan_build(source, ExportOptions(precision="kept"))
    found = logits(execute(plan, tmp_path / "kept"))
    is_rounded = form in ROUNDED and family in MIXTURES
    assert bool(plan.rounded) == is_rounded
    assert plan.prequantized or form == "fp8"
    if not is_rounded:
        np.testing.assert_allclose(found, wide, atol=TOLERANCE * np.abs(wide).max())
    else:
        assert all(
            "expert weights are quantised to 8-bit integers (relative error 0." in remark for remark in plan.rounded
        )


# The operators of a layer's seven products, of which those of queries, keys and values are one.
OPERATORS = {
    "awq": "MatMulNBits", "gptq": "MatMulNBits", "gptq_sym": "MatMulNBits", "gptq_v2": "MatMulNBits",
    "gptq_2": "MatMulNBits", "gptq_8": "MatMulNBits", "gptq_act_order": "MatMulNBits", "auto_round": "MatMulNBits",
    "auto_round_awq": "MatMulNBits", "w4a16": "MatMulNBits", "w8a8": "MatMulNBits", "int8": "MatMulNBits",
    "nf4": "MatMulBnb4", "nvfp4": "QuantizedMatMul", "hqq": "QuantizedMatMul", "mlx": "QuantizedMatMul",
    "mlx_8": "QuantizedMatMul", "fp8": "MatMulNBits",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_which_operators_hold_them(form: str, tmp_path: Path) -> None:
    source, _ = write(tmp_path, form)
    plan = plan_build(source)
    model = onnx.load(execute(plan, tmp_path / "model") / "model.onnx", load_external_data=False)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count(OPERATORS[form]) == 2 * 5 + (form in ("mlx", "mlx_8", "fp8"))  # the head is quantised, too
    # What queries, keys and values read is put in order once, as are what o_proj reads, gate and up, and down.
    assert kinds.count("Gather") - ("embed" in str([n.name for n in model.graph.node if n.op_type == "Gather"])) == (
        1 + (2 * 4 if form == "gptq_act_order" else 0)
    )
    said = "".join(plan.prequantized)
    assert ("onnxruntime" in said) == (OPERATORS[form] != "QuantizedMatMul") or form == "fp8"
    assert ("this package" in said) == (form != "fp8")
    assert plan.options.precision == ("int8" if form == "fp8" else "kept")


def test_symmetric_weights_have_no_zero_points(tmp_path: Path) -> None:
    plans = [plan_build(write(tmp_path, form)[0]) for form in ("gptq_sym", "gptq")]
    for number, plan in enumerate(plans):
        execute(plan, tmp_path / str(number))
    assert "14 matrices are kept exactly: 4 bits by 32 (read by this package, onnxruntime)" in plans[0].prequantized
    assert "14 matrices are kept exactly: 4 bits by 32 with zero points (read by this package, onnxruntime)" in (
        plans[1].prequantized
    )
    with pytest.warns(DeprecationWarning, match="is now BuildPlan.prequantized"):
        assert plans[0].kept == plans[0].prequantized  # type: ignore[attr-defined]


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["awq", "gptq_act_order", "nf4", "hqq"])
def test_onnxruntime_genai_reads_them(form: str, og_logits: Any, tmp_path: Path) -> None:
    source, floats = write(tmp_path, form)
    wide = logits(build_model(floats, tmp_path / "wide", ExportOptions(precision="fp32")))
    found = og_logits(
        build_model(source, tmp_path / "kept", ExportOptions(precision="kept", accuracy_level=1)), TOKENS, 30
    )
    np.testing.assert_allclose(found, wide[-len(found) :], atol=2e-4 * np.abs(wide).max())


def test_rounded_activations_stay_near(tmp_path: Path) -> None:
    """Products are the fast ones, whose activations are integers of 8 bits."""
    source, floats = write(tmp_path, "awq")
    wide = logits(build_model(floats, tmp_path / "wide", ExportOptions(precision="fp32")))
    found = logits(build_model(source, tmp_path / "kept"), "auto")
    assert 0 < np.linalg.norm(found - wide) < 0.05 * np.linalg.norm(wide)


def test_columns_in_another_order_stay_in_the_program(tmp_path: Path) -> None:
    """No node runs on the host between two parts of it."""
    source, _ = write(tmp_path, "gptq_act_order")
    with genai.Model(build_model(source, tmp_path / "kept")) as model:
        program = model.decoder.program
        assert sum(isinstance(op, SelectColumns) for op in program.ops) == 2 * 4
        assert not [part for part in program.parts if isinstance(part, HostNode)]


def test_adapters_know_the_order_before(tmp_path: Path) -> None:
    """Their factors are of the columns that x has before it is put in the order of a matrix."""
    source, floats = write(tmp_path, "gptq_act_order")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    modules = {
        "self_attn.q_proj": (64, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
    }
    tensors = {}
    for layer in range(2):
        for name, (rows, columns) in modules.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = random_tensor(f"{key}.A", (4, columns), 1)
            tensors[f"{key}.lora_B.weight"] = random_tensor(f"{key}.B", (rows, 4), 1)
    save_file(tensors, adapter / "adapter_model.safetensors")
    names = [name.rpartition(".")[2] for name in modules]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": names}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    kept = build_model(source, tmp_path / "kept")
    wide = build_model(floats, tmp_path / "wide", ExportOptions(precision="fp32"))
    expected, plain = logits(wide, adapter=adapter), logits(wide)
    assert np.abs(expected - plain).max() > 0.1
    for device in ("cpu", "reference"):
        found = logits(kept, adapter=adapter, device=device)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max())


def test_gpt_oss(tmp_path: Path) -> None:
    """Experts of MXFP4, both of whose layers are one tensor each: integers of 8 bits hold them exactly."""
    source, floats = write_gpt_oss(tmp_path)
    wide = logits(build_model(floats, tmp_path / "wide", ExportOptions(precision="fp32")))
    plan = plan_build(source)
    found = logits(execute(plan, tmp_path / "kept"))
    assert plan.options.precision == "kept" and not plan.rounded
    np.testing.assert_allclose(found, wide, atol=TOLERANCE * np.abs(wide).max())


def numbers_of(source: Path, name: str) -> Any:
    """A matrix of a checkpoint as floats."""
    matrix = open_checkpoint(source)[name]
    return matrix if type_of(matrix) is None else dequantize(matrix)


Q = "model.layers.1.self_attn.q_proj"


def rewritten(source: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> Path:
    """A checkpoint with these tensors in the place of those of the matrix Q."""
    file = SafetensorsFile(source / "model.safetensors")
    kept = {name: np.array(file.read(name)) for name in file.tensors if not name.startswith(f"{Q}.")}
    save_file(kept | {f"{Q}.{name}": tensor for name, tensor in tensors.items()}, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    key = "quantization" if "quantization" in config else "quantization_config"
    (source / "config.json").write_text(json.dumps({**config, key: config[key] | settings}))
    return source


def test_floats_of_8_bits_with_a_scale_per_row_among_those_with_blocks(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.linspace(0.1, 2, 64, dtype=np.float32)[:, None]
    source = rewritten(write(tmp_path, "fp8")[0], {"weight": weight, "weight_scale": scale}, {})
    np.testing.assert_array_equal(numbers_of(source, f"{Q}.weight"), weight.astype(np.float32) * scale)


def test_blocks_that_are_larger_than_any_matrix() -> None:
    """No memory is taken for rows that there are not."""
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.5, 2.0]], np.float32)
    files = {"a.weight": weight, "a.weight_scale_inv": scale}
    ((name, matrix),) = fp8.read(files, HFConfig({"weight_block_size": [2**40, 32]}))
    assert name == "a.weight"
    np.testing.assert_array_equal(matrix.read(), weight.astype(np.float32) * np.repeat(scale, 32, axis=1))


def test_compressed_floats_with_a_scale_per_block(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.5, 2.0], [1.5, 0.25]], np.float32)
    groups = {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8, "block_structure": [48, 32]}}}
    source = write(tmp_path, "w4a16")[0]
    source = rewritten(source, {"weight": weight, "weight_scale": scale}, {"config_groups": groups})
    wide = np.repeat(np.repeat(scale, 48, 0)[:64], 32, 1)
    np.testing.assert_array_equal(numbers_of(source, f"{Q}.weight"), weight.astype(np.float32) * wide)


def test_mlx_layers_in_another_mode(tmp_path: Path) -> None:
    """As gpt-oss has it: most layers affine, experts in MXFP4, or the other way around."""
    codes = np.random.default_rng(0).integers(0, 2**32, (64, 8), np.uint32)
    exponents = np.full((64, 2), 125, np.uint8)
    tensors, settings = {"weight": codes, "scales": exponents}, {Q: {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    source = rewritten(write(tmp_path, "mlx")[0], tensors, settings)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    grid = np.concatenate([grid, -grid])
    nibbles = codes.view(np.uint8)
    wide = np.stack([grid[nibbles & 15], grid[nibbles >> 4]], -1).reshape(64, 64) / 4
    np.testing.assert_array_equal(numbers_of(source, f"{Q}.weight"), wide)
    other = {Q: {"group_size": 32, "bits": 4, "mode": "nvfp4"}}
    with pytest.raises(UnsupportedModelError, match=rf"quantization.{Q}.mode is 'nvfp4'"):
        open_checkpoint(rewritten(source, tensors, other))
