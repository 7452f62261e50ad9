"""Adapters of onnxruntime-genai: files and graphs of the one run in the other, with the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import genai
from genai import AdapterFormat, InputError, OptionError, StateError
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine.decoder import compute
from genai.lora.read import read_adapter
from tools.random_weights import RandomWeights

SPEC = DecoderSpec(
    model_type="llama", vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_size=16, context_length=128, eos_token_ids=(2,),
)  # fmt: skip
# Where the exporter leaves places, and their sizes.
ADAPTED = {"attn/qkv_proj": (64, 128), "attn/o_proj": (64, 64), "mlp/down_proj": (96, 64)}
PROMPT = [5, 9, 33, 7, 60, 61]


def with_inputs(folder: Path) -> None:
    """Give a folder's graph inputs of rank 0 beside its projections, as Olive does after the builder."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    graph = model.graph
    for layer in range(SPEC.num_layers):
        for place, (columns, rows) in ADAPTED.items():
            node = next(n for n in graph.node if n.name == f"/model/layers.{layer}/{place}/MatMul")
            name, output = f"model.layers.{layer}.{place.replace('/', '.')}", node.output[0]
            node.output[0] = f"{output}_base"
            for factor, shape in (("A", [columns, 0]), ("B", [0, rows])):
                full, open_ = f"{name}.lora_{factor}.MatMul.weight", [size or f"{name}.r" for size in shape]
                graph.input.append(helper.make_tensor_value_info(full, TensorProto.FLOAT, open_))
                graph.initializer.append(helper.make_tensor(full, TensorProto.FLOAT, shape, []))
            own = f"/model/layers.{layer}/{place}"
            source, hidden, delta = node.input[0], f"{own}/h", f"{own}/d"
            for op, inputs, result, called in (
                ("MatMul", [source, f"{name}.lora_A.MatMul.weight"], hidden, "lora_A/MatMul"),
                ("MatMul", [hidden, f"{name}.lora_B.MatMul.weight"], delta, "lora_B/MatMul"),
                ("Add", [node.output[0], delta], output, "lora/Add"),
            ):
                graph.node.append(helper.make_node(op, inputs, [result], f"{own}/{called}"))
    nodes = _sorted(list(graph.node), {value.name for value in (*graph.input, *graph.initializer)})
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)


def _sorted(nodes: list[Any], known: set[str]) -> list[Any]:
    done: list[Any] = []
    while nodes:
        ready = [node for node in nodes if all(not name or name in known for name in node.input)]
        assert ready
        done += ready
        known |= {name for node in ready for name in node.output}
        nodes = [node for node in nodes if not any(node is one for one in ready)]
    return done


def write_file(path: Path, seed: int, rank: int) -> Path:
    rng, arrays = np.random.default_rng(seed), {}
    for layer in range(SPEC.num_layers):
        for place, (columns, rows) in ADAPTED.items():
            name = f"model.layers.{layer}.{place.replace('/', '.')}"
            arrays[f"{name}.lora_A.MatMul.weight"] = rng.standard_normal((columns, rank)).astype(np.float32) * 0.2
            arrays[f"{name}.lora_B.MatMul.weight"] = rng.standard_normal((rank, rows)).astype(np.float32) * 0.2
    AdapterFormat.of(arrays).export_adapter(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model_folder(
        tmp_path_factory.mktemp("m") / "m", SPEC, ExportOptions(precision="fp32"), RandomWeights(SPEC, seed=3)
    )
    with_inputs(made)
    return made


def opened(og: Any, folder: Path, files: dict[str, Path]) -> tuple[Any, Any]:
    """A generator and adapters by name; the calls are the same for both libraries."""
    model = og.Model(str(folder))
    adapters = og.Adapters(model)
    for name, path in files.items():
        adapters.load(str(path), name)
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=32)
    return og.Generator(model, params), adapters


def logits(og: Any, folder: Path, files: dict[str, Path], names: list[str]) -> list[np.ndarray]:
    """Of a prompt and two more tokens, with these adapters."""
    generator, adapters = opened(og, folder, files)
    for name in names:
        generator.set_active_adapter(adapters, name)
    rows = []
    for tokens in (PROMPT, [17], [40]):
        generator.append_tokens(np.array(tokens, np.int32))
        rows.append(np.array(generator.get_logits()).reshape(-1))
    return rows


@pytest.mark.oracle
def test_the_same_logits_as_onnxruntime_genai(folder: Path, tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    files = {"a": write_file(tmp_path / "a.onnx_adapter", 1, 4), "b": write_file(tmp_path / "b.onnx_adapter", 2, 9)}
    seen = []
    for names in ([], ["a"], ["b"], ["a", "b"]):
        theirs, ours = logits(og, folder, files, names), logits(genai, folder, files, names)
        for one, other in zip(theirs, ours, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        seen.append(ours[-1])
    assert np.abs(seen[0] - seen[1]).max() > 0.1
    np.testing.assert_array_equal(seen[2], seen[3])  # the later one takes the place of the earlier


def test_places_of_the_graph_are_found(folder: Path, tmp_path: Path) -> None:
    with genai.Model(folder) as model:
        assert model.info.flattened
        assert len(model.info.adapter_inputs) == 2 * len(ADAPTED)
        file = write_file(tmp_path / "a.onnx_adapter", 1, 4)
        adapters = genai.Adapters(model)
        adapters.load(file, "a")
        assert adapters.info("a")["modules"] == 2 * len(ADAPTED)
        assert read_adapter(file).ranks == [4]


def test_order_and_containers(folder: Path, tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.onnx_adapter", 1, 4)
    with genai.Model(folder) as model, genai.Model(folder) as other:
        adapters, more, foreign = genai.Adapters(model), genai.Adapters(model), genai.Adapters(other)
        for one in (adapters, more, foreign):
            one.load(file, "a")
        generator = genai.Generator(model, genai.GeneratorParams(model))
        with pytest.raises(OptionError, match="Adapter not found: x"):
            generator.set_active_adapter(adapters, "x")
        generator.set_active_adapter(adapters, "a")
        with pytest.raises(StateError, match="can only register a single Adapters container"):
            generator.set_active_adapter(more, "a")
        with pytest.raises(InputError, match="needs the Adapters of this model"):
            generator.set_active_adapter(foreign, "a")
        with pytest.raises(StateError, match="Adapter still in use: a"):
            adapters.unload("a")
        generator.close()
        adapters.unload("a")
        with pytest.raises(OptionError, match="Adapter not found"):
            adapters.unload("a")


def test_switching_goes_on_from_here(folder: Path, tmp_path: Path) -> None:
    """What is computed stays: only later tokens go through the other adapter."""
    file = write_file(tmp_path / "a.onnx_adapter", 1, 4)
    with genai.Model(folder) as model:
        adapters = genai.Adapters(model)
        adapters.load(file, "a")
        generator = genai.Generator(model, genai.GeneratorParams(model))
        generator.append_tokens(PROMPT)
        base = generator.get_logits().copy()
        generator.set_active_adapter(adapters, "a")
        np.testing.assert_array_equal(generator.get_logits(), base)
        generator.append_tokens([17])
        changed = generator.get_logits().copy()
        plain = genai.Generator(model, genai.GeneratorParams(model))
        plain.append_tokens([*PROMPT, 17])
        assert np.abs(plain.get_logits() - changed).max() > 1e-3


def test_outputs_of_the_last_run_are_those_that_it_had(folder: Path, tmp_path: Path) -> None:
    """get_output computes them again, through what they went through; what is cached stays as it is."""
    file = write_file(tmp_path / "a.onnx_adapter", 1, 4)
    with genai.Model(folder) as model:
        adapters = genai.Adapters(model)
        adapters.load(file, "a")

        def after(*, asked: bool) -> np.ndarray:
            generator = genai.Generator(model, genai.GeneratorParams(model))
            generator.append_tokens(PROMPT)
            base = generator.get_logits().copy()
            generator.set_active_adapter(adapters, "a")
            if asked:
                np.testing.assert_array_equal(generator.get_output("logits")[:, -1:], base)
            generator.append_tokens([17])
            return generator.get_logits().copy()

        np.testing.assert_array_equal(after(asked=True), after(asked=False))


@pytest.mark.parametrize("kept", [1, 3, len(PROMPT), len(PROMPT) + 1])
def test_a_rewind_behind_a_switch_keeps_what_was_computed(folder: Path, tmp_path: Path, kept: int) -> None:
    """The last token that is kept is computed again, through what it went through before, also for its own logits."""
    files = {name: write_file(tmp_path / f"{name}.onnx_adapter", seed, 4) for seed, name in enumerate("ab")}
    with genai.Model(folder) as model:
        adapters = genai.Adapters(model)
        for name, file in files.items():
            adapters.load(file, name)
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=64)

        def begun(tokens: list[int]) -> genai.Generator:
            generator = genai.Generator(model, params)
            generator.append_tokens(tokens[: len(PROMPT)])
            if len(tokens) > len(PROMPT):
                generator.set_active_adapter(adapters, "a")
                generator.append_tokens(tokens[len(PROMPT) :])
            return generator

        tokens = [*PROMPT, 17, 18]
        straight, back = begun(tokens[:kept]), begun(tokens)
        shown = straight.get_logits().copy()
        back.set_active_adapter(adapters, "b")
        back.rewind_to(kept)
        np.testing.assert_array_equal(back.get_logits(), shown)
        np.testing.assert_array_equal(back.get_output("logits")[:, -1:], shown)
        back.rewind_to(kept)
        straight.set_active_adapter(adapters, "b")
        for generator in (straight, back):
            generator.append_tokens([40, 41])
        np.testing.assert_array_equal(back.get_logits(), straight.get_logits())
        copy = back.fork()
        back.rewind_to(0)  # nothing is left that went through anything else
        back.append_tokens(PROMPT)
        fresh = genai.Generator(model, params)
        fresh.set_active_adapter(adapters, "b")
        fresh.append_tokens(PROMPT)
        np.testing.assert_array_equal(back.get_logits(), fresh.get_logits())
        copy.rewind_to(kept)
        np.testing.assert_array_equal(copy.get_logits(), shown)


@pytest.mark.oracle
def test_rewinds_and_switches_as_onnxruntime_genai(folder: Path, tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    files = {name: write_file(tmp_path / f"{name}.onnx_adapter", seed, 4) for seed, name in enumerate("ab")}

    def rows(library: Any) -> list[np.ndarray]:
        (generator, adapters), found = opened(library, folder, files), []
        for tokens, name, kept in ((PROMPT, "a", 3), ([17, 18, 19], "b", 5), ([40], "a", 2), ([41, 42], "b", 1)):
            generator.append_tokens(np.array(tokens, np.int32))
            found.append(np.array(generator.get_logits()).reshape(-1)[-96:])
            generator.set_active_adapter(adapters, name)
            generator.rewind_to(kept)
        generator.append_tokens(np.array([7], np.int32))
        return [*found, np.array(generator.get_logits()).reshape(-1)[-96:]]

    for theirs, ours in zip(rows(og), rows(genai), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_what_several_adapters_computed_is_never_found_by_others(tmp_path: Path) -> None:
    """A layer with a window puts blocks that leave it into the prefix cache while a sequence goes on."""
    spec = replace(SPEC, sliding_window=32, model_type="mistral", context_length=512)
    made = write_model_folder(tmp_path / "m", spec, ExportOptions(precision="fp32"), RandomWeights(spec, seed=3))
    with_inputs(made)
    with genai.Model(made) as model:
        adapters = genai.Adapters(model)
        adapters.load(write_file(tmp_path / "a.onnx_adapter", 1, 4), "a")
        decoder, mix = model.decoder, adapters.mix("a")
        tokens = np.random.default_rng(0).integers(3, 96, 400).tolist()

        def found(*, switched: bool) -> int:
            sequence = decoder.open()
            sequence.adapt(None if switched else mix)
            for start in range(0, 400, 100):
                sequence.append(tokens[start : start + 100])
                compute(decoder, [sequence])
                sequence.adapt(mix)
            other = decoder.open()
            other.adapt(mix)
            other.append(tokens)
            reused = other.reuse()
            sequence.close()
            other.close()
            return reused

        assert found(switched=True) == 0
        assert found(switched=False) > 0


def test_values_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with genai.Model(folder) as model:
        adapters = genai.Adapters(model)
        for arrays, message in (
            ({"nothing": np.ones(3, np.float32)}, "Invalid input name: 'nothing'"),
            ({"model.layers.9.attn.o_proj.lora_A": np.ones((64, 2), np.float32),
              "model.layers.9.attn.o_proj.lora_B": np.ones((2, 64), np.float32)}, "not a projection of the base"),
        ):  # fmt: skip
            AdapterFormat.of(arrays).export_adapter(tmp_path / "x.onnx_adapter")
            with pytest.raises(InputError, match=message):
                adapters.load(tmp_path / "x.onnx_adapter", "x")
        assert adapters.names == []


def with_bias(folder: Path) -> None:
    """An input with a default that is no factor: a bias of the logits."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    head = next(node for node in model.graph.node if "logits" in node.output)
    head.output[0] = "logits_0"
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [96]))
    model.graph.initializer.append(helper.make_tensor("bias", TensorProto.FLOAT, [96], [0.0] * 96))
    model.graph.node.append(helper.make_node("Add", ["logits_0", "bias"], ["logits"], "/add_bias"))
    onnx.save(model, path)


def test_inputs_that_are_no_factors(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", SPEC, ExportOptions(precision="fp32"), RandomWeights(SPEC, seed=3))
    with_bias(folder)
    bias = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    AdapterFormat.of({"bias": bias}).export_adapter(tmp_path / "b.onnx_adapter")
    base, adapted = (logits(genai, folder, {"b": tmp_path / "b.onnx_adapter"}, names) for names in ([], ["b"]))
    for one, other in zip(base, adapted, strict=True):
        np.testing.assert_allclose(one + bias, other, atol=1e-4)
    for wrong, message in ((bias[:5], "the graph's default is float32"), (bias * np.nan, "not finite")):
        AdapterFormat.of({"bias": wrong}).export_adapter(tmp_path / "w.onnx_adapter")
        with genai.Model(folder) as model, pytest.raises(InputError, match=message):
            genai.Adapters(model).load(tmp_path / "w.onnx_adapter", "w")
    with genai.Model(folder) as model:
        adapters = genai.Adapters(model)
        adapters.load(tmp_path / "b.onnx_adapter", "b")
        with pytest.raises(InputError, match="replaces graph inputs"):
            adapters.mix("b")


def with_inner_bias(folder: Path) -> None:
    """An input with a default inside the first layer, so that keys and values of the second depend on it."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    graph = model.graph
    index, node = next(
        (i, node) for i, node in enumerate(graph.node) if node.name == "/model/layers.0/mlp/down_proj/MatMul"
    )
    name, node.output[0] = node.output[0], f"{node.output[0]}_base"
    graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [64]))
    graph.initializer.append(helper.make_tensor("bias", TensorProto.FLOAT, [64], [0.0] * 64))
    graph.node.insert(index + 1, helper.make_node("Add", [node.output[0], "bias"], [name], "/add_bias"))
    onnx.save(model, path)


@pytest.mark.oracle
def test_values_change_later_tokens_only_as_in_onnxruntime_genai(tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    folder = write_model_folder(tmp_path / "m", SPEC, ExportOptions(precision="fp32"), RandomWeights(SPEC, seed=3))
    with_inner_bias(folder)
    for seed, name in enumerate("ab"):
        bias = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
        AdapterFormat.of({"bias": bias}).export_adapter(tmp_path / f"{name}.onnx_adapter")

    def rows(library: Any) -> list[np.ndarray]:
        model = library.Model(str(folder))
        adapters = library.Adapters(model)
        for name in "ab":
            adapters.load(str(tmp_path / f"{name}.onnx_adapter"), name)
        params = library.GeneratorParams(model)
        params.set_search_options(max_length=64)
        generator, found = library.Generator(model, params), []

        def look() -> None:
            found.append(np.array(generator.get_logits()).reshape(-1)[-96:])

        generator.append_tokens(np.array(PROMPT, np.int32))
        look()
        generator.set_active_adapter(adapters, "a")
        look()
        generator.append_tokens(np.array([17, 18], np.int32))
        look()
        generator.set_active_adapter(adapters, "b")
        generator.rewind_to(7)
        generator.append_tokens(np.array([40], np.int32))
        look()
        generator.generate_next_token()
        generator.set_active_adapter(adapters, "a")
        generator.generate_next_token()
        look()
        return [*found, np.array(generator.get_sequence(0))]

    for theirs, ours in zip(rows(og), rows(genai), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_sessions_take_adapters(folder: Path, tmp_path: Path) -> None:
    """RunOptions.add_active_adapter: arrays for inputs that are not fed."""
    path = tmp_path / "m.onnx"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])
    factors = [helper.make_tensor_value_info("a", TensorProto.FLOAT, [4, "r"]),
               helper.make_tensor_value_info("b", TensorProto.FLOAT, ["r", 3])]  # fmt: skip
    empty = [
        helper.make_tensor("a", TensorProto.FLOAT, [4, 0], []),
        helper.make_tensor("b", TensorProto.FLOAT, [0, 3], []),
    ]
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x, *factors], [y], empty)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    rng = np.random.default_rng(0)
    given = {"a": rng.standard_normal((4, 2)).astype(np.float32), "b": rng.standard_normal((2, 3)).astype(np.float32)}
    AdapterFormat.of(given).export_adapter(tmp_path / "x.onnx_adapter")
    feed = {"x": rng.standard_normal((5, 4)).astype(np.float32)}
    session = genai.InferenceSession(path)
    np.testing.assert_array_equal(session.run(None, feed)[0], np.zeros((5, 3)))
    adapter, options = genai.LoraAdapter(), genai.RunOptions()
    with pytest.raises(InputError, match="the adapter is empty"):
        options.add_active_adapter(adapter)
    with pytest.raises(InputError, match="the adapter is a str"):
        options.add_active_adapter("x")  # type: ignore[arg-type]
    adapter.Load(tmp_path / "x.onnx_adapter")
    options.add_active_adapter(adapter)
    (found,) = session.run(None, feed, options)
    np.testing.assert_allclose(found, feed["x"] @ given["a"] @ given["b"], rtol=1e-5, atol=1e-6)
    AdapterFormat.of({"q": given["a"]}).export_adapter(tmp_path / "q.onnx_adapter")
    adapter.Load(tmp_path / "q.onnx_adapter")
    with pytest.raises(genai.InvalidArgument):
        session.run(None, feed, options)
