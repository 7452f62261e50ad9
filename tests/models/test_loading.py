"""Loading a model folder: every defect causes an error in three parts, and nothing crashes or hangs."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import genai as og
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.doctor.model_info import describe
from genai.errors import (
    CacheCapacityError,
    ConfigError,
    ExternalDataError,
    GraphError,
    InputError,
    ModelFolderError,
    NotSupportedYetError,
    UnsupportedModelError,
    UnsupportedOpError,
)
from tools.random_weights import RandomWeights

SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=16,
    context_length=64,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model_folder(folder, SPEC, ExportOptions(precision="int4"), RandomWeights(SPEC))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_graph(folder: Path, change: Callable[[onnx.ModelProto], Any]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def refused(folder: Path, error: type[og.GenaiError], *words: str) -> None:
    with pytest.raises(error) as caught:
        og.Model(folder)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert caught.value.why, text
    assert caught.value.fix, text


def external(model: onnx.ModelProto) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def set_location(model: onnx.ModelProto, key: str, value: str) -> None:
    entries = {entry.key: entry for entry in external(model).external_data}
    entries[key].value = value


def test_the_untouched_folder_loads(folder: Path) -> None:
    with og.Model(folder) as model:
        assert model.type == "llama"
        assert model.device_type == "CPU"
        assert model.info.parameters == sum(int(np.prod(v.shape)) for v in RandomWeights(SPEC).values())


def test_missing_files(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()
    refused(folder, ExternalDataError, "model.onnx.data")
    (folder / "model.onnx").unlink()
    refused(folder, ModelFolderError, "model.onnx")
    refused(folder / "nothing", ModelFolderError, "nothing")


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_truncated_external_data(folder: Path, keep: int) -> None:
    path = folder / "model.onnx.data"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, ExternalDataError, "model.onnx.data")


@pytest.mark.parametrize(
    "content", [b"", b"hello world, this is not a model", b"\x00" * 64, b"PK\x03\x04" + b"x" * 100]
)
def test_bytes_that_are_not_a_model(folder: Path, content: bytes) -> None:
    (folder / "model.onnx").write_bytes(content)
    refused(folder, GraphError, "model.onnx")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_truncated_model(folder: Path, keep: float) -> None:
    path = folder / "model.onnx"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    refused(folder, GraphError, "model.onnx")


@pytest.mark.parametrize("location", ["/etc/passwd", "../outside.data", "sub/../../outside.data"])
def test_external_data_outside_the_folder(folder: Path, location: str) -> None:
    (folder.parent / "outside.data").write_bytes((folder / "model.onnx.data").read_bytes())
    edit_graph(folder, lambda model: set_location(model, "location", location))
    refused(folder, ExternalDataError, location)


def test_external_data_behind_a_link_out_of_the_folder(folder: Path) -> None:
    outside = folder.parent / "outside.data"
    (folder / "model.onnx.data").rename(outside)
    (folder / "model.onnx.data").symlink_to(outside)
    refused(folder, ExternalDataError, "model.onnx.data")


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "99999999"), ("length", "99999999"), ("offset", "-4"), ("length", "x")]
)
def test_external_data_ranges(folder: Path, key: str, value: str) -> None:
    edit_graph(folder, lambda model: set_location(model, key, value))
    refused(folder, ExternalDataError, external(onnx.load(folder / "model.onnx", load_external_data=False)).name)


def rename_op(model: onnx.ModelProto, op_type: str, domain: str) -> None:
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    node.op_type, node.domain = op_type, domain
    if domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(domain, 1))


def test_an_operator_that_we_lack(folder: Path) -> None:
    edit_graph(folder, lambda model: rename_op(model, "FancyMatMul", "com.example"))
    refused(folder, UnsupportedOpError, "com.example::FancyMatMul")


def test_a_known_operator_outside_what_its_kernel_supports(folder: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "bits":
                    attribute.i = 3

    edit_graph(folder, change)
    refused(folder, UnsupportedOpError, "MatMulNBits", "bits is 3")


def test_weights_of_another_size_than_the_node_says(folder: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "N":
                    attribute.i += 1

    edit_graph(folder, change)
    with pytest.raises(GraphError):
        og.Model(folder)


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("model.vocab_size", "64", ConfigError),
        ("model.vocab_sise", 64, ConfigError),
        ("model.decoder.num_hidden_layers", 2, ConfigError),
        ("model.decoder.inputs.input_ids", "tokens", ConfigError),
        ("model.decoder.outputs.logits", "scores", ConfigError),
        ("model.decoder.filename", "other.onnx", ModelFolderError),
        ("model.decoder.pipeline", [{"a": {}}], NotSupportedYetError),
    ],
)
def test_configurations_that_do_not_fit(folder: Path, path: str, value: Any, error: type[og.GenaiError]) -> None:
    def change(config: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            config = config[name]
        config[last] = value

    edit_config(folder, change)
    refused(
        folder,
        error,
        str(value) if isinstance(value, str) and error is not ConfigError else path.split(".")[-1].split("_")[0],
    )


@pytest.mark.parametrize("size", [60, 65, 2**31 - 1])
def test_another_vocabulary_than_the_graphs(folder: Path, size: int) -> None:
    edit_config(folder, lambda config: config["model"].update(vocab_size=size))
    refused(folder, ConfigError, "64 logits", str(size))


@pytest.mark.parametrize("dense", [False, True])
def test_a_vocabulary_that_the_graph_does_not_tell(folder: Path, dense: bool) -> None:
    def change(model: onnx.ModelProto) -> None:
        outputs = {value.name: value for value in model.graph.output}
        for dim in outputs["logits"].type.tensor_type.shape.dim:
            dim.dim_param = "any"
        shape = helper.make_node("Shape", ["logits/whole"], ["logits/shape"])
        for node in model.graph.node:
            node.output[:] = ["logits/whole" if name == "logits" else name for name in node.output]
        model.graph.node.extend([shape, helper.make_node("Reshape", ["logits/whole", "logits/shape"], ["logits"])])
        if dense:
            model.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
            model.graph.output.append(helper.make_tensor_value_info("count", onnx.TensorProto.INT64, []))

    edit_graph(folder, change)
    edit_config(folder, lambda config: config["model"].update(vocab_size=32))
    with pytest.raises(ConfigError, match="64 logits"), og.Model(folder, quiet=True) as model:
        generator = og.Generator(model, og.GeneratorParams(model))
        generator.append_tokens([1, 2])


def test_a_vocabulary_beyond_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.models.decoder_graph.available_memory", lambda: 1000)
    refused(folder, CacheCapacityError, "vocab_size is 64")


@pytest.mark.parametrize("number", ["7", "100000000", "4000000000"])
def test_the_number_of_a_layer_is_only_a_name(folder: Path, number: str) -> None:
    def generated() -> list[int]:
        with og.Model(folder, quiet=True) as model:
            generator = og.Generator(model, og.GeneratorParams(model))
            generator.append_tokens([1, 2, 3])
            generator.generate_next_token()
            return list(generator.get_sequence(0).tolist())

    expected = generated()
    edit_graph(folder, lambda model: rename_layer(model, number))
    assert generated() == expected


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "x"])
def test_a_layer_without_a_number(folder: Path, number: str) -> None:
    edit_graph(folder, lambda model: rename_layer(model, number))
    with pytest.raises(og.GenaiError) as caught, og.Model(folder, quiet=True) as model:
        og.Generator(model, og.GeneratorParams(model)).append_tokens([1, 2])
    assert caught.value.why and caught.value.fix


def rename_layer(model: onnx.ModelProto, number: str) -> None:
    def renamed(name: str) -> str:
        return name.replace("past_key_values.0.", f"past_key_values.{number}.").replace(
            "present.0.", f"present.{number}."
        )

    for value in (*model.graph.input, *model.graph.output):
        value.name = renamed(value.name)
    for node in model.graph.node:
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]


@pytest.mark.parametrize("size", [2**20, 2**31 - 1])
def test_more_sequences_than_fit(folder: Path, size: int) -> None:
    with og.Model(folder, quiet=True) as model:
        params = og.GeneratorParams(model)
        params.set_search_options(batch_size=size)
        with pytest.raises(CacheCapacityError, match=f"batch_size = {size}") as caught:
            og.Generator(model, params)
        assert caught.value.why and caught.value.fix
    edit_config(folder, lambda config: config["search"].update(batch_size=size))
    with og.Model(folder, quiet=True) as model, pytest.raises(CacheCapacityError):
        og.Generator(model, og.GeneratorParams(model))


@pytest.mark.parametrize("size", [2**31, 2**40])
def test_more_sequences_than_can_be_counted(folder: Path, size: int) -> None:
    with og.Model(folder, quiet=True) as model, pytest.raises(og.OptionError, match=f"batch_size = {size}"):
        og.GeneratorParams(model).set_search_options(batch_size=size)
    edit_config(folder, lambda config: config["search"].update(batch_size=size))
    with pytest.raises(og.GenaiError, match="batch_size"), og.Model(folder, quiet=True) as model:
        og.Generator(model, og.GeneratorParams(model))


@pytest.mark.parametrize("change", ["half", "flat", "empty"])
@pytest.mark.parametrize("name", ["norm", "cos_cache", "sin_cache"])
def test_tables_and_norms_of_another_shape(folder: Path, name: str, change: str) -> None:
    def damage(model: onnx.ModelProto) -> None:
        tensors = [tensor for tensor in model.graph.initializer if name in tensor.name]
        assert tensors
        for tensor in tensors:
            array = numpy_helper.to_array(tensor, str(folder))
            changed = {"half": array[: len(array) // 2], "flat": array.reshape(1, -1), "empty": array[:0]}[change]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), tensor.name))

    edit_graph(folder, damage)
    with contextlib.suppress(og.GenaiError), og.Model(folder, quiet=True) as model:
        og.Generator(model, og.GeneratorParams(model)).append_tokens([1, 2])


def test_no_error_of_a_folder_leaves_as_it_came(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise IndexError("nobody foresaw this")

    monkeypatch.setattr("genai.models.decoder_graph.count_weights", fail)
    refused(folder, UnsupportedModelError, "cannot be loaded", "IndexError: nobody foresaw this")
    with pytest.raises(UnsupportedModelError, match="nobody foresaw this"):
        describe(folder)
    monkeypatch.setattr("genai.models.decoder_graph.count_weights", lambda graph: np.zeros(2**50))
    refused(folder, CacheCapacityError, "needs more memory")
    monkeypatch.setattr("genai.text.tokenizer.load_tokenizer", fail)
    with pytest.raises(UnsupportedModelError, match="nobody foresaw this"):
        og.Tokenizer(folder)


def test_a_missing_tokenizer_is_said_by_the_tokenizer(folder: Path) -> None:
    with og.Model(folder) as model, pytest.raises(og.GenaiError, match=r"tokenizer\.json") as caught:
        og.Tokenizer(model)
    assert caught.value.fix


def test_a_graph_that_mixes_tokens_in_an_unknown_way_runs_alone_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A running mean over the tokens so far: it is not flattened, and would need state between steps. So the whole
    prompt is computed at once and compared with the same prompt in a batch."""

    def change(model: onnx.ModelProto) -> None:
        node = model.graph.node[-1]
        inner = helper.make_node("CumSum", [node.input[0], "axis"], ["summed"], name="mix")
        model.graph.initializer.append(helper.make_tensor("axis", onnx.TensorProto.INT64, [], [1]))
        node.input[0] = "summed"
        model.graph.node.insert(len(model.graph.node) - 1, inner)

    edit_graph(folder, change)
    caplog.set_level("INFO", "genai")
    with og.Model(folder) as model:
        assert not model.info.flattened
        assert "CumSum" in model.info.reason
        params = og.GeneratorParams(model)
        params.set_search_options(batch_size=2)
        batch = og.Generator(model, params)
        batch.append_tokens([[3, 4, 5], [9, 8]])
        alone = og.Generator(model, og.GeneratorParams(model))
        alone.append_tokens([9, 8])
        np.testing.assert_array_equal(batch.get_logits()[1], alone.get_logits()[0])
    assert "sequence by sequence" in caplog.text


def test_an_unknown_input_is_not_fed_with_guesses(folder: Path, bundled_folder: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1, 3]))

    edit_graph(folder, change)
    with og.Model(folder, quiet=True) as model:
        assert "pixels" in model.info.reason
        with pytest.raises(InputError, match="Missing Input: pixels"):
            og.Generator(model, og.GeneratorParams(model)).append_tokens([1, 2])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder / name, folder)
    with og.LLM(folder, quiet=True) as llm, pytest.raises(InputError, match="Missing Input: pixels"):
        llm.generate([[1, 2]])


@pytest.mark.slow
def test_load_and_unload_leaves_memory_flat(original: Path, tmp_path: Path) -> None:
    spec = DecoderSpec(**{**vars(SPEC), "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192})
    folder = tmp_path / "larger"
    write_model_folder(folder, spec, ExportOptions(precision="int4"), RandomWeights(spec))

    def cycle() -> int:
        with og.Model(folder) as model:
            generator = og.Generator(model, og.GeneratorParams(model))
            generator.append_tokens([1, 2, 3])
            generator.generate_next_token()
        with Path("/proc/self/statm").open() as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    for _ in range(3):
        cycle()
    sizes = [cycle() for _ in range(20)]
    # What earlier tests have left may go meanwhile: that is no growth.
    assert max(sizes[3:]) - min(sizes[:3]) < 4e6, sizes


def test_dense_decoding_equals_paged(folder: Path) -> None:
    """The same model in both decoders: an unused output that depends on the scores prevents flattening."""
    with og.Model(folder, accuracy="fp32") as model:
        paged = og.Generator(model, og.GeneratorParams(model))
        paged.append_tokens([5, 6, 7, 8])
        paged.generate_next_token()
        expected, tokens = paged.get_logits(), paged.get_sequence(0)

    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
        proto.graph.output.append(helper.make_tensor_value_info("count", onnx.TensorProto.INT64, []))

    edit_graph(folder, change)
    with og.Model(folder, accuracy="fp32") as model:
        assert not model.info.flattened
        dense = og.Generator(model, og.GeneratorParams(model))
        dense.append_tokens([5, 6, 7])
        dense.append_tokens([8])
        dense.generate_next_token()
        assert dense.get_sequence(0).tolist() == tokens.tolist()
        np.testing.assert_allclose(dense.get_logits(), expected, atol=1e-4)
        dense.rewind_to(2)
        dense.append_tokens([7, 8])
        dense.generate_next_token()
        assert dense.get_sequence(0).tolist() == tokens.tolist()
