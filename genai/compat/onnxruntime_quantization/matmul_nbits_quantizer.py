"""Weights only, in blocks of 4 or 8 bits: products and table look-ups of com.microsoft, or blocked DequantizeLinear.

The names are those of onnxruntime's file of this name. How weights are rounded is in `genai.quant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from genai.common.progress import task
from genai.kernels.weights import BLOCKS, QuantizationError, QuantizedWeight
from genai.quant.methods import InputStatistics

from ...errors import GraphError, InputError, NotSupportedYetError, OptionError, did_you_mean
from ...onnx.ir import Graph, Node, OnnxModel, OnnxTensor, make_node
from ...onnx.node import MS
from ...onnx.reader import MAX_PROTOBUF_BYTES
from ...onnx.types import DataType
from ...onnx.writer import to_proto
from ...ops.weight_spelling import uniform_arrays
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from ...quantize.onnx_graph.selection import chosen_nodes
from ...quantize.onnx_graph.types import QuantFormat
from ...quantize.onnx_graph.weight_methods import METHODS, BlockFormat, BlockMethod, input_statistics
from ...quantize.onnx_graph.writing import weight_bytes, write_quantised
from .onnx_model import ONNXModel

_OPERATORS = {"MatMul": 0, "Gather": 1}
"""What is quantised, and along which axis of the weight blocks lie."""
_BITS = (4, 8)
# DequantizeLinear has blocks since then.
_BLOCKED_OPSET = 21


class WeightOnlyQuantConfig:
    """How weights are quantised.

    Args:
        algorithm: the name of a method.
        quant_format: QOperator, or QDQ for operator sets from 21 on.
        op_types_to_quantize: "MatMul", "Gather"; None = MatMul.
        quant_axes: pairs of operator and axis; None = MatMul 0, Gather 1, which is all that there is.
        customized_weight_config: per node {"bits": 4 or 8, "group_size": block, "scheme": "sym" or "asym"}.
    """

    def __init__(
        self,
        algorithm: str,
        quant_format: QuantFormat,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | Mapping[str, int] | None = None,
        customized_weight_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.algorithm, self.quant_format = algorithm, quant_format
        self.op_types_to_quantize = set(op_types_to_quantize or ("MatMul",))
        self.quant_axes = dict(quant_axes or _OPERATORS)
        self.customized_weight_config = customized_weight_config


class DefaultWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Rounding to nearest in blocks.

    Args:
        block_size: 16, 32, 64, 128 or 256.
        is_symmetric: no zero points.
        accuracy_level: of the product; 4 = activations may become 8 bits.
        bits: 4 or 8.
        channel_wised_quantize: refused; a block has at most 256 columns.
    """

    def __init__(
        self,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | Mapping[str, int] | None = None,
        bits: int = 4,
        channel_wised_quantize: bool = False,
    ) -> None:
        super().__init__("DEFAULT", quant_format, op_types_to_quantize, quant_axes)
        self.block_size, self.is_symmetric, self.bits = block_size, is_symmetric, bits
        self.accuracy_level, self.channel_wised_quantize = accuracy_level, channel_wised_quantize


class RTNWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Rounding to nearest, with what the quantiser itself says of bits and blocks.

    Args:
        ratios: parts of the range that are kept, per node; refused unless empty.
    """

    def __init__(
        self,
        ratios: Mapping[str, float] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        customized_weight_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__("RTN", quant_format, op_types_to_quantize, None, customized_weight_config)
        self.ratios = dict(ratios or {})


class KQuantWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Searched scales and zero points. Args: see `RTNWeightOnlyQuantConfig`."""

    def __init__(
        self,
        ratios: Mapping[str, float] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        customized_weight_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__("k_quant", quant_format, op_types_to_quantize, None, customized_weight_config)
        self.ratios = dict(ratios or {})


class HQQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Half-quadratic quantisation: scales and zero points that make the error small where it is not large anyway.

    Zero points are whole numbers here, where onnxruntime's are floats.

    Args:
        axis: 1; blocks lie along the inputs, which is how the operator reads them.
    """

    def __init__(
        self,
        block_size: int = 128,
        bits: int = 4,
        axis: int = 1,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__("HQQ", quant_format, op_types_to_quantize, quant_axes)
        self.block_size, self.bits, self.axis = block_size, bits, axis


class GPTQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Rounding that makes up for the errors of the columns before, by what activations are like.

    Columns come in the order of their inputs' size, block by block, and scales are searched, whatever `actorder` and
    `mse` say: both make the error smaller and cost nothing in the model.

    Args:
        calibration_data_reader: gives the inputs of the model, as for `quantize_static`.
        percdamp: 0.01; more is taken where it is needed.
        perchannel: True; each row has scales of its own.
    """

    def __init__(
        self,
        calibration_data_reader: Any = None,
        percdamp: float = 0.01,
        block_size: int = 128,
        actorder: bool = False,
        mse: bool = False,
        perchannel: bool = True,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
    ) -> None:
        super().__init__("GPTQ", quant_format, op_types_to_quantize)
        self.calibration_data_reader = calibration_data_reader
        self.percdamp, self.block_size, self.actorder = percdamp, block_size, actorder
        self.mse, self.perchannel = mse, perchannel


class NVAWQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Not supported: it hands the model to a package of NVIDIA's."""

    def __init__(
        self,
        tokenizer_dir: str | Path,
        dataset_name: str = "cnn",
        cache_dir: str | Path = "./cache",
        calibration_method: str = "awq_lite",
    ) -> None:
        raise NotSupportedYetError(
            "NVAWQWeightOnlyQuantConfig is not supported",
            "it hands the model to a package of NVIDIA's, with a data set that it downloads",
            "use DefaultWeightOnlyQuantConfig",
        )


class MatMulNBitsQuantizer:
    """Quantises the constant matrices of a model in blocks.

    Args:
        model: path, onnx.ModelProto or ONNXModel; it is not changed.
        bits, block_size, is_symmetric, accuracy_level, quant_format, op_types_to_quantize, quant_axes,
            channel_wised_quantize: see `DefaultWeightOnlyQuantConfig`; what `algo_config` says wins.
        nodes_to_exclude: names of nodes that stay float. nodes_to_include: names of the only ones that do not.
        algo_config: how; None = rounding to nearest.

    Attributes:
        model: ONNXModel; after `process`, the quantised one.

    Raises:
        OptionError, NotSupportedYetError: an option that cannot be obeyed, when `process` is called.
    """

    def __init__(
        self,
        model: str | Path | onnx.ModelProto | ONNXModel,
        bits: int = 4,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        nodes_to_include: Sequence[str] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | Mapping[str, int] | None = None,
        channel_wised_quantize: bool = False,
        algo_config: WeightOnlyQuantConfig | None = None,
    ) -> None:
        self.model = model if isinstance(model, ONNXModel) else ONNXModel(model)
        self.bits, self.block_size, self.is_symmetric = bits, block_size, is_symmetric
        self.accuracy_level = accuracy_level
        self.nodes_to_exclude, self.nodes_to_include = list(nodes_to_exclude or ()), list(nodes_to_include or ())
        self.algo_config = algo_config or DefaultWeightOnlyQuantConfig(
            block_size=block_size,
            is_symmetric=is_symmetric,
            accuracy_level=accuracy_level,
            quant_format=quant_format,
            op_types_to_quantize=op_types_to_quantize,
            quant_axes=quant_axes,
            bits=bits,
            channel_wised_quantize=channel_wised_quantize,
        )

    def process(self) -> None:
        """Quantise; `model` is then another one.

        Raises:
            OptionError, NotSupportedYetError: an option that cannot be obeyed.
            InputError: no matrix of the model fits, or one has NaN or infinity.
        """
        config = self.algo_config
        form = self._form()
        method = _checked(config, form)
        model = self.model.ir.copy()
        run_rewrites(model, (lift_constants,), Level.BASIC)
        if config.quant_format is QuantFormat.QDQ and (model.opset_version() or 0) < _BLOCKED_OPSET:
            raise GraphError(
                f"the model is of operator set {model.opset_version()}, and QDQ needs {_BLOCKED_OPSET}",
                "DequantizeLinear has blocks since that version",
                "convert the model first, or use QuantFormat.QOperator",
            )
        include, exclude = self.nodes_to_include, self.nodes_to_exclude
        custom = _customized(config, form, model.graph)
        found = [
            (graph, node)
            for graph in model.graphs()
            for node in chosen_nodes(
                graph,
                config.op_types_to_quantize,
                *((include, exclude) if graph is model.graph else (None, None)),
                include_option="nodes_to_include",
            )
            if node.key[0] == "" and _matrix(graph, node) is not None
        ]
        if not found:
            raise InputError(
                "no weight of the model can be quantised",
                f"no chosen node of {', '.join(sorted(config.op_types_to_quantize))} has a constant float matrix",
                "check op_types_to_quantize, nodes_to_include and nodes_to_exclude",
            )
        accuracy = getattr(config, "accuracy_level", self.accuracy_level)
        if accuracy not in (None, *range(5)):
            raise OptionError(f"accuracy_level is {accuracy!r}", "it can be 0 to 4", "pass 4 or 0")
        writer = _Writer(model, config.quant_format, method, accuracy, self._inputs(model, found))
        with task("Quantising", len(found), after=0.5) as progress:
            for graph, node in found:
                writer.write(graph, node, custom.get(node.name, form))
                progress.add(1)
        for graph in model.graphs():
            for name in [*graph.initializers]:
                if not graph.is_used(name):
                    graph.remove_initializer(name)
        self.model = ONNXModel(model)

    def _inputs(self, model: OnnxModel, found: Sequence[tuple[Graph, Node]]) -> dict[str, InputStatistics]:
        """By weight what it is multiplied with, where the method wants to know; several nodes may share one."""
        if not isinstance(self.algo_config, GPTQWeightOnlyQuantConfig):
            return {}
        values: dict[str, set[str]] = {}
        for graph, node in found:
            tensor = _matrix(graph, node)
            if node.op_type == "MatMul" and tensor is not None:
                values.setdefault(tensor.name, set()).add(node.input(0))
        reader = self.algo_config.calibration_data_reader
        return input_statistics(to_proto(model), values, reader) if values else {}

    def _form(self) -> BlockFormat:
        config = self.algo_config
        return BlockFormat(
            getattr(config, "bits", self.bits),
            getattr(config, "block_size", self.block_size),
            getattr(config, "is_symmetric", self.is_symmetric),
        )


def quantize_weights(source: Any, target: str | Path, config: WeightOnlyQuantConfig) -> None:
    """Quantise the weights of a model, and write it, with a file beside it where one cannot hold it.

    Raises: see `MatMulNBitsQuantizer.process`.
    """
    quantizer = MatMulNBitsQuantizer(source, algo_config=config)
    quantizer.process()
    write_quantised(quantizer.model.ir, target, weight_bytes(quantizer.model.ir) > MAX_PROTOBUF_BYTES)


def _checked(config: WeightOnlyQuantConfig, form: BlockFormat) -> BlockMethod:
    """The method, once it is known that every option can be obeyed."""
    if not isinstance(config.quant_format, QuantFormat):
        raise OptionError(
            f"quant_format is {config.quant_format!r}", "it is a QuantFormat", "pass QuantFormat.QOperator"
        )
    if config.algorithm not in METHODS:
        raise NotSupportedYetError(
            f"the method {config.algorithm!r} is not supported",
            f"weights are rounded by {', '.join(METHODS)}",
            "use DefaultWeightOnlyQuantConfig or RTNWeightOnlyQuantConfig",
        )
    for name, known in (("axis", 1), ("percdamp", 0.01), ("perchannel", True)):
        if getattr(config, name, known) != known:
            raise NotSupportedYetError(
                f"{name}={getattr(config, name)} is not supported", f"{config.algorithm} has {name}={known} here",
                "leave it out",
            )  # fmt: skip
    if getattr(config, "ratios", None):
        raise NotSupportedYetError("ratios are not supported", "ranges are not clipped by node", "leave them out")
    if getattr(config, "channel_wised_quantize", False):
        raise NotSupportedYetError(
            "channel_wised_quantize is not supported", "a block has at most 256 columns", "use block_size=256"
        )
    _check_form(form)
    for name in config.op_types_to_quantize:
        if name not in _OPERATORS:
            raise OptionError(
                f"op_types_to_quantize names {name!r}",
                "there are MatMul and Gather",
                did_you_mean(name, _OPERATORS, "pass these"),
            )
    if "Gather" in config.op_types_to_quantize and (config.quant_format is QuantFormat.QDQ or form.bits != 4):
        raise NotSupportedYetError(
            "tables of Gather in this form are not supported",
            "onnxruntime gathers from tables of 4 bits, by an operator of its own",
            "use QuantFormat.QOperator and bits=4, or MatMul only",
        )
    for name, axis in config.quant_axes.items():
        if _OPERATORS.get(name) != axis:
            raise NotSupportedYetError(
                f"quant_axes has {name!r}: {axis}",
                f"blocks lie along the axes {_OPERATORS}, which is how the operators read them",
                "leave quant_axes out",
            )
    return METHODS[config.algorithm]


def _check_form(form: BlockFormat) -> None:
    if form.bits not in _BITS:
        raise NotSupportedYetError(f"bits is {form.bits}", f"weights have {_BITS} bits here", "pass bits=4")
    if form.block_size not in BLOCKS:
        raise OptionError(
            f"block_size is {form.block_size}", f"a block has {', '.join(map(str, BLOCKS))} columns", "pass 32"
        )


def _customized(config: WeightOnlyQuantConfig, form: BlockFormat, graph: Graph) -> dict[str, BlockFormat]:
    """Formats of single nodes."""
    found = {}
    names = {node.name for node in graph.nodes}
    for name, given in (config.customized_weight_config or {}).items():
        if name not in names:
            raise OptionError(
                f"customized_weight_config names {name!r}",
                "the model has no such node",
                did_you_mean(name, names, "correct the name"),
            )
        if unknown := sorted(set(given) - {"bits", "group_size", "scheme"}):
            raise OptionError(
                f"customized_weight_config[{name!r}] has {unknown[0]!r}",
                "it has bits, group_size and scheme",
                "leave it out",
            )
        found[name] = replace(
            form,
            bits=given.get("bits", form.bits),
            block_size=given.get("group_size", form.block_size),
            is_symmetric=given["scheme"] == "sym" if "scheme" in given else form.is_symmetric,
        )
        _check_form(found[name])
    return found


def _matrix(graph: Graph, node: Node) -> OnnxTensor | None:
    """The constant float matrix of a MatMul, or the table of a Gather of rows."""
    tensor = graph.constant_tensor(node.input(1 if node.op_type == "MatMul" else 0))
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in (DataType.FLOAT, DataType.FLOAT16):
        return None
    return None if node.op_type == "Gather" and node.attribute("axis", 0) not in (0, -2) else tensor


@dataclass(frozen=True)
class _Writer:
    """Puts quantised nodes in the place of float ones; a weight that several use is stored once."""

    model: OnnxModel
    format: QuantFormat
    method: BlockMethod
    accuracy_level: int | None
    inputs: Mapping[str, InputStatistics]
    stored: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)

    def write(self, graph: Graph, node: Node, form: BlockFormat) -> None:
        """Quantise one node."""
        tensor = _matrix(graph, node)
        assert tensor is not None
        write = self._table if node.op_type == "Gather" else self._product
        if node.op_type == "MatMul" and self.format is QuantFormat.QDQ:
            write = self._dequantised
        key = (graph, tensor.name, write, form)
        if key not in self.stored:
            self.stored[key] = self._store(graph, node, tensor, form)
        write(graph, node, self.stored[key], tensor.shape, form)

    def _store(self, graph: Graph, node: Node, tensor: OnnxTensor, form: BlockFormat) -> list[str]:
        """Names of the integers, the scales and, if there are any, the zero points."""
        weight, name = tensor.array(), tensor.name
        try:
            matrix = np.ascontiguousarray(weight.T) if node.op_type == "MatMul" else weight
            inputs = self.inputs.get(name) if node.op_type == "MatMul" else None
            blocks = self.method(matrix, form, tensor.dtype is DataType.FLOAT16, inputs)
        except QuantizationError as error:
            raise InputError(
                f"the weight {name!r} of node {node.name!r} cannot be quantised",
                str(error),
                "look at the float model, or keep the node float: nodes_to_exclude=[...]",
            ) from error
        scales = blocks.scales.astype(tensor.dtype.numpy_dtype)
        suffix = f"_Q{form.bits}"
        if node.op_type == "MatMul" and self.format is QuantFormat.QOperator:
            parts: list[tuple[str, NDArray[Any], DataType | None]]
            stored = uniform_arrays(blocks)
            parts = [(f"{name}{suffix}", stored["codes"], None), (f"{name}_scales", scales, None)]
            parts += [(f"{name}_zero_points", stored["zero_points"], None)] if "zero_points" in stored else []
        else:
            # 4-bit types came with this IR version.
            self.model.ir_version = max(self.model.ir_version, 10)
            steps, points, dtype = _integers(blocks)
            arrays = [(suffix, steps, dtype), ("_scales", scales, None), ("_zero_points", points, dtype)]
            if node.op_type == "MatMul":
                arrays = [(f"_DQ{end}", None if array is None else array.T, kind) for end, array, kind in arrays]
            parts = [(f"{name}{end}", array, kind) for end, array, kind in arrays if array is not None]
        return [_added(graph, *part) for part in parts]

    def _product(self, graph: Graph, node: Node, stored: list[str], shape: tuple[int, ...], form: BlockFormat) -> None:
        self.model.opset_imports.setdefault(MS, 1)
        product = make_node(
            "MatMulNBits",
            [node.inputs[0], *stored],
            node.outputs,
            domain=MS,
            name=f"{node.name}_Q{form.bits}",
            K=shape[0],
            N=shape[1],
            bits=form.bits,
            block_size=form.block_size,
            accuracy_level=self.accuracy_level or None,
        )
        graph.replace_node(node, product)

    def _table(self, graph: Graph, node: Node, stored: list[str], shape: tuple[int, ...], form: BlockFormat) -> None:
        self.model.opset_imports.setdefault(MS, 1)
        table = make_node(
            "GatherBlockQuantized",
            [stored[0], node.inputs[1], *stored[1:]],
            node.outputs,
            domain=MS,
            name=f"{node.name}_Q4",
            block_size=form.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        graph.replace_node(node, table)

    def _dequantised(
        self, graph: Graph, node: Node, stored: list[str], shape: tuple[int, ...], form: BlockFormat
    ) -> None:
        product = node.copy()
        product.inputs[1] = graph.fresh_name(f"{stored[0]}_output")
        dequantise = make_node(
            "DequantizeLinear", stored, [product.inputs[1]], name=f"{node.name}_DQ", axis=0, block_size=form.block_size
        )
        graph.replace_node(node, dequantise, product)


def _added(graph: Graph, prefix: str, values: NDArray[Any], dtype: DataType | None = None) -> str:
    name = graph.fresh_name(prefix)
    graph.add_initializer(OnnxTensor.from_array(name, values, dtype))
    return name


def _integers(weight: QuantizedWeight) -> tuple[NDArray[Any], NDArray[Any] | None, DataType]:
    """One integer per element [n, k], zero points [n, blocks] or None, and their type: signed where there are none."""
    bits = weight.format.bits
    if weight.offsets is None:
        return (weight.codes.astype(np.int16) - (1 << (bits - 1))).astype(np.int8), None, DataType[f"INT{bits}"]
    return weight.codes, weight.offsets, DataType[f"UINT{bits}"]
