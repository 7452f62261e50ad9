"""Decoders exported by torch.onnx with plain attention: found by pattern and batched, or run densely, said aloud."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

import genai
from genai.cli.info import figures_of
from genai.doctor.model_info import describe
from genai.engine.decoder import compute as compute_pending
from genai.kernels.ir import HostNode
from genai.lowering.exported_attention import find_plain_attention
from genai.lowering.rows import NotFlattenable
from genai.models.config import Config
from genai.models.exported_decoder import Trials, flatten_exported
from genai.onnx.reader import read_model

EXPORTS = Path(__file__).parent / "exports"
WINDOWS: dict[str, list[int | None]] = {
    "llama_eager": [None],
    "qwen2_sdpa": [None],
    "mistral_window": [7],
    "gemma2_softcap": [7, None],
    "gpt_neox_sdpa": [None],
    "llama_dynamo": [None],
    "qwen2_sdpa_dynamo": [None],
    "qwen3_optimum": [None],
    "gemma2_optimum": [7, None],
    "llama_builder_fp16": [None],
    "qwen3_builder_bf16": [None],
    "phi_builder_fp16": [None],
    "gemma3_optimum": [7, None],
    "qwen3_opset23_dynamo": [None],
    "cohere_optimum": [None],
    "gpt2_optimum": [None],
    "gpt_neo_optimum": [None, 7],
    "opt_optimum": [None],
    "stablelm_optimum": [None],
}


def rows_of(model: genai.Model, tokens: list[int], pieces: list[int]) -> np.ndarray:
    sequence, rows, start = model.decoder.open(), [], 0
    for length in pieces:
        sequence.append(tokens[start : start + length])
        rows.append(compute_pending(model.decoder, [sequence], all_rows=True)[0][-length:])
        start += length
    sequence.close()
    return np.concatenate(rows)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("pieces", [[24], [7, 1, 16], [1] * 24], ids=["whole", "chunks", "token by token"])
def test_logits(name: str, pieces: list[int]) -> None:
    golden = load_file(EXPORTS / name / "golden.safetensors")
    with genai.Model(EXPORTS / name) as model:
        assert model.info.flattened, model.info.reason
        assert model.info.num_layers == 2
        close(rows_of(model, golden["input_ids"].tolist(), pieces), golden["logits"])


@pytest.mark.parametrize("name", WINDOWS)
def test_batched_equals_alone(name: str) -> None:
    golden = load_file(EXPORTS / name / "golden.safetensors")
    tokens = golden["input_ids"].tolist()
    with genai.Model(EXPORTS / name) as model:
        sequences = [model.decoder.open() for _ in range(3)]
        for sequence, count in zip(sequences, (24, 5, 11), strict=True):
            sequence.append(tokens[:count])
        results = compute_pending(model.decoder, sequences, all_rows=True)
        for rows, count in zip(results, (24, 5, 11), strict=True):
            close(rows, golden["logits"][:count])


@pytest.mark.parametrize("name", WINDOWS)
def test_every_node_becomes_an_op(name: str) -> None:
    with genai.Model(EXPORTS / name) as model:
        assert not [part.op_type for part in model.decoder.program.parts if isinstance(part, HostNode)]


@pytest.mark.parametrize(("name", "windows"), WINDOWS.items())
def test_masks_are_tried_out(name: str, windows: list[int | None]) -> None:
    config = Config(EXPORTS / name)
    model = read_model(EXPORTS / name / "model.onnx")
    layers, trials = find_plain_attention(model.graph, config.model.decoder.names), Trials(config, model)
    assert [trials.window(*layer.masks) for layer in layers] == windows * (len(layers) // len(windows))


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """changed(edit) -> a copy of the llama export, or of another export, whose graph was edited."""

    def make(edit: Callable[[onnx.GraphProto], None], name: str = "llama_eager") -> Path:
        folder = tmp_path / "export"
        shutil.copytree(EXPORTS / name, folder)
        model = onnx.load(folder / "model.onnx")
        model.opset_import.append(helper.make_opsetid("nobody.knows", 1))
        edit(model.graph)
        onnx.save(model, folder / "model.onnx")
        return folder

    return make


def mask_add(graph: onnx.GraphProto) -> onnx.NodeProto:
    """The addition of the mask to the first layer's scores."""
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    return next(node for node in graph.node if softmax.input[0] in node.output)


def insert_on_mask(graph: onnx.GraphProto, operator: str, constant: np.ndarray) -> None:
    """Put operator(mask, constant) between the mask and all scores."""
    add = mask_add(graph)
    mask = add.input[1]
    graph.initializer.append(numpy_helper.from_array(constant, "changed_by"))
    users = [node for node in graph.node if mask in node.input]
    place = next(i for i, node in enumerate(graph.node) if node == users[0])
    for user in users:
        user.input[:] = ["changed" if name == mask else name for name in user.input]
    graph.node.insert(place, helper.make_node(operator, [mask, "changed_by"], ["changed"]))


BIAS = np.float32(-0.5)
NOTHING_HIDDEN = np.float32(0)


@pytest.mark.parametrize(
    ("operator", "constant", "reason"),
    [("Add", BIAS, "a bias"), ("Mul", NOTHING_HIDDEN, "is neither causal nor a sliding window")],
    ids=["bias", "not causal"],
)
def test_other_masks_run_densely_and_say_so(
    changed: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    operator: str,
    constant: np.float32,
    reason: str,
) -> None:
    caplog.set_level("INFO", "genai")
    folder = changed(lambda graph: insert_on_mask(graph, operator, np.array(constant)))
    with pytest.raises(NotFlattenable, match=reason):
        flatten_exported(Config(folder))
    with genai.Model(folder) as model:
        assert not model.info.flattened
        assert reason in model.info.reason
        assert "sequence by sequence" in caplog.text
        assert np.isfinite(rows_of(model, [3, 4, 5, 6], [3, 1])).all()


def test_a_mask_that_cannot_be_computed_alone(changed: Callable[..., Path]) -> None:
    """The graph has an operator without a kernel: refused when the mask is evaluated, not before."""

    def edit(graph: onnx.GraphProto) -> None:
        insert_on_mask(graph, "Add", np.array(NOTHING_HIDDEN))
        next(node for node in graph.node if node.output[0] == "changed").domain = "nobody.knows"

    with pytest.raises(NotFlattenable, match="could not be evaluated"):
        flatten_exported(Config(changed(edit)))


def test_a_mask_that_depends_on_the_tokens(changed: Callable[..., Path]) -> None:
    """It hides nothing more for the token ids of the trials, so only the dependency itself reveals it."""

    def edit(graph: onnx.GraphProto) -> None:
        insert_on_mask(graph, "Add", np.array(NOTHING_HIDDEN))
        added = next(node for node in graph.node if node.output[0] == "changed")
        place = list(graph.node).index(added)
        zero = [
            helper.make_node("Cast", ["input_ids"], ["ids"], to=1),
            helper.make_node("ReduceMin", ["ids"], ["least"]),
        ]
        for node in zero[::-1]:
            graph.node.insert(place, node)
        added.input[1] = "least"

    with pytest.raises(NotFlattenable, match="depends on the tokens"):
        flatten_exported(Config(changed(edit)))


def test_an_older_operator_set(tmp_path: Path) -> None:
    """Before version 16, ONNX infers no shape for LessOrEqual, which computes masks."""
    folder = tmp_path / "export"
    shutil.copytree(EXPORTS / "qwen2_sdpa", folder)
    model = onnx.load(folder / "model.onnx")
    assert "LessOrEqual" in {node.op_type for node in model.graph.node}
    next(entry for entry in model.opset_import if not entry.domain).version = 14
    onnx.save(model, folder / "model.onnx")
    flatten_exported(Config(folder))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([("Shape", ["attention_mask"], ["sizes"], {"start": 1})], "because it depends on more than the position"),
        (
            [("Shape", ["input_ids"], ["sizes"], {}), ("ReduceMax", ["sizes"], ["number"], {"keepdims": 0})],
            "is not a table of positions",
        ),
    ],
    ids=["total length", "number of new tokens"],
)
def test_rotations_that_depend_on_lengths(
    changed: Callable[..., Path], value: list[tuple[str, list[str], list[str], dict[str, int]]], reason: str
) -> None:
    """The cosines are multiplied with a length, as in dynamic scaling; or the scores are, with a number that varies."""

    def edit(graph: onnx.GraphProto) -> None:
        made = [helper.make_node(op, inputs, outputs, **more) for op, inputs, outputs, more in value]
        made.append(helper.make_node("Cast", [made[-1].output[0]], ["factor"], to=1))
        op = "Cos" if reason.startswith("because") else "Tanh"
        node = next((node for node in graph.node if node.op_type == op), None) or mask_add(graph)
        made.append(helper.make_node("Mul", [node.output[0], "factor"], ["scaled"]))
        for user in graph.node:
            user.input[:] = ["scaled" if name == node.output[0] else name for name in user.input]
        place = list(graph.node).index(node) + 1
        for new in made[::-1]:
            graph.node.insert(place, new)

    with pytest.raises(NotFlattenable, match=reason):
        flatten_exported(Config(changed(edit, "gemma2_optimum" if reason.startswith("is not") else "qwen3_optimum")))


def test_missing_layer(changed: Callable[..., Path]) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        next(node for node in graph.node if node.op_type == "Softmax").op_type = "Hardmax"

    with pytest.raises(NotFlattenable, match="recognised in 1 of 2 layers: it does not consist of"):
        flatten_exported(Config(changed(edit)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda name: [helper.make_node("Add", [name, "distances"], ["more"])], r"have a bias besides .*\(ALiBi\)"),
        (lambda name: [helper.make_node("Where", ["seen", name, "low"], ["more"])], "a Where applies a mask"),
    ],
    ids=["ALiBi", "Where"],
)
def test_the_form_of_attention_that_is_not_recognised(
    changed: Callable[..., Path], make: Callable[[str], list[onnx.NodeProto]], reason: str
) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        constants = {"distances": np.zeros((6, 1, 1), "f"), "seen": np.array(True), "low": np.float32(-1)}
        graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items())
        add = mask_add(graph)
        place = list(graph.node).index(add)
        graph.node.insert(place, make(add.input[0])[0])
        add.input[0] = "more"

    folder = changed(edit)
    with pytest.raises(NotFlattenable, match=f"attention is recognised in 1 of 2 layers: .*{reason}"):
        flatten_exported(Config(folder))
    facts = dict(figures_of(describe(folder)))
    assert facts["runs"].startswith("one sequence at a time, because attention is recognised in 1 of 2 layers")
    assert "one after the other" in facts["effect"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_attention_heads", 12, "has 6 heads, but genai_config.json has num_attention_heads = 12"),
        ("num_key_value_heads", 3, "has 2 heads, but genai_config.json has num_key_value_heads = 3"),
        ("head_size", 3, "heads do not have the size 3"),
    ],
)
def test_heads_that_contradict_the_configuration(tmp_path: Path, key: str, value: int, reason: str) -> None:
    shutil.copytree(EXPORTS / "llama_eager", tmp_path / "export")
    path = tmp_path / "export" / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(NotFlattenable, match=reason):
        flatten_exported(Config(tmp_path / "export"))


@pytest.mark.parametrize("index", [3, 4], ids=["biases of projections", "padding"])
def test_attention_operators_with_other_inputs_are_not_recognised(changed: Callable[..., Path], index: int) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        attention = next(node for node in graph.node if node.op_type == "MultiHeadAttention")
        graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float16), "more"))
        attention.input[index] = "more"

    with pytest.raises(NotFlattenable, match="attention is recognised in 1 of 2 layers"):
        flatten_exported(Config(changed(edit, "llama_builder_fp16")))


def test_a_mask_of_an_attention_operator_is_tried_out(changed: Callable[..., Path]) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        tile = next(node for node in graph.node if node.op_type == "Tile")
        graph.initializer.append(numpy_helper.from_array(np.float16(0), "nothing_hidden"))
        place = list(graph.node).index(tile)
        graph.node.insert(place, helper.make_node("Mul", [tile.input[0], "nothing_hidden"], ["seen"]))
        tile.input[0] = "seen"

    with pytest.raises(NotFlattenable, match="is neither causal nor a sliding window"):
        flatten_exported(Config(changed(edit, "llama_builder_fp16")))


def test_rotations_in_sections(changed: Callable[..., Path]) -> None:
    """As onnxruntime-genai's builder writes the decoders of models for images: the positions have three axes."""

    def edit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "RotaryEmbedding":
                node.op_type = "MRotaryEmbedding"
                node.attribute.append(helper.make_attribute("mrope_section", [1, 1, 1]))
                node.attribute.append(helper.make_attribute("mrope_layout", 1))
        positions = next(value for value in graph.input if value.name == "position_ids")
        positions.type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_value=3))

    folder = changed(edit, "llama_builder_fp16")
    golden = load_file(EXPORTS / "llama_builder_fp16" / "golden.safetensors")
    with genai.Model(folder) as model:
        assert model.info.flattened, model.info.reason
        close(rows_of(model, golden["input_ids"].tolist(), [7, 1, 16]), golden["logits"])


def table_row(name: str) -> str:
    """The row of the table of exporters for one export."""
    model, folder = onnx.load(EXPORTS / name / "model.onnx"), EXPORTS / name
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    exporter = "`torch.onnx`, dynamo" if "dynamo" in name else "`torch.onnx`, TorchScript"
    exporter = "optimum" if "optimum" in name else "onnxruntime-genai's builder" if "builder" in name else exporter
    precision = name.rpartition("_")[2] if "builder" in name else "fp32"
    return f"| {exporter} | {opset} | {Config(folder).model.type} | {precision} |"


def test_the_table_of_exporters_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "folder-layouts.md"
    rows = dict.fromkeys(table_row(name) for name in WINDOWS)
    assert "\n".join(sorted(rows)) in page.read_text(), "\n".join(sorted(rows))
