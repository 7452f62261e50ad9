"""Graphs of the shapes of ResNet-50, MobileNetV2 and BERT: both sessions agree on what we write, and it is as near to
the float model as what onnxruntime's quantiser writes. Small ones always; the full sizes are slow.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

import genai.compat.onnxruntime_quantization as ours

from . import shapes
from .conftest import Feeds, apart, run_here, run_there

pytestmark = pytest.mark.oracle
theirs = pytest.importorskip("onnxruntime.quantization")


def pictures(count: int, size: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [{"x": random.standard_normal((1, 3, size, size), np.float32)} for _ in range(count)]


def sentences(count: int, words: int, length: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {"ids": random.integers(0, words, (1, length)), "mask": np.arange(length)[None] < random.integers(4, length)}
        for _ in range(count)
    ]


def as_numbers(feeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value.astype(np.int64) if value.dtype == bool else value for name, value in one.items()} for one in feeds
    ]


SMALL = {
    "resnet": (partial(shapes.resnet, 8, (1, 1, 1, 1), 10, 32), partial(pictures, size=32)),
    "mobilenet": (partial(shapes.mobilenet, 4, 3, 10, 32), partial(pictures, size=32)),
    "bert": (partial(shapes.bert, 32, 2, 4, 100), lambda count, seed=0: as_numbers(sentences(count, 100, 12, seed))),
}
FULL = {
    "resnet50": (shapes.resnet, partial(pictures, size=224)),
    "mobilenet_v2": (shapes.mobilenet, partial(pictures, size=224)),
    "bert_base": (shapes.bert, lambda count, seed=0: as_numbers(sentences(count, 30522, 32, seed))),
}
WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "QDQ": {},
    "QDQ by channel": {"per_channel": True},
    "QOperator by channel": {"per_channel": True, "quant_format": "QOperator"},
}


def quantise(library: Any, way: str, source: Any, target: Any, feeds: list[Any]) -> None:
    if way == "dynamic":
        library.quantize_dynamic(str(source), str(target), op_types_to_quantize=["MatMul", "Gather"])
        return
    options = dict(WAYS[way])
    if "quant_format" in options:
        options["quant_format"] = library.QuantFormat[options["quant_format"]]
    kinds = library.QuantType
    library.quantize_static(
        str(source), str(target), Feeds(feeds), activation_type=kinds.QUInt8, weight_type=kinds.QInt8, **options
    )


def compare(case: Any, way: str, folder: Any, count: int) -> None:
    make, data = case
    model = make()
    source = folder / "model.onnx"
    onnx.save(model, source)
    for library, name in ((theirs, "theirs"), (ours, "ours")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of masks, see test_calibration
            quantise(library, way, source, folder / f"{name}.onnx", data(count))
    trials = data(4, seed=77)
    expected = [run_there(source, feed) for feed in trials]
    there = [run_there(folder / "ours.onnx", feed) for feed in trials]
    here = [run_here(folder / "ours.onnx", feed) for feed in trials]
    peer = [run_there(folder / "theirs.onnx", feed) for feed in trials]
    error, their_error = apart(there, expected), apart(peer, expected)
    assert error <= 1.1 * their_error, (error, their_error)
    # The sessions round a few values in the middle between two integers differently, and that goes on from there: on
    # ResNet-50 onnxruntime with its optimisations differs from itself without by more than from us. It stays below what
    # quantising costs.
    assert apart(here, there) <= 0.9 * error + 1e-6, (apart(here, there), error)
    assert abs(apart(here, expected) - error) <= 0.1 * error + 1e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMALL)
def test_small(name, way, tmp_path):
    if way == "dynamic" and name != "bert":
        pytest.skip("images have no products of matrices but the last")
    compare(SMALL[name], way, tmp_path, 8)


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FULL)
def test_full_size(name, way, tmp_path):
    if way == "dynamic" and name != "bert_base":
        pytest.skip("images have no products of matrices but the last")
    compare(FULL[name], way, tmp_path, 2)
