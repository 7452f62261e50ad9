"""quantize_static, quantize_dynamic and quantize, as in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from ...errors import OptionError
from ...quantize.onnx_graph.dynamic import DynamicRequest, quantize_dynamically
from ...quantize.onnx_graph.static import StaticRequest, quantize_statically
from ...quantize.onnx_graph.tensors_data import CalibrationMethod
from ...quantize.onnx_graph.types import QuantFormat, QuantType
from ...quantize.onnx_graph.writing import quantize_file, require_writable_path
from ..onnxruntime.providers import before_the_cpu, chosen_providers
from .configs import (
    DynamicQuantConfig as DynamicQuantConfig,
    QuantConfig as QuantConfig,
    StaticQuantConfig as StaticQuantConfig,
    get_qdq_config as get_qdq_config,
)
from .matmul_nbits_quantizer import WeightOnlyQuantConfig, quantize_weights
from .options import read_dynamic_options, read_extra_options

ModelInput = str | Path | onnx.ModelProto


def quantize_static(
    model_input: ModelInput,
    model_output: str | Path,
    calibration_data_reader: Any = None,
    quant_format: QuantFormat = QuantFormat.QDQ,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: QuantType = QuantType.QInt8,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibration_providers: Sequence[Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | Path | None = None,
) -> None:
    """Write a model with integer weights and activations. The activations' scales are calibrated once, with data.

    Args:
        model_input: path of the float model, or an onnx.ModelProto.
        model_output: path to write to.
        calibration_data_reader: reader of the model's feeds; see `CalibrationDataReader`. Not needed if the file at
            `calibration_cache_path` exists.
        quant_format: QDQ, or QOperator for integer operators.
        op_types_to_quantize: operators to quantise; None = all operators that have rules.
        per_channel: True for one weight scale per output channel.
        reduce_range: True for 7-bit weights, for processors without VNNI.
        activation_type, weight_type: types of 8 bits; in QDQ form, also of 4 and 16 bits.
        nodes_to_quantize: names of nodes; None = all.
        nodes_to_exclude: names of nodes to keep in float.
        use_external_data_format: True to write weights to a separate file, `model_output` + ".data".
        calibrate_method: MinMax, Entropy or Percentile.
        calibration_providers: providers that run the calibration; see `InferenceSession`.
        extra_options: see docs/reference/onnx-quantisation.md.
        calibration_cache_path: JSON file of ranges; it is read if it exists, else written.

    Raises:
        OptionError: an argument has the wrong type, or names a node or operator that the model lacks.
        NotSupportedYetError: an option is not supported; the message names it.
        InputError: the model is already quantised, there is no data, the data does not fit or contains NaN, or there is
            nothing to quantise.
        GraphError: the input is not a model, or its operator set is below 10 (13 for per_channel).
    """
    request = StaticRequest(
        calibration_data_reader,
        quant_format,
        op_types_to_quantize,
        _flag("per_channel", per_channel),
        _flag("reduce_range", reduce_range),
        activation_type,
        weight_type,
        nodes_to_quantize,
        nodes_to_exclude,
        calibrate_method,
        before_the_cpu(chosen_providers(list(calibration_providers))) if calibration_providers else (),
        read_extra_options(extra_options),
        None if calibration_cache_path is None else Path(calibration_cache_path),
    )
    quantize_file(
        model_input,
        model_output,
        lambda model: quantize_statically(model, model_input, request),
        external=use_external_data_format,
    )


def quantize_dynamic(
    model_input: ModelInput,
    model_output: str | Path,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a model with integer weights that quantises its activations in each run, according to their ranges.

    Args: see `quantize_static`. Supported extra options: WeightSymmetric, MatMulConstBOnly and EnableSubgraph.

    Raises: see `quantize_static`.
    """
    request = DynamicRequest(
        op_types_to_quantize,
        _flag("per_channel", per_channel),
        _flag("reduce_range", reduce_range),
        weight_type,
        nodes_to_quantize,
        nodes_to_exclude,
        read_dynamic_options(extra_options),
    )
    quantize_file(
        model_input,
        model_output,
        lambda model: quantize_dynamically(model, request),
        external=use_external_data_format,
    )


def quantize(
    model_input: ModelInput, model_output: str | Path, quant_config: QuantConfig | WeightOnlyQuantConfig
) -> None:
    """Quantise a model with a configuration object.

    Args:
        model_input: see `quantize_static`.
        model_output: see `quantize_static`.
        quant_config: a StaticQuantConfig or DynamicQuantConfig, or a configuration for weights only
            (`genai.compat.onnxruntime_quantization.matmul_nbits_quantizer`).

    Raises: see `quantize_static`.
    """
    if isinstance(quant_config, StaticQuantConfig):
        quantize_static(
            model_input,
            model_output,
            quant_config.calibration_data_reader,
            quant_config.quant_format,
            quant_config.op_types_to_quantize,
            quant_config.per_channel,
            quant_config.reduce_range,
            quant_config.activation_type,
            quant_config.weight_type,
            quant_config.nodes_to_quantize,
            quant_config.nodes_to_exclude,
            quant_config.use_external_data_format,
            quant_config.calibrate_method,
            quant_config.calibration_providers,
            quant_config.extra_options,
        )
    elif isinstance(quant_config, DynamicQuantConfig):
        quantize_dynamic(
            model_input,
            model_output,
            quant_config.op_types_to_quantize,
            quant_config.per_channel,
            quant_config.reduce_range,
            quant_config.weight_type,
            quant_config.nodes_to_quantize,
            quant_config.nodes_to_exclude,
            quant_config.use_external_data_format,
            quant_config.extra_options,
        )
    elif isinstance(quant_config, WeightOnlyQuantConfig):
        require_writable_path(model_output)
        quantize_weights(model_input, model_output, quant_config)
    else:
        raise OptionError(
            f"quant_config is a {type(quant_config).__name__}",
            "a StaticQuantConfig, DynamicQuantConfig or WeightOnlyQuantConfig is expected",
            "pass an object of one of these classes",
        )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", "True or False is expected", f"pass {name}=True or False")
    return value
