"""Checkpoints that others have quantised: logits are those of the same numbers as floats; what is kept, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

import genai
from genai.builder import ExportOptions, build_model, plan_build
from genai.builder.build import execute
from genai.engine.decoder import compute
from genai.engine.paged import PagedDecoder
from genai.kernels.records import HostNode, Reordered
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
        model.decoder.adapt(sequence, adapters.mix("a" if adapter else None))
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
    assert plan.kept or form == "fp8"
    if not is_rounded:
        np.testing.assert_allclose(found, wide, atol=TOLERANCE * np.abs(wide).max())
    else:
        assert all("experts are now integers of 8 bits, 0." in remark for remark in plan.rounded)


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
    said = "".join(plan.kept)
    assert ("onnxruntime" in said) == (OPERATORS[form] != "QuantizedMatMul") or form == "fp8"
    assert ("this package" in said) == (form != "fp8")
    assert plan.options.precision == ("int8" if form == "fp8" else "kept")


def test_symmetric_weights_have_no_zero_points(tmp_path: Path) -> None:
    plans = [plan_build(write(tmp_path, form)[0]) for form in ("gptq_sym", "gptq")]
    for number, plan in enumerate(plans):
        execute(plan, tmp_path / str(number))
    assert "14 matrices are kept exactly: 4 bits by 32 (read by this package, onnxruntime)" in plans[0].kept
    assert "14 matrices are kept exactly: 4 bits by 32 with zero points (read by this package, onnxruntime)" in (
        plans[1].kept
    )


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
        assert sum(isinstance(record, Reordered) for record in program.records) == 2 * 4
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
