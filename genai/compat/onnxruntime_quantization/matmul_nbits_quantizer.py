"""Weights only, in blocks of 4 or 8 bits, by the names of onnxruntime's file of this name.

The quantiser itself is `genai.quantize.onnx_graph.weight_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from ...onnx.ir import Graph
from ...onnx.reader import MAX_PROTOBUF_BYTES
from ...quantize.onnx_graph.types import QuantFormat
from ...quantize.onnx_graph.weight_blocks import BLOCK_AXES, BlockRequest, quantize_in_blocks
from ...quantize.onnx_graph.weight_methods import BlockFormat
from ...quantize.onnx_graph.writing import weight_bytes, write_quantised
from .onnx_model import ONNXModel


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
        self.quant_axes = dict(quant_axes or BLOCK_AXES)
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
        config, form = self.algo_config, self._form()
        _refuse(config)
        request = BlockRequest(
            config.algorithm,
            form,
            _customized(config, form, self.model.ir.graph),
            config.quant_format,
            config.op_types_to_quantize,
            getattr(config, "accuracy_level", self.accuracy_level),
            self.nodes_to_include,
            self.nodes_to_exclude,
            getattr(config, "calibration_data_reader", None),
        )
        model = self.model.ir.copy()
        quantize_in_blocks(model, request)
        self.model = ONNXModel(model)

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


def _refuse(config: WeightOnlyQuantConfig) -> None:
    """Refuse what onnxruntime's configurations have and nothing here obeys."""
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
    for name, axis in config.quant_axes.items():
        if BLOCK_AXES.get(name) != axis:
            raise NotSupportedYetError(
                f"quant_axes has {name!r}: {axis}",
                f"blocks lie along the axes {BLOCK_AXES}, which is how the operators read them",
                "leave quant_axes out",
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
    return found
