"""Rarely needed options for quantising an ONNX graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .overrides import TensorOverride


@dataclass(frozen=True)
class StaticOptions:
    """Options of static quantisation, named as in `extra_options`.

    Attributes:
        weight_symmetric: None means True if the weights' type is signed.
        default_tensor_type: type of values whose type cannot be inferred; None means that these values stay float.
    """

    activation_symmetric: bool = False
    activation_restricted_asymmetric: bool = False
    weight_symmetric: bool | None = None
    force_quantize_no_input_check: bool = False
    mat_mul_const_b_only: bool = False
    add_qdq_pair_to_weight: bool = False
    op_types_to_exclude_output_quantization: tuple[str, ...] = ()
    dedicated_qdq_pair: bool = False
    channel_axes: Mapping[str, int] = field(default_factory=dict)
    calib_tensor_range_symmetric: bool = False
    calib_moving_average: bool = False
    calib_moving_average_constant: float = 0.01
    calib_percentile: float = 99.999
    quantize_bias: bool = True
    use_qdq_contrib_ops: bool = False
    minimum_real_range: float = 0.0
    overrides: Mapping[str, TensorOverride] = field(default_factory=dict)
    keep_removable_activations: bool = False
    adjust_weight_for_bias: bool = True
    default_tensor_type: int | None = None


@dataclass(frozen=True)
class DynamicOptions:
    """Options of dynamic quantisation, named as in `extra_options`."""

    weight_symmetric: bool | None = None
    mat_mul_const_b_only: bool = True
    enable_subgraph: bool = False
