"""A writer for the quantised model's folder: the float graph with packed matrices, and the other files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..convert.folder import CONFIG, MODEL, copy_tokenizer
from ..models.exported_config import ExportedModel
from ..onnx.deserialize import Deserializer
from ..onnx.external_data import ExternalData
from ..onnx.ir import DataType, OnnxModel, OnnxTensor
from ..onnx.node import MS, OURS
from ..onnx.own_functions import OLDEST_OPSET, own_functions
from ..onnx.writer import write_model
from ..optimize.simplify import remove_dead_code
from .matrix_quantizer import MatrixQuantizer
from .packing import MixturePacking, Packing
from .sites import MIXTURE_MATRICES


def write_folder(quantizer: MatrixQuantizer, folder: Path, *, accuracy_level: int) -> int:
    """Write the model, its configuration and its tokenizer to an existing folder.

    Returns:
        The size in bytes of all tensors, without the padding that aligns them in the file.

    Raises:
        OSError: a file cannot be written.
        ModelFolderError: a file of the model cannot be written.
    """
    source = quantizer.source
    model = source.model.copy()
    _replace_matrices(quantizer, model, accuracy_level)
    for name, array in quantizer.vectors().items():
        before = model.graph.initializers[name]
        model.graph.initializers[name] = OnnxTensor.from_array(name, array, before.dtype)
    remove_dead_code.apply(model)
    for name in [name for name in model.graph.initializers if not model.graph.is_used(name)]:
        model.graph.remove_initializer(name)
    for name in source.hollow():
        if name in model.graph.initializers:
            model.graph.initializers[name] = _computed_when_written(model.graph.initializers[name], source.stored)
    model.graph.invalidate()
    model.opset_imports.setdefault(MS, 1)
    _declare_own(model)
    exported = source.config.exported
    target = folder / (source.config.model.decoder.filename if exported is None else MODEL)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_model(model, target, external_data=f"{target.name}.data")
    if exported is None:
        _copy_config(source.folder / CONFIG, folder / CONFIG)
    else:
        write_config(exported, folder / CONFIG)
    copy_tokenizer(source.folder, folder)
    return sum(tensor.nbytes for tensor in model.graph.initializers.values())


def _copy_config(source: Path, target: Path) -> None:
    """Copy a configuration, without the draft model and the MTP head, whose files are not part of the output."""
    config = json.loads(source.read_text(encoding="utf-8"))
    if not [name for name in ("draft", "mtp") if config["model"].pop(name, None) is not None]:
        shutil.copyfile(source, target)
    else:
        target.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def write_config(model: ExportedModel, target: Path) -> None:
    """Write the configuration of a model that had no genai_config.json. Its embeddings are now part of its graph."""
    block = {name: value for name, value in model.raw["model"].items() if name != "embedding"}
    inputs = {name: value for name, value in block["decoder"]["inputs"].items() if name != "inputs_embeds"}
    block["decoder"] = {**block["decoder"], "filename": MODEL, "inputs": {"input_ids": "input_ids", **inputs}}
    target.write_text(json.dumps({**model.raw, "model": block}, indent=4) + "\n", encoding="utf-8")


def _replace_matrices(quantizer: MatrixQuantizer, model: OnnxModel, accuracy_level: int) -> None:
    mixtures: dict[str, tuple[Any, dict[int, Packing]]] = {}
    for site in quantizer.source.sites:
        choice, packed = quantizer.choices[site], quantizer.packed(site)
        if not choice.bits or packed is None:
            continue
        packing = Packing(model.graph, site, choice, packed, accuracy_level)
        if site.mixture is None:
            packing.replace()
            continue
        node = site.mixture
        index = next(position for position in MIXTURE_MATRICES if node.input(position) == site.name)
        mixtures.setdefault(node.output(0), (node, {}))[1][index] = packing
    for node, packings in mixtures.values():
        MixturePacking(model.graph, node, packings).replace()


def _declare_own(model: OnnxModel) -> None:
    """If a model uses our operators, define them as functions, so that other runtimes can run it."""
    if not any(node.domain == OURS for node in model.graph.nodes):
        return
    model.opset_imports.setdefault(OURS, 1)
    reader = Deserializer(ExternalData(None), model.ir_version)
    for proto in own_functions(model.opset_imports.get("", OLDEST_OPSET)):
        function = reader.function(proto)
        model.functions[function.key] = function


@dataclass(frozen=True)
class _ComputedStorage:
    """Elements that are recomputed each time they are read."""

    make: Callable[[], NDArray[Any]]

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        return np.ascontiguousarray(self.make()).reshape(-1)

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        return self.elements(dtype, count).view(np.uint8)


def _computed_when_written(tensor: OnnxTensor, load: Callable[[str], NDArray[Any]]) -> OnnxTensor:
    return OnnxTensor(tensor.name, tensor.dtype, tensor.shape, _ComputedStorage(lambda: load(tensor.name)))
