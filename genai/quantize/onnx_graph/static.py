"""Static quantisation of a model: placement, calibration, computation of the parameters, writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genai.common.warning import warn_caller

from ...errors import InputError, OptionError
from ...onnx.ir import Graph, OnnxModel
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from ...optimize.shapes import infer_shapes
from ...session.execution_providers import ChosenProvider
from .calibrate import Calibration, Calibrator
from .operator_rules import QOPERATOR_OPERATORS, STATIC_OPERATORS
from .options import StaticOptions
from .parameters import ParameterRules, Parameters, find_parameters
from .placement import Placement, Placer
from .qdq import QdqWriter
from .qoperator import to_operators_on_integers
from .selection import checked_op_types, chosen_nodes, require_float_model
from .tensors_data import CalibrationMethod, TensorsData, load_tensors_data, save_tensors_data
from .types import BYTES, STATIC_TYPES, QuantFormat, QuantType, checked_type

# The opsets that introduced QuantizeLinear and its scales per channel.
_OPSET, _OPSET_PER_CHANNEL = 10, 13


@dataclass(frozen=True)
class StaticRequest:
    """The validated arguments of a static quantisation.

    Attributes:
        reader: an object whose get_next() returns feeds of the model; not needed if `cache` exists.
        op_types: operators to quantise; None means all operators that have rules.
        per_channel: True for one scale per output channel of weights.
        reduce_range: True to use only 7 bits for weights.
        include: names of the nodes to quantise; None means all nodes.
        exclude: names of nodes that stay float; None means no nodes.
        providers: execution providers of the calibration; see `SessionConfig`.
        cache: JSON file with the ranges. The file is read if it exists, and otherwise written.

    Raises:
        OptionError: a format or type is not supported, or both the data and the ranges are missing.
        NotSupportedYetError: the type is float8.
    """

    reader: Any = None
    format: QuantFormat = QuantFormat.QDQ
    op_types: Sequence[str] | None = None
    per_channel: bool = False
    reduce_range: bool = False
    activation_type: QuantType = QuantType.QInt8
    weight_type: QuantType = QuantType.QInt8
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    method: CalibrationMethod = CalibrationMethod.MinMax
    providers: Sequence[ChosenProvider] = ()
    options: StaticOptions = field(default_factory=StaticOptions)
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, QuantFormat):
            raise OptionError(
                f"quant_format is {self.format!r}", "quant_format must be a QuantFormat", "pass QuantFormat.QDQ"
            )
        known = STATIC_TYPES if self.format is QuantFormat.QDQ else BYTES
        for name in ("activation_type", "weight_type"):
            object.__setattr__(self, name, checked_type(name, getattr(self, name), known))
        if self.activation_type is QuantType.QInt8 and self.weight_type is QuantType.QUInt8:
            raise OptionError(
                "activation_type is QInt8, but weight_type is QUInt8",
                "onnxruntime multiplies signed activations only by signed weights",
                "pass activation_type=QuantType.QUInt8, or weight_type=QuantType.QInt8",
            )
        if self.reader is None and (self.cache is None or not self.cache.exists()):
            raise OptionError(
                "no calibration_data_reader is given",
                "ranges of activations are derived from data"
                + ("" if self.cache is None else f", and the file of ranges {str(self.cache)!r} does not exist"),
                "pass a CalibrationDataReader, or use quantize_dynamic",
            )


def prepare_model(model: OnnxModel) -> None:
    """Convert Constant nodes and default values of inputs to initializers, and infer types, in place."""
    graph = model.graph
    defaults = {value.name for value in graph.inputs} & graph.initializers.keys()
    graph.inputs[:] = [value for value in graph.inputs if value.name not in defaults]
    graph.invalidate()
    run_rewrites(model, (lift_constants,), Level.BASIC)
    infer_shapes(model)


def quantize_statically(model: OnnxModel, source: Any, request: StaticRequest) -> None:
    """Quantise a model in place.

    Args:
        source: the path or the onnx.ModelProto of the model, for the calibration.

    Raises:
        GenaiError: see `quantize_static`.
    """
    options = request.options
    opset = _OPSET_PER_CHANNEL if request.per_channel else _OPSET
    require_float_model(
        model, opset, f"QuantizeLinear{' with per-channel scales' * request.per_channel} needs this opset"
    )
    prepare_model(model)
    default = STATIC_OPERATORS if request.format is QuantFormat.QDQ else QOPERATOR_OPERATORS
    op_types = checked_op_types(request.op_types, default, model.graph)
    nodes = chosen_nodes(model.graph, op_types, request.include, request.exclude)
    placement = Placer(model.graph, options, request.per_channel, _symmetric_values(options)).place(nodes)
    if not placement.nodes:
        raise _nothing_to_do(model.graph, sorted(op_types), len(nodes))
    ranges = _ranges(source, request, placement)
    rules = ParameterRules(model.graph, options, request.activation_type, request.weight_type, request.reduce_range)
    parameters = find_parameters(placement, ranges, rules)
    _tell_what_stays_float(parameters)
    QdqWriter(model, placement, parameters, options).write()
    if request.format is QuantFormat.QOperator:
        to_operators_on_integers(model)


def _symmetric_values(options: StaticOptions) -> set[str | None]:
    named = {name for name, override in options.overrides.items() if override.common.symmetric or override.common.scale}
    return {*named, None} if options.activation_symmetric else {*named}


def _ranges(source: Any, request: StaticRequest, placement: Placement) -> TensorsData:
    """Return the ranges in the file if it exists; otherwise, derive them from the data and write the file."""
    if request.cache is not None and request.cache.exists():
        ranges = load_tensors_data(request.cache)
        if ranges.calibration_method is not request.method:
            raise InputError(
                f"the ranges in {str(request.cache)!r} were computed with {ranges.calibration_method}",
                f"calibrate_method is {request.method}",
                "delete the file, or set calibrate_method to the method in the file",
            )
        return ranges
    calibration = _calibration(request)
    calibrator = Calibrator(source, calibration.observer, request.providers)
    if request.cache is None:  # otherwise observe all values, so that the file can be reused with other nodes
        known = placement.activations
        calibrator.only([known[name].bounded_by or name for name in known if placement.root(name) == name])
    calibrator.collect(request.reader)
    ranges = calibrator.ranges(calibration)
    if request.cache is not None:
        save_tensors_data(ranges, request.cache)
    return ranges


def _calibration(request: StaticRequest) -> Calibration:
    """Return the calibration that the options describe."""
    options = request.options
    return Calibration(
        request.method,
        options.calib_tensor_range_symmetric,
        options.calib_moving_average_constant if options.calib_moving_average else None,
        percentile=options.calib_percentile,
    )


def _tell_what_stays_float(parameters: Parameters) -> None:
    if parameters.float_values:
        shown = ", ".join(parameters.float_values[:5]) + ", ..." * (len(parameters.float_values) > 5)
        warn_caller(
            f"{len(parameters.float_values)} values stay float, because they were infinite, larger than 1e30 "
            f"(as in masks) or never computed: {shown}"
        )


def _nothing_to_do(graph: Graph, op_types: Sequence[str], chosen: int) -> InputError:
    present = sorted({node.op_type for node in graph.nodes})
    return InputError(
        f"nothing in the model can be quantised: {chosen} nodes are selected, and none of them is suitable",
        f"{', '.join(op_types) or 'no operators'} on float32 can be quantised; the model has {', '.join(present)}",
        "check nodes_to_quantize, nodes_to_exclude and op_types_to_quantize, and that the model is float32",
    )
