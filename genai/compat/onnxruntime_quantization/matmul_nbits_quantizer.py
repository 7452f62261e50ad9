"""Weight-only quantisation in blocks of 4 or 8 bits, with the names of onnxruntime's module.

The implementation is in `genai.quantize.onnx_graph.weight_blocks`.
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
    """Configuration of weight-only quantisation.

    Args:
        algorithm: name of the method.
        quant_format: QOperator, or QDQ for operator set 21 and later.
        op_types_to_quantize: "MatMul", "Gather"; None = MatMul.
        quant_axes: pairs of operator and axis; None = MatMul 0 and Gather 1, the only supported values.
        customized_weight_config: by node name, {"bits": 4 or 8, "group_size": block size, "scheme": "sym" or "asym"}.
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
    """Round-to-nearest quantisation in blocks.

    Args:
        block_size: 16, 32, 64, 128 or 256.
        is_symmetric: True to omit zero points.
        accuracy_level: activation precision in the matmul; 4 = activations may be quantised to 8 bits.
        bits: 4 or 8.
        channel_wised_quantize: not supported; a block has at most 256 columns.
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
    """Round-to-nearest quantisation, with the quantiser's bit width and block size.

    Args:
        ratios: share of the range to keep per node; must be empty.
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
    """Half-quadratic quantisation: fits scales and zero points with a loss that tolerates outliers.

    Zero points are integers here, but floats in onnxruntime.

    Args:
        axis: must be 1; blocks run along the inputs, as the operator requires.
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
    """GPTQ: compensates for the rounding errors of earlier columns, using statistics of the activations.

    Regardless of `actorder` and `mse`, columns are processed in the order of their inputs' size, block by block, and
    scales are searched, because both reduce the error at no cost for the model.

    Args:
        calibration_data_reader: reader of the model's inputs, as for `quantize_static`.
        percdamp: must be 0.01; the damping is increased automatically if necessary.
        perchannel: must be True; each row has separate scales.
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
    """Not supported: this configuration requires an NVIDIA package."""

    def __init__(
        self,
        tokenizer_dir: str | Path,
        dataset_name: str = "cnn",
        cache_dir: str | Path = "./cache",
        calibration_method: str = "awq_lite",
    ) -> None:
        raise NotSupportedYetError(
            "NVAWQWeightOnlyQuantConfig is not supported",
            "this configuration requires an NVIDIA package that downloads a data set",
            "use DefaultWeightOnlyQuantConfig",
        )


class MatMulNBitsQuantizer:
    """A quantiser that quantises the constant matrices of a model in blocks.

    Args:
        model: path, onnx.ModelProto or ONNXModel. The original is not changed.
        bits, block_size, is_symmetric, accuracy_level, quant_format, op_types_to_quantize, quant_axes,
            channel_wised_quantize: see `DefaultWeightOnlyQuantConfig`; `algo_config` overrides them.
        nodes_to_exclude: names of nodes to keep in float.
        nodes_to_include: names of the only nodes to quantise.
        algo_config: the method; None = round to nearest.

    Attributes:
        model: the ONNXModel; after `process`, the quantised model.

    Raises:
        OptionError, NotSupportedYetError: an option is not supported; raised by `process`.
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
        """Quantise the model, and replace `model` with the result.

        Raises:
            OptionError, NotSupportedYetError: an option is not supported.
            InputError: no matrix of the model can be quantised, or a matrix contains NaN or infinity.
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
    """Quantise the weights of a model and write the model.

    If the model is too large for one file, the weights are written to a separate file.

    Raises: see `MatMulNBitsQuantizer.process`.
    """
    quantizer = MatMulNBitsQuantizer(source, algo_config=config)
    quantizer.process()
    write_quantised(quantizer.model.ir, target, weight_bytes(quantizer.model.ir) > MAX_PROTOBUF_BYTES)


def _refuse(config: WeightOnlyQuantConfig) -> None:
    """Raise NotSupportedYetError for options of onnxruntime that are not supported here."""
    for name, known in (("axis", 1), ("percdamp", 0.01), ("perchannel", True)):
        if getattr(config, name, known) != known:
            raise NotSupportedYetError(
                f"{name}={getattr(config, name)} is not supported", f"{config.algorithm} always uses {name}={known}",
                "omit this argument",
            )  # fmt: skip
    if getattr(config, "ratios", None):
        raise NotSupportedYetError("ratios are not supported", "ranges are not clipped per node", "omit ratios")
    if getattr(config, "channel_wised_quantize", False):
        raise NotSupportedYetError(
            "channel_wised_quantize is not supported", "a block can have at most 256 columns", "use block_size=256"
        )
    for name, axis in config.quant_axes.items():
        if BLOCK_AXES.get(name) != axis:
            raise NotSupportedYetError(
                f"quant_axes contains {name!r}: {axis}",
                f"the operators require blocks along the axes {BLOCK_AXES}",
                "omit quant_axes",
            )


def _customized(config: WeightOnlyQuantConfig, form: BlockFormat, graph: Graph) -> dict[str, BlockFormat]:
    """Return the formats of nodes with a customised configuration."""
    found = {}
    names = {node.name for node in graph.nodes}
    for name, given in (config.customized_weight_config or {}).items():
        if name not in names:
            raise OptionError(
                f"customized_weight_config contains the node {name!r}",
                "the model has no such node",
                did_you_mean(name, names, "correct the name"),
            )
        if unknown := sorted(set(given) - {"bits", "group_size", "scheme"}):
            raise OptionError(
                f"customized_weight_config[{name!r}] contains {unknown[0]!r}",
                "the supported keys are bits, group_size and scheme",
                "remove this key",
            )
        found[name] = replace(
            form,
            bits=given.get("bits", form.bits),
            block_size=given.get("group_size", form.block_size),
            is_symmetric=given["scheme"] == "sym" if "scheme" in given else form.is_symmetric,
        )
    return found
