"""Folders that onnxruntime-genai's builder writes with options: quantised caches, and outputs for draft models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai
from genai.engine.decoder import compute as compute_pending
from genai.errors import ConfigError, NotSupportedYetError
from genai.models.config import Config
from genai.models.decoder_graph import read_decoder

TOKENS = [1, 30, 31, 32, 33, 34, 7]


@pytest.fixture(scope="module")
def plain(form_folder: Callable[..., Path]) -> Path:
    return form_folder("fp32")


@pytest.fixture
def changed(plain: Path, tmp_path: Path) -> Callable[[Callable[[onnx.ModelProto], None]], Path]:
    def make(change: Callable[[onnx.ModelProto], None]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(plain, folder)
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        change(model)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        return folder

    return make


def logits(folder: Path) -> np.ndarray:
    with genai.Model(folder) as model:
        sequence = model.decoder.open()
        sequence.append(TOKENS)
        return compute_pending(model.decoder, [sequence], all_rows=True)[0]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_quantisation_of_a_cache_is_not_used(
    plain: Path, changed: Callable[..., Path], caplog: pytest.LogCaptureFixture, bits: int
) -> None:
    """The cache has the type that the user selects, so the logits are those of the graph with a float cache."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.array([0.03], np.float32), "scale"))
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                node.input[:] = [*node.input, *[""] * (12 - len(node.input)), "scale", "scale"]
                for name, value in (("k_quant_type", "PER_TENSOR"), ("v_quant_type", "PER_TENSOR")):
                    node.attribute.append(helper.make_attribute(name, value))
                node.attribute.append(helper.make_attribute("kv_cache_bit_width", bits))
        for value in (*model.graph.input, *model.graph.output):
            if value.name.startswith(("past", "present")):
                value.type.tensor_type.elem_type = TensorProto.INT8 if bits == 8 else TensorProto.UINT8
                size = value.type.tensor_type.shape.dim[3]
                size.dim_value = size.dim_value * bits // 8

    folder = changed(change)
    caplog.set_level("INFO", "genai")
    np.testing.assert_array_equal(logits(folder), logits(plain))
    assert "the quantised KV cache of the graph is not used" in caplog.text
    decoder = read_decoder(Config(folder), kv_dtype="int8")
    assert decoder.flat is not None
    assert decoder.info.kv_dtype == "int8"


def test_an_output_that_is_computed_on_the_host(plain: Path, changed: Callable[..., Path]) -> None:
    """As with aux_hidden_state_layers: hidden states of several layers are joined."""

    def change(model: onnx.ModelProto) -> None:
        head = next(node for node in model.graph.node if "logits" in node.output)
        join = helper.make_node("Concat", [head.input[0], head.input[0]], ["aux_hidden_states"], axis=-1)
        model.graph.node.append(join)
        shape = ["batch_size", "sequence_length", 2 * 96]
        model.graph.output.append(helper.make_tensor_value_info("aux_hidden_states", TensorProto.FLOAT, shape))

    np.testing.assert_array_equal(logits(changed(change)), logits(plain))


def test_a_decoder_without_its_output_layer(changed: Callable[..., Path]) -> None:
    """As with exclude_lm_head=true: the message names the option of the exporter."""

    def change(model: onnx.ModelProto) -> None:
        head = next(node for node in model.graph.node if "logits" in node.output)
        model.graph.node.remove(head)
        model.graph.node.append(helper.make_node("Identity", [head.input[0]], ["hidden_states"]))
        logits = next(value for value in model.graph.output if value.name == "logits")
        logits.name = "hidden_states"

    with pytest.raises(ConfigError, match=r"computes hidden states, not logits") as caught:
        read_decoder(Config(changed(change)))
    assert "exclude_lm_head" in caught.value.fix


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("rnn_states_prev", "states of a fixed size"),
        ("cross_past_key_names", "has an encoder"),
        ("block_table", "paged attention"),
        ("per_layer_inputs", "changes the generated tokens"),
    ],
)
def test_keys_that_are_not_supported(plain: Path, key: str, reason: str) -> None:
    with pytest.raises(NotSupportedYetError, match=reason):
        Config(plain).overlay(json.dumps({"model": {"decoder": {"inputs": {key: "name"}}}}))
