"""The point where two models diverge: a change is found at its operator, and equal models do not diverge."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai import Model
from genai.engine.decoder import compute
from genai.errors import (
    ContextOverflowError,
    InputError,
    MissingPackageError,
    ModelFolderError,
    OptionError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from genai.evaluate import ModelDiff, diff_models, diff_with_onnxruntime, encode_prompt
from genai.evaluate.model_diff import _compared, _errors, layer_of
from genai.evaluate.values import TracedValue, _feed, trace_values

PROMPT = "What is 12 + 7? Count from 3 to 7."
TOKENS = np.random.default_rng(0).integers(3, 800, 23)
ORT_FORMS = ["fp32", "int4", "biases", "qk-norm", "prune-head", "window", "long-rope"]


def scale(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    """Multiply one weight."""

    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))

    return change


def dense(model: onnx.ModelProto) -> None:
    """An output that keeps a graph from being flattened."""
    model.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))


def first_of(diff: ModelDiff) -> str:
    assert diff.first is not None
    return diff.values[diff.first].name


def by_name(diff: ModelDiff) -> dict[str, float]:
    return {value.name: value.relative_rms for value in diff.values}


# --- two folders ---------------------------------------------------------------------------------------------------


def test_a_model_and_itself(bundled: Any) -> None:
    diff = diff_models(bundled, bundled, encode_prompt(bundled, PROMPT))
    assert diff.first is None and len(diff.values) > 60
    assert all((v.relative_rms, v.max_abs, v.cosine) == (0, 0, 1) for v in diff.values)
    assert diff.only_in_base == diff.only_in_other == ()
    assert diff.values[-1].name == "logits" and diff.values[-1].shape == (1, diff.tokens, 1536)


@pytest.mark.parametrize("length", [23, 40])
def test_what_is_traced_is_what_a_step_computes(bundled: Any, form_model: Callable[..., Model], length: int) -> None:
    """With decode and prefill numerics; the pruned head has nodes that run on the host."""
    tokens = np.random.default_rng(0).integers(3, 800, length)
    for model in (bundled, form_model("prune-head")):
        sequence = model.decoder.open()
        sequence.append(tokens.tolist())
        (logits,) = compute(model.decoder, [sequence], all_rows=True)
        sequence.close()
        traced = trace_values(model, tokens)["logits"].array
        np.testing.assert_array_equal(traced.reshape(logits.shape), logits)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_changed_scale_is_found_at_its_product(
    bundled: Any, bundled_folder: Path, altered: Callable[..., Path], isolate: bool
) -> None:
    change = scale("model.layers.3.mlp.up_proj.MatMul.weight_scales", 1.2)
    with Model(altered(bundled_folder, change, embed=True), threads=2) as other:
        diff = diff_models(bundled, other, encode_prompt(bundled, PROMPT), isolate=isolate)
    assert first_of(diff) == "/model/layers.3/mlp/up_proj/MatMul/output_0"
    value = diff.values[diff.first or 0]
    assert (value.op_type, value.layer) == ("MatMulNBits", 3)
    assert value.relative_rms == pytest.approx(0.2, abs=1e-3)
    assert value.cosine == pytest.approx(1, abs=1e-6)
    assert all(v.relative_rms == 0 for v in diff.values[: diff.first])
    others = [v for v in diff.values if v is not value]
    assert (max(v.relative_rms for v in others) == 0) == isolate


def test_layers_of_one_side_are_named(form_model: Callable[..., Model]) -> None:
    two, three = form_model("fp32"), form_model("three-layers")
    diff = diff_models(two, three, TOKENS)
    assert diff.layers_only_in_base == ()
    # The builder numbers the final norm like one more layer, so layer 2 has a value in the smaller model too ...
    assert any(name.startswith("/model/layers.2/mlp") for name in diff.only_in_other)
    back = diff_models(three, two, TOKENS)
    assert set(back.only_in_base) == set(diff.only_in_other)
    # ... and layer 3 only in the larger.
    assert (diff.layers_only_in_other, back.layers_only_in_base) == ((3,), (3,))


def test_int4_beside_fp32_by_name(form_model: Callable[..., Model]) -> None:
    diff = diff_models(form_model("fp32"), form_model("int4"), TOKENS, isolate=True)
    names = by_name(diff)
    assert 0.02 < names["/model/layers.1/mlp/down_proj/MatMul/output_0"] < 0.3
    assert names["/model/layers.1/attn/GroupQueryAttention/output_0"] < 1e-5
    ops = {value.op_type for value in diff.values}
    assert "MatMulNBits" in ops and "PagedAttention" in ops


def test_cache_type_shows_in_attention_only(bundled_folder: Path, exact: Model) -> None:
    with Model(bundled_folder, threads=2, accuracy="fp32", kv_dtype="fp16") as half:
        diff = diff_models(exact, half, encode_prompt(exact, PROMPT), tolerance=1e-9, isolate=True)
    parted = {value.op_type for value in diff.values if value.relative_rms > 1e-9}
    assert parted == {"PagedAttention"}


def test_dense_beside_paged(
    form_folder: Callable[[str], Path], form_model: Callable[..., Model], altered: Callable[..., Path]
) -> None:
    with Model(altered(form_folder("fp32"), dense), threads=2) as model:
        assert not model.info.flattened
        diff = diff_models(form_model("fp32"), model, TOKENS, tolerance=1e-5)
    assert diff.first is None
    assert "logits" in by_name(diff) and "present.0.key" in diff.only_in_other


# --- onnxruntime ---------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("form", ORT_FORMS)
def test_fp32_activations_equal_onnxruntime(form_model: Callable[..., Model], form: str, isolate: bool) -> None:
    model = form_model(form)
    diff = diff_with_onnxruntime(model, TOKENS, tolerance=2e-5, isolate=isolate)
    assert diff.first is None, diff.values[diff.first]
    assert {0, 1, None} <= {value.layer for value in diff.values}
    assert diff.values[-1].name == "logits"
    assert all(name.endswith("/logits_rows") for name in diff.only_in_other)


@pytest.mark.oracle
@pytest.mark.parametrize("length", [1, 6, 7, 8])
def test_prompts_around_the_length_of_a_window(form_model: Callable[..., Model], length: int) -> None:
    diff = diff_with_onnxruntime(form_model("window"), TOKENS[:length], tolerance=2e-5)
    assert diff.first is None


@pytest.mark.oracle
@pytest.mark.parametrize("length", [100, 101, 256])
def test_prompts_around_the_threshold_of_long_rope(form_model: Callable[..., Model], length: int) -> None:
    tokens = np.random.default_rng(1).integers(3, 800, length)
    assert diff_with_onnxruntime(form_model("long-rope"), tokens, tolerance=2e-5).first is None


@pytest.mark.oracle
def test_a_pruned_head_is_compared_at_the_last_token(form_model: Callable[..., Model]) -> None:
    diff = diff_with_onnxruntime(form_model("prune-head"), TOKENS)
    logits = diff.values[-1]
    assert (logits.shape, logits.base_shape) == ((len(TOKENS), 1, 1536), (1, 1, 1536))
    assert logits.relative_rms < 1e-5


@pytest.mark.oracle
def test_the_bundled_model_with_int8_activations(bundled: Any) -> None:
    """Each operator alone: int8 products agree to rounding, attention to its fp16 cache."""
    tokens = encode_prompt(bundled, PROMPT)
    diff = diff_with_onnxruntime(bundled, tokens, isolate=True)
    assert diff.first is None and len(diff.values) == 68
    for value in diff.values:
        assert value.relative_rms < (2e-3 if value.op_type == "PagedAttention" else 2e-6), value
    together = diff_with_onnxruntime(bundled, tokens)
    assert together.first is None
    assert together.values[-1].relative_rms > 10 * diff.values[-1].relative_rms


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["int4", "window"])
def test_a_model_that_is_not_flattened(
    form_folder: Callable[[str], Path], altered: Callable[..., Path], form: str
) -> None:
    with Model(altered(form_folder(form), dense), threads=2) as model:
        assert not model.info.flattened
        diff = diff_with_onnxruntime(model, TOKENS, tolerance=2e-5)
    assert diff.first is None
    assert {"count", "logits"} <= by_name(diff).keys()
    # With a window, onnxruntime's present tensors have its full length; they are not compared.
    assert ("present.1.value" in by_name(diff)) == (form == "int4")


@pytest.mark.oracle
def test_nothing_is_written_into_the_folder(
    form_folder: Callable[[str], Path], form_model: Callable[..., Model]
) -> None:
    model, folder = form_model("int4"), form_folder("int4")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))}
    diff_with_onnxruntime(model, TOKENS)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))} == before


@pytest.mark.oracle
@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_what_onnxruntime_cannot_load(
    form_folder: Callable[[str], Path], altered: Callable[..., Path], content: bytes | None
) -> None:
    """A model file that was emptied, replaced or deleted since it was loaded."""
    folder = altered(form_folder("fp32"), lambda model: None)
    with Model(folder, threads=2) as model:
        (folder / "model.onnx").unlink()
        if content is not None:
            (folder / "model.onnx").write_bytes(content)
        with pytest.raises(ModelFolderError, match="was replaced after the model was loaded"):
            diff_with_onnxruntime(model, TOKENS)


def test_onnxruntime_is_missing(bundled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError) as caught:
        diff_with_onnxruntime(bundled, encode_prompt(bundled, PROMPT))
    assert (
        "onnxruntime cannot be imported" in caught.value.what
        and "optional" in caught.value.why
        and caught.value.fix == "pip install onnxruntime"
    )


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan"), float("inf"), True, "0.1"])
def test_tolerance(bundled: Any, tolerance: Any) -> None:
    for diff in (lambda: diff_models(bundled, bundled, TOKENS, tolerance=tolerance),
                 lambda: diff_with_onnxruntime(bundled, TOKENS, tolerance=tolerance)):  # fmt: skip
        with pytest.raises(OptionError, match="tolerance"):
            diff()


def test_too_long_a_prompt(form_model: Callable[..., Model]) -> None:
    with pytest.raises(ContextOverflowError, match="257 tokens"):
        trace_values(form_model("fp32"), np.full(257, 5))


def test_values_that_do_not_fit_into_memory(form_model: Callable[..., Model]) -> None:
    model = form_model("fp32")
    with pytest.raises(InputError, match=r"more than 102\.4 kB"):
        trace_values(model, TOKENS, memory=100 * 1024)
    assert trace_values(model, TOKENS)["logits"].array.shape == (1, len(TOKENS), 1536)


def test_other_vocabulary(form_model: Callable[..., Model], bundled: Any) -> None:
    with pytest.raises(VocabularyMismatchError):
        diff_models(bundled, form_model("small-vocabulary"), TOKENS)


def test_a_decoder_without_a_plan() -> None:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(context_length=64)), decoder=SimpleNamespace(vocab_size=8)
    )
    with pytest.raises(UnsupportedModelError, match="SimpleNamespace"):
        trace_values(model, TOKENS)


@pytest.mark.parametrize(
    ("name", "type_", "shape"),
    [
        ("pixels", "tensor(float)", [1, 3]),
        ("input_ids", "tensor(string)", ["batch", "sequence"]),
        ("past_key_values.0.key", "tensor(float)", ["batch", "past"]),
    ],
)
def test_an_input_that_onnxruntime_wants_and_nobody_knows(
    bundled: Any, name: str, type_: str, shape: list[object]
) -> None:
    value = SimpleNamespace(name=name, type=type_, shape=shape)
    with pytest.raises(UnsupportedModelError, match=name):
        _feed(value, TOKENS, bundled.config.model.decoder, 0)


def test_no_name_in_common() -> None:
    other = {"b": TracedValue("Add", np.ones(3))}
    with pytest.raises(InputError, match="no value has the same name in left and right"):
        _compared({"a": np.ones(3)}, other, ("left", "right"), 1, 0.1, False)


def test_values_of_other_sizes_part() -> None:
    other = {"x": TracedValue("Add", np.ones((1, 3, 4))), "y": TracedValue("Mul", np.ones(5))}
    diff = _compared({"x": np.ones((3, 4)), "y": np.ones(6)}, other, ("left", "right"), 3, 0.1, False)
    assert [value.relative_rms for value in diff.values] == [0, np.inf]
    assert diff.first == 1 and (diff.values[1].shape, diff.values[1].base_shape) == ((5,), (6,))


def test_few_common_names(form_folder: Callable[[str], Path], altered: Callable[..., Path], form_model: Any) -> None:
    def rename(model: onnx.ModelProto) -> None:
        kept = {value.name for value in (*model.graph.input, *model.graph.output)} | {
            tensor.name for tensor in model.graph.initializer
        } - {"logits"}
        for node in model.graph.node:
            node.input[:] = [n if not n or n in kept else f"other {n}" for n in node.input]
            node.output[:] = [n if not n or n in kept else f"other {n}" for n in node.output]
        for value in model.graph.value_info:
            value.name = f"other {value.name}"

    with Model(altered(form_folder("fp32"), rename), threads=2) as other:
        diff = diff_models(form_model("fp32"), other, TOKENS)
    assert [value.name for value in diff.values] == ["logits"]
    assert len(diff.only_in_base) == len(diff.only_in_other) > 10


# --- parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("/model/layers.31/mlp/Mul/output_0", 31),
        ("transformer.h.3.attn", 3),
        ("model.layer.7.out", 7),
        ("/blocks.2/x", 2),
        ("/model/embed_tokens/Gather/output_0", None),
        ("logits", None),
        ("players.4", None),
    ],
)
def test_layer_of_a_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_errors_by_hand() -> None:
    relative, largest, cosine = _errors(np.array([3.0, 4.0, 1.0]), np.array([3.0, 4.0, 0.0]))
    assert (relative, largest) == (0.2, 1.0)
    assert cosine == pytest.approx(25 / np.sqrt(26 * 25))
    assert _errors(np.zeros(3), np.zeros(3)) == (0, 0, 1)
    assert _errors(np.ones(3), np.zeros(3)) == (np.inf, 1, 0)
    assert _errors(np.array([]), np.array([])) == (0, 0, 1)


def test_errors_with_infinities() -> None:
    masked = np.array([-np.inf, 1.0, np.nan])
    assert _errors(masked, masked) == (0, 0, 1)
    assert _errors(masked, np.array([-np.inf, 1.0, 2.0]))[0] == np.inf
    assert _errors(np.array([np.inf]), np.array([-np.inf]))[0] == np.inf


def test_errors_of_extreme_and_integer_values() -> None:
    huge = np.full(4, 3e38, np.float32)
    assert _errors(huge, -huge)[0] == pytest.approx(2)
    assert _errors(np.array([1e-40], np.float32), np.array([2e-40], np.float32))[0] == pytest.approx(0.5, rel=1e-4)
    assert _errors(np.array([0], np.uint8), np.array([255], np.uint8)) == (1.0, 255.0, 0.0)
