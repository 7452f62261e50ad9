"""A LoRA adapter with random factors on every projection of a shape, and onnxruntime-genai's files for this adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

from genai import AdapterFormat
from genai.convert.tensors import tensor_shapes

from .shapes import Shape

RANK = 16
# Small, so that the model's outputs with and without the adapter are similar.
_SPREAD = 0.01
_PREFIX = "base_model.model."


def make_adapter(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the adapter in PEFT's format unless it exists; its folder appears only when complete."""
    if folder.exists():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    factors: dict[str, NDArray[np.float16]] = {}
    for name, size in tensor_shapes(shape.spec).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            continue
        for factor, sizes in (("A", (RANK, size[1])), ("B", (size[0], RANK))):
            values = rng.standard_normal(sizes, np.float32) * _SPREAD
            factors[f"{_PREFIX}{module}.lora_{factor}.weight"] = values.astype(np.float16)
    targets = sorted({name.split(".")[-3] for name in factors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": targets,
              "bias": "none"}  # fmt: skip
    (partial / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(factors, partial / "adapter_model.safetensors")
    return partial.rename(folder)


def factors_of(adapter: Path) -> dict[str, NDArray[np.float32]]:
    """Return the factors, keyed by the input names that onnxruntime-genai's builder gives to its graphs."""
    stored = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removeprefix(_PREFIX).replace(".self_attn.", ".attn.").replace(".weight", ".MatMul.weight"):
            np.ascontiguousarray(values.T.astype(np.float32))
        for name, values in stored.items()
    }  # fmt: skip


def write_adapter_file(adapter: Path, output: Path) -> None:
    """Write the adapter as an `.onnx_adapter` file."""
    AdapterFormat.of(factors_of(adapter)).export_adapter(output)


def add_adapter_inputs(path: Path, adapter: Path) -> None:
    """Add LoRA inputs, of rank 0 by default, to each projection that the adapter has; do not rewrite the weights."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    factors = factors_of(adapter)
    nodes: list[Any] = []
    for node in graph.node:
        nodes.append(node)
        # /model/layers.0/attn/q_proj/MatMul -> model.layers.0.attn.q_proj
        module = node.name.strip("/").replace("/", ".").partition(".MatMul")[0]
        first = f"{module}.lora_A.MatMul.weight"
        if first not in factors or not node.op_type.startswith("MatMul"):
            continue
        second, output, source = first.replace(".lora_A.", ".lora_B."), node.output[0], node.input[0]
        for name, shape in ((first, [factors[first].shape[0], 0]), (second, [0, factors[second].shape[1]])):
            open_ = [size or f"{module}.rank" for size in shape]
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, open_))
            graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, shape, []))
        node.output[0] = f"{output}/base"
        nodes += [
            helper.make_node("MatMul", [source, first], [f"{output}/hidden"], f"{node.name}/lora_A"),
            helper.make_node("MatMul", [f"{output}/hidden", second], [f"{output}/delta"], f"{node.name}/lora_B"),
            helper.make_node("Add", [f"{output}/base", f"{output}/delta"], [output], f"{node.name}/lora_Add"),
        ]
        del factors[first], factors[second]
    if factors:
        raise ValueError(f"{path}: no projection for {next(iter(factors))}")
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)
