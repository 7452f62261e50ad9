"""onnxruntime-genai's own API tests, rewritten: the same calls in both libraries give the same results.

Each case has the name of the test that it rewrites. docs/reference/onnxruntime-genai-tests.md lists all of them,
including those that are not supported yet.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from genai import AdapterFormat
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from tools.api_tests import DIFFERS, WAITING
from tools.random_weights import RandomWeights

from .conftest import SMALL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "onnxruntime-genai-tests.md"
TEXTS = ["This is a test.", "What is 12 + 7?", "The quick brown fox jumps over the lazy dog."]
ROWS = np.array([[100, 101, 102, 52], [100, 101, 195, 731]], np.int32)
MESSAGES = json.dumps([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi, how are you?"}])
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
Case = Callable[[Any, Path], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    """A small float32 decoder with the bundled model's tokenizer, which shows its hidden states."""
    spec = DecoderSpec(**{**SMALL, "vocab_size": 1536, "eos_token_ids": (2, 0)})
    folder = tmp_path_factory.mktemp("cases") / "model"
    options = ExportOptions(precision="fp32")
    write_model_folder(folder, spec, options, RandomWeights(spec, seed=1), tokenizer_dir=bundled_folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    head = next(node for node in model.graph.node if "logits" in node.output)
    model.graph.node.append(helper.make_node("Identity", [head.input[0]], ["hidden_states"]))
    shape = ["batch_size", "sequence_length", spec.hidden_size]
    model.graph.output.append(helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT, shape))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def started(og: Any, model: Any, ids: Any, **options: Any) -> Any:
    params = og.GeneratorParams(model)
    params.set_search_options(**{"do_sample": False, "max_length": 10, "batch_size": len(ids), **options})
    generator = og.Generator(model, params)
    generator.append_tokens(ids)
    return generator


def finished(generator: Any, rows: int = 1) -> list[list[int]]:
    while not generator.is_done():
        generator.generate_next_token()
    return [np.asarray(generator.get_sequence(row)).tolist() for row in range(rows)]


def config(og: Any, folder: Path) -> Any:
    config = og.Config(str(folder))
    config.clear_providers()
    config.append_provider("cuda")
    config.clear_providers()
    config.set_provider_option("cuda", "infinite_clock", "1")
    config.set_provider_option("quantum", "break_universe", "true")
    config.append_provider("slide rule")
    config.overlay('{"search": {"max_length": 33}}')
    config.clear_providers()
    return og.GeneratorParams(og.Model(config)).get_search_options()["max_length"]


def log_callback(og: Any, folder: Path) -> Any:
    said: list[str] = []
    og.set_log_options(enabled=True, generate_next_token=True)
    og.set_log_callback(said.append)
    try:
        started(og, og.Model(str(folder)), ROWS[:1]).generate_next_token()
    finally:
        og.set_log_callback(None)
        og.set_log_options(enabled=False)
    return bool(said), all(isinstance(line, str) for line in said)


def log_filename(og: Any, folder: Path) -> Any:
    """The file takes the place of the callback."""
    said: list[str] = []
    path = folder.parent / f"{og.__name__}.log"
    og.set_log_callback(said.append)
    og.set_log_options(enabled=True, generate_next_token=True, filename=str(path))
    try:
        started(og, og.Model(str(folder)), ROWS[:1]).generate_next_token()
    finally:
        og.set_log_options(enabled=False, filename="")
        og.set_log_callback(None)
    return path.stat().st_size > 0, said


def named_tensors(og: Any, folder: Path) -> Any:
    tensors = og.NamedTensors()
    tensors["input_ids"] = ROWS
    tensors["other"] = og.Tensor(np.ones((2, 2), np.float32))
    seen = {name: np.asarray(tensors[name].as_numpy()).tolist() for name in tensors.keys()}  # noqa: SIM118
    inside = ["other" in tensors, "absent" in tensors, len(tensors)]
    for name in seen:
        del tensors[name]
    return seen, inside, len(tensors)


def greedy_search(og: Any, folder: Path) -> Any:
    params = og.GeneratorParams(og.Model(og.Config(str(folder))))
    params.set_search_options(do_sample=False, max_length=10, batch_size=2)
    options = params.get_search_options()
    generator = started(og, og.Model(str(folder)), ROWS)
    counts = [int(generator.token_count())]
    while not generator.is_done():
        logits = generator.get_logits()
        generator.set_logits(logits)
        generator.set_logits(logits)  # what is shown stays what it was
        generator.generate_next_token()
        counts.append(int(generator.token_count()))
    return int(options["max_length"]), bool(options["early_stopping"]), counts, finished(generator, 2)


def rewind(og: Any, folder: Path) -> Any:
    generator = started(og, og.Model(str(folder)), ROWS[1:])
    first = finished(generator)
    generator.rewind_to(3)
    generator.append_tokens(np.array([first[0][3:5]], np.int32))
    assert finished(generator) == first
    return first


def rewind_cuda(og: Any, folder: Path) -> Any:
    """Also several rows, back to nothing."""
    model = og.Model(str(folder))
    rows = np.concatenate([ROWS, [[64, 65, 66, 67]]]).astype(np.int32)
    generator = started(og, model, rows)
    first = finished(generator, 3)
    generator.rewind_to(0)
    others = (rows[::-1] + 1).astype(np.int32)
    generator.append_tokens(others)
    again = finished(generator, 3)
    assert again == finished(started(og, model, others), 3)
    return first, again


def tokenizer_encode_decode(og: Any, folder: Path) -> Any:
    tokenizer = og.Tokenizer(og.Model(str(folder)))
    ids = [np.asarray(tokenizer.encode(text)).tolist() for text in TEXTS]
    assert [tokenizer.decode(np.array(row, np.int32)) for row in ids] == TEXTS
    batch = tokenizer.encode_batch(TEXTS)
    assert tokenizer.decode_batch(batch) == TEXTS
    return ids, batch.as_numpy().tolist()


def phi3_chat_template(og: Any, folder: Path) -> Any:
    """The folder's own template."""
    tokenizer = og.Tokenizer(og.Model(str(folder)))
    return [tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=adds) for adds in (True, False)]


def phi2_chat_template(og: Any, folder: Path) -> Any:
    """A template that is given."""
    tokenizer = og.Tokenizer(og.Model(str(folder)))
    return tokenizer.apply_chat_template(template_str=TEMPLATE, messages=MESSAGES, add_generation_prompt=True)


def stream(og: Any, folder: Path) -> Any:
    tokenizer = og.Tokenizer(og.Model(str(folder)))
    stream = tokenizer.create_stream()
    pieces = [[stream.decode(int(token)) for token in tokenizer.encode(text)] for text in TEXTS]
    assert ["".join(some) for some in pieces] == TEXTS
    return pieces


def batching(og: Any, folder: Path) -> Any:
    model = og.Model(str(folder))
    tokenizer = og.Tokenizer(model)
    rows = finished(started(og, model, tokenizer.encode_batch(TEXTS).as_numpy(), max_length=30), len(TEXTS))
    texts = tokenizer.decode_batch(og.Tensor(np.array(rows, np.int32)))
    # Random tokens are not always text, and theirs drops what follows a byte that is none.
    assert all(text.startswith(given) for text, given in zip(texts, TEXTS, strict=True))
    return rows


def e2e(og: Any, folder: Path) -> Any:
    model = og.Model(str(folder))
    tokenizer = og.Tokenizer(model)
    ids = [int(tokenizer.bos_token_id), int(tokenizer.pad_token_id), [int(i) for i in tokenizer.eos_token_ids]]
    row = finished(started(og, model, tokenizer.encode_batch(TEXTS[:1]).as_numpy(), max_length=20))[0]
    return ids, row, tokenizer.decode(np.array(row, np.int32))


def load_model_from_memory(og: Any, folder: Path) -> Any:
    content, rows = (folder / "model.onnx").read_bytes(), []
    for wrap in (bytes, bytearray, memoryview):
        config = og.Config(str(folder))
        data = wrap(content)  # which theirs does not keep
        config.add_model_data("model.onnx", data)
        model = og.Model(config)
        config.remove_model_data("model.onnx")
        rows.append(finished(started(og, model, ROWS), 2))
    assert rows == [rows[0]] * 3
    return rows[0]


def model_device_type(og: Any, folder: Path) -> Any:
    model = og.Model(str(folder))
    return model.device_type, model.type


def get_output(og: Any, folder: Path) -> Any:
    generator = started(og, og.Model(str(folder)), ROWS)
    prompt = np.asarray(generator.get_output("logits")).copy()
    generator.generate_next_token()
    generator.generate_next_token()
    return prompt, np.asarray(generator.get_output("logits")).copy()


def hidden_states(og: Any, folder: Path) -> Any:
    generator, seen = started(og, og.Model(str(folder)), ROWS), []
    for _ in range(2):
        generator.generate_next_token()
        seen.append(np.asarray(generator.get_output("hidden_states")).copy())
    assert [one.shape for one in seen] == [(2, 4, SMALL["hidden_size"]), (2, 1, SMALL["hidden_size"])]
    return seen


def preset_extra_inputs(og: Any, folder: Path) -> Any:
    """A constant input that both libraries know, and one that nobody feeds."""
    seen: list[Any] = []
    for name in ("num_logits_to_keep", "onnx::Neg_67", "abcde"):
        changed = folder.parent / f"{og.__name__}-{name.replace(':', '')}"
        shutil.copytree(folder, changed)
        model = onnx.load(changed / "model.onnx", load_external_data=False)
        head = next(node for node in model.graph.node if "logits" in node.output)
        head.output[:] = ["before"]
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))
        model.graph.node.append(helper.make_node("Cast", [name], ["number"], to=TensorProto.FLOAT))
        model.graph.node.append(helper.make_node("Add", ["before", "number"], ["logits"]))
        (changed / "model.onnx").write_bytes(model.SerializeToString())
        try:
            seen.append(finished(started(og, og.Model(str(changed)), ROWS), 2))
        except RuntimeError as error:
            seen.append(name in str(error))
    assert seen[2] is True
    return seen


def decoder_no_input_ids_does_not_inject_input_ids(og: Any, folder: Path) -> Any:
    return embeddings_apart(og, folder, [])


def decoder_with_input_ids_receives_input_ids(og: Any, folder: Path) -> Any:
    return embeddings_apart(og, folder, ["input_ids"])


def embeddings_apart(og: Any, folder: Path, also: list[str]) -> Any:
    """The folder's table in a graph of its own, beside one of pictures; the decoder takes also token ids, or not."""
    apart = Path(shutil.copytree(folder, folder.parent / f"{og.__name__}-apart-{len(also)}"))
    decoder = onnx.load(apart / "model.onnx", load_external_data=False)
    (lookup,) = (node for node in decoder.graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    (table,) = (tensor for tensor in decoder.graph.initializer if tensor.name == lookup.input[0])
    decoder.graph.node.remove(lookup)
    decoder.graph.node.insert(0, helper.make_node("Identity", ["inputs_embeds"], [lookup.output[0]]))
    decoder.graph.initializer.remove(table)
    (ids,) = (value for value in decoder.graph.input if value.name == "input_ids")
    rows = helper.make_tensor_value_info("image_features", TensorProto.FLOAT, ["rows", table.dims[1]])
    embeds = helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["batch", "length", table.dims[1]])
    pixels = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["rows", table.dims[1]])
    lookup.output[:] = ["inputs_embeds"]
    write_graph(apart / "embedding.onnx", decoder, [lookup], [ids, rows], [embeds], [table])
    node = helper.make_node("Identity", ["pixel_values"], ["image_features"])
    write_graph(apart / "vision.onnx", decoder, [node], [pixels], [rows], [])
    if not also:
        decoder.graph.input.remove(ids)
    decoder.graph.input.append(embeds)
    (apart / "model.onnx").write_bytes(decoder.SerializeToString())
    config = json.loads((apart / "genai_config.json").read_text())
    names = {"input_ids": "input_ids", "image_features": "image_features"}
    config["model"] |= {
        "type": "phi3v",
        "embedding": {"filename": "embedding.onnx", "inputs": names, "outputs": {"inputs_embeds": "inputs_embeds"}},
        "vision": {"filename": "vision.onnx", "inputs": {"pixel_values": "pixel_values"}},
    }
    config["model"]["decoder"]["inputs"] |= {"inputs_embeds": "inputs_embeds"}
    (apart / "genai_config.json").write_text(json.dumps(config))
    return finished(started(og, og.Model(str(apart)), ROWS[:1]))


def write_graph(path: Path, like: onnx.ModelProto, nodes: Any, inputs: Any, outputs: Any, constants: Any) -> None:
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=like.opset_import, ir_version=like.ir_version), path)


def adapters(og: Any, folder: Path) -> Any:
    """Two inputs with defaults, added to the logits; set by one adapter each, then by one for both."""
    changed, names, rng = (
        folder.parent / f"{og.__name__}-adapters",
        ("adapter_a", "adapter_b"),
        np.random.default_rng(0),
    )
    shutil.copytree(folder, changed)
    model = onnx.load(changed / "model.onnx", load_external_data=False)
    head = next(node for node in model.graph.node if "logits" in node.output)
    head.output[:] = ["logits_0"]
    values = {name: rng.random(1536).astype(np.float32) for name in names}
    for name in names:
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1536]))
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [1536], [0.0] * 1536))
    model.graph.node.append(helper.make_node("Add", [*names], ["both"], name="adapter_add"))
    model.graph.node.append(helper.make_node("Add", ["both", "logits_0"], ["logits"], name="add_to_logits"))
    (changed / "model.onnx").write_bytes(model.SerializeToString())
    seen: list[Any] = []
    for arrays in ([{name: values[name]} for name in names], [values]):
        model = og.Model(str(changed))
        loaded = og.Adapters(model)
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=10, batch_size=2)
        generator = og.Generator(model, params)
        for index, own in enumerate(arrays):
            AdapterFormat.of(own).export_adapter(changed / f"{index}.onnx_adapter")
            loaded.load(str(changed / f"{index}.onnx_adapter"), f"adapter_{index}")
            generator.set_active_adapter(loaded, f"adapter_{index}")
        generator.append_tokens(ROWS)
        seen += [np.array(generator.get_logits()), finished(generator, 2)]
    return seen


CASES: tuple[Case, ...] = (
    config, log_callback, log_filename, named_tensors, greedy_search, rewind,
    rewind_cuda, tokenizer_encode_decode, phi3_chat_template, phi2_chat_template, stream,
    batching, e2e, load_model_from_memory, model_device_type, get_output, hidden_states,
    preset_extra_inputs, decoder_no_input_ids_does_not_inject_input_ids, decoder_with_input_ids_receives_input_ids,
    adapters,
)  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"test_{case.__name__}")
def test_both_give_the_same(case: Case, folder: Path) -> None:
    import genai

    theirs = pytest.importorskip("onnxruntime_genai")
    assert_equal(case(genai, folder), case(theirs, folder))


def assert_equal(ours: Any, theirs: Any) -> None:
    """Equal but for the last bits of floating-point numbers."""
    if isinstance(theirs, np.ndarray):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert ours == theirs


def test_the_page_lists_what_is_here() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (test_\w+) \| (.+) \|$", text, re.M))
    states = Counter(state.split(":")[0] for state in rows.values())
    said = re.search(r"Of (\d+) functions, (\d+) pass, (\d+) need .*? and (\d+) ", text, re.S)
    assert said is not None
    assert [int(number) for number in said.groups()] == [
        len(rows), states["passes"], states["not supported"], states["other hardware"]
    ]  # fmt: skip
    here = {f"test_{case.__name__}" for case in CASES}
    assert here | {"test_telemetry_control"} == {name for name, state in rows.items() if state.startswith("passes")}
    start = "not supported: "
    waits = {name: state.removeprefix(start) for name, state in rows.items() if state.startswith(start)}
    assert waits == {name: next(why for prefix, why in WAITING.items() if name.startswith(prefix)) for name in waits}
    assert all(any(name.startswith(prefix) for name in rows) for prefix in WAITING)


def test_the_page_lists_what_differs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(test_[^`.]+)` \| \d+ \| (.+) \|$", text, re.M)) == DIFFERS
