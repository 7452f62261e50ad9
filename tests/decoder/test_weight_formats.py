"""Decoders whose weights have every form: CPU, reference and onnxruntime (by functions) give the same logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai.engine.decoder import compute as logits_of
from genai.kernels.weights import ROW, uniform_format
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder
from genai.models.loading import load_decoder
from genai.models.memory_plan import plan_memory
from genai.onnx.own_functions import own_functions
from genai.ops.weight_nodes import WeightNode, embedding_node, linear_node
from genai.quant import formats
from genai.quant.formats import GRIDS, row_scaled_format
from tests.decoder.conftest import SMALL
from tests.decoder.test_foreseen_kernels import assert_foreseen
from tests.nearest import round_to_nearest

# What the products have in turn, and the table of embeddings.
PRODUCTS: list[tuple[Any, Any]] = [
    (uniform_format(3, 32), None),
    (formats.Q4_K, None),
    (uniform_format(2, 32), None),
    (row_scaled_format(4, 32), GRIDS["iq4"]),
    (uniform_format(6, ROW), None),
    (formats.Q3_K, None),
    (uniform_format(4, 16, zero_points=True), None),
    (uniform_format(4, 32), GRIDS["nf4"]),
]
TABLE = (formats.Q6_K, None)
TOKENS = [5, 300, 17, 42, 9, 200, 31]


@pytest.fixture(scope="module")
def folder(form_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder whose every weight is quantised."""
    target = tmp_path_factory.mktemp("quantised") / "model"
    shutil.copytree(form_folder("biases-fp32"), target)
    model = onnx.load(target / "model.onnx")
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    forms = iter(PRODUCTS * 10)
    for node in model.graph.node:
        matrix = next((name for name in node.input if name in constants and len(constants[name].dims) == 2), "")
        if node.op_type not in ("MatMul", "Gather") or not matrix:
            continue
        array = numpy_helper.to_array(constants[matrix])
        is_product = node.op_type == "MatMul"
        form, grid = next(forms) if is_product else TABLE
        weight = round_to_nearest(array.T if is_product else array, form, grid)
        weight_node = linear_node(weight, accuracy_level=0) if is_product else embedding_node(weight)
        _replace(model.graph, node, weight_node, node.input[0 if is_product else 1], matrix)
    model.functions.extend(own_functions(22))
    model.opset_import.append(helper.make_opsetid("genai", 1))
    kept = {name for node in model.graph.node for name in node.input}
    unused = [tensor for tensor in model.graph.initializer if tensor.name not in kept]
    for tensor in unused:
        model.graph.initializer.remove(tensor)
    onnx.save(model, target / "model.onnx")
    return target


def _replace(graph: Any, node: Any, weight_node: WeightNode, computed: str, name: str) -> None:
    names = {kind: f"{name}.{kind}" for kind in weight_node.arrays}
    graph.initializer.extend(numpy_helper.from_array(array, names[kind]) for kind, array in weight_node.arrays.items())
    new = helper.make_node(
        weight_node.op_type, weight_node.inputs(computed, names), list(node.output), name=node.name,
        domain=weight_node.domain, **weight_node.attributes,
    )  # fmt: skip
    node.CopyFrom(new)


def logits(folder: Path, device: str, accuracy: str = "fp32") -> np.ndarray:
    options: dict[str, Any] = {"kv_dtype": "fp32", "accuracy": accuracy, "cache_bytes": None, "context_size": 64}
    decoder, info, _ = load_decoder(Config(folder), threads=2, quiet=True, device=device, **options)
    assert info.flattened
    sequence = decoder.open()
    sequence.append(TOKENS)
    rows = logits_of(decoder, [sequence], all_rows=True)
    sequence.close()
    return np.concatenate(rows)


def test_the_cpu_and_the_reference_agree(folder: Path) -> None:
    expected = logits(folder, "reference")
    scale = np.abs(expected).max()
    assert np.abs(logits(folder, "cpu") - expected).max() < 1e-5 * scale
    rounded = np.abs(logits(folder, "cpu", "int8") - expected).max()
    assert 1e-5 * scale < rounded < 0.1 * scale


def test_its_kernels_are_foreseen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_foreseen(folder, monkeypatch)


@pytest.mark.oracle
def test_onnxruntime_agrees(folder: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {}
    for given in session.get_inputs():
        if given.name == "input_ids":
            feeds[given.name] = np.array([TOKENS], np.int64)
        elif given.name == "attention_mask":
            feeds[given.name] = np.ones((1, len(TOKENS)), np.int64)
        else:
            feeds[given.name] = np.zeros((1, SMALL["num_key_value_heads"], 0, SMALL["head_size"]), np.float32)
    (found,) = session.run(["logits"], feeds)
    expected = logits(folder, "cpu")
    assert np.abs(found[0] - expected).max() < 1e-4 * np.abs(expected).max()


def test_what_is_counted(folder: Path) -> None:
    """Products whose activations may be rounded are those with quantised weights; memory is planned for them all."""
    decoder = read_decoder(Config(folder))
    stored = sum(tensor.nbytes for tensor in decoder.model.graph.initializers.values())
    plan = plan_memory(decoder, Config(folder))
    assert 0.9 * stored < plan.weights + plan.mapped < 1.6 * stored
    assert decoder.operators["genai::QuantizedMatMul"] > 4
    assert decoder.operators["genai::QuantizedGather"] == 1
