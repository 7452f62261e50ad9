"""`extra_options` of quantisation: each key either takes effect or raises an error with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from ...onnx.types import DataType
from ...quantize.onnx_graph.options import DynamicOptions, StaticOptions
from ...quantize.onnx_graph.overrides import read_overrides

_REFUSED = {
    "SmoothQuant": "SmoothQuant is not supported",
    "SmoothQuantAlpha": "SmoothQuant is not supported",
    "SmoothQuantFolding": "SmoothQuant is not supported",
    "extra.Sigmoid.nnapi": "models for NNAPI are not supported",
    "BlockSize": "static quantisation has scales per tensor or channel (for blocks, use matmul_nbits_quantizer)",
}
"""Options that are refused, unless their value turns them off."""


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False is expected")
    return value


def _not(name: str, value: Any) -> bool:
    return not _flag(name, value)


def _flag_or_none(name: str, value: Any) -> bool | None:
    return None if value is None else _flag(name, value)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _wrong(name, value, "a number above 0 is expected")
    return float(value)


def _range(name: str, value: Any) -> float:
    return 0.0 if value is None else _positive(name, value)


def _percentile(name: str, value: Any) -> float:
    if _positive(name, value) > 100:
        raise _wrong(name, value, "a percentage of at most 100 is expected")
    return float(value)


def _share(name: str, value: Any) -> float:
    if _positive(name, value) > 1:
        raise _wrong(name, value, "a weight of at most 1 is expected")
    return float(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise _wrong(name, value, "a list of operators is expected")
    return tuple(value)


def _axes(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "a mapping from operators to axes is expected")
    # onnxruntime's table nests the axis in another dictionary.
    found: dict[str, Any] = {key: one.get("axis") if isinstance(one, Mapping) else one for key, one in value.items()}
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in found.values()):
        raise _wrong(name, value, "an axis must be an integer")
    return found


def _element_type(name: str, value: Any) -> int:
    if value not in list(DataType):
        raise _wrong(name, value, "a value of onnx.TensorProto.DataType is expected")
    return int(value)


def _stride(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise _wrong(name, value, "None or an integer of at least 1 is expected")


_KNOWN: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "ActivationSymmetric": ("activation_symmetric", _flag),
    "ActivationRestrictedAsymmetric": ("activation_restricted_asymmetric", _flag),
    "WeightSymmetric": ("weight_symmetric", _flag_or_none),
    "ForceQuantizeNoInputCheck": ("force_quantize_no_input_check", _flag),
    "MatMulConstBOnly": ("mat_mul_const_b_only", _flag),
    "AddQDQPairToWeight": ("add_qdq_pair_to_weight", _flag),
    "OpTypesToExcludeOutputQuantization": ("op_types_to_exclude_output_quantization", _names),
    "DedicatedQDQPair": ("dedicated_qdq_pair", _flag),
    "QDQOpTypePerChannelSupportToAxis": ("channel_axes", _axes),
    "CalibTensorRangeSymmetric": ("calib_tensor_range_symmetric", _flag),
    "CalibMovingAverage": ("calib_moving_average", _flag),
    "CalibMovingAverageConstant": ("calib_moving_average_constant", _share),
    "CalibPercentile": ("calib_percentile", _percentile),
    "QuantizeBias": ("quantize_bias", _flag),
    "UseQDQContribOps": ("use_qdq_contrib_ops", _flag),
    "MinimumRealRange": ("minimum_real_range", _range),
    "TensorQuantOverrides": ("overrides", read_overrides),
    "QDQKeepRemovableActivations": ("keep_removable_activations", _flag),
    "QDQDisableWeightAdjustForInt32Bias": ("adjust_weight_for_bias", _not),
    "DefaultTensorType": ("default_tensor_type", _element_type),
    # These limit the number of values in memory and do not change the ranges. Here, only one value is in memory.
    "CalibStridedMinMax": ("", _stride),
    "CalibMaxIntermediateOutputs": ("", _stride),
}
DYNAMIC_OPTIONS = ("WeightSymmetric", "MatMulConstBOnly", "EnableSubgraph")
"""The extra options of dynamic quantisation."""
_ONLY_STATIC = "DynamicQuantizeLinear computes the ranges of activations in each run"


def read_extra_options(given: Mapping[str, Any] | None) -> StaticOptions:
    """Return the options of static quantisation.

    Raises:
        OptionError: a key is unknown, or a value has the wrong type.
        NotSupportedYetError: an option is not supported.
    """
    found: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name in _KNOWN:
            attribute, read = _KNOWN[name]
            value = read(name, value)
            if attribute:
                found[attribute] = value
        elif name == "EnableSubgraph":
            _refuse_unless_off(name, value, "calibration observes the values of the main graph only")
        else:
            _refuse_or_complain(name, value, (*_KNOWN, "EnableSubgraph"))
    return StaticOptions(**found)


def read_dynamic_options(given: Mapping[str, Any] | None) -> DynamicOptions:
    """Return the options of dynamic quantisation.

    Raises: see `read_extra_options`.
    """
    found: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name == "WeightSymmetric":
            found["weight_symmetric"] = _flag_or_none(name, value)
        elif name == "MatMulConstBOnly":
            found["mat_mul_const_b_only"] = _flag(name, value)
        elif name == "EnableSubgraph":
            found["enable_subgraph"] = _flag(name, value)
        elif name in _KNOWN:
            _refuse_unless_off(name, value, _ONLY_STATIC)
        else:
            _refuse_or_complain(name, value, (*DYNAMIC_OPTIONS, *_KNOWN))
    return DynamicOptions(**found)


def _refuse_or_complain(name: str, value: Any, known: tuple[str, ...]) -> None:
    if name in _REFUSED:
        return _refuse_unless_off(name, value, _REFUSED[name])
    raise OptionError(
        f"extra_options contains the unknown key {name!r}",
        f"the known keys are {', '.join(sorted(known))}",
        did_you_mean(str(name), (*known, *_REFUSED), "remove this key"),
    )


def _refuse_unless_off(name: str, value: Any, why: str) -> None:
    if value not in (None, False, 0) and value != {} and value != []:
        raise NotSupportedYetError(f"the extra option {name} = {value!r:.80} is not supported", why, "omit this option")


def _wrong(name: str, value: Any, why: str) -> OptionError:
    return OptionError(f"extra_options[{name!r}] is {value!r:.80}", why, "correct the value in extra_options")
