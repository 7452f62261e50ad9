"""Configuration objects for `quantize(model, output, config)`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ...errors import OptionError, did_you_mean
from ...onnx.reader import read_model
from ...onnx.writer import to_proto
from ...quantize.onnx_graph.operator_rules import STATIC_OPERATORS
from ...quantize.onnx_graph.selection import excluded_by
from ...quantize.onnx_graph.tensors_data import CalibrationMethod
from ...quantize.onnx_graph.types import QuantFormat, QuantType


@dataclass
class QuantConfig:
    """The options common to static and dynamic quantisation; see `quantize_static`."""

    activation_type: QuantType = QuantType.QUInt8
    weight_type: QuantType = QuantType.QInt8
    op_types_to_quantize: Sequence[str] | None = None
    nodes_to_quantize: Sequence[str] | None = None
    nodes_to_exclude: Sequence[str] | None = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False


class StaticQuantConfig(QuantConfig):
    """The arguments of `quantize_static` other than the model."""

    def __init__(
        self,
        calibration_data_reader: Any,
        calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
        quant_format: QuantFormat = QuantFormat.QDQ,
        activation_type: QuantType = QuantType.QInt8,
        weight_type: QuantType = QuantType.QInt8,
        op_types_to_quantize: Sequence[str] | None = None,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        per_channel: bool = False,
        reduce_range: bool = False,
        use_external_data_format: bool = False,
        calibration_providers: Sequence[Any] | None = None,
        extra_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            activation_type,
            weight_type,
            op_types_to_quantize,
            nodes_to_quantize,
            nodes_to_exclude,
            per_channel,
            reduce_range,
            use_external_data_format,
        )
        self.calibration_data_reader = calibration_data_reader
        self.calibrate_method, self.quant_format = calibrate_method, quant_format
        self.calibration_providers = calibration_providers
        self.extra_options = dict(extra_options or {})


class DynamicQuantConfig(QuantConfig):
    """The arguments of `quantize_dynamic` other than the model."""

    def __init__(
        self,
        weight_type: QuantType = QuantType.QInt8,
        op_types_to_quantize: Sequence[str] | None = None,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        per_channel: bool = False,
        reduce_range: bool = False,
        use_external_data_format: bool = False,
        extra_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            QuantType.QUInt8,
            weight_type,
            op_types_to_quantize,
            nodes_to_quantize,
            nodes_to_exclude,
            per_channel,
            reduce_range,
            use_external_data_format,
        )
        self.extra_options = dict(extra_options or {})


def get_qdq_config(
    model_input: str | Path | onnx.ModelProto,
    calibration_data_reader: Any,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibrate_args: dict[str, Any] | None = None,
    activation_type: QuantType = QuantType.QUInt8,
    weight_type: QuantType = QuantType.QInt8,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    keep_removable_activations: bool = False,
    min_real_range: float | None = None,
    tensor_quant_overrides: dict[str, list[dict[str, Any]]] | None = None,
    calibration_providers: Sequence[Any] | None = None,
    op_types_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | Callable[[onnx.ModelProto, onnx.NodeProto], bool] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> StaticQuantConfig:
    """Return a configuration that quantises all operators that have rules, in QDQ form.

    Args:
        calibrate_args: "symmetric", "moving_average", "averaging_constant", "max_intermediate_outputs", "percentile".
        weight_symmetric: True for symmetric weights; None = symmetric if the weights' type is signed.
        min_real_range: minimum width of a range.
        nodes_to_exclude: names, or a function of model and node.
        extra_options: see `quantize_static`; the other arguments override them.

    Raises:
        OptionError: an argument is unknown. Other errors are raised when the model is quantised.
    """
    options = {**copy.deepcopy(dict(extra_options or {})), **_calibration_options(calibrate_args or {})}
    options |= {
        "ActivationSymmetric": activation_symmetric,
        "WeightSymmetric": weight_symmetric,
        "QDQKeepRemovableActivations": keep_removable_activations,
        "MinimumRealRange": min_real_range,
        "TensorQuantOverrides": copy.deepcopy(tensor_quant_overrides or {}),
        # Quantise everything, including operators that only pass values on.
        "ForceQuantizeNoInputCheck": True,
    }
    model = read_model(model_input)
    present = {node.op_type for node in model.graph.nodes}
    excluded: Sequence[str] | None
    if callable(nodes_to_exclude):
        proto = model_input if isinstance(model_input, onnx.ModelProto) else to_proto(model)
        excluded = excluded_by(nodes_to_exclude, proto, proto.graph.node)
    else:
        excluded = nodes_to_exclude
    return StaticQuantConfig(
        calibration_data_reader,
        calibrate_method,
        QuantFormat.QDQ,
        activation_type,
        weight_type,
        list(op_types_to_quantize or sorted(present & set(STATIC_OPERATORS))),
        None,
        excluded,
        per_channel,
        reduce_range,
        calibration_providers=calibration_providers,
        extra_options=options,
    )


_CALIBRATION = {
    "symmetric": "CalibTensorRangeSymmetric",
    "moving_average": "CalibMovingAverage",
    "averaging_constant": "CalibMovingAverageConstant",
    "max_intermediate_outputs": "CalibMaxIntermediateOutputs",
    "percentile": "CalibPercentile",
}


def _calibration_options(given: Mapping[str, Any]) -> dict[str, Any]:

    for name in given:
        if name not in _CALIBRATION:
            raise OptionError(
                f"calibrate_args contains {name!r}",
                f"the known arguments are {', '.join(_CALIBRATION)}",
                did_you_mean(name, _CALIBRATION, "remove this argument"),
            )
    return {_CALIBRATION[name]: value for name, value in given.items()}
