"""Decoders without attention layers, whose logits depend on the last token only, and heads that are no matmul."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai
from genai.engine.decoder import compute
from genai.errors import ConfigError, UnsupportedModelError

from ..table_models import after, block, table_model, write_config, write_graph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return table_model(tmp_path / "table", after({3: 7}))


def begin(model: genai.Model, rows: list[list[int]], length: int) -> genai.Generator:
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=length, batch_size=len(rows))
    generator = genai.Generator(model, params)
    generator.append_tokens(rows)
    return generator


def test_a_table_is_a_batched_decoder(folder: Path) -> None:
    with genai.Model(folder) as model:
        assert model.info.flattened and model.info.num_layers == model.info.kv_bytes_per_token == 0
        generator = begin(model, [[1, 2], [5, 8], [0, 4]], 8)
        while not generator.is_done():
            generator.generate_next_token()
        rows = [generator.get_sequence(row).tolist() for row in range(3)]
        assert rows == [[1, 2, 3, 7, 8, 0, 1, 2], [5, 8, 0, 1, 2, 3, 7, 8], [0, 4, 5, 6, 7, 8, 0, 1]]


def test_proposed_tokens_are_verified_in_one_step(folder: Path) -> None:
    with genai.Model(folder) as model:
        assert model.decoder.verifies
        sequence = model.decoder.open()
        sequence.append([1, 2])
        sequence.propose([3, 4, 5])
        (logits,) = compute(model.decoder, [sequence])
        assert np.array_equal(logits, after({3: 7})[[2, 3, 4, 5]]) and sequence.num_computed == 5
        sequence.append([3])
        assert sequence.num_computed == 5 and sequence.proposed == [4, 5]
        sequence.append([7])
        assert sequence.num_computed == 3


def test_forks_rewinds_and_states(folder: Path, tmp_path: Path) -> None:
    with genai.Model(folder) as model:
        generator = begin(model, [[token % 9 for token in range(40)]], 60)
        for _ in range(3):
            generator.generate_next_token()
        other = generator.fork()
        other.generate_next_token()
        generator.rewind_to(38)
        generator.append_tokens([3])
        generator.generate_next_token()
        assert generator.get_sequence(0).tolist()[-3:] == [1, 3, 7]
        assert other.get_sequence(0).tolist()[-4:] == [7, 8, 0, 1]
        assert other.save_state(tmp_path / "state") > 0
        generator.load_state(tmp_path / "state")
        generator.generate_next_token()
        assert generator.get_sequence(0).tolist()[-3:] == [0, 1, 2]


def test_a_head_that_is_no_matmul(tmp_path: Path, form_folder: Callable[..., Path]) -> None:
    """The logits are looked up for every token, and only the needed rows are returned."""
    source = form_folder("fp32")
    folder = tmp_path / "head"
    shutil.copytree(source, folder)
    model = onnx.load(source / "model.onnx", load_external_data=False)
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["best"], axis=-1, keepdims=0))
    rng = np.random.default_rng(0)
    table = rng.normal(size=(320, 320)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    model.graph.node.append(helper.make_node("Gather", ["table", "best"], ["scores"]))
    shape = ["batch_size", "sequence_length", 320]
    del model.graph.output[0]
    model.graph.output.insert(0, helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    config = genai.Config(folder)
    config.overlay('{"model": {"decoder": {"outputs": {"logits": "scores"}}}}')
    with genai.Model(config) as changed, genai.Model(source) as plain:
        assert changed.info.flattened == plain.info.flattened
        best = begin(plain, [[5, 6, 7]], 20).get_logits().argmax()
        assert np.array_equal(begin(changed, [[5, 6, 7]], 20).get_logits()[0, 0], table[best])


def test_the_number_of_layers_must_be_right(folder: Path, form_folder: Callable[..., Path]) -> None:
    write_config(folder, decoder=block(num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="no input for the keys and values of earlier tokens"):
        genai.Model(folder)
    config = genai.Config(form_folder("fp32"))
    config.overlay('{"model": {"decoder": {"num_hidden_layers": 0}}}')
    with pytest.raises(ConfigError, match=r"2 attention layers, but genai_config\.json has num_hidden_layers 0"):
        genai.Model(config)


@pytest.mark.parametrize(("kind", "domain"), [("Softmax", ""), ("CumSum", ""), ("MultiHeadAttention", "com.microsoft")])
def test_no_layers_but_operators_that_combine_tokens(kind: str, domain: str, folder: Path) -> None:
    """Without a cache, such a graph would not see earlier tokens."""
    model = onnx.load(folder / "model.onnx")
    model.graph.node.insert(1, helper.make_node(kind, ["rows"], ["mixed"], domain=domain))
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ConfigError, match=rf"num_hidden_layers is 0 .* has a node {kind}"):
        genai.Model(folder)


def test_logits_that_the_graph_rounds_to_16_bits(folder: Path) -> None:
    """Samplers read float32, so the logits before the rounding are used, as in float16 graphs that run as exported."""
    table = np.random.default_rng(1).normal(size=(10, 10)).astype(np.float32)
    write_graph(folder / "model.onnx", table)
    for code in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        model = onnx.load(folder / "model.onnx")
        model.graph.node[-1].output[0] = "wide"
        model.graph.node.append(helper.make_node("Cast", ["wide"], ["logits"], to=code))
        model.graph.output[0].type.tensor_type.elem_type = code
        onnx.save(model, folder / "rounded.onnx")
        config = genai.Config(folder)
        config.overlay('{"model": {"decoder": {"filename": "rounded.onnx"}}}')
        with genai.Model(config) as loaded:
            assert loaded.info.flattened
            logits = begin(loaded, [[4]], 5).get_logits()
            assert logits.dtype == np.float32 and np.array_equal(logits[0, 0], table[4])
