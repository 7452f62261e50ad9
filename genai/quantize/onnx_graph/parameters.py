"""Scales and zero points of all quantised tensors, derived from ranges, constants or the caller's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError
from genai.quant.affine import (
    AffineParameters,
    IntegerRange,
    affine_parameters,
    bias_steps,
    channel_ranges,
    quantize_affine,
    snapped_parameters,
    widened_for_bias,
)

from ...errors import InputError, OptionError, did_you_mean
from ...onnx.ir import Graph
from .calibrate import MOST
from .options import StaticOptions
from .overrides import ChannelOverride, TensorOverride
from .placement import ConstantUse, Placement
from .tensors_data import TensorsData
from .types import QuantType


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of one tensor; `axis` is the axis of its channels, or None for one scale."""

    type: QuantType
    parameters: AffineParameters
    integers: IntegerRange
    axis: int | None = None

    def rounded(self) -> Quantisation:
        """Return the quantisation with the scale rounded to the nearest power of two."""
        scale = np.exp2(np.rint(np.log2(self.parameters.scale))).astype(np.float32)
        return replace(self, parameters=replace(self.parameters, scale=scale))


@dataclass(frozen=True)
class QuantisedConstant:
    """The integers of a constant.

    Attributes:
        steps: integers in the shape of the constant.
        type: type of the integers; None means int32, for a bias.
    """

    steps: NDArray[Any]
    type: QuantType | None
    parameters: AffineParameters
    axis: int | None


@dataclass(frozen=True)
class ParameterRules:
    """Conversion of ranges to scales and zero points."""

    graph: Graph
    options: StaticOptions
    activation_type: QuantType
    weight_type: QuantType
    reduce_range: bool

    def activation(self, name: str, low: float, high: float, *, constant: bool = False) -> Quantisation:
        """Return the quantisation of a value with a known range, either an activation or a constant."""
        tensor_override = self.options.overrides.get(name)
        override = ChannelOverride() if tensor_override is None else tensor_override.common
        kind = override.quant_type or self.activation_type
        symmetric = self.options.activation_symmetric if override.symmetric is None else override.symmetric
        reduced = self.reduce_range and constant if override.reduce_range is None else override.reduce_range
        integers = kind.integers(symmetric=symmetric, reduce_range=reduced)
        if override.scale is not None:
            return Quantisation(kind, _exact(override), integers)
        low, high = (
            (low if override.rmin is None else override.rmin),
            (high if override.rmax is None else override.rmax),
        )
        least = self.options.minimum_real_range
        snapped = self.options.activation_restricted_asymmetric and not constant
        if snapped and kind is QuantType.QUInt8 and not symmetric:
            return Quantisation(kind, snapped_parameters(low, high, integers, least_range=least), integers)
        parameters = affine_parameters(
            np.asarray(low, np.float32), np.asarray(high, np.float32), integers, symmetric=symmetric, least_range=least
        )
        return Quantisation(kind, parameters, integers)

    def constant(self, use: ConstantUse) -> Quantisation:
        """Return the quantisation of a constant other than a bias, based on the constant's values."""
        if use.kind == "data":
            return self.data_constant(use.name)
        override = self.options.overrides.get(use.name)
        shared_override = ChannelOverride() if override is None else override.common
        kind = shared_override.quant_type or self.weight_type
        axis = use.axis if override is None or override.axis is None else override.axis % max(1, self._rank(use.name))
        symmetric = self.options.weight_symmetric if shared_override.symmetric is None else shared_override.symmetric
        # Integer operators have one zero point for all channels.
        symmetric = axis is not None or (kind.is_signed if symmetric is None else symmetric)
        reduced = self.reduce_range if shared_override.reduce_range is None else shared_override.reduce_range
        integers = kind.integers(symmetric=symmetric, reduce_range=reduced)
        low, high = self._constant_range(use.name, axis)
        if override is not None:
            parameters = _overridden(use.name, override, low, high)
            if isinstance(parameters, AffineParameters):
                return Quantisation(kind, parameters, integers, axis)
            low, high = parameters
        least = self.options.minimum_real_range
        parameters = affine_parameters(low, high, integers, symmetric=symmetric, least_range=least)
        return Quantisation(kind, parameters, integers, axis)

    def data_constant(self, name: str) -> Quantisation:
        """Return the quantisation of a constant that is used as an activation and has the type of activations."""
        low, high = self._constant_range(name, None)
        return self.activation(name, float(low), float(high), constant=True)

    def is_mask(self, name: str) -> bool:
        """Return True if a constant contains the huge values of a mask, which no useful scale can cover."""
        low, high = self._constant_range(name, None)
        return max(-float(low), float(high)) >= MOST

    def steps(self, name: str, how: Quantisation) -> QuantisedConstant:
        """Return the integers of a constant."""
        try:
            dtype = how.type.data_type.numpy_dtype
            steps = quantize_affine(self._array(name), how.parameters, how.integers, how.axis, dtype)
        except QuantizationError as error:
            raise _not_finite(name, error) from error
        return QuantisedConstant(steps, how.type, how.parameters, how.axis)

    def bias(self, use: ConstantUse, x: Quantisation, weight: Quantisation) -> QuantisedConstant:
        """Quantise a bias to int32 with the scale of the products."""
        scale = x.parameters.scale.astype(np.float32) * weight.parameters.scale
        values = self._array(use.name)
        if not np.all(np.isfinite(values)):
            raise _not_finite(use.name, "a bias must be finite")
        points = AffineParameters(scale, np.zeros(scale.shape, np.int32))
        return QuantisedConstant(bias_steps(values, scale), None, points, use.axis)

    def fitted_to_bias(self, weight: Quantisation, x: Quantisation, bias: ConstantUse) -> Quantisation:
        """Return the weight's quantisation, with larger scales if the bias would otherwise not fit into int32."""
        values = self._array(bias.name)
        if not np.all(np.isfinite(values)):
            raise _not_finite(bias.name, "a bias must be finite")
        wider = widened_for_bias(weight.parameters.scale, float(x.parameters.scale), values)
        return Quantisation(
            weight.type, AffineParameters(wider, weight.parameters.zero_point), weight.integers, weight.axis
        )

    def _constant_range(self, name: str, axis: int | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        try:
            low, high = channel_ranges(self._array(name), axis)
        except QuantizationError as error:
            raise InputError(
                f"constant {name!r} cannot be quantised",
                str(error),
                "exclude the nodes that use the constant: nodes_to_exclude=[...]",
            ) from error
        if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high))):
            raise _not_finite(name, "a weight must be finite")
        return low, high

    def _array(self, name: str) -> NDArray[Any]:
        array = self.graph.constant(name)
        assert array is not None
        return array

    def _rank(self, name: str) -> int:
        return self._array(name).ndim


def _exact(override: ChannelOverride) -> AffineParameters:
    return AffineParameters(np.asarray(override.scale, np.float32), np.asarray(override.zero_point, np.int32))


def _overridden(
    name: str, override: TensorOverride, low: NDArray[np.float32], high: NDArray[np.float32]
) -> AffineParameters | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the caller's parameters, or ranges with the caller's bounds."""
    channels = override.channels
    if len(channels) == 1 and low.ndim:
        channels = channels * low.size
    if len(channels) != low.size:
        raise OptionError(
            f"TensorQuantOverrides[{name!r}] has {len(channels)} dictionaries",
            f"the tensor has {low.size} channels along axis {override.axis}",
            "pass one dictionary for all channels, or one per channel",
        )
    if channels[0].scale is not None:
        scale = np.asarray([one.scale for one in channels], np.float32).reshape(low.shape)
        points = np.asarray([one.zero_point for one in channels], np.int32).reshape(low.shape)
        return AffineParameters(scale, points)
    pairs = list(zip(channels, low.reshape(-1), high.reshape(-1), strict=True))
    lowest = np.asarray([old if one.rmin is None else one.rmin for one, old, _ in pairs], np.float32)
    highest = np.asarray([old if one.rmax is None else one.rmax for one, _, old in pairs], np.float32)
    return lowest.reshape(low.shape), highest.reshape(low.shape)


def _not_finite(name: str, why: Any) -> InputError:
    return InputError(
        f"constant {name!r} contains NaN or infinite values",
        str(why),
        "check the float model, or exclude the nodes that use the constant: nodes_to_exclude=[...]",
    )


@dataclass
class Parameters:
    """The scales and zero points of a graph.

    Attributes:
        activations: quantisation by value.
        constants: quantised constants by operand, without the biases of nodes with a float input.
        float_values: values that stay float because their range is unknown.
    """

    activations: dict[str, Quantisation] = field(default_factory=dict)
    constants: dict[tuple[int, int], QuantisedConstant] = field(default_factory=dict)
    float_values: list[str] = field(default_factory=list)


def find_parameters(placement: Placement, ranges: TensorsData, rules: ParameterRules) -> Parameters:
    """Return the scales and zero points of a placement."""
    parameters = Parameters()
    _check_overrides(placement, rules.options.overrides)
    for name in placement.activations:
        root = placement.root(name)
        if root not in placement.activations:  # the constant table of a Gather
            if rules.is_mask(root):
                parameters.float_values.append(name)
            else:
                parameters.activations[name] = rules.data_constant(root)
            continue
        fixed = placement.activations[root].range
        override = rules.options.overrides.get(root)
        if fixed is not None:
            how = rules.activation(root, *fixed)
            parameters.activations[name] = how.rounded() if placement.activations[root].rounds_scale else how
        elif (seen := placement.activations[root].bounded_by or root) in ranges:
            parameters.activations[name] = rules.activation(root, *map(float, ranges[seen].range_value))
        elif override is not None and override.common.scale is not None:
            parameters.activations[name] = rules.activation(root, 0.0, 0.0)
        else:
            parameters.float_values.append(name)
    _find_constants(placement, rules, parameters)
    return parameters


def _find_constants(placement: Placement, rules: ParameterRules, parameters: Parameters) -> None:
    """Add weights and their biases. Nodes that use a constant in the same way share its integers."""
    uses, shared = placement.constants, dict[tuple[Any, ...], QuantisedConstant]()
    for use, following in zip(uses, [*uses[1:], None], strict=True):
        if use.kind == "bias":
            continue
        if use.kind == "data" and rules.is_mask(use.name):
            parameters.float_values.append(use.name)
            continue
        how = rules.constant(use)
        x = parameters.activations.get(use.node.inputs[0])
        if following is not None and following.kind == "bias" and x is not None:
            if rules.options.adjust_weight_for_bias:
                how = rules.fitted_to_bias(how, x, following)
            parameters.constants[id(following.node), following.index] = rules.bias(following, x, how)
        key = (use.name, use.kind, how.axis, how.parameters.scale.tobytes())
        if key not in shared:
            shared[key] = rules.steps(use.name, how)
        parameters.constants[id(use.node), use.index] = shared[key]


def _check_overrides(placement: Placement, overrides: Mapping[str, TensorOverride]) -> None:
    known = {*placement.activations, *(use.name for use in placement.constants)}
    for name, override in overrides.items():
        if name not in known:
            raise OptionError(
                f"TensorQuantOverrides contains {name!r}",
                "no quantised value or constant has that name",
                did_you_mean(name, known, "correct the name, or omit the override"),
            )
        if name in placement.activations and (override.axis is not None or len(override.channels) > 1):
            raise OptionError(
                f"TensorQuantOverrides[{name!r}] has an axis",
                "activations have a single scale",
                "pass one dictionary without 'axis'",
            )
