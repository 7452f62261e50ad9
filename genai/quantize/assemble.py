"""A writer for the quantised model's folder: the float graph with packed matrices, and the other files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizedWeight

from ..convert.folder import CONFIG, MODEL, copy_tokenizer
from ..models.exported_config import ExportedModel
from ..onnx.deserialize import Deserializer
from ..onnx.external_data import ExternalData
from ..onnx.ir import DataType, OnnxModel, OnnxTensor
from ..onnx.node import MS, OURS
from ..onnx.own_functions import OLDEST_OPSET, own_functions
from ..onnx.reader import read_model
from ..onnx.writer import write_model
from ..optimize.simplify import remove_dead_code
from .choices import FormatChoice
from .matrix_quantizer import MatrixQuantizer
from .packing import MixturePacking, Packing
from .sites import MIXTURE_MATRICES, Site
from .source import FloatGraph

Matrix = tuple[Site, FormatChoice, QuantizedWeight]


def write_folder(
    quantizer: MatrixQuantizer, folder: Path, *, accuracy_level: int, head: MatrixQuantizer | None = None
) -> int:
    """Write the model, its MTP head, its configuration and its tokenizer to an existing folder.

    Args:
        quantizer: the matrices of the decoder.
        folder: the folder.
        accuracy_level: precision to which matmuls may round activations.
        head: the matrices of the MTP head; None if there is none.

    Returns:
        The size in bytes of all tensors, without the padding that aligns them in the file.

    Raises:
        OSError: a file cannot be written.
        ModelFolderError: a file of the model cannot be written.
    """
    source = quantizer.source
    model = _quantized_model(source, quantizer, _matrices(quantizer, source.sites), accuracy_level)
    exported = source.config.exported
    target = folder / (source.config.model.decoder.filename if exported is None else MODEL)
    nbytes = _write_graph(model, target)
    if head is not None:
        matrices = [*_matrices(head, head.source.sites), *_matrices(quantizer, head.source.shared_sites)]
        model = _quantized_model(head.source, head, matrices, accuracy_level)
        nbytes += _write_graph(model, folder / head.source.config.model.decoder.filename, beside=target)
    if exported is None:
        _copy_config(source.config.folder / CONFIG, folder / CONFIG, without=("draft",) if head else ("draft", "mtp"))
    else:
        write_config(exported, folder / CONFIG)
    copy_tokenizer(source.config.folder, folder)
    return nbytes


def _matrices(quantizer: MatrixQuantizer, sites: Iterable[Site]) -> list[Matrix]:
    """Return the quantised matrices of sites of the quantiser's graph, or of another graph that shares them."""
    own = {site.name: site for site in quantizer.source.sites}
    return [
        (site, choice, packed)
        for site in sites
        if (choice := quantizer.choices[own[site.name]]).bits
        and (packed := quantizer.packed(own[site.name])) is not None
    ]


def _quantized_model(
    source: FloatGraph, quantizer: MatrixQuantizer, matrices: Iterable[Matrix], accuracy_level: int
) -> OnnxModel:
    """Return a float graph with quantised matrices; the other hollow tensors are computed when they are written."""
    model = source.model.copy()
    _replace_matrices(model, matrices, accuracy_level)
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
    return model


def _write_graph(model: OnnxModel, target: Path, *, beside: Path | None = None) -> int:
    """Write a graph, and return the size in bytes of its tensors.

    Args:
        model: the graph.
        target: the file.
        beside: a graph in the same folder. Its tensors are not stored again.
    """
    initializers, shared = model.graph.initializers, dict[str, OnnxTensor]()
    if beside is not None and beside.parent == target.parent:
        others = read_model(beside).graph.initializers
        shared = {name: others[name] for name, one in initializers.items() if _is_equal(one, others.get(name))}
    initializers.update(shared)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_model(model, target, external_data=f"{target.name}.data", kept=shared)
    return sum(tensor.nbytes for name, tensor in initializers.items() if name not in shared)


def _is_equal(one: OnnxTensor, other: OnnxTensor | None) -> bool:
    """Return True if two tensors have the same type, shape and elements, and the other one is in an external file."""
    if other is None or not other.is_external or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(one.raw(), other.raw())


def _copy_config(source: Path, target: Path, *, without: Sequence[str]) -> None:
    """Copy a configuration without the blocks of models whose files are not part of the output."""
    config = json.loads(source.read_text(encoding="utf-8"))
    if not [name for name in without if config["model"].pop(name, None) is not None]:
        shutil.copyfile(source, target)
    else:
        target.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def write_config(model: ExportedModel, target: Path) -> None:
    """Write the configuration of a model that had no genai_config.json. Its embeddings are now part of its graph."""
    block = {name: value for name, value in model.raw["model"].items() if name != "embedding"}
    inputs = {name: value for name, value in block["decoder"]["inputs"].items() if name != "inputs_embeds"}
    block["decoder"] = {**block["decoder"], "filename": MODEL, "inputs": {"input_ids": "input_ids", **inputs}}
    target.write_text(json.dumps({**model.raw, "model": block}, indent=4) + "\n", encoding="utf-8")


def _replace_matrices(model: OnnxModel, matrices: Iterable[Matrix], accuracy_level: int) -> None:
    mixtures: dict[str, tuple[Any, dict[int, Packing]]] = {}
    for site, choice, packed in matrices:
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
