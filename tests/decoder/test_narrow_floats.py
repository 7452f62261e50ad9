"""Graphs of float16 and bfloat16 that run node by node, as onnxruntime-genai's builder makes them for the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai as og

FLOAT = TensorProto.FLOAT
NARROW = {"float16": (TensorProto.FLOAT16, np.float16), "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16)}


def narrow_folder(source: Path, folder: Path, kind: str, *, widened: bool) -> Path:
    """A folder with weights of that precision; all of the graph is of that type, or with `widened` float32."""
    code, dtype = NARROW[kind]
    shutil.copytree(source, folder)
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == FLOAT:
            rounded = numpy_helper.to_array(tensor).astype(dtype)
            array = rounded.astype(np.float32) if widened else rounded.view(np.uint16)
            made = helper.make_tensor(tensor.name, FLOAT if widened else code, array.shape, array.tobytes(), raw=True)
            tensor.CopyFrom(made)
    if not widened:
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            if value.type.tensor_type.elem_type == FLOAT:
                value.type.tensor_type.elem_type = code
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i == FLOAT:
                    attribute.i = code
    # Whatever is no row per token keeps a graph from being flattened.
    model.graph.node.append(helper.make_node("ReduceSum", ["input_ids"], ["count"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("count", TensorProto.INT64, []))
    onnx.save(model, folder / "model.onnx")
    return folder


@pytest.mark.parametrize("kind", NARROW)
def test_they_are_computed_in_float32(kind: str, form_folder: Callable[..., Path], tmp_path: Path) -> None:
    source = form_folder("fp32")
    logits = []
    for widened in (True, False):
        with og.Model(narrow_folder(source, tmp_path / str(widened), kind, widened=widened), quiet=True) as model:
            assert not model.info.flattened
            assert model.info.kv_dtype == "fp32"
            generator = og.Generator(model, og.GeneratorParams(model))
            generator.append_tokens([20, 21, 22, 23])
            generator.append_tokens([24])
            logits.append(generator.get_logits())
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)
    with og.Model(source) as model:
        generator = og.Generator(model, og.GeneratorParams(model))
        generator.append_tokens([20, 21, 22, 23, 24])
        distance = np.abs(generator.get_logits() - logits[1]).max()
    assert 0 < distance < 0.1
