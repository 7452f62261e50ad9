"""The float model to quantise, read one matrix at a time from a Hugging Face checkpoint or a decoder folder.

Both become a graph with hollow matrices. A hollow matrix is address space without memory, from which the compiler
learns the shape and the type. Its contents are computed from the mapped files on demand and are not kept.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from genai.common.host_memory import ReservedMemory
from genai.kernels.weights import QuantizedWeight, pack_bits, uniform_format, uniform_grid
from genai.quant.block_types import type_of
from genai.quant.grids import in_parallel, row_slices

from ..common.paths import expanded
from ..convert.build import plan_build
from ..convert.checkpoint import is_checkpoint
from ..convert.folder import write_model_folder
from ..convert.graph_writer import HollowFile
from ..convert.options import ExportOptions
from ..convert.weights import Chunks
from ..errors import InputError, UnsupportedModelError
from ..lowering.rules import find_stored_weights
from ..models.config import Config
from ..models.decoder_file import read_decoder_file
from ..models.decoder_graph import whole_number
from ..models.folders import folder_errors
from ..onnx.ir import DataType, Graph, Node, OnnxTensor, make_node
from ..onnx.storage import ExternalStorage
from ..ops.weights import BLOCK_PRODUCT
from ..optimize.shapes import infer_shapes
from ..optimize.simplify import remove_dead_code
from .sites import FLOATS, LEAST_ELEMENTS, MIXTURE, MTP_PREFIX, Site, find_sites

Loader = Callable[[], NDArray[np.float32]]
# Number of rows dequantised at a time.
_PART_ROWS = 4096


class FloatGraph:
    """The graph of a decoder, or of its MTP head, in floats.

    Args:
        source: the path as the caller passed it.
        config: configuration of the folder in which the graph is the decoder.
        chunks: tensors that the graph's data file has holes for, by name.
        requantize: True to accept weights that are already quantised, and to use their dequantised values.
        decoder: the graph of the decoder if this is the graph of its MTP head. Initializers of the head that are not
            those of the decoder are renamed to start with "mtp.", so that names identify matrices.

    Attributes:
        source, config: as passed.
        model: the exported graph with hollow matrices; see `stored`.
        shared: names of the initializers that an MTP head reads from the decoder's files.
        sites: the matrices to quantise.
        shared_sites: the matrices of an MTP head that are sites of the decoder.
        requantized: number of matrices that were already quantised.

    Raises:
        ModelFolderError, GraphError: the graph cannot be read.
        InputError: the model is already quantised, and `requantize` is False.
        UnsupportedModelError: QMoE does not support a mixture of experts.
    """

    def __init__(
        self, source: Path, config: Config, chunks: Mapping[str, Chunks], *, requantize: bool,
        decoder: FloatGraph | None = None,
    ) -> None:  # fmt: skip
        self.source, self.config = source, config
        self.sites: tuple[Site, ...] = ()
        self._loaders: dict[str, Loader] = {}
        self._holes, self._chunks = chunks, dict[str, Chunks]()
        self._memory: list[ReservedMemory] = []
        self.requantized = 0
        try:
            self._open(requantize, decoder)
        except BaseException:
            self.close()
            raise

    def _open(self, requantize: bool, decoder: FloatGraph | None) -> None:
        with folder_errors(self.config.folder):
            self.model = read_decoder_file(self.config)
            infer_shapes(self.model)
        graph = self.model.graph
        self._places = {
            name: (tensor.storage.entries["location"], tensor.storage.offset)
            for name, tensor in graph.initializers.items()
            if isinstance(tensor.storage, ExternalStorage)
        }
        self.shared: set[str] = set()
        if decoder is not None:
            self.shared = {name for name, _ in self._places.items() & decoder._places.items()}
            new_names = {name: MTP_PREFIX + name.removeprefix("model.") for name in graph.initializers}
            new_names |= {name: name for name in self.shared}
            self._holes = {new_names[name]: one for name, one in self._holes.items()}
            self._holes |= {name: one for name, one in decoder._holes.items() if name in self.shared}
            for name, new in new_names.items():
                if name != new:
                    graph.rename(name, new)
        for name, one in self._holes.items():
            self._chunks[name] = one
            self._loaders[name] = lambda one=one: np.concatenate(list(one))  # type: ignore[misc]
        if quantized := [node for node in graph.nodes if _is_quantized(graph, node)]:
            self._dequantize(quantized, requantize)
        self._widen()
        infer_shapes(self.model)
        _refuse_experts(graph)
        known = set() if decoder is None else {site.name for site in decoder.sites}
        sites = find_sites(graph, self.config.model.decoder.names)
        self.sites = tuple(site for site in sites if site.name not in known)
        self.shared_sites = tuple(site for site in sites if site.name in known)
        self._fill_others()

    def _fill_others(self) -> None:
        """Read all hollow tensors except sites: routers, vectors, and matrices that are too small to quantise."""
        initializers = self.model.graph.initializers
        for name in self._loaders.keys() - {site.name for site in (*self.sites, *self.shared_sites)}:
            if name in initializers:
                initializers[name] = OnnxTensor.from_array(name, self.stored(name), initializers[name].dtype)
            del self._loaders[name]
            self._chunks.pop(name, None)

    def stored(self, name: str) -> NDArray[np.float32]:
        """Return a matrix in the layout of its initializer, as float32."""
        loader, tensor = self._loaders.get(name), self.model.graph.initializers[name]
        if loader is not None:
            return loader().reshape(tensor.shape)
        array = tensor.array()
        return array if array.dtype == np.float32 else array.astype(np.float32)

    def narrow_weight(self, site: Site) -> NDArray[Any]:
        """Return a site's matrix [rows, columns] in the file's dtype; a view if the matrix is stored in one piece."""
        parts = self._parts(site)
        return parts[0][1] if len(parts) == 1 else self.weight(site)

    def weight(self, site: Site) -> NDArray[np.float32]:
        """Return a site's matrix as float32 [rows, columns], possibly a view of the file."""
        parts = self._parts(site)
        if len(parts) == 1 and parts[0][1].dtype == np.float32 and parts[0][1].flags.c_contiguous:
            return parts[0][1]
        matrix = np.empty((site.rows, site.columns), np.float32)

        def fill(part: tuple[int, NDArray[Any]]) -> None:
            first, rows = part
            matrix[first : first + len(rows)] = rows

        for _ in in_parallel(fill, _pieces(parts)):
            pass
        return matrix

    def check(self, site: Site) -> None:
        """Check that a site's matrix can be quantised.

        Raises:
            InputError: the matrix contains NaN or infinity; the message names the row and the block of 32.
        """

        def look(part: tuple[int, NDArray[Any]]) -> None:
            _require_finite(site, part[0], part[1].astype(np.float32, copy=False))

        for _ in in_parallel(look, _pieces(self._parts(site))):
            pass

    def _parts(self, site: Site) -> list[tuple[int, NDArray[Any]]]:
        """Return the parts of a matrix in the file, each as the index of its first row and its rows."""
        chunks = self._chunks.get(site.name)
        if chunks is None or chunks.transposed != site.inputs_first:
            stored = self.stored(site.name)
            return [(0, stored.T if site.inputs_first else stored.reshape(site.rows, site.columns))]
        parts, first = [], 0
        for _, matrix in chunks.matrices():
            parts.append((first, matrix))
            first += len(matrix)
        return parts

    def hollow(self) -> list[str]:
        """Return the names of the initializers whose elements are computed on demand."""
        return list(self._loaders)

    def release(self, name: str) -> None:
        """Release the memory pages of a matrix that is currently not needed."""
        self.model.graph.initializers[name].release_pages()

    def close(self) -> None:
        """Free address space."""
        self._loaders.clear()
        self._chunks.clear()
        for memory in self._memory:
            memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hollow(self, name: str, shape: tuple[int, ...], loader: Loader) -> OnnxTensor:
        memory = ReservedMemory(4 * int(np.prod(shape, dtype=np.int64)))
        self._memory.append(memory)
        self._loaders[name] = loader
        return OnnxTensor.from_array(name, memory.bytes.view(np.float32).reshape(shape))

    def _widen(self) -> None:
        """Replace matrices of narrow floats and their Casts to float32 with hollow float32 matrices."""
        graph = self.model.graph
        for node in [node for node in graph.nodes if node.op_type == "Cast"]:
            tensor = graph.initializers.get(node.input(0))
            if tensor is None or tensor.dtype not in FLOATS or tensor.num_elements < LEAST_ELEMENTS:
                continue
            if node.attribute("to") != DataType.FLOAT:
                continue
            if tensor.name.startswith(MTP_PREFIX):
                graph.rename(node.output(0), MTP_PREFIX + node.output(0).removeprefix("model."))
            name = node.output(0)
            graph.remove_nodes([node])
            graph.add_initializer(self._hollow(name, tensor.shape, lambda tensor=tensor: _wide(tensor)))  # type: ignore[misc]
            if not graph.is_used(tensor.name):
                graph.remove_initializer(tensor.name)

    def _dequantize(self, nodes: list[Node], requantize: bool) -> None:
        kinds = sorted({node.op_type for node in nodes})
        _refuse_quantized(self.source, f"{len(nodes)} nodes ({', '.join(kinds)})", requantize)
        if unknown := [kind for kind in kinds if kind not in (BLOCK_PRODUCT, "GatherBlockQuantized")]:
            raise UnsupportedModelError(
                f"{self.source} has quantised weights in {', '.join(unknown)}",
                f"--requantize supports only {BLOCK_PRODUCT} and GatherBlockQuantized",
                "use the float model",
            )
        self.requantized = len(nodes)
        float_names: dict[str, str] = {}
        for node in nodes:
            self._replace_packed(node, float_names)
        # The Casts of the old scales have the names that new Casts need.
        remove_dead_code.apply(self.model)

    def _replace_packed(self, node: Node, float_names: dict[str, str]) -> None:
        graph, is_product = self.model.graph, node.op_type == BLOCK_PRODUCT
        data, scales, points = (1, 2, 3) if is_product else (0, 2, 3)
        tensor = _packed_source(graph, node.input(data))
        side = [_behind_cast(graph, node.input(index)) if node.input(index) else None for index in (scales, points)]
        if tensor is None or side[0] is None:
            raise UnsupportedModelError(
                f"{node.op_type} {node.name!r}: the weights are not initializers", "only initializers can be read",
                "use the float model",
            )  # fmt: skip
        bits = whole_number(node, "bits", 4)
        block = whole_number(node, "block_size", 32)
        rows = whole_number(node, "N", 1) if is_product else tensor.shape[0]
        columns = whole_number(node, "K", 1) if is_product else tensor.nbytes // rows * 8 // bits
        if tensor.name not in float_names:
            # onnxruntime's quantisers append the format to the name: weight_Q4, weight_Q4G32.
            name = graph.fresh_name(re.sub(rf"_Q{bits}(G\d+)?$", "", tensor.name))
            float_names[tensor.name] = name

            def load() -> NDArray[np.float32]:
                scales, points = side
                assert scales is not None
                return _dequantized(tensor, scales.array(), points, rows, columns, bits, block)

            graph.add_initializer(self._hollow(name, (columns, rows), load))
        name = float_names[tensor.name]
        if is_product:
            product = [make_node("MatMul", [node.input(0), name], node.outputs, name=node.name)]
            if node.input(5):
                plain = graph.fresh_name(f"{node.output(0)}/product")
                product = [
                    make_node("MatMul", [node.input(0), name], [plain], name=node.name),
                    make_node("Add", [plain, node.input(5)], node.outputs, name=f"{node.name}/bias"),
                ]
            graph.replace_node(node, *product)
            return
        turned = graph.fresh_name(f"{name}/turned")
        graph.replace_node(
            node,
            make_node("Transpose", [name], [turned], name=turned, perm=[1, 0]),
            make_node("Gather", [turned, node.input(1)], node.outputs, name=node.name, axis=0),
        )


class FloatModel(FloatGraph):
    """A decoder in floats, with its MTP head.

    Args:
        source: a Hugging Face checkpoint folder, or a model folder.
        requantize: True to accept weights that are already quantised, and to use their dequantised values.

    Attributes:
        folder: a model folder with a configuration and a tokenizer.
        head: the graph of the MTP head; None if there is none.
        remarks: remarks to show to the user.

    Raises:
        ModelFolderError, ConfigError, InputError, GraphError: the model cannot be read.
        InputError: the model is already quantised, and `requantize` is False.
        UnsupportedModelError: there is nothing to quantise, or QMoE does not support a mixture of experts.
    """

    def __init__(self, source: str | Path, *, requantize: bool = False) -> None:
        path = expanded(source)
        self.remarks: list[str] = []
        self.head: FloatGraph | None = None
        self._cleanup = ExitStack()
        with ExitStack() as stack:
            folder, chunks, head_chunks = path, dict[str, Chunks](), dict[str, Chunks]()
            if is_checkpoint(path):
                parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="genai-quantize-")))
                folder, chunks, head_chunks = self._hollow_folder(path, parent, requantize)
            config = Config(folder)
            self.folder = config.folder  # the path of one of several graphs stands for its folder
            super().__init__(path, config, chunks, requantize=requantize)
            stack.callback(super().close)
            if not self.sites:
                raise UnsupportedModelError(
                    f"{path}: the model has no float matrix that can be quantised",
                    "only constant matrices of matmuls and token embeddings are quantised",
                    "use a float decoder, or a Hugging Face checkpoint",
                )
            if (head_config := config.for_mtp()) is not None:
                self.head = FloatGraph(path, head_config, head_chunks, requantize=requantize, decoder=self)
                stack.callback(self.head.close)
            if count := self.requantized + (0 if self.head is None else self.head.requantized):
                self.remarks.append(
                    f"{path} is already quantised: its {count} matrices are used as the float model, and their "
                    "existing error is not measured"
                )
            self._cleanup = stack.pop_all()

    @property
    def all_sites(self) -> tuple[Site, ...]:
        """The matrices of the decoder, and those that only the MTP head has."""
        return (*self.sites, *(() if self.head is None else self.head.sites))

    def close(self) -> None:
        """Delete temporary files and free address space."""
        self._cleanup.close()

    def _hollow_folder(
        self, source: Path, parent: Path, requantize: bool
    ) -> tuple[Path, dict[str, Chunks], dict[str, Chunks]]:
        """Write the folder that `genai build --precision fp32` writes, but with holes in place of large tensors.

        Returns:
            The folder, and the chunks of the omitted tensors of the decoder and of its MTP head, by name.
        """
        plan = plan_build(source, ExportOptions(precision="fp32"))
        if quantized := {kind.name for name in plan.weights if (kind := type_of(np.empty(0, plan.weights.kind(name))))}:
            _refuse_quantized(source, f"weights in {', '.join(sorted(quantized))}", requantize)
        self.remarks += plan.remarks
        files: list[HollowFile] = []

        def opened(path: Path) -> HollowFile:
            files.append(HollowFile(path))
            return files[-1]

        folder = write_model_folder(
            parent / "model", plan.spec, plan.options, plan.weights,
            tokenizer_dir=plan.checkpoint.folder, search=plan.search, open_data=opened,
        )  # fmt: skip
        return folder, files[0].hollow, files[1].hollow if len(files) > 1 else {}


def _refuse_quantized(source: Path, evidence: str, requantize: bool) -> None:
    if not requantize:
        raise InputError(
            f"{source} is already quantised: {evidence}",
            "quantising it again would add a second error to the first",
            "use the float model, or set --requantize; the report then measures the error against this model",
        )


def _is_quantized(graph: Graph, node: Node) -> bool:
    """Return True if a node reads an integer matrix, packed or in DequantizeLinear."""
    if node.op_type == "DequantizeLinear":
        tensor = graph.initializers.get(node.input(0))
        return tensor is not None and len(tensor.shape) > 1
    return bool(find_stored_weights(node.op_type).packed)


def _packed_source(graph: Graph, name: str) -> OnnxTensor | None:
    """Return the initializer of packed bytes, which may pass through a Reshape."""
    while (tensor := graph.initializers.get(name)) is None:
        node = graph.producer(name)
        if node is None or node.op_type != "Reshape":
            return None
        name = node.input(0)
    return tensor


def _behind_cast(graph: Graph, name: str) -> OnnxTensor | None:
    """Return a constant as it is stored, before any Cast that widens narrow scales."""
    if (node := graph.producer(name)) is not None and node.op_type == "Cast":
        name = node.input(0)
    return graph.constant_tensor(name)


def _dequantized(
    tensor: OnnxTensor,
    scales: NDArray[Any],
    points: OnnxTensor | None,
    rows: int,
    columns: int,
    bits: int,
    block: int,
) -> NDArray[np.float32]:
    """Return the dequantised matrix as float32 [columns, rows]."""
    fractions = points is not None and points.dtype in FLOATS  # zero points that are not integers
    weight_format = uniform_format(bits, block, zero_points=points is not None and not fractions)
    data, scales = _codes(tensor, rows, bits), scales.reshape(rows, -1)
    # Without zero points the middle code represents 0, except in the type uint4, in which code 0 represents 0.
    grid = uniform_grid(bits, centred=points is None and tensor.dtype != DataType.UINT4)
    zeros = (None, None) if points is None or fractions else (scales, _codes(points, rows, bits))
    arrays = QuantizedWeight.from_packed(weight_format, rows, columns, data, grid, scales, None, *zeros)
    lowest = None
    if points is not None and fractions:
        lowest = points.array().astype(np.float32).reshape(rows, -1) * scales.astype(np.float32)
    result = np.empty((columns, rows), np.float32)
    for first in range(0, rows, _PART_ROWS):
        part = slice(first, min(first + _PART_ROWS, rows))
        values = arrays.dequantize_rows(part)
        if lowest is not None:
            values = values - np.repeat(lowest[part], block, axis=1)[:, :columns]
        result[:, part] = values.T
    return result


def _codes(tensor: OnnxTensor, rows: int, bits: int) -> NDArray[np.uint8]:
    """Return codes or zero points, packed row by row. Signed values are offset to the middle of the range."""
    half = 1 << (bits - 1)
    if tensor.dtype in (DataType.INT4, DataType.UINT4):  # packed without a gap between rows
        numbers = tensor.array().astype(np.int8).reshape(rows, -1)
        return pack_bits((numbers + (half if tensor.dtype == DataType.INT4 else 0)).astype(np.uint8), bits)
    packed = np.asarray(tensor.raw()).view(np.uint8).reshape(rows, -1)
    return packed ^ np.uint8(half) if tensor.dtype == DataType.INT8 else packed


def _pieces(parts: list[tuple[int, NDArray[Any]]]) -> list[tuple[int, NDArray[Any]]]:
    """Split parts into pieces that fit into a core's cache."""
    return [(first + rows.start, part[rows]) for first, part in parts for rows in row_slices(*part.shape)]


def _require_finite(site: Site, first: int, rows: NDArray[np.float32]) -> None:
    if not np.isfinite(rows).all():
        row, column = np.argwhere(~np.isfinite(rows))[0].tolist()
        expert, row = divmod(first + row, site.rows // (site.experts or 1))
        of = f" of expert {expert}" if site.experts else ""
        raise InputError(
            f"{site.name} contains NaN or infinity in row {row}{of}, column {column} (block {column // 32}, at 32 "
            "columns per block)",
            "NaN or infinity in a weight makes all logits wrong",
            "check the training run or the download that produced these weights",
        )


def _wide(tensor: OnnxTensor) -> NDArray[np.float32]:
    result: NDArray[np.float32] = tensor.array().astype(np.float32)
    return result


def _refuse_experts(graph: Graph) -> None:
    """Raise if QMoE does not support a mixture. QMoE normalises routing weights and has gate and up in one matrix."""
    for node in graph.nodes:
        if node.key == MIXTURE and not (int(node.attribute("normalize_routing_weights", 0)) and not node.input(6)):
            raise UnsupportedModelError(
                f"{node.op_type} {node.name!r}: the routing weights are not normalised, or the experts have a "
                "third matrix",
                "QMoE, the operator for quantised experts, supports neither",
                "export the model with genai build, which writes mixtures in a supported form",
            )
