"""What a generator shows beside tokens: inputs and outputs of its last run, inputs of one's own, and the log."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import genai as og
from genai.compat.onnxruntime_genai.log import log_values
from genai.doctor.model_info import describe
from genai.errors import InputError, OptionError, StateError, UnsupportedModelError

VOCAB, LAYERS, HIDDEN = 320, 2, 96
PROMPTS = [[30, 31, 32, 33, 34], [40, 41]]


@pytest.fixture(scope="module")
def plain(form_folder: Callable[..., Path]) -> Path:
    return form_folder("fp32")


@pytest.fixture
def changed(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """changed(change of the onnx.ModelProto, overlay of genai_config.json) -> a folder."""

    def make(change: Callable[[onnx.ModelProto], Any]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(plain, folder)
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        change(model)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        return folder

    return make


def started(library: Any, folder: Path | Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> Any:
    model = folder if not isinstance(folder, Path) else library.Model(str(folder))
    params = library.GeneratorParams(model)
    params.set_search_options(batch_size=len(prompts), max_length=60, **options)
    generator = library.Generator(model, params)
    width = max(map(len, prompts))
    pad = model.config.model.pad_token_id or 0 if library is og else 0
    generator.append_tokens(np.array([[*row, *[pad] * (width - len(row))] for row in prompts], np.int32))
    return generator


def show_hidden_states(model: onnx.ModelProto) -> None:
    """As the builder of onnxruntime-genai does: the head's input gets this name."""
    head = next(node for node in model.graph.node if "logits" in node.output)
    model.graph.node.append(helper.make_node("Identity", [head.input[0]], ["hidden_states"]))
    shape = ["batch_size", "sequence_length", HIDDEN]
    model.graph.output.append(helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT, shape))


@pytest.mark.oracle
@pytest.mark.parametrize("batched", [True, False])
def test_outputs_and_inputs_of_each_run(changed: Callable[..., Path], batched: bool) -> None:
    theirs_library = pytest.importorskip("onnxruntime_genai")

    def change(model: onnx.ModelProto) -> None:
        show_hidden_states(model)
        if not batched:
            model.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
            model.graph.output.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))

    folder = changed(change)
    model = og.Model(folder, quiet=True)
    assert model.info.flattened == batched
    prompts = [PROMPTS[0], PROMPTS[0][::-1]]
    ours, theirs = started(og, model, prompts), started(theirs_library, folder, prompts)
    for _ in range(4):
        for name in ("logits", "hidden_states"):
            mine, expected = ours.get_output(name), np.asarray(theirs.get_output(name))
            assert mine.shape == expected.shape
            np.testing.assert_allclose(mine, expected, atol=2e-4)
        for name in ("input_ids", "attention_mask"):
            mine, expected = ours.get_input(name), np.asarray(theirs.get_input(name))
            np.testing.assert_array_equal(mine, expected, strict=True)
        for generator in (ours, theirs):
            generator.generate_next_token()
    assert ours.get_sequence(0).tolist() == np.asarray(theirs.get_sequence(0)).tolist()


def test_asking_changes_nothing(plain: Path) -> None:
    """Rows of different lengths, more tokens between, and logits of one's own."""
    model = og.Model(plain)
    asked, other = started(og, model, min_length=50), started(og, model, min_length=50)
    for step in range(6):
        prompt = asked.get_output("logits")
        assert prompt.shape == (2, 5 if step < 2 else 1, VOCAB)
        if step == 0:
            assert not prompt[1, 2:].any()
            alone = started(og, model, PROMPTS[1:])
            np.testing.assert_allclose(prompt[1, :2], alone.get_output("logits")[0], atol=1e-4)
        if step == 3:
            for generator in (asked, other):
                logits = np.zeros_like(generator.get_logits())
                logits[..., 77] = 1
                generator.set_logits(logits)
            asked.get_output("logits")
        for generator in (asked, other):
            generator.generate_next_token()
            if step == 3:
                assert generator.get_next_tokens().tolist() == [77, 77]
            np.testing.assert_array_equal(asked.get_sequence(0)[:5], other.get_sequence(0)[:5])
    for row in range(2):
        assert asked.get_sequence(row).tolist() == other.get_sequence(row).tolist()
    np.testing.assert_array_equal(asked.get_logits(), other.get_logits())
    before = asked.get_output("logits")
    with pytest.raises(og.GenaiError, match="exceed max_length"):
        asked.append_tokens([[5] * 60, [8]])
    np.testing.assert_array_equal(asked.get_output("logits"), before)
    asked.append_tokens([[5, 6, 7], [8]])
    assert asked.get_output("logits").shape == (2, 3, VOCAB)
    assert asked.get_input("input_ids").tolist()[0] == [5, 6, 7]
    asked.rewind_to(3)
    with pytest.raises(StateError, match="no token has been computed"):
        asked.get_output("logits")


def test_what_is_not_shown(plain: Path) -> None:
    generator = started(og, plain)
    for action, name in ((generator.get_output, "present.0.key"), (generator.get_input, "position_ids")):
        with pytest.raises(InputError, match=f"{name}.*was not found") as caught:
            action(name)
        assert "logits" in caught.value.why or "input_ids" in caught.value.why
    generator.close()
    with pytest.raises(StateError, match="no token has been computed"):
        generator.get_output("logits")
    fresh = og.Generator(generator._model, og.GeneratorParams(generator._model))
    for action, name in ((fresh.get_output, "logits"), (fresh.get_input, "input_ids")):
        with pytest.raises(StateError, match="no token has been computed"):
            action(name)


def add_to_logits(name: str, shape: list[int]) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        head = next(node for node in model.graph.node if "logits" in node.output)
        head.output[0] = "logits_0"
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
        model.graph.node.extend(
            [
                helper.make_node("Cast", [name], ["extra"], to=TensorProto.FLOAT),
                helper.make_node("Add", ["extra", "logits_0"], ["logits"]),
            ]
        )

    return change


@pytest.mark.parametrize(("name", "shape"), [("num_logits_to_keep", []), ("onnx::Neg_67", [1])])
def test_inputs_of_a_known_value_are_constants(
    changed: Callable[..., Path], plain: Path, name: str, shape: list[int]
) -> None:
    model = og.Model(changed(add_to_logits(name, shape)))
    assert model.info.flattened
    np.testing.assert_array_equal(started(og, model).get_logits(), started(og, plain).get_logits())


def test_other_inputs_are_given_by_the_caller(changed: Callable[..., Path], plain: Path) -> None:
    model = og.Model(changed(add_to_logits("abcde", [])), quiet=True)
    params = og.GeneratorParams(model)
    generator = og.Generator(model, params)
    with pytest.raises(InputError, match="Missing Input: abcde") as caught:
        generator.append_tokens([30, 31, 32])
    assert "set_model_input('abcde'" in caught.value.fix
    assert generator.token_count() == 0
    generator.set_model_input("abcde", og.Tensor(np.array(5, np.int64)))
    generator.append_tokens([30, 31, 32])
    without = started(og, plain, [[30, 31, 32]])
    np.testing.assert_allclose(generator.get_logits(), without.get_logits() + 5, atol=1e-4)
    with pytest.raises(InputError, match="no input 'x'"):
        generator.set_model_input("x", np.zeros(1))
    with pytest.raises(InputError, match="set_model_input"):
        generator.set_model_input("abcde", "text")
    with pytest.raises(InputError, match="no input 'x'"):
        without.set_model_input("x", np.zeros(1))


def test_keys_and_values_in_one_tensor(changed: Callable[..., Path], plain: Path) -> None:
    """As GPT-2's folders have them: past_0 [2, batch, heads, length, size]."""

    def change(model: onnx.ModelProto) -> None:
        graph = model.graph
        graph.initializer.extend(helper.make_tensor(f"part{i}", TensorProto.INT64, [], [i]) for i in (0, 1))
        graph.initializer.append(helper.make_tensor("first_axis", TensorProto.INT64, [1], [0]))
        nodes = []
        for layer in range(LAYERS):
            presents = []
            for part, kind in enumerate(("key", "value")):
                old = f"past_key_values.{layer}.{kind}"
                nodes.append(helper.make_node("Gather", [f"past_{layer}", f"part{part}"], [old], axis=0))
                old = f"present.{layer}.{kind}"
                presents.append(f"{old}/5d")
                graph.node.append(helper.make_node("Unsqueeze", [old, "first_axis"], [presents[-1]]))
            graph.node.append(helper.make_node("Concat", presents, [f"present_{layer}"], axis=0))
        for node in reversed(nodes):
            graph.node.insert(0, node)
        for values in (graph.input, graph.output):
            kept = [value for value in values if "past_key" not in value.name and "present" not in value.name]
            del values[:]
            values.extend(kept)
        shape = [2, "batch", 2, "length", 16]
        for layer in range(LAYERS):
            graph.input.append(helper.make_tensor_value_info(f"past_{layer}", TensorProto.FLOAT, shape))
            graph.output.append(helper.make_tensor_value_info(f"present_{layer}", TensorProto.FLOAT, shape))

    config = og.Config(changed(change))
    names = '{"inputs": {"past_names": "past_%d"}, "outputs": {"present_names": "present_%d"}}'
    config.overlay(f'{{"model": {{"decoder": {names}}}}}')
    model = og.Model(config, quiet=True)
    assert not model.info.flattened
    ours, expected = started(og, model, min_length=40), started(og, plain, min_length=40)
    for generator in (ours, expected):
        for _ in range(5):
            generator.generate_next_token()
        generator.rewind_to(7)
        generator.append_tokens([[9, 8], [7, 6]])
    np.testing.assert_allclose(ours.get_logits(), expected.get_logits(), atol=1e-4)
    assert ours.get_sequence(1).tolist() == expected.get_sequence(1).tolist()
    assert describe(config)["kv_bytes_per_token"] == expected._model.info.kv_bytes_per_token
    config.overlay('{"model": {"decoder": {"inputs": {"past_names": "other_%d"}}}}')
    with pytest.raises((InputError, UnsupportedModelError)):
        started(og, og.Model(config, quiet=True))


def test_a_model_from_memory(plain: Path, tmp_path: Path) -> None:
    config = og.Config(plain)
    expected = started(og, plain).get_logits()
    config.add_model_data("model.onnx", memoryview((plain / "model.onnx").read_bytes()))
    np.testing.assert_array_equal(started(og, og.Model(config)).get_logits(), expected)
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(plain / "genai_config.json", empty)
    config = og.Config(empty)
    for name in ("model.onnx", "model.onnx.data"):
        config.add_model_data(name, (plain / name).read_bytes())
    model = og.Model(config)
    config.remove_model_data("model.onnx")
    np.testing.assert_array_equal(started(og, model).get_logits(), expected)
    with pytest.raises(og.GenaiError, match=r"model\.onnx"):
        og.Model(config)


@pytest.fixture
def log_off() -> Iterator[None]:
    yield
    og.set_log_callback(None)
    og.set_log_options(enabled=False, filename="", generate_next_token=False, append_next_tokens=False,
                       hit_eos=False, hit_max_length=False, model_logits=False, warning=False, ansi_tags=False,
                       value_stats=True)  # fmt: skip


def test_the_log(plain: Path, tmp_path: Path, log_off: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    og.set_log_callback(lines.append)
    og.set_log_options(generate_next_token=True, append_next_tokens=True, hit_max_length=True, ansi_tags=False)
    generator = started(og, plain)
    assert lines == []
    og.set_log_options(enabled=True)
    generator = started(og, plain)
    generator.generate_next_token()
    assert [line.split(":")[0] for line in lines] == ["append_next_tokens", "generate_next_token"]
    file = tmp_path / "log.txt"
    og.set_log_options(filename=str(file))
    generator.generate_next_token()
    assert "token_count 6" in file.read_text()
    assert len(lines) == 2
    og.set_log_options(filename="")
    generator.generate_next_token()
    assert "generate_next_token" in capsys.readouterr().err
    for wrong in ({"foo": True}, {"enabled": "x"}, {"filename": 1}, {"hit_eos": 1}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            og.set_log_options(**wrong)
    with pytest.raises(InputError, match="cannot be written"):
        og.set_log_options(filename=str(tmp_path / "none" / "log.txt"))
    with pytest.raises(InputError, match="set_log_callback"):
        og.set_log_callback(5)  # type: ignore[arg-type]


def logged(library: Any, folder: Path, beams: int = 1, **options: bool) -> list[str]:
    """Return the log of a prompt and two steps."""
    lines: list[str] = []
    library.set_log_callback(lines.append)
    library.set_log_options(enabled=True, ansi_tags=False, **options)
    try:
        prompts = [[5, 6, 7]] if beams > 1 else [[5, 6, 7], [9, 8, 7]]
        generator = started(library, folder, prompts, do_sample=False, num_beams=beams)
        generator.generate_next_token()
        generator.generate_next_token()
    finally:
        library.set_log_options(enabled=False, **dict.fromkeys(options, False))
        library.set_log_callback(None)
    return [line for line in lines if line.strip()]


@pytest.mark.oracle
def test_logged_logits(plain: Path, log_off: None) -> None:
    """The same values, extremes, positions, means and deviations as in onnxruntime-genai's log."""
    theirs = pytest.importorskip("onnxruntime_genai")
    number = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    ours, expected = (logged(library, plain, model_logits=True) for library in (og, theirs))
    assert [line.split(":")[0] for line in ours] == ["model_logits", "value_stats"] * 2
    assert len(ours) == len(expected)
    for line, other in zip(ours, expected, strict=True):
        found, wanted = (re.findall(number, text) for text in (line, other))
        assert len(found) == len(wanted) >= 6
        np.testing.assert_allclose(np.array(found, float), np.array(wanted, float), rtol=1e-3, atol=1e-4)
        assert re.sub(number, "", other).split()[1:] == re.sub(number, "", line).split()[1:]


def test_logged_logits_of_beams_and_styles(plain: Path, log_off: None) -> None:
    lines = logged(og, plain, 2, model_logits=True, generate_next_token=True)
    kinds = [line.split(":")[0] for line in lines]
    assert kinds == ["generate_next_token", "model_logits", "value_stats"] * 2
    og.set_log_options(value_stats=False)
    assert not any("value_stats" in line for line in logged(og, plain, model_logits=True))
    coloured: list[str] = []
    og.set_log_callback(coloured.append)
    og.set_log_options(enabled=True, append_next_tokens=True, warning=True, ansi_tags=True)
    started(og, plain)
    logging.getLogger("genai.somewhere").warning("a %s", "warning")
    logging.getLogger("genai.somewhere").info("no warning")
    assert [line.split()[1] for line in coloured] == ["append_next_tokens", "warning"]
    assert all(line.startswith("\x1b[1m\x1b[44m  ") for line in coloured)
    assert coloured[1].endswith(" a warning\n")


@pytest.mark.parametrize("name", ["model_input_values", "model_output_values", "model_output_shapes", "ort_lib"])
def test_log_options_that_cannot_be_obeyed(name: str) -> None:
    og.set_log_options(**{name: False})
    with pytest.raises(OptionError, match=f"log option {name} = True") as caught:
        og.set_log_options(**{name: True})
    assert caught.value.why and caught.value.fix


def test_logged_values_that_are_not_finite(log_off: None) -> None:
    lines: list[str] = []
    og.set_log_callback(lines.append)
    og.set_log_options(enabled=True, model_logits=True)
    log_values("model_logits", np.array([1, 2.5, np.nan], np.float32))
    assert lines == ["model_logits: Values[ 1 2.5 nan ]\n", "value_stats: first value that is not finite at index[2]\n"]


def test_terminating(plain: Path) -> None:
    generator = started(og, plain)
    generator.set_runtime_option("terminate_session", "1")
    for action in (generator.generate_next_token, lambda: generator.append_tokens([[1], [2]])):
        with pytest.raises(StateError, match="Terminated"):
            action()
    generator.set_runtime_option("terminate_session", "0")
    generator.generate_next_token()
    assert generator.token_count() == 6
    for wrong in (("terminate_session", "yes"), ("enable_profiling", "1")):
        with pytest.raises(OptionError, match=wrong[0]):
            generator.set_runtime_option(*wrong)


@pytest.mark.oracle
def test_options_have_the_same_types(bundled_folder: Path, bundled: Any) -> None:
    library = pytest.importorskip("onnxruntime_genai")
    theirs = library.GeneratorParams(library.Model(str(bundled_folder))).get_search_options()
    ours = og.GeneratorParams(bundled).get_search_options()
    assert {name: (type(value), value) for name, value in ours.items()} == {
        name: (type(value), value) for name, value in theirs.items()
    }


CLOSED: dict[str, tuple[Any, ...]] = {
    "append_tokens": ([5],), "generate_next_token": (), "get_logits": (), "rewind_to": (0,),
    "set_logits": (np.zeros(5),), "set_model_input": ("x", np.zeros(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_after_close(name: str, bundled: og.Model) -> None:
    with og.Generator(bundled, og.GeneratorParams(bundled)) as generator:
        generator.append_tokens([5, 6, 7])
    generator.close()  # again
    with pytest.raises(StateError, match="the generator is closed"):
        getattr(generator, name)(*CLOSED[name])
