"""One float model out of checkpoints and folders of every kind, computed stage by stage."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai import Model
from genai.convert import ExportOptions
from genai.convert.build import build_model
from genai.errors import InputError
from genai.evaluate.scored_text import pending_logits
from genai.kernels.cpu.linear.calls import has_bfloat_products
from genai.models.folders import bundled_model
from genai.quant.grids import UniformGrid
from genai.quant.methods import METHODS, InputStatistics
from genai.quantize import quantize_model
from genai.quantize.calibration import CalibrationText
from genai.quantize.folding import find_fold
from genai.quantize.quality import Evaluation
from genai.quantize.sites import Site
from genai.quantize.source import FloatModel
from genai.quantize.stage_values import StageValues
from genai.quantize.statistics import gather
from genai.quantize.streaming import StreamedDecoder, batches_of, nothing_instead
from tools.peers.checkpoint import make_checkpoint
from tools.peers.shapes import SHAPES

from .conftest import CHECKPOINT, quick, small_folder


def logits_of(decoder: StreamedDecoder, tokens: np.ndarray, instead: Any = nothing_instead) -> np.ndarray:
    flow = StageValues(batches_of(tokens, 64))  # one sequence per batch
    for stage in decoder.stages[:-1]:
        flow.advance(decoder, stage, instead=instead)
    with decoder.running(decoder.stages[-1], instead=instead) as running:
        rows = [running.run(b, flow.read(i))[decoder.logits] for i, b in enumerate(flow.batches)]
    return np.concatenate(rows).reshape(*tokens.shape, -1)


def engine_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    found = []
    with Model(folder, accuracy="fp32", quiet=True, threads=1) as model:
        for row in tokens:
            with closing(model.decoder.open()) as sequence:
                sequence.append(row.tolist())
                found.append(pending_logits(model.decoder, sequence, all_rows=True))
    return np.stack(found)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_checkpoint_and_its_folders_are_one_model(precision: Any, tmp_path: Path) -> None:
    """The checkpoint is float16, so both hold it exactly."""
    folder = build_model(CHECKPOINT, tmp_path / "model", ExportOptions(precision=precision))
    with FloatModel(CHECKPOINT) as one, FloatModel(folder) as two:
        assert [site.base_name for site in one.sites] == [site.base_name for site in two.sites]
        assert len(one.sites) == 1 + 6 * 5
        for a, b in zip(one.sites, two.sites, strict=True):
            np.testing.assert_array_equal(one.weight(a), two.weight(b))
        assert [site.part for site in one.sites[:4]] == ["embedding and head", "attention", "attention", "feed-forward"]


def test_stages_compute_what_the_engine_does(float_folder: Path, decoder: StreamedDecoder, tokens: np.ndarray) -> None:
    np.testing.assert_array_equal(logits_of(decoder, tokens), engine_logits(float_folder, tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "qkv_bias": True},
        {"model_type": "qwen3", "qk_norm": True},
        {
            "model_type": "gemma2",
            "post_norms": True,
            "norm_weight_offset": 1.0,
            "attention_softcap": 50.0,
            "tie_word_embeddings": True,
        },
        {"model_type": "phi3", "sliding_window": 16},
    ],
    ids=lambda changes: str(changes["model_type"]),
)
def test_families(changes: dict[str, Any], tmp_path: Path, tokens: np.ndarray) -> None:
    folder = small_folder(tmp_path / "model", **changes)
    with FloatModel(folder) as source:
        found = logits_of(StreamedDecoder(source, 1), tokens)
    np.testing.assert_allclose(found, engine_logits(folder, tokens), rtol=1e-5, atol=1e-5)


LLAMA_SIZES = {
    "vocab_size": 1536, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("llama-3.2-1b", LLAMA_SIZES),
        (
            "moe-32x1024",
            {**LLAMA_SIZES, "hidden_size": 64, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 64},
        ),
    ],
    ids=["keys and values too small to quantise", "routers"],
)
def test_what_is_not_quantised_is_computed_with(
    shape: str, changes: dict[str, Any], tmp_path: Path, tokens: np.ndarray
) -> None:
    config = {**SHAPES[shape].config, **changes}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", replace(SHAPES[shape], config=config))
    folder = build_model(checkpoint, tmp_path / "model", ExportOptions(precision="fp32"))
    with FloatModel(checkpoint) as source:
        assert set(source.hollow()) == {site.name for site in source.sites}
        found = logits_of(StreamedDecoder(source, 1), tokens)
    np.testing.assert_allclose(found, engine_logits(folder, tokens), rtol=1e-5, atol=1e-5)


def test_long_vectors_in_half_precision(tmp_path: Path, tokens: np.ndarray) -> None:
    """A norm's weight of 4,096 numbers that a Cast widens is no matrix."""
    sizes = {"hidden_size": 4096, "intermediate_size": 32, "num_layers": 1, "vocab_size": 1536}
    folder = small_folder(tmp_path / "model", **sizes)
    model = onnx.load(folder / "model.onnx", load_external_data=True)
    vectors = [tensor for tensor in model.graph.initializer if list(tensor.dims) == [4096]]
    for tensor in vectors:
        cast = helper.make_node("Cast", [f"{tensor.name}/half"], [tensor.name], to=onnx.TensorProto.FLOAT)
        half = numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{tensor.name}/half")
        tensor.CopyFrom(half)
        model.graph.node.insert(0, cast)
    onnx.save(model, folder / "model.onnx")
    assert len(vectors) == 3
    with FloatModel(folder) as source:
        found = logits_of(StreamedDecoder(source, 1), tokens[:1])
    np.testing.assert_allclose(found, engine_logits(folder, tokens[:1]), rtol=1e-5, atol=1e-5)


def test_few_values_live_between_stages(decoder: StreamedDecoder) -> None:
    types = decoder.program.types
    for stage in decoder.stages[1:]:
        assert sum(types[name].width for name in stage.program.given) <= 2 * 256
    assert len(decoder.stages) > 6 * 4
    assert sum(len(stage.uses) for stage in decoder.stages) == 31


def test_statistics_are_those_of_the_inputs(decoder: StreamedDecoder, tokens: np.ndarray) -> None:
    flow = StageValues(batches_of(tokens, 64))
    for stage in decoder.stages:
        if any("layers.0.mlp.down_proj" in use.site.name for use in stage.uses):
            break
        flow.advance(decoder, stage)
    use = next(use for use in stage.uses if "down_proj" in use.site.name)
    with decoder.running(stage, only=[use.value]) as running:
        x = np.concatenate([running.run(b, flow.read(i))[use.value] for i, b in enumerate(flow.batches)])
    found = gather(decoder, stage, [use.value], flow, flow, gram=True)[use.value]
    exact = x.astype(np.float64)
    assert found.count == tokens.size and found.gram is not None and found.cross is not None
    # On the way, and here, numbers are rounded to bfloat16 where the machine multiplies that faster.
    most = 2e-2 if has_bfloat_products() else 1e-4
    np.testing.assert_allclose(found.squares, (exact**2).mean(axis=0), rtol=most)
    expected = exact.T @ exact / len(x)
    assert np.linalg.norm(found.gram - expected) < most * np.linalg.norm(expected)
    np.testing.assert_allclose(np.diag(found.gram), np.diag(expected), rtol=most)
    # BLAS multiplies an array with itself in another order.
    np.testing.assert_allclose(found.cross, found.gram, rtol=1e-4, atol=1e-5 * found.gram.max())


def test_rounded_products_change_little(decoder: StreamedDecoder, tokens: np.ndarray) -> None:
    """What calibration sees where products round to bfloat16: the floats' values, but for that rounding."""
    wide, narrow = StageValues(batches_of(tokens, 64)), StageValues(batches_of(tokens, 64))
    for stage in decoder.stages[:-1]:
        wide.advance(decoder, stage)
        narrow.advance(decoder, stage, narrow=True)
    for index in range(len(wide.batches)):
        found = narrow.read(index)
        for name, value in wide.read(index).items():
            assert np.linalg.norm(found[name] - value) < 1e-2 * np.linalg.norm(value)
            assert np.array_equal(found[name], value) != has_bfloat_products()


@pytest.mark.parametrize("folder", ["tied", "groups", "bias"])
def test_folds_are_exact_in_floats(folder: str, tmp_path: Path, tokens: np.ndarray) -> None:
    """Columns times factors, and what makes their inputs divided by them: the same logits."""
    changes = {"tied": {"tie_word_embeddings": True}, "groups": {}, "bias": {"model_type": "qwen2", "qkv_bias": True}}
    path = small_folder(tmp_path / "model", **changes[folder])
    rng = np.random.default_rng(1)
    with FloatModel(path) as source:
        wanted = logits_of(StreamedDecoder(source, 1), tokens)
        graph = source.model.graph
        products = {node.output(0): site for site in source.sites for node in site.products}
        matrices = {site.name: np.array(source.weight(site)) for site in source.sites}
        kinds = []
        for value in dict.fromkeys(node.input(0) for site in source.sites for node in site.products):
            group = [site for site in source.sites if any(node.input(0) == value for node in site.products)]
            fold = find_fold(graph, source.config, group, products)
            if fold is None:
                continue
            size = group[0].columns
            shared = np.arange(size) if fold.sharing is None else fold.sharing
            factors = np.exp(rng.standard_normal(shared.max() + 1)).astype(np.float32)
            for site in group:
                matrices[site.name] *= factors[shared]
            for name in fold.vectors:
                tensor = graph.initializers[name]
                graph.initializers[name] = type(tensor).from_array(name, tensor.array() / factors)
            if fold.rows is not None:
                site, first, count = fold.rows
                assert count == len(factors)
                matrices[site.name][first : first + count] /= factors[:, None]
            kinds.append("norm" if fold.vectors else "values" if fold.sharing is not None else "up")
        changed = logits_of(StreamedDecoder(source, 1), tokens, lambda site: matrices[site.name])
    assert kinds.count("norm") == (4 if folder == "tied" else 5)  # a tied head is also a table
    assert kinds.count("up") == 2
    assert kinds.count("values") == (0 if folder == "bias" else 2)  # a bias lies between
    np.testing.assert_allclose(changed, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())


def test_quantised_models_are_refused_unless_asked_for() -> None:
    with pytest.raises(InputError, match="already quantised") as caught:
        FloatModel(bundled_model())
    assert "--requantize" in str(caught.value)
    with FloatModel(bundled_model(), requantize=True) as model, FloatModel(CHECKPOINT) as exact:
        assert "their existing error is not measured" in model.remarks[0]
        for one, two in zip(model.sites, exact.sites, strict=True):
            assert one.rows == two.rows and np.abs(model.weight(one) - exact.weight(two)).max() < 0.2
        found = model.weight(model.sites[1])
    assert found.std() > 0


def test_requantised_products_are_those_of_the_quantised_model(tokens: np.ndarray) -> None:
    with FloatModel(bundled_model(), requantize=True) as source:
        found = logits_of(StreamedDecoder(source, 1), tokens)
    wanted = engine_logits(bundled_model(), tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


def test_nan_names_the_tensor_row_and_block(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    model = onnx.load(folder / "model.onnx", load_external_data=True)
    for tensor in model.graph.initializer:
        if tensor.name == "model.layers.1.mlp.up_proj.MatMul.weight":
            array = numpy_helper.to_array(tensor).copy()
            array[70, 5] = np.nan  # [columns, rows]
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "model.onnx")
    with FloatModel(folder) as source:
        site = next(site for site in source.sites if site.name == "model.layers.1.mlp.up_proj.MatMul.weight")
        with pytest.raises(InputError, match=r"up_proj.* row 5, column 70 \(block 2, at 32 columns per block\)"):
            source.check(site)


def test_divergence_of_the_model_itself_is_zero(decoder: StreamedDecoder, tokens: np.ndarray) -> None:
    quality = Evaluation(decoder, CalibrationText(tokens, "random")).measure(nothing_instead)
    assert quality.kld == quality.maximum == 0 and quality.top1_agreement == 1
    assert quality.perplexity == quality.base_perplexity and quality.tokens == 3 * 39


def test_divergence_is_that_of_the_logits(decoder: StreamedDecoder, tokens: np.ndarray) -> None:
    grid = UniformGrid()

    def rounded(site: Site) -> np.ndarray:
        return METHODS["rtn"].quantize(decoder.source.weight(site), grid, None).blocks.values(grid)

    quality = Evaluation(decoder, CalibrationText(tokens, "random")).measure(rounded)
    one, two = (logits_of(decoder, tokens, way)[:, :-1].astype(np.float64) for way in (nothing_instead, rounded))
    p, q = (
        x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        for x in (one, two)
    )
    divergence = (np.exp(p) * (p - q)).sum(-1)
    assert quality.kld == pytest.approx(divergence.mean(), rel=1e-6)
    assert quality.median == pytest.approx(np.median(divergence), rel=1e-6)
    assert quality.top1_agreement == (p.argmax(-1) == q.argmax(-1)).mean()
    targets = np.take_along_axis(q, tokens[:, 1:, None], axis=2)
    assert quality.perplexity == pytest.approx(np.exp(-targets.mean()), rel=1e-6)


def test_statistics_scale() -> None:
    rng = np.random.default_rng(0)
    x, factors = rng.standard_normal((50, 8)), np.exp(rng.standard_normal(8))
    one = InputStatistics(50, (x**2).mean(0), x.T @ x / 50, x.T @ x / 50).scaled(factors)
    y = x * factors
    assert one.gram is not None and one.cross is not None
    np.testing.assert_allclose(one.squares, (y**2).mean(0))
    np.testing.assert_allclose(one.gram, y.T @ y / 50)
    np.testing.assert_allclose(one.cross, y.T @ y / 50)


@pytest.mark.oracle
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_onnxruntimes_quantiser_writes(symmetric: bool, tmp_path: Path) -> None:
    """Its tables have signed codes of 4 bits, or unsigned ones with zero points of 4 bits."""
    ort = pytest.importorskip("onnxruntime")
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    folder = small_folder(tmp_path / "float", tie_word_embeddings=False)
    model = onnx.load(folder / "model.onnx")
    operators = ("MatMul", "Gather")
    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=symmetric, op_types_to_quantize=operators)
    quantizer.process()
    for path in folder.glob("model.onnx*"):
        path.unlink()
    quantizer.model.save_model_to_file(str(folder / "model.onnx"), True)
    made = onnx.load(folder / "model.onnx")
    (lookup,) = (node for node in made.graph.node if node.op_type == "GatherBlockQuantized")
    alone = onnx.helper.make_graph(
        [lookup], "lookup", [next(one for one in made.graph.input if one.name == lookup.input[1])],
        [onnx.helper.make_tensor_value_info(lookup.output[0], onnx.TensorProto.FLOAT, None)],
        [one for one in made.graph.initializer if one.name in lookup.input],
    )  # fmt: skip
    session = ort.InferenceSession(
        onnx.helper.make_model(alone, opset_imports=made.opset_import, ir_version=10).SerializeToString()
    )
    with FloatModel(folder, requantize=True) as source:
        site = next(site for site in source.sites if site.is_table)
        (table,) = session.run(None, {lookup.input[1]: np.arange(site.rows)[None]})
        np.testing.assert_allclose(source.weight(site), table[0], rtol=1e-6)


@pytest.mark.oracle
def test_zero_points_that_are_no_integers(tmp_path: Path) -> None:
    """As onnxruntime's HQQ writes them: (code - zero point) * scale. 100 columns do not fill their last block."""
    ort = pytest.importorskip("onnxruntime")
    folder = small_folder(tmp_path / "float", intermediate_size=100, tie_word_embeddings=False)
    quantize_model(folder, tmp_path / "out", quick(symmetric=False, half_scales=False, evaluate=False))
    model, rng = onnx.load(tmp_path / "out" / "model.onnx"), np.random.default_rng(0)
    onnx.load_external_data_for_model(model, str(tmp_path / "out"))
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    for node in products:
        shape = tensors[node.input[2]].dims
        points = rng.uniform(3, 12, list(shape)).astype(np.float32)
        tensors[node.input[3]].CopyFrom(numpy_helper.from_array(points, node.input[3]))
    for path in (tmp_path / "out").glob("model.onnx*"):
        path.unlink()
    onnx.save(model, tmp_path / "out" / "model.onnx")
    node = next(one for one in products if "layers.1.mlp.down_proj" in one.input[1])
    x = np.eye(100, dtype=np.float32)
    alone = helper.make_graph(
        [helper.make_node(node.op_type, ["x", *node.input[1:4]], ["y"], domain=node.domain)],
        "product",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [tensors[name] for name in node.input[1:4]],
    )
    del alone.node[0].attribute[:]
    alone.node[0].attribute.extend(one for one in node.attribute if one.name != "accuracy_level")
    made = helper.make_model(alone, opset_imports=model.opset_import, ir_version=10)
    (expected,) = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    with FloatModel(tmp_path / "out", requantize=True) as source:
        site = next(site for site in source.sites if "layers.1.mlp.down_proj" in site.name)
        np.testing.assert_allclose(source.weight(site), expected.T, rtol=1e-5, atol=1e-6)
