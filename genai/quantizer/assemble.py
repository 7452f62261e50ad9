"""The quantised model's folder: the float graph with packed matrices in place of floats, beside its other files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.blocks import QuantizedBlocks, num_blocks

from ..builder.folder import CONFIG, copy_tokenizer
from ..graph.ir import DataType, Graph, Node, OnnxTensor, make_node
from ..graph.node import MS
from ..graph.rewrites.simplify import remove_dead_code
from ..graph.writer import write_model
from ..ops.products import BLOCK_PRODUCT
from .choices import FormatChoice
from .quantising import Quantising
from .sites import Site


def write_folder(quantising: Quantising, folder: Path, *, accuracy_level: int) -> int:
    """Write the model, its configuration and its tokenizer into a folder that exists.

    Returns:
        Bytes of all tensors, without what aligns them in the file.

    Raises:
        OSError: it cannot be written. ModelFolderError: the model's files cannot.
    """
    source = quantising.source
    model = source.model.copy()
    for site in source.sites:
        choice, packed = quantising.choices[site], quantising.packed(site)
        if choice.bits and packed is not None:
            _Packing(model.graph, site, choice, packed, accuracy_level).replace()
    for name, array in quantising.vectors().items():
        before = model.graph.initializers[name]
        model.graph.initializers[name] = OnnxTensor.from_array(name, array, before.dtype)
    remove_dead_code.apply(model)
    for name in [name for name in model.graph.initializers if not model.graph.is_used(name)]:
        model.graph.remove_initializer(name)
    for name in source.hollow():
        if name in model.graph.initializers:
            model.graph.initializers[name] = _made_when_written(model.graph.initializers[name], source.stored)
    model.graph.invalidate()
    model.opset_imports.setdefault(MS, 1)
    name = source.config.model.decoder.filename
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_model(model, target, external_data=f"{target.name}.data")
    shutil.copyfile(source.folder / CONFIG, folder / CONFIG)
    copy_tokenizer(source.folder, folder)
    return sum(tensor.nbytes for tensor in model.graph.initializers.values())


@dataclass(frozen=True)
class _MadeStorage:
    """Elements that are made each time they are asked for."""

    make: Callable[[], NDArray[Any]]

    def elements(self, dtype: DataType, count: int) -> NDArray[Any]:
        return np.ascontiguousarray(self.make()).reshape(-1)

    def raw(self, dtype: DataType, count: int) -> NDArray[np.uint8]:
        return self.elements(dtype, count).view(np.uint8)


def _made_when_written(tensor: OnnxTensor, load: Callable[[str], NDArray[Any]]) -> OnnxTensor:
    return OnnxTensor(tensor.name, tensor.dtype, tensor.shape, _MadeStorage(lambda: load(tensor.name)))


@dataclass(frozen=True)
class _Packing:
    """One matrix in the graph."""

    graph: Graph
    site: Site
    choice: FormatChoice
    packed: QuantizedBlocks
    accuracy_level: int

    def replace(self) -> None:
        """Products and lookups read the packed matrix."""
        names = self._initializers()
        for node in self.site.products:
            self._replace_product(self._own(node), names)
        for node in self.site.lookups:
            self._replace_lookup(self._own(node), names)

    def _own(self, node: Node) -> Node:
        """The copied graph's node."""
        own = self.graph.producer(node.output(0))
        assert own is not None
        return own

    def _initializers(self) -> list[str]:
        """Names of bytes, scales and zero points, as onnxruntime-genai's builder names them."""
        base, packed = self.site.base_name, self.packed
        data, scales, points = f"{base}_Q{packed.bits}", f"{base}_scales", f"{base}_zero_points"
        # A table that is only looked up is stored as the lookup wants it.
        rows = packed.data if self.site.products else packed.data.reshape(packed.n, -1)
        self.graph.add_initializer(OnnxTensor.from_array(data, rows))
        names = [data, scales]
        narrow = packed.scales.astype(np.float16)
        if self.site.half:
            self.graph.add_initializer(OnnxTensor.from_array(scales, narrow))
        elif self.choice.half_scales and np.array_equal(narrow.astype(np.float32), packed.scales):
            self.graph.add_initializer(OnnxTensor.from_array(f"{scales}/half", narrow))
            cast = make_node("Cast", [f"{scales}/half"], [scales], name=f"{scales}/Cast", to=int(DataType.FLOAT))
            self.graph.nodes.insert(0, cast)
            self.graph.invalidate()
        else:
            self.graph.add_initializer(OnnxTensor.from_array(scales, packed.scales))
        if packed.zero_points is not None:
            self.graph.add_initializer(OnnxTensor.from_array(points, packed.zero_points))
            names.append(points)
        return names

    def _replace_product(self, node: Node, names: list[str]) -> None:
        bias = node.input(2) if node.op_type == "Gemm" else ""
        result = node.output(0)
        product = self.graph.fresh_name(f"{result}/product") if bias else result
        level = {"accuracy_level": self.accuracy_level} if self.accuracy_level else {}
        made = [
            make_node(
                BLOCK_PRODUCT, [node.input(0), *names], [product], domain=MS, name=f"{node.name}_Q{self.packed.bits}",
                K=self.packed.k, N=self.packed.n, bits=self.packed.bits, block_size=self.packed.block_size, **level,
            )
        ]  # fmt: skip
        if bias:
            made.append(make_node("Add", [product, bias], [result], name=f"{node.name}/bias"))
        self.graph.replace_node(node, *made)

    def _replace_lookup(self, node: Node, names: list[str]) -> None:
        """Rows [vocabulary, bytes] of the same bytes; where blocks are longer than rows, the rest is cut off."""
        packed, graph = self.packed, self.graph
        padded = num_blocks(packed.k, packed.block_size) * packed.block_size
        rows, nodes = names[0], []
        if self.site.products:
            shape = graph.add_constant(f"{node.name}/shape", np.array([packed.n, padded * packed.bits // 8], np.int64))
            rows = graph.fresh_name(f"{names[0]}/rows")
            nodes.append(make_node("Reshape", [names[0], shape], [rows], name=rows))
        sides = names[1:]
        result = node.output(0)
        whole = result if padded == packed.k else graph.fresh_name(f"{result}/padded")
        nodes.append(
            make_node(
                "GatherBlockQuantized", [rows, node.input(1), *sides], [whole], domain=MS,
                name=f"{node.name}BlockQuantized", bits=packed.bits, block_size=packed.block_size, gather_axis=0,
                quantize_axis=1,
            )
        )  # fmt: skip
        if padded != packed.k:
            ends = [
                graph.add_constant(f"{node.name}/{part}", np.array([value], np.int64))
                for part, value in (("first", 0), ("last", packed.k), ("axis", -1))
            ]
            nodes.append(make_node("Slice", [whole, *ends], [result], name=f"{node.name}/Slice"))
        graph.replace_node(node, *nodes)
