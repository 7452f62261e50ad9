"""Exports that onnxruntime's tools quantised: batched, with the values that the graph would compute on floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import genai
from genai.engine.decoder import compute as compute_pending
from genai.kernels.ir import HostNode
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder
from genai.onnx.types import DataType

from .test_exports import EXPORTS, close, rows_of

# The form and the tool of each export. `golden` holds the logits that onnxruntime computes from the same weights, with
# float32 activations.
FORMS = {
    "qwen3_builder_int8": ("int8, `GroupQueryAttention`", "`quantize_dynamic`"),
    "qwen3_optimum_int8": ("int8", "`quantize_dynamic`"),
    "qwen3_optimum_uint8": ("uint8, one scale per column", "`quantize_dynamic`"),
    "qwen3_optimum_q4_qdq": ("int4 with zero points, QDQ", "`MatMulNBitsQuantizer`"),
    "qwen3_optimum_q4_gather": ("int4 with zero points, also the embedding", "`MatMulNBitsQuantizer`"),
    "qwen3_optimum_q4_hqq": ("int4 with zero points that are floats (HQQ)", "`MatMulNBitsQuantizer`"),
    "qwen3_optimum_q4f16": ("int4, and fp16 for everything else", "`MatMulNBitsQuantizer`, `convert_float_to_float16`"),
    "qwen3_optimum_fp16": ("fp16, some operators in fp32", "`convert_float_to_float16`"),
    "qwen3_optimum_bnb4": ("NF4", "`MatMulBnb4Quantizer`"),
}
OPERATORS = (
    "Cast DequantizeLinear DynamicQuantizeLinear GatherBlockQuantized MatMulBnb4 MatMulInteger MatMulNBits"
).split()


@pytest.mark.parametrize(
    "name", [*FORMS][:2] + [pytest.param(name, marks=pytest.mark.drawn(3)) for name in [*FORMS][2:]]
)
def test_logits(name: str) -> None:
    golden = load_file(EXPORTS / name / "golden.safetensors")
    tokens = golden["input_ids"].tolist()
    with genai.Model(EXPORTS / name, accuracy="fp32") as model:
        assert model.info.flattened, model.info.reason
        assert not [part.op_type for part in model.decoder.program.parts if isinstance(part, HostNode)]
        close(rows_of(model, tokens, [7, 1, 16]), golden["logits"])
        sequences = [model.decoder.open() for _ in range(2)]
        for sequence, count in zip(sequences, (24, 5), strict=True):
            sequence.append(tokens[:count])
        for rows, count in zip(compute_pending(model.decoder, sequences, all_rows=True), (24, 5), strict=True):
            close(rows, golden["logits"][:count])


def test_activations_are_rounded_row_by_row() -> None:
    """onnxruntime quantises all tokens of a step with one scale; here, no token changes the result of another one."""
    golden = load_file(EXPORTS / "qwen3_builder_int8" / "golden.safetensors")
    tokens, logits = golden["input_ids"].tolist(), golden["logits"]
    with genai.Model(EXPORTS / "qwen3_builder_int8") as model:
        whole = rows_of(model, tokens, [24])
        np.testing.assert_array_equal(rows_of(model, tokens, [1] * 24), whole)
    error = np.abs(whole - logits).max() / np.abs(logits).max()
    assert 1e-4 < error < 0.03


def test_weights_are_not_read_for_an_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.optimize.dequantized._Stored.codes", None)
    decoder = read_decoder(Config(EXPORTS / "qwen3_builder_int8"))
    assert decoder.info.flattened
    assert decoder.info.kv_dtype == "fp16"
    assert "MatMulNBits" in {node.op_type for node in decoder.model.graph.nodes}
    assert "MatMulInteger" in decoder.operators


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama_builder_fp16", DataType.FLOAT16), ("qwen3_builder_bf16", DataType.BFLOAT16)]
)
def test_matrices_of_16_bits_are_not_widened(name: str, dtype: DataType) -> None:
    graph = read_decoder(Config(EXPORTS / name)).model.graph
    matrices = [node.input(1) for node in graph.nodes if node.op_type == "MatMul"]
    assert {graph.initializers[matrix].dtype for matrix in matrices} == {dtype}


def table_row(name: str) -> str:
    nodes = onnx.load(EXPORTS / name / "model.onnx").graph.node
    used = {node.op_type for node in nodes} - ({"Cast"} if "16" not in name else set())
    form, tool = FORMS[name]
    return f"| {form} | {tool} | {', '.join(f'`{op_type}`' for op_type in OPERATORS if op_type in used)} |"


def test_the_table_of_forms_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "folder-layouts.md"
    rows = "\n".join(table_row(name) for name in FORMS)
    assert rows in page.read_text(), rows
